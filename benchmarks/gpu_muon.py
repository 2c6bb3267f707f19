"""Time of one Muon update on one GPU: torch's, and ours in each form; and of its parts.

    python benchmarks/gpu_muon.py [--models 345M 1.3B 1.3B-Llama] [--sweep | --count | --steps N]

With random weights and gradients, prints milliseconds (ours in a CUDA graph), the flops that the
form needs by arithmetic, TFLOP/s, the largest distance of a first update from float64's, relative
to it, and the memory of the update: with cuBLAS's full symmetric products, and with halves. Then
each part's time, with TFLOP/s of the flops that are computed, or GB/s of the bytes that must move.
The updates end with the weights in bfloat16: by a pass of their own, as until 0.18, or by the
kernel that subtracts. Trials are other numbers of matrices at a time, tiles of 128 x 128, and two
streams, which take the matrices in turn.

`--sweep` instead times the symmetric products with tiles of other sizes (rows x columns x depth,
warps, stages), also of three times as many matrices, and their distance from cuBLAS's. `--count`
needs no GPU: it prints the flops, bytes and launches of each part, and their time at 600 TFLOP/s
and 4 TB/s. `--steps N` trains for N steps of 16,384 and of 65,536 tokens, with AdamW and with
Muon, whose weights are copied by a pass of their own or not. A variant that fails is named, and the
others go on.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import SIZES, attempt, describe_machine, distance, new_parser, seconds_of
from torch import Tensor, nn

from meshwright.base.runs.rows import read_new_rows
from meshwright.kernels import muon as passes
from meshwright.kernels import symmetric
from meshwright.kernels.triton import symmetric as kernel
from meshwright.kernels.triton.symmetric import TILES, SymmetricTiles, count_tiles, half_product
from meshwright.optim import muon
from meshwright.optim.rule_table import MatrixForm
from meshwright.parallel.flat import FlatStore

DEVICE = torch.device("cuda")
LR = 0.02
STEPS = 5  # Newton-Schulz iterations


class Matrices(NamedTuple):
    """The matrices of a model's layers: rows and columns of each kind."""

    layers: int
    shapes: list[tuple[int, int]]


def of_gpt(layers: int, hidden: int) -> Matrices:
    h = hidden
    return Matrices(layers, [(3 * h, h), (h, h), (4 * h, h), (h, 4 * h)])


MODELS = {name: of_gpt(*SIZES[name][:2]) for name in ("345M", "1.3B", "2.7B")}
# Four query groups of width 128, and a gate's two matrices.
MODELS["1.3B-Llama"] = Matrices(
    24, [(3072, 2048), (2048, 2048), (5440, 2048), (5440, 2048), (2048, 5440)]
)
GPT = "--seq-length 1024 --hidden-dropout 0 --attention-dropout 0 --num-layers 24"
LLAMA = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
FLAGS = {
    "345M": f"{GPT} --hidden-size 1024 --num-attention-heads 16",
    "1.3B": f"{GPT} --hidden-size 2048 --num-attention-heads 16",
    "1.3B-Llama": f"{GPT} --hidden-size 2048 --num-attention-heads 16 --num-query-groups 4 {LLAMA}",
}
# What --count assumes of a GPU, in a second.
FLOPS, BYTES = 6e14, 4e12

FULL = symmetric.half_product.plain  # type: ignore[attr-defined]
QUINTIC = muon.C / muon.SPREAD**2, muon.B / muon.SPREAD, muon.A  # of R, as it is stored

# rows, columns, depth, warps, stages
SWEEP = [
    SymmetricTiles(128, 128, 64, 4, 3),
    SymmetricTiles(128, 128, 64, 4, 4),
    SymmetricTiles(128, 128, 32, 4, 6),
    SymmetricTiles(128, 256, 64, 8, 3),
    SymmetricTiles(128, 256, 64, 8, 4),
    SymmetricTiles(64, 128, 64, 4, 4),
]


def computed(m: int, tiles: SymmetricTiles = TILES) -> float:
    """Return the share of a symmetric product [m, m] that the kernel computes."""
    return count_tiles(m, tiles) * tiles.rows * tiles.columns / m**2


class Products(NamedTuple):
    """The numbers of products of a matrix [m, k], m <= k: X X^T, those [m, m], and Q X."""

    grams: int
    squares: int
    wides: int


def products(m: int, k: int, gram: bool) -> Products:
    if not (gram and 2 * k >= muon.GRAM * m):
        return Products(STEPS, STEPS, STEPS)
    counts = [min(muon.MUON_RESTART, STEPS - first) for first in range(0, STEPS, muon.MUON_RESTART)]
    return Products(len(counts), sum(4 * n - 3 for n in counts), len(counts))


def flops(size: Matrices, gram: bool, halves: bool) -> float:
    """Return the flops of the products, with full symmetric ones or with halves."""
    total = 0.0
    for shape in size.shapes:
        m, k = sorted(shape)
        square, wide, part = 2.0 * m**3, 2.0 * m * m * k, computed(m) if halves else 1.0
        grams, squares, wides = products(m, k, gram)
        total += wides * wide + (grams * wide + squares * square) * part
    return total * size.layers


def parameters(size: Matrices) -> list[nn.Parameter]:
    torch.manual_seed(0)
    out = []
    for _, (rows, columns) in itertools.product(range(size.layers), size.shapes):
        p = nn.Parameter(torch.randn(rows, columns, device=DEVICE) * 0.02)
        # Singular values over four orders of magnitude, as gradients have them.
        p.grad = torch.randn(rows, columns, device=DEVICE) * torch.logspace(
            0, -4, columns, device=DEVICE
        )
        out.append(p)
    return out


def exact(gradient: Tensor, steps: int = STEPS) -> Tensor:
    """Return the first update's matrix in float64."""
    x = gradient.double() * (1 - 0.95) * (1 + 0.95)  # Nesterov's look-ahead of a first moment
    x = x.mT if x.shape[0] > x.shape[1] else x
    x = x / x.norm()
    for _ in range(steps):
        r = x @ x.mT
        x = muon.A * x + (muon.B * r + muon.C * r @ r) @ x
    return x.mT if gradient.shape[0] > gradient.shape[1] else x


def farthest(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], size: Matrices) -> float:
    """Return the largest relative distance of a first update from float64's."""
    params = parameters(Matrices(1, size.shapes))
    before = [p.detach().clone() for p in params]
    make(params).step()
    distances = []
    for p, old in zip(params, before, strict=True):
        assert p.grad is not None
        rate = LR * 0.2 * math.sqrt(max(p.shape))
        want = exact(p.grad)
        distances.append(distance((old - p.detach()).double() / rate, want))
    return max(distances)


def torchs(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon(
        params, lr=LR, weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )


class TwoPasses(muon.Muon):
    """Muon, whose weights are copied by a pass of their own."""

    copies: list[Tensor] | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        assert self.copies is not None
        # A flat buffer is copied at once: about as fast as this launch for all matrices.
        torch._foreach_copy_(self.copies, [p.detach() for p in self.param_groups[0]["params"]])


class TwoStreams(muon.Muon):
    """Muon that takes the matrices in turn by two streams, so that one fills the other's gaps."""

    other: torch.cuda.Stream | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        if self.other is None:
            self.other = torch.cuda.Stream()
        streams = [torch.cuda.current_stream(), self.other]
        self.other.wait_stream(streams[0])
        pairs = list(enumerate(group["params"]))
        turns = muon.chunks(pairs, lambda i, _: self.spread.forms[i], self.chunk)
        for turn, some in enumerate(turns):
            with torch.cuda.stream(streams[turn % 2]):
                self._update([i for i, _ in some], group)
        streams[0].wait_stream(self.other)


def ours(
    params: list[nn.Parameter], rule: type[muon.Muon] = muon.Muon, chunk: int = muon.MUON_CHUNK
) -> torch.optim.Optimizer:
    copies = [p.detach().bfloat16() for p in params]
    forms = [MatrixForm(tuple(p.shape)) for p in params]
    spread = muon.Spread(forms, DEVICE, copies=None if rule is TwoPasses else copies)
    optimizer = rule(params, spread=spread, chunk=chunk)
    if isinstance(optimizer, TwoPasses):
        optimizer.copies = copies
    optimizer.param_groups[0].update(lr=LR)
    return optimizer


def time_update(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], size: Matrices, work: float
) -> str:
    params = parameters(size)
    optimizer = make(params)
    ms = 1e3 * seconds_of(optimizer.step, graph=make is not torchs)
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    optimizer.step()
    more = (torch.cuda.max_memory_allocated() - held) / 2**30
    del optimizer, params
    off = farthest(make, size)
    return f"{ms:8.2f} ms {work / 1e12:7.2f} TFLOP {work / ms / 1e9:7.0f} TFLOP/s  off {off:.4f}  +{more:.2f} GiB"


def print_update(
    name: str,
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    size: Matrices,
    work: float,
) -> None:
    if line := attempt(name, time_update, make, size, work):
        print(f"  {name:34s} {line}", flush=True)


def updates(size: Matrices) -> None:
    print_update("torch.optim.Muon", torchs, size, flops(size, False, False))
    orthogonalise, smallest = muon.orthogonalise, symmetric.SMALLEST
    for gram, halves in itertools.product((False, True), repeat=2):
        symmetric.SMALLEST = smallest if halves else 1 << 30
        muon.orthogonalise = (
            orthogonalise if gram else functools.partial(orthogonalise, is_gram=False)
        )
        name = f"{'gram' if gram else 'plain'}, {'halves' if halves else 'full products'}"
        print_update(name, ours, size, flops(size, gram, halves))
    muon.orthogonalise, symmetric.SMALLEST = orthogonalise, smallest
    work = flops(size, True, True)
    print_update(
        "gram, halves, copies in a pass", functools.partial(ours, rule=TwoPasses), size, work
    )
    print_update("trial: two streams", functools.partial(ours, rule=TwoStreams), size, work)
    for chunk in (muon.MUON_CHUNK // 4, muon.MUON_CHUNK // 2, 2 * muon.MUON_CHUNK):
        name = f"trial: {chunk >> 20} Mi elements at a time"
        print_update(name, functools.partial(ours, chunk=chunk), size, work)
    kernel.TILES = SymmetricTiles(128, 128, 64, 4, 3)
    print_update("trial: tiles of 128 x 128", ours, size, work)
    kernel.TILES = TILES


def print_part(
    name: str, run: Callable[[], object], amount: float, unit: str, more: str = ""
) -> None:
    """Print a part's time and its rate."""
    if seconds := attempt(name, lambda: seconds_of(run, least=0.005)):
        print(
            f"  {name:44s} {1e3 * seconds:8.3f} ms {amount / seconds:7.0f} {unit}{more}", flush=True
        )


def parts(n: int, rows: int, columns: int) -> None:
    """Time the parts of the update of n matrices."""
    m, k = sorted((rows, columns))
    print(f"  {n} x {rows} x {columns}")
    number, giga = torch.full((), 0.5, device=DEVICE), n * rows * columns / 1e9
    gradients, moments = (list(torch.randn(n, rows, columns, device=DEVICE)) for _ in range(2))
    advance = functools.partial(passes.advance, gradients, moments, number, number * 0, 0.95)
    print_part("advance", advance, 14 * giga, "GB/s")
    ahead, norms = advance()
    print_part("normalise", lambda: muon.normalised(ahead, norms), 4 * giga, "GB/s")
    x = muon.normalised(ahead, norms)
    x = x if rows <= columns else x.mT
    r = symmetric.symmetric_product(x, x, scale=muon.SPREAD)
    tera = 2e-12 * n * m * m
    for kind, multiply, part in (
        ("full", FULL, 1.0),
        ("half", symmetric.symmetric_product, computed(m)),
    ):
        gram = functools.partial(multiply, x, x, None, muon.SPREAD, 0.0, 0.0)
        print_part(f"X X^T, {kind}", gram, tera * k * part, "TFLOP/s")
        quintic = functools.partial(multiply, r, r, r, *QUINTIC)
        print_part(f"a I + b R + c R^2, {kind}", quintic, tera * m * part, "TFLOP/s")
        square = functools.partial(multiply, r, r, None, muon.SPREAD**-2, 0.0, 0.0)
        print_part(f"P R, {kind}", square, tera * m * part, "TFLOP/s")
    print_part("Q X", lambda: muon.multiply_symmetric(r, x), tera * k, "TFLOP/s")
    update = x if rows <= columns else x.mT
    subtract = functools.partial(passes.subtract, gradients, update, number, number, number * 0)
    print_part("subtract", subtract, 10 * giga, "GB/s")
    copies = [x.bfloat16() for x in gradients]
    print_part("subtract and copy", lambda: subtract(False, copies), 12 * giga, "GB/s")


def sweep(hidden: int, n: int) -> None:
    """Time symmetric products with tiles of other sizes."""
    r = torch.randn(n, hidden, hidden, device=DEVICE).half() / hidden**0.5
    r = FULL(r, r, None, 1.0, 0.0, 0.0)
    wide = torch.randn(n, hidden, 4 * hidden, device=DEVICE).half() / hidden**0.5
    tall = wide.view(n, 4 * hidden, hidden).mT
    for name, x, c in (
        ("b R + c R^2", r, r),
        ("X X^T, by row", wide, None),
        ("X X^T, by column", tall, None),
    ):
        tera = 2e-12 * n * hidden**2 * x.shape[2]
        want = FULL(x, x, c, 1.0, -0.5, 0.25)
        print(f"  {n} x {hidden} x {x.shape[2]}: {name}")
        print_part("cuBLAS", functools.partial(FULL, x, x, c, 1.0, -0.5, 0.25), tera, "TFLOP/s")
        for tiles in SWEEP:
            label = " ".join(map(str, tiles))
            run = functools.partial(half_product, x, x, c, 1.0, -0.5, 0.25, tiles)
            off = attempt(label, lambda run=run, want=want: distance(run(), want))
            if off is not None:
                print_part(
                    label, run, tera * computed(hidden, tiles), "TFLOP/s", f"  off {off:.5f}"
                )


# Counted


class Part(NamedTuple):
    """A part of the update of all matrices of a shape."""

    name: str
    launches: int
    flops: float = 0.0
    bytes: float = 0.0

    @property
    def seconds(self) -> float:
        return max(self.flops / FLOPS, self.bytes / BYTES)


def counted(n: int, rows: int, columns: int) -> Iterator[Part]:
    """Yield the parts of the update of n matrices, by what the kernels' docstrings say."""
    m, k = sorted((rows, columns))
    batches = math.ceil(n / max(1, muon.MUON_CHUNK // (m * k)))
    grams, squares, wides = products(m, k, gram=True)
    numbers, square = n * m * k, n * m * m
    part = computed(m)
    # The sum of the squares, and its root
    yield Part("advance, norms", 3 * batches, bytes=14.0 * numbers)
    yield Part("normalise", batches, bytes=4.0 * numbers)
    yield Part(
        "X X^T, half",
        grams * batches,
        grams * 2.0 * square * k * part,
        grams * 2.0 * (numbers + square),
    )
    # Each reads two squares and writes one.
    yield Part(
        "polynomials and P R, half",
        squares * batches,
        squares * 2.0 * square * m * part,
        squares * 6.0 * square,
    )
    yield Part(
        "Q X", wides * batches, wides * 2.0 * square * k, wides * 2.0 * (2 * numbers + square)
    )
    # The rates are numbers of the device: five small kernels.
    yield Part("subtract and copy", 6 * batches, bytes=12.0 * numbers)


def print_counts(size: Matrices) -> None:
    totals: dict[str, float] = {}
    for shape in size.shapes:
        form = "gram" if 2 * max(shape) >= muon.GRAM * min(shape) else "plain"
        print(f"  {size.layers} x {shape[0]} x {shape[1]}, {form}")
        for part in counted(size.layers, *shape):
            ms = 1e3 * part.seconds
            totals[part.name] = totals.get(part.name, 0.0) + ms
            print(
                f"    {part.name:27s} {part.launches:4d} launches {part.flops / 1e12:6.2f} TFLOP "
                f"{part.bytes / 1e9:6.2f} GB {ms:6.2f} ms"
            )
    print("  in all " + ", ".join(f"{name} {ms:.2f}" for name, ms in totals.items()), end="")
    print(f": {sum(totals.values()):.2f} ms")


# Steps


def copy_apart() -> None:
    """Let the store copy the matrices' weights by a pass of its own, as until 0.18."""
    publish, matrices = FlatStore.publish_weights, FlatStore._matrices

    def publish_weights(store: FlatStore, has_all: bool = True) -> None:
        if not has_all:
            for p in store.update_ranges:
                if p.rule == "muon":
                    store.weights[p.target : p.target + p.master.numel()].copy_(p.master)
        publish(store, has_all)

    def without_copies(store: FlatStore, name: str) -> list[Any]:
        return [member._replace(copy=None) for member in matrices(store, name)]

    FlatStore.publish_weights, FlatStore._matrices = publish_weights, without_copies  # type: ignore[method-assign]


RUN = "import sys; from meshwright.__main__ import main; sys.exit(main(sys.argv[1:]))"
RUN_APART = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); "
    f"import gpu_muon; gpu_muon.copy_apart(); {RUN}"
)
WAYS = {
    "AdamW": (RUN, "--optimizer adam"),
    "Muon, copies in a pass": (RUN_APART, "--optimizer muon"),
    "Muon": (RUN, "--optimizer muon"),
}


def time_steps(model: str, way: str, tokens: int, count: int) -> str:
    """Train, and return the median milliseconds of the later half of the steps, and the loss."""
    code, optimizer = WAYS[way]
    batch = tokens // 1024
    # 16 samples at a time are as fast as more, and fit for each model.
    flags = (
        f"train {FLAGS[model]} {optimizer} --micro-batch-size 16 --global-batch-size {batch} "
        f"--bf16 --lr 1.5e-4 --mock-data --vocab-size 50257 --train-iters {count} --seed 1 "
        "--log-interval 1"
    )
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", code, *flags.split(), "--run-dir", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-400:] or done.stdout[-400:])
        rows = [row for row in read_new_rows(Path(folder))[0] if row["event"] == "step"]
    ms = statistics.median(row["ms"] for row in rows[len(rows) // 2 :])
    return f"{ms:8.2f} ms  loss {rows[-1]['loss']:.4f}"


def print_steps(model: str, count: int) -> None:
    for tokens, way in itertools.product((16384, 65536), WAYS):
        if line := attempt(way, time_steps, model, way, tokens, count):
            print(f"  {tokens} tokens a step, {way:24s} {line}", flush=True)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["345M", "1.3B"])
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--sweep", action="store_true")
    kind.add_argument("--count", action="store_true")
    kind.add_argument("--steps", type=int, default=0, metavar="N")
    args = parser.parse_args()
    print(describe_machine("torch", "triton"))
    for name in args.models:
        layers, shapes = size = MODELS[name]
        print(name)
        if args.count:
            print_counts(size)
            continue
        if args.steps:
            print_steps(name, args.steps)
            continue
        if args.sweep:
            hidden = shapes[1][0]
            count = max(1, min(layers, muon.MUON_CHUNK // (4 * hidden**2)))
            sweep(hidden, count)
            sweep(hidden, 3 * count)
            continue
        updates(size)
        for rows, columns in dict.fromkeys(shapes):
            count = max(1, min(layers, muon.MUON_CHUNK // (rows * columns)))
            attempt(f"{count} x {rows} x {columns}", parts, count, rows, columns)


if __name__ == "__main__":
    main()
