"""`train --dry-run --rank R --world-size N` sets up a rank as a run does, whatever N is."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
import torch.distributed as dist

from helpers import TINY_FLAGS, TinyRun
from meshwright.__main__ import main
from meshwright.base.errors import USAGE
from meshwright.config import flags
from meshwright.config.schema import TrainConfig
from meshwright.training.before import one_rank

LAYOUT = "--tensor-model-parallel-size=2 --pipeline-model-parallel-size=2 --global-batch-size=4096".split()


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    capsys.readouterr()
    status = main(["train", "--dry-run", *TINY_FLAGS, *words])
    out, err = capsys.readouterr()
    assert status == 0, err
    assert not dist.is_initialized()
    return out.splitlines()


@pytest.mark.flag("rank")
def test_a_rank_of_4096(capsys: pytest.CaptureFixture[str]) -> None:
    lines = dry_run(capsys, *LAYOUT, "--rank=5", "--world-size=4096", "--zero-stage=1")
    assert "rank 5 of 4096: pipeline 0 of 2, data 2 of 1024, tensor 1 of 2" in lines
    assert "  group tp: ranks 4, 5" in lines and "  group embedding: ranks 5, 2053" in lines
    assert "  group shard: 1024 ranks, 1, 3, 5 ... 2047" in lines
    assert not any("rank 5 of" in line for line in dry_run(capsys, *LAYOUT, "--world-size=4096"))


@pytest.mark.parametrize(
    "more",
    [
        ["--zero-stage=3"],
        ["--cpu-optimizer", "--zero-stage=2"],
        ["--swiglu"],
        ["--zero-stage=1", "--data-parallel-sums=copies"],
        ["--tensor-model-parallel-size=2", "--sequence-parallel", "--tp-overlap=on"],
    ],
)
def test_other_stores(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    lines = dry_run(capsys, *LAYOUT, "--rank=4095", "--world-size=4096", *more)
    assert "rank 4095 of 4096: pipeline 1 of 2, data 1023 of 1024, tensor 1 of 2" in lines
    assert any(line.startswith("  memory, estimated by the plan: weights") for line in lines)


def test_a_rank_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (
            ["--dry-run", "--rank=4", "--world-size=4", *LAYOUT],
            "--rank 4 does not fit --world-size 4; ranks count from 0 to 3",
        ),
        (["--rank=0"], "--rank 0 is for --dry-run"),
    ):
        assert main(["train", *TINY_FLAGS, *words]) == USAGE
        assert said in capsys.readouterr().err


def test_it_names_the_files_of_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "run"
    TinyRun(tmp_path / "log", capsys, "--save", saved, "--train-iters=1")
    words = ["--load", str(saved), "--rank=1", "--world-size=4", "--finetune"]
    [line] = [line for line in dry_run(capsys, *LAYOUT, *words) if line.startswith("  reads")]
    assert line == "  reads 1 of the checkpoint's files, rank_00000.safetensors"


def test_the_set_up_takes_the_memory_of_few_ranks() -> None:
    """Python's objects: a list of all ranks' groups, or of their places, would show."""
    peaks = []
    for world in (64, 64, 4096):  # the first one imports
        words = [*TINY_FLAGS, *LAYOUT, "--rank=5", f"--world-size={world}", "--zero-stage=1"]
        config = flags.parse_settings(TrainConfig, words, "meshwright train").config
        tracemalloc.start()
        one_rank.describe_rank(config, 64, 256)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < peaks[1] + 2e6, peaks
