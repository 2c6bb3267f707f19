"""The rows of `meshwright bench`: each is one run of `meshwright train`, and sets group them."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from meshwright.base.errors import UserError
from meshwright.base.hints import did_you_mean
from meshwright.config.presets import ALIASES, PRESETS, family_of
from meshwright.config.problem import SettingsError, with_value

# GPTs of 345 million, 1.3 billion and 2.7 billion parameters.
A = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024"
B = "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 1024"
C = "--num-layers 32 --hidden-size 2560 --num-attention-heads 32 --seq-length 2048"
L = "--num-layers 36 --hidden-size 1280 --num-attention-heads 20 --seq-length 1024"  # 762 million
XL = "--num-layers 48 --hidden-size 1600 --num-attention-heads 25 --seq-length 1024"  # 1.5 billion
MODEL_124M = "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024"
TINY = "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128"
LLAMA = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --num-query-groups 4"
LLAMA_8B = "--preset llama3-8b"
DRY = "--hidden-dropout 0 --attention-dropout 0"
FP8 = "--fp8-format e4m3"
WARMUP = 5  # steps
# Other programs; each is a function in programs.py.
Peer = Literal["plain-compiled", "transformers", "transformers-compiled", "megatron-core"]
# All rows but those of presets share these.
RECIPE = f"--lr 1.5e-4 --lr-decay-style cosine --lr-warmup-iters {WARMUP} --weight-decay 0.1 --clip-grad 1.0"


@dataclass(frozen=True)
class BenchRow:
    name: str
    flags: str  # of train: the model, its batch and its precision
    steps: int = 30
    gpus: int = 1
    beside: str = ""  # the row on one GPU with which this one is compared
    peers: tuple[int, ...] = ()  # micro-batches that other programs try, the likeliest first
    # The samples of a step of the plain program, which accumulates micro-batches as the flags say
    plain_batch: int = 0
    vocabulary: int = 50257  # of random tokens
    is_fresh: bool = False  # compilers' caches start empty with the set, not with the user's own


def row(
    name: str, flags: str, micro: int, batch: int = 0, steps: int = 30, **more: object
) -> BenchRow:
    """Return a row of this recipe; `batch` is the global batch, `micro` without one."""
    sizes = f"--micro-batch-size {micro} --global-batch-size {batch or micro}"
    # A CPU is measured in float32.
    precision = "" if "--fp16" in flags or "--device cpu" in flags else " --bf16"
    return BenchRow(name, f"{flags} {sizes}{precision} {RECIPE}", steps, **more)  # type: ignore[arg-type]


def of_345m() -> list[BenchRow]:
    # Steps of small micro-batches are short, so more of them are counted.
    small = [row(f"345M micro-batch {n}", A, n, steps=60) for n in (1, 2, 4)]
    return [
        row("345M", f"{A} {DRY}", 32, peers=(32, 64, 16)),
        row("345M dropout 0.1", A, 32, peers=(32, 64, 16)),
        *small,
        row("345M micro-batch 8", A, 8, steps=60),
        row("345M micro-batch 64", A, 64, steps=20),
        row("345M accumulation 4 x 16", A, 4, 64, steps=20),
        row("345M dropout 0, micro-batch 2", f"{A} {DRY}", 2, steps=60),
        row("345M dropout 0, micro-batch 64", f"{A} {DRY}", 64, steps=20),
        row("345M fp8", f"{A} {DRY} {FP8}", 32),
        row("345M fp8, micro-batch 64", f"{A} {DRY} {FP8}", 64, steps=20),
        # Another optimizer, whose cost many micro-batches share.
        row("345M Muon", f"{A} {DRY} --optimizer muon", 32),
        row("345M Muon, 16 micro-batches", f"{A} {DRY} --optimizer muon", 32, 512, steps=10),
        row("345M, 16 micro-batches", f"{A} {DRY}", 32, 512, steps=10),
        # What graphs, kernels and the compiler are worth.
        row("345M micro-batch 2, no graphs", f"{A} --cuda-graphs off", 2, steps=60),
        row("345M no graphs", f"{A} {DRY} --cuda-graphs off", 32),
        row("345M no kernels", f"{A} {DRY} --fused-kernels off", 32, steps=20),
        row(
            "345M no kernels, not compiled",
            f"{A} {DRY} --fused-kernels off --compile off",
            32,
            steps=20,
        ),
    ]


def of_options() -> list[BenchRow]:
    a = f"{A} {DRY}"
    return [
        row("345M", a, 32),
        row("345M RoPE SwiGLU RMSNorm GQA", f"{a} {LLAMA}", 32),
        row("345M full recompute", f"{a} --checkpoint-activations", 32, steps=20),
        row("345M selective recompute", f"{a} --recompute-activations", 32, steps=20),
        row("345M fp16", f"{a} --fp16 --initial-loss-scale 65536", 32, steps=20),
        row(
            "1.5B full recompute, dropout 0.1",
            f"{XL} --checkpoint-activations",
            8,
            16,
            steps=12,
            plain_batch=16,
        ),
        row("762M selective recompute, dropout 0.1", f"{L} --recompute-activations", 5, 20, 12),
        row("345M deterministic", f"{a} --deterministic-mode", 32, steps=20),
        row("345M offloaded optimizer", f"{a} --cpu-optimizer", 32, steps=9),
        BenchRow(
            "345M micro-batch auto",
            f"{a} --micro-batch-size auto --global-batch-size 256 --bf16 {RECIPE}",
            9,
        ),
    ]


def of_sizes() -> list[BenchRow]:
    llama = f"{B} {LLAMA} {DRY}"
    return [
        row("124M", f"{MODEL_124M} {DRY}", 32, peers=(32, 64, 16)),
        row("345M", f"{A} {DRY}", 32, peers=(32, 64, 16)),
        row("1.3B", f"{B} {DRY}", 16, steps=20, peers=(16, 8, 32)),
        row("1.3B dropout 0.1", B, 16, steps=20, peers=(16, 8, 32)),
        row("1.3B fp8", f"{B} {DRY} {FP8}", 16, steps=20),
        row("1.3B Llama", llama, 16, steps=20, peers=(16, 8, 32)),
        row("2.7B", f"{C} {DRY}", 8, steps=12, peers=(4, 8, 2)),
        row("2.7B fp8", f"{C} {DRY} {FP8}", 8, steps=12),
        row("2.7B dropout 0.1", C, 8, steps=12, peers=(4, 8, 2)),
    ]


def of_layouts(gpus: int) -> list[BenchRow]:
    """Return rows on several GPUs, each beside a row on one GPU with as many samples for each."""
    # All GPUs take part, so that each row says which share of its speed alone a GPU still reaches.
    on_all = functools.partial(row, gpus=gpus)
    tensor = "--tensor-model-parallel-size 2 --sequence-parallel"
    stages = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage"
    # Without interleaving and sequence parallelism, as other programs are compared.
    by_stages = "--pipeline-model-parallel-size 2 --pipeline-layout 13,11 --zero-stage 1"
    by_columns = "--tensor-model-parallel-size 2 --zero-stage 1"
    a = f"{A} {DRY}"
    c = f"{C} {DRY}"
    # Too large for one GPU.
    on_all_8b = functools.partial(on_all, micro=1, steps=6, vocabulary=128256)
    sharded_8b = f"{LLAMA_8B} --zero-stage 3 --recompute-granularity selective"
    return [
        row("345M", a, 32),
        on_all(f"345M DP{gpus}", a, 32, 32 * gpus, beside="345M"),
        on_all(f"345M DP{gpus} ZeRO-1", f"{a} --zero-stage 1", 32, 32 * gpus, beside="345M"),
        row("345M micro-batch 4", A, 4, steps=60),
        on_all(
            f"345M micro-batch 4 DP{gpus}",
            A,
            4,
            4 * gpus,
            steps=60,
            beside="345M micro-batch 4",
        ),
        on_all(
            f"345M micro-batch 4 DP{gpus} ZeRO-3",
            f"{A} --zero-stage 3",
            4,
            4 * gpus,
            steps=60,
            beside="345M micro-batch 4",
        ),
        # The head computes as much as 4 of these layers, so the last stage has fewer.
        on_all(
            "345M PP2",
            f"{a} {stages} 6 --pipeline-layout 7,7,7,3",
            8,
            64 * gpus // 2,
            20,
            beside="345M",
        ),
        row("762M", f"{L} {DRY}", 16, 32, steps=12),
        on_all(
            "762M PP2",
            f"{L} {DRY} {stages} 9 --pipeline-layout 10,10,10,6",
            8,
            64 * gpus // 2,
            12,
            beside="762M",
        ),
        row("1.3B", f"{B} {DRY}", 16, steps=20),
        on_all(f"1.3B DP{gpus}", f"{B} {DRY}", 16, 16 * gpus, 20, beside="1.3B"),
        on_all(
            f"1.3B DP{gpus} ZeRO-1",
            f"{B} {DRY} --zero-stage 1",
            16,
            16 * gpus,
            20,
            beside="1.3B",
        ),
        on_all("1.3B PP2", f"{B} {DRY} {by_stages}", 4, 16 * gpus, 20, beside="1.3B"),
        on_all("1.3B TP2", f"{B} {DRY} {by_columns}", 16, 16 * gpus, 20, beside="1.3B"),
        row("2.7B", c, 8, steps=12),
        on_all(
            f"2.7B DP{gpus} ZeRO-3",
            f"{c} --zero-stage 3",
            8,
            8 * gpus,
            12,
            beside="2.7B",
        ),
        on_all("2.7B TP2 SP", f"{c} {tensor}", 8, 8 * gpus // 2, 12, beside="2.7B"),
        on_all(
            "2.7B TP2 SP, no overlap",
            f"{c} {tensor} --tp-overlap off",
            8,
            8 * gpus // 2,
            12,
            beside="2.7B",
        ),
        on_all("2.7B PP2", f"{c} {stages} 8", 4, 32 * gpus // 2, 8, beside="2.7B"),
        on_all_8b("Llama 3 8B ZeRO-3", sharded_8b, batch=2 * gpus),
        on_all_8b("Llama 3 8B fp8 ZeRO-3", f"{sharded_8b} --fp8-format hybrid", batch=2 * gpus),
        on_all_8b(
            "Llama 3 8B PP2",
            f"{LLAMA_8B} {stages} 8 --pipeline-layout 9,9,8,6",
            batch=16 * gpus // 2,
        ),
    ]


def of_seeds() -> list[BenchRow]:
    """Return rows of the settings that the guides in compat/ publish, on one GPU."""
    fp16 = "--fp16 --min-lr 1e-5 --lr 1.5e-4 --weight-decay 0.01 --clip-grad 1.0"
    recompute = f"{fp16} --checkpoint-activations"

    def published(name: str, flags: str, micro: int, batch: int, steps: int = 30) -> BenchRow:
        sizes = f"--micro-batch-size {micro} --global-batch-size {batch}"
        return BenchRow(name, f"{flags} {sizes}", steps, plain_batch=batch)

    out = [
        published("Megatron-LM 345M", f"{A} {fp16}", 1, 2, 60),
        published("Megatron-DeepSpeed 345M", f"{A} {recompute}", 8, 16),
        published("benchmark 4 of 64", f"{A} {fp16}", 4, 64, 12),
        published("benchmark 32 of 512", f"{A} {recompute}", 32, 512, 8),
    ]
    ascend = [name for name in PRESETS if name.startswith("ascend-")]
    for name in (*ascend, "oneflow-117m", "oneflow-345m"):
        out.append(preset(name, cut=False))
    return out


def preset(name: str, cut: bool = True) -> BenchRow:
    """Return a preset's row: with `cut`, at most eight of its micro-batches a step."""
    values = PRESETS[name]
    micro = values["micro_batch_size"]
    batch = values["global_batch_size"]
    if cut:
        batch = min(batch, 8 * micro)
    # Presets that name no format are measured in the one that GPUs are used with.
    precision = "" if values.get("fp16") else " --bf16"
    is_small = values["hidden_size"] < 768
    return BenchRow(
        name,
        f"--preset {name} --global-batch-size {batch}{precision}",
        steps=30 if is_small else 10,
        plain_batch=batch,
        peers=() if is_small else (micro, 2 * micro, 4 * micro),
        vocabulary=family_of(name).vocabulary,
    )


def of_startup() -> list[BenchRow]:
    """Return rows of few steps, which show the seconds to the first one."""
    rows = [("345M cold", A, 32), ("345M warm", A, 32), ("1.3B", B, 16), ("2.7B", C, 8)]
    return [row(name, flags, micro, steps=3, is_fresh=True) for name, flags, micro in rows]


def of_cpu() -> list[BenchRow]:
    """Return rows of tiny models, which take about a minute on two cores."""
    sizes = "--vocab-size 512 --device cpu"
    return [
        row("tiny", f"{TINY} {DRY} {sizes}", 4, peers=(4, 8)),
        row("tiny dropout 0.1", f"{TINY} {sizes}", 4),
        row("tiny accumulation 1 x 4", f"{TINY} {DRY} {sizes}", 1, 4),
        row("tiny Llama", f"{TINY} {LLAMA} {DRY} {sizes}", 4),
        row("tiny DP2", f"{TINY} {DRY} {sizes}", 4, 8, gpus=2, beside="tiny"),
    ]


OTHER_NAMES = {"h200": "345m"}
ABOUT = {
    "345m": "GPT of 345 million parameters: batches, dropout, optimizers (also: h200)",
    "options": "345M with other networks, precisions, recomputation, offloading",
    "sizes": "124M to 2.7B, and the network of Llama",
    "layouts": "several GPUs: data, tensor and pipeline parallel, each beside one GPU",
    "seeds": "what the guides in compat/ publish, on one GPU",
    "startup": "seconds to the first step, with empty and with filled caches",
    "cpu": "tiny models; a minute on two cores",
}


def rows_of(name: str, gpus: int) -> list[BenchRow]:
    """Return the rows of one set, or of a preset, for this number of GPUs."""
    set_name = OTHER_NAMES.get(name, name)
    # Layouts have two ranks at least, whatever the machine has.
    if set_name == "layouts":
        return of_layouts(max(gpus, 2))
    makers = {
        "345m": of_345m,
        "sizes": of_sizes,
        "options": of_options,
        "seeds": of_seeds,
        "startup": of_startup,
        "cpu": of_cpu,
    }
    if set_name in makers:
        return makers[set_name]()
    if set_name in PRESETS:
        return [preset(set_name)]
    hint = did_you_mean(name, [*ABOUT, *OTHER_NAMES, *PRESETS], 0.7)
    if not hint:
        hint = "; `meshwright bench --list` names the sets, and each preset is one"
    raise UserError(f"no set {name!r}{hint}")


def default_sets(gpus: int) -> list[str]:
    if not gpus:
        return ["cpu"]
    return ["345m"] if gpus == 1 else ["345m", "layouts"]


def chosen(sets: Iterable[str], pattern: str | None, gpus: int) -> list[BenchRow]:
    """Return the rows of the sets, each once, whose names match the pattern.

    A row on several GPUs brings the one with which it is compared.
    """
    # Sets share rows, which are run once.
    rows = {row.name: row for name in sets for row in rows_of(name, gpus)}
    try:
        matches = re.compile(pattern or "", re.IGNORECASE).search
    except re.error as error:
        raise SettingsError(
            f"{with_value('rows', repr(pattern))} is not a regular expression: {error}; give a part of the names"
        ) from None
    needed: set[str] = set()
    for row in rows.values():
        if matches(row.name):
            needed |= {row.name, row.beside}
    if not needed:
        raise SettingsError(
            f"{with_value('rows', repr(pattern))} matches none of the rows: {', '.join(rows)}"
        )
    return [row for row in rows.values() if row.name in needed]


def presets() -> list[str]:
    return [name for name in PRESETS if name not in ALIASES]
