"""Time of one Muon update on one GPU: torch's, and ours in each form.

    python benchmarks/gpu_muon.py [--models 345M 1.3B]

With random weights and gradients, prints milliseconds (ours in a CUDA graph), the flops that the
form needs by arithmetic, TFLOP/s, the largest distance of a first update from float64's, relative
to it, and the memory of the update. A variant that fails is named, and the
others go on. `gpu_kernels.py muon` has each kernel alone.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import torch
from common import SIZES, attempt, describe_machine, distance, new_parser, seconds_of
from torch import Tensor, nn

from meshwright.optim import muon

MODELS = {name: SIZES[name][:2] for name in ("345M", "1.3B", "2.7B")}  # layers, hidden size
DEVICE = torch.device("cuda")
LR = 0.02


def shapes(hidden: int) -> list[tuple[int, int]]:
    return [(3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)]


def flops(hidden: int, layers: int, gram: bool, steps: int = 5) -> float:
    """Return the flops of the products."""
    total = 0.0
    for rows, columns in shapes(hidden):
        m, k = sorted((rows, columns))
        square, wide = 2.0 * m**3, 2.0 * m * m * k
        if gram and 2 * k >= 3 * m:
            counts = [min(muon.MUON_RESTART, steps - first) for first in range(0, steps, muon.MUON_RESTART)]
            total += sum(2 * wide + (4 * n - 3) * square for n in counts)
        else:
            total += steps * (2 * wide + square)
    return total * layers


def parameters(layers: int, hidden: int) -> list[nn.Parameter]:
    torch.manual_seed(0)
    out = []
    for _, (rows, columns) in itertools.product(range(layers), shapes(hidden)):
        p = nn.Parameter(torch.randn(rows, columns, device=DEVICE) * 0.02)
        # Singular values over four orders of magnitude, as gradients have them.
        p.grad = torch.randn(rows, columns, device=DEVICE) * torch.logspace(0, -4, columns, device=DEVICE)
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


def farthest(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], layers: int, hidden: int) -> float:
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
    return torch.optim.Muon(params, lr=LR, weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw")


def ours(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = muon.Muon(params)
    optimizer.param_groups[0].update(lr=LR)
    return optimizer


def time_update(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], size: tuple[int, int], work: float) -> str:
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
    name: str, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], size: tuple[int, int], work: float
) -> None:
    if line := attempt(name, time_update, make, size, work):
        print(f"  {name:34s} {line}", flush=True)


def updates(size: tuple[int, int]) -> None:
    layers, hidden = size
    print_update("torch.optim.Muon", torchs, size, flops(hidden, layers, False))
    orthogonalise = muon.orthogonalise
    for gram in (False, True):
        muon.orthogonalise = orthogonalise if gram else functools.partial(orthogonalise, is_gram=False)
        print_update("gram" if gram else "plain", ours, size, flops(hidden, layers, gram))
    muon.orthogonalise = orthogonalise


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["345M", "1.3B"])
    args = parser.parse_args()
    print(describe_machine("torch", "triton"))
    for name in args.models:
        print(name)
        updates(MODELS[name])


if __name__ == "__main__":
    main()
