"""The plan's times beside those that others published, for docs/plan.md.

    python benchmarks/plan_published.py > tables.md

The plan predicts this program on the published devices, not the program that was measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from meshwright.apps.plan.memory import memory_of_ranks
from meshwright.apps.plan.timing import StepTime, terms_of
from meshwright.base.device_profiles import DeviceProfile, load_profile
from meshwright.config import flags
from meshwright.config.schema import TrainConfig
from meshwright.model.counts import flops_per_token

STILL = "--hidden-dropout 0 --attention-dropout 0"
# arXiv 2104.04473, table 1, A100 of 80 GB: parameters in 10^9, heads, hidden size, layers, tensor
# and pipeline size, GPUs, batch, TFLOP/s of a GPU with recomputation.
WEAK_SCALING = [
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
    (3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
    (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
    (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
    (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148),
    (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
    (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163),
    (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163),
]
# arXiv 2205.05198, tables 3 and 5, A100 of 80 GB: name, heads, hidden size, layers, pipeline size,
# layers of a virtual stage, batch, micro-batch, seconds with full recomputation, and with sequence
# parallelism and a selective one.
RECOMPUTATION = [
    ("22B", 64, 6144, 48, 1, 0, 4, 4, 1.42, 1.10),
    ("175B", 96, 12288, 96, 8, 4, 64, 1, 18.13, 13.75),
    ("530B", 128, 20480, 105, 35, 1, 280, 1, 49.05, 37.83),
    ("1T", 160, 25600, 128, 64, 0, 512, 1, 94.42, 71.49),
]
# GPT-2_for_PyTorch of Ascend's ModelZoo, tables 2 and 3, eight devices: preset, tensor and pipeline
# size, the device that is assumed, samples/s.
ASCEND = [
    ("ascend-345m", 1, 2, "v100", 37.8),
    ("ascend-1.3b", 2, 2, "v100", 15.71),
    ("ascend-2.7b", 2, 2, "v100", 4.125),
    ("ascend-3.7b", 2, 2, "v100", 3.120),
    ("ascend-345m-without-mp", 1, 1, "a100-40", 235),
]
# Benchmarks of Megatron-DeepSpeed and LiBai on two machines of eight GPUs, without published
# figures: tensor and pipeline size, recomputation, micro-batch, batch.
GRID = [
    (1, 1, False, 4, 64),
    (1, 1, True, 32, 512),
    (2, 1, True, 32, 512),
    (4, 1, True, 32, 512),
    (8, 1, True, 32, 512),
    (1, 4, True, 32, 512),
    (2, 4, True, 32, 512),
]


def predict(
    words: str, world: int, profile: DeviceProfile, padded: int
) -> tuple[TrainConfig, StepTime, float]:
    """Return the configuration, its step, and the allocated gigabytes of the fullest rank."""
    config = flags.parse_settings(
        TrainConfig, [*words.split(), f"--world-size={world}"], "plan", check=False
    ).config
    most = max(rank.allocated for rank in memory_of_ranks(config, padded, profile))
    return config, terms_of(config, padded, profile).result(), most / 2**30


def gpt(heads: int, hidden: int, layers: int, more: str) -> str:
    sizes = f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --seq-length 2048"
    return f"{sizes} {STILL} --bf16 --vocab-size 51200 {more}"


def weak_scaling() -> Iterator[str]:
    yield "| parameters | GPUs | TP x PP | published, TFLOP/s a GPU | predicted | micro-batch | difference |"
    yield "|---|---|---|---:|---:|---:|---:|"
    profile = load_profile("a100-80")
    for size, heads, hidden, layers, tp, pp, gpus, batch, published in WEAK_SCALING:
        tries = []
        for micro in (1, 2, 4, 8):
            if batch % (micro * (gpus // tp // pp)):
                continue
            layout = f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}"
            words = f"{layout} --micro-batch-size {micro} --global-batch-size {batch} --recompute-granularity full"
            config, step, allocated = predict(
                gpt(heads, hidden, layers, words), gpus, profile, 51200
            )
            flops = (
                flops_per_token(config.model, 51200, 2048, "full")
                * step.tokens_per_second
                / gpus
                / 1e12
            )
            if allocated < 75:
                tries.append((flops, micro))
        best, micro = max(tries)
        yield f"| {size}B | {gpus} | {tp} x {pp} | {published} | {best:.0f} | {micro} | {best / published - 1:+.0%} |"


def recomputation() -> Iterator[str]:
    yield "| model | published, s: full recomputation | predicted | sequence parallel, selective | predicted | ratios |"
    yield "|---|---:|---:|---:|---:|---|"
    profile = load_profile("a100-80")
    for name, heads, hidden, layers, pp, virtual, batch, micro, full, selective in RECOMPUTATION:
        layout = f"--tensor-model-parallel-size 8 --pipeline-model-parallel-size {pp}"
        layout += f" --num-layers-per-virtual-pipeline-stage {virtual}" if virtual else ""
        layout += f" --micro-batch-size {micro} --global-batch-size {batch}"
        got = []
        for more in (
            "--recompute-granularity full",
            "--sequence-parallel --recompute-granularity selective",
        ):
            words = gpt(heads, hidden, layers, f"{layout} {more}")
            got.append(predict(words, 8 * pp, profile, 51200)[1].seconds)
        ratios = f"published {full / selective:.2f}, predicted {got[0] / got[1]:.2f}"
        yield f"| {name} | {full} | {got[0]:.2f} | {selective} | {got[1]:.2f} | {ratios} |"


def ascend() -> Iterator[str]:
    yield "| preset | TP x PP | published, samples/s of 8 | predicted | on | difference |"
    yield "|---|---|---:|---:|---|---:|"
    for preset, tp, pp, device, published in ASCEND:
        words = f"--preset {preset} --tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}"
        config, step, _ = predict(
            f"{words} --vocab-size 50257", 8, load_profile(device), 50304 if tp == 1 else 50432
        )
        rate = config.global_batch / step.seconds
        yield f"| {preset} | {tp} x {pp} | {published} | {rate:.1f} | {device} | {rate / published - 1:+.0%} |"


def grid() -> Iterator[str]:
    yield "| TP x PP | recomputation | micro-batch, batch | predicted on 16 A100 of 40 GB, samples/s | of 16 V100 |"
    yield "|---|---|---|---:|---:|"
    sizes = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --fp16 --vocab-size 50257"
    for tp, pp, again, micro, batch in GRID:
        words = f"{sizes} --tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} --zero-stage 1"
        words += f" --micro-batch-size {micro} --global-batch-size {batch}"
        words += " --recompute-granularity full" if again else ""
        rates = [
            batch / predict(words, 16, load_profile(name), 51200)[1].seconds
            for name in ("a100-40", "v100")
        ]
        way = "full" if again else "none"
        yield f"| {tp} x {pp} | {way} | {micro}, {batch} | {rates[0]:.0f} | {rates[1]:.0f} |"


if __name__ == "__main__":
    print(
        "\n".join(
            itertools.chain(weak_scaling(), [""], recomputation(), [""], ascend(), [""], grid())
        )
    )
