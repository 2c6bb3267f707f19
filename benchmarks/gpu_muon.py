"""Time of one Muon update on one GPU: torch's, and ours in each form; and of its parts.

    python benchmarks/gpu_muon.py [--models 345M 1.3B] [--sweep]

With random weights and gradients, prints milliseconds (ours in a CUDA graph), the flops that the
form needs by arithmetic, TFLOP/s, the largest distance of a first update from float64's, relative
to it, and the memory of the update: with cuBLAS's full symmetric products, and with halves. Then
each part's time, with TFLOP/s of the flops that are computed, or GB/s of the bytes that must move.
`--sweep` instead times the symmetric products with tiles of other sizes (rows x columns x depth,
warps, stages), and their distance from cuBLAS's. A variant that fails is named,
and the others go on.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import torch
from common import SIZES, attempt, describe_machine, distance, new_parser, seconds_of
from torch import Tensor, nn

from meshwright.kernels import muon as passes
from meshwright.kernels import symmetric
from meshwright.kernels.triton.symmetric import TILES, SymmetricTiles, count_tiles, half_product
from meshwright.optim import muon

MODELS = {name: SIZES[name][:2] for name in ("345M", "1.3B", "2.7B")}  # layers, hidden size
DEVICE = torch.device("cuda")
LR = 0.02


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


def shapes(hidden: int) -> list[tuple[int, int]]:
    return [(3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)]


def computed(m: int, tiles: SymmetricTiles = TILES) -> float:
    """Return the share of a symmetric product [m, m] that the kernel computes."""
    return count_tiles(m, tiles) * tiles.rows * tiles.columns / m**2


def flops(hidden: int, layers: int, gram: bool, halves: bool, steps: int = 5) -> float:
    """Return the flops of the products, with full symmetric ones or with halves."""
    total = 0.0
    for rows, columns in shapes(hidden):
        m, k = sorted((rows, columns))
        square, wide, part = 2.0 * m**3, 2.0 * m * m * k, computed(m) if halves else 1.0
        if gram and 2 * k >= 3 * m:
            counts = [
                min(muon.MUON_RESTART, steps - first)
                for first in range(0, steps, muon.MUON_RESTART)
            ]
            total += sum(wide + (wide + (4 * n - 3) * square) * part for n in counts)
        else:
            total += steps * (wide + (wide + square) * part)
    return total * layers


def parameters(layers: int, hidden: int) -> list[nn.Parameter]:
    torch.manual_seed(0)
    out = []
    for _, (rows, columns) in itertools.product(range(layers), shapes(hidden)):
        p = nn.Parameter(torch.randn(rows, columns, device=DEVICE) * 0.02)
        # Singular values over four orders of magnitude, as gradients have them.
        p.grad = torch.randn(rows, columns, device=DEVICE) * torch.logspace(
            0, -4, columns, device=DEVICE
        )
        out.append(p)
    return out


def exact(gradient: Tensor, steps: int = 5) -> Tensor:
    """Return the first update's matrix in float64."""
    x = gradient.double() * (1 - 0.95) * (1 + 0.95)  # Nesterov's look-ahead of a first moment
    x = x.mT if x.shape[0] > x.shape[1] else x
    x = x / x.norm()
    for _ in range(steps):
        r = x @ x.mT
        x = muon.A * x + (muon.B * r + muon.C * r @ r) @ x
    return x.mT if gradient.shape[0] > gradient.shape[1] else x


def farthest(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], layers: int, hidden: int
) -> float:
    """Return the largest relative distance of a first update from float64's."""
    params = parameters(1, hidden)
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


def ours(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = muon.Muon(params)
    optimizer.param_groups[0].update(lr=LR)
    return optimizer


def time_update(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], size: tuple[int, int], work: float
) -> str:
    params = parameters(*size)
    optimizer = make(params)
    ms = 1e3 * seconds_of(optimizer.step, graph=make is ours)
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    optimizer.step()
    more = (torch.cuda.max_memory_allocated() - held) / 2**30
    del optimizer, params
    off = farthest(make, *size)
    return f"{ms:8.2f} ms {work / 1e12:7.2f} TFLOP {work / ms / 1e9:7.0f} TFLOP/s  off {off:.4f}  +{more:.2f} GiB"


def print_update(
    name: str,
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    size: tuple[int, int],
    work: float,
) -> None:
    if line := attempt(name, time_update, make, size, work):
        print(f"  {name:34s} {line}", flush=True)


def updates(size: tuple[int, int]) -> None:
    layers, hidden = size
    print_update("torch.optim.Muon", torchs, size, flops(hidden, layers, False, False))
    orthogonalise, smallest = muon.orthogonalise, symmetric.SMALLEST
    for gram, halves in itertools.product((False, True), repeat=2):
        symmetric.SMALLEST = smallest if halves else 1 << 30
        muon.orthogonalise = (
            orthogonalise if gram else functools.partial(orthogonalise, is_gram=False)
        )
        name = f"{'gram' if gram else 'plain'}, {'halves' if halves else 'full products'}"
        print_update(name, ours, size, flops(hidden, layers, gram, halves))
    muon.orthogonalise, symmetric.SMALLEST = orthogonalise, smallest


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


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["345M", "1.3B"])
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    print(describe_machine("torch", "triton"))
    for name in args.models:
        layers, hidden = MODELS[name]
        print(name)
        if args.sweep:
            sweep(hidden, max(1, min(layers, muon.MUON_CHUNK // (4 * hidden**2))))
            continue
        updates(MODELS[name])
        for rows, columns in shapes(hidden):
            count = max(1, min(layers, muon.MUON_CHUNK // (rows * columns)))
            attempt(f"{count} x {rows} x {columns}", parts, count, rows, columns)


if __name__ == "__main__":
    main()
