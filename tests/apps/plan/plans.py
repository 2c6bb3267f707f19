"""Configurations for the tests of plans."""

from __future__ import annotations

from meshwright.config.flags import parse_settings
from meshwright.config.schema import TrainConfig

SMALL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 100 --bf16"
LARGE = "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --vocab-size 50257 --bf16"
STILL = "--hidden-dropout 0 --attention-dropout 0"


PADDED = 1024  # size of the vocabulary


class Gpu:
    kind, context_bytes, symmetric_ranks = "cuda", 10**9, 1


def config_of(*words: str) -> TrainConfig:
    """Return the settings of a run of random tokens."""
    common = "--mock-data --train-iters 3 --lr 1e-3 --vocab-size 1000".split()
    return parse_settings(TrainConfig, [*common, *words], "meshwright train").config


def planned(words: str, world: int = 1) -> TrainConfig:
    """Return the configuration of a run on so many ranks."""
    return parse_settings(
        TrainConfig, [*words.split(), "--world-size", str(world)], "plan", check=False
    ).config
