"""Settings of runs drawn at random, for benchmarks/plan_drawn.py.

Left out are states in host memory and several copies of ZeRO 3's shards: neither runs on the meta
device.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from plans import config_of

from meshwright.base.errors import UserError
from network_values import words_beyond

SHAPES = (256, 4), (384, 6), (512, 8), (768, 12), (1024, 16), (1536, 16), (2048, 16), (2560, 32)
WAYS = {  # flags by what they decide; each line is drawn once
    "activation": ["", "", "--swiglu", "--squared-relu", "--glu-activation geglu", "--no-bias-gelu-fusion"],
    "position": ["", "", "--position-embedding-type rope", "--position-embedding-type rope --rotary-percent 0.5"]
    + ["--position-embedding-type none"],
    "norm": ["", "--normalization RMSNorm", "--apply-layernorm-1p", "--disable-layernorm-bias"],
    "bias": ["", "", "--disable-bias-linear", "--disable-bias-linear --add-qkv-bias"],
    "head": ["", "--untie-embeddings-and-output-weights"],
    "logits": ["", "", "", "--final-logit-softcapping 30"],
    "embedding": ["", "", "", "--embed-layernorm", "--embedding-dropout 0", "--embedding-dropout 0.2"],
    "residual": ["", "", "", "--apply-residual-connection-post-layernorm", "--use-parallel-residual"],
    "heads": ["", "", "", "--qk-layernorm"],
    "ffn": ["", "", "--ffn-hidden-size 1152"],
    "loss": ["", "", "", "--z-loss-coef 1e-4"],
    "documents": ["", "", "", "--eod-mask-loss", "--eod-mask-loss --reset-position-ids"],
    "dropout": ["--hidden-dropout 0 --attention-dropout 0"] * 2
    + ["--hidden-dropout 0.1 --attention-dropout 0", "--hidden-dropout 0 --attention-dropout 0.1", ""],
    "format": ["--bf16"] * 6 + ["--fp16"] * 2 + ["", "", "--bf16 --fp32-residual-connection"]
    + ["--bf16 --fp8-format e4m3", "--bf16 --fp8-format hybrid", "--bf16 --fp8-format hybrid --first-last-layers-bf16"],
    "recompute": ["", "", "", "--recompute-granularity selective"]
    + [f"--recompute-granularity full --recompute-method uniform --recompute-num-layers {n}" for n in (1, 2)]
    + ["--recompute-granularity full --recompute-method block --recompute-num-layers 1"],
    "optimizer": ["", "", "", "--optimizer muon", "--optimizer lion", "--optimizer sgd"],
    "average": ["", "", "", "--ema 0.999"],
    "state": ["", "", "", "--optimizer-state-dtype bfloat16", "--optimizer-state-dtype float8"],
    "decay": ["", "", "", "--cautious-weight-decay"],
    "kernels": ["", "", "", "", "--fused-kernels off --compile off"],
    "schedule": ["", "", "", "--pipeline-schedule gpipe"],
    "zero": [f"--zero-stage {n}" for n in (0, 0, 1, 1, 2, 3)],
    "rates": ["", "", "", "--vector-lr 2e-3", "--embedding-lr 2e-3", "--head-lr 5e-4 --vector-lr 2e-3"],
    "scale": ["", "", "", "--mup-base-hidden-size 128", "--mup-base-hidden-size 128 --mup-base-num-layers 2"],
    "instances": ["", "", "", "--num-distributed-optimizer-instances 2"],
}  # fmt: skip
# Groups of the table that lines above draw under other names, or that decide sizes drawn apart.
LISTED = {"layers", "heads", "groups", "window", "norm of heads", "norm of embeddings", "initial"}
LISTED |= {"carried over", "sequence", *WAYS}
WAYS |= words_beyond(LISTED)


def draw(rng: random.Random, more: Sequence[str] = ()) -> tuple[list[str], int]:
    """Return the flags of a legal run, among them those given, and one of its pipeline ranks."""
    while True:
        words = [*draw_words(rng), *more]
        try:
            config = config_of(*words)
        except UserError:
            continue
        if (
            config.parallel.zero_stage == 3
            and config.parallel.num_distributed_optimizer_instances > 1
        ):
            continue
        return words, rng.randrange(config.parallel.pipeline_model_parallel_size)


def draw_words(rng: random.Random) -> list[str]:
    (hidden, heads), layers = rng.choice(SHAPES), rng.choice([2, 3, 4, 4, 6, 8])
    words = f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads}".split()
    tp, cp, pp, dp = (
        rng.choice(sizes)
        for sizes in ([1, 1, 1, 2, 4], [1, 1, 1, 1, 2], [1, 1, 1, 2, 3, 4], [1, 1, 2, 4])
    )
    micro, length = rng.choice([1, 2, 4, 8]), rng.choice([128, 256, 512, 1024])
    batch = micro * dp * rng.choice([1, 1, 2, 3] if pp == 1 else [pp, 2 * pp, 4 * pp])
    words += f"--micro-batch-size {micro} --global-batch-size {batch} --seq-length {length}".split()
    words += f"--world-size {tp * cp * pp * dp} --tensor-model-parallel-size {tp}".split()
    words += f"--context-parallel-size {cp} --pipeline-model-parallel-size {pp}".split()
    words += (
        ["--num-query-groups", str(rng.choice([1, 2, heads // 2, heads]))]
        if rng.random() < 0.3
        else []
    )
    words += ["--sequence-parallel"] if tp > 1 and rng.random() < 0.6 else []
    words += (
        ["--num-layers-per-virtual-pipeline-stage", "1"] if pp > 1 and rng.random() < 0.2 else []
    )
    words += ["--tp-overlap", "off"]
    for name, choices in WAYS.items():
        if (
            name not in ("schedule", "zero", "instances")
            or (pp if name == "schedule" else dp * cp) > 1
        ):
            words += rng.choice(choices).split()
    return words
