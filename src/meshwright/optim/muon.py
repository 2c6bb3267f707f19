"""Muon: momentum whose matrices are orthogonalised by Newton-Schulz iterations.

Our own because torch.optim.Muon takes one matrix after the other, and needs the host to know
whether a step is finite. This one has the same formula,
constants and state, updates all matrices of one shape at once, and never waits for the device, so
that a CUDA graph can hold it.

With X [m, k], m <= k, of norm 1, an iteration is X <- P X, where R = X X^T, P = a I + b R + c R^2.

    plain   computes R, R^2 and P X: 4 m^2 k + 2 m^3 flops
    gram    keeps R and the product Q of the P, which are all symmetric and commute:
            R <- P R P, Q <- P Q, 8 m^3 flops. X itself is read and written once in 3 iterations.

The work by arithmetic, for the 24 layers of a model of hidden size 1024 (345M) and 5 iterations, in
TFLOP and in ms at 600 TFLOP/s (benchmarks/gpu_muon.py measures it):

    plain   7.2   12.0
    gram    5.2    8.7       k >= 1.5 m; plain for square matrices

Every product but P X and Q X is symmetric. A Triton kernel that computed half of each took 10.0 ms
where cuBLAS takes 11.6, on one H200: 1 % of a step of 32,768 tokens, 0.1 % of one of 524,288. That
did not pay for its code.

R has the squares of X's singular values; its rounding errors grow with 1 / value^2. So R is
computed again from X after 3 iterations, and all is in float16, whose 3 more bits of precision need
no scale because no number exceeds 512. Measured on a CPU, with random matrices of condition 1 to
10^6 and matrices of low rank: the distance from float64's result is 1/5 to 1/14 of that of the
plain form in bfloat16, which torch computes. In bfloat16 the gram form would be up to 4 times worse
than plain, and would diverge without the second R. Devices without Triton kernels keep torch's
form.

All data-parallel ranks compute the same update. Each could orthogonalise a part of the matrices, at
the cost of gathering the results.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshwright import device as devices
from meshwright.kernels import muon as passes
from meshwright.optim.rule_table import GRAM, MUON_CHUNK, MUON_STAGE

# Keller Jordan's coefficients, as torch has them: the steepest slope at 0.
A, B, C = 3.4445, -4.7750, 2.0315
SMALLEST_NORM = 1e-7
SPREAD = 256.0  # factor of a stored R: its entries, about 1 / m, are far from float16's smallest


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and updates of AdamW's size, over matrices.

    As for torch's fused optimizers, `grad_scale` divides the gradients, and a step with a
    `found_inf` other than 0 changes nothing; both are tensors on the device. The learning rate and
    the weight decay may be so too.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(
        self, params: Iterable[Any], momentum: float = 0.95, ns_steps: int = 5, chunk: int = MUON_CHUNK
    ) -> None:
        super().__init__(params, {"lr": 0.0, "weight_decay": 0.0, "momentum": momentum, "ns_steps": ns_steps})
        self.chunk = chunk

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for matrices in chunks([p for p in group["params"] if p.grad is not None], self.chunk):
                self._update(matrices, group)

    def _update(self, matrices: list[nn.Parameter], group: dict[str, Any]) -> None:
        first = matrices[0]
        gradients = [p.grad for p in matrices if p.grad is not None]
        moments = [self._moment(p) for p in matrices]
        lr, rows, columns = group["lr"], *first.shape
        skipped = scalar(0.0 if self.found_inf is None else self.found_inf, first)
        scale = scalar(1.0 if self.grad_scale is None else self.grad_scale, first)
        ahead, norms = passes.advance(gradients, moments, scale, skipped, group["momentum"])
        x = normalised(ahead, norms)
        del ahead
        x = orthogonalise(x.mT, group["ns_steps"]).mT if rows > columns else orthogonalise(x, group["ns_steps"])
        decay, rate = 1 - lr * group["weight_decay"], lr * (0.2 * math.sqrt(max(rows, columns)))
        passes.subtract([p.detach() for p in matrices], x, scalar(decay, first), scalar(rate, first), skipped)

    def _moment(self, p: nn.Parameter) -> Tensor:
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        return state["momentum_buffer"]  # type: ignore[no-any-return]


def chunks(parameters: list[nn.Parameter], size: int) -> Iterator[list[nn.Parameter]]:
    """Yield matrices of one shape, with at most `size` elements in all, but at least one matrix."""
    shapes: dict[torch.Size, list[nn.Parameter]] = {}
    for p in parameters:
        shapes.setdefault(p.shape, []).append(p)
    for shape, members in shapes.items():
        count = max(1, size // shape.numel())
        yield from (members[i : i + count] for i in range(0, len(members), count))


def scalar(value: float | Tensor, like: Tensor) -> Tensor:
    """Return a number as a tensor [] on the device, of the format of `like`."""
    if isinstance(value, Tensor):
        return value.to(like.device, like.dtype)
    return torch.full((), value, dtype=like.dtype, device=like.device)


def normalised(x: Tensor, norms: Tensor) -> Tensor:
    """Return x [n, r, c] / its norms [n], rounded as torch does, in the iterations' format."""
    if x.dtype is torch.float64:
        return x / norms.clamp(min=SMALLEST_NORM)[:, None, None]
    low = torch.float16 if devices.has_kernels(x.device) else torch.bfloat16
    rounded = norms.bfloat16().clamp(min=SMALLEST_NORM)[:, None, None]
    return torch.div(x, rounded, out=torch.empty_like(x, dtype=low))


def orthogonalise(x: Tensor, steps: int, is_gram: bool | None = None) -> Tensor:
    """Return the matrices x [n, m, k], m <= k, of norm 1, with singular values of about 1.

    The result lies in memory as x does: row by row or column by column.
    """
    if is_gram is None:
        is_gram = x.dtype is torch.float16 and 2 * x.shape[2] >= GRAM * x.shape[1]
    if is_gram:
        for first in range(0, steps, MUON_STAGE):
            x = multiply_symmetric(polynomial_of_gram(x, min(MUON_STAGE, steps - first)), x)
        return x
    for _ in range(steps):
        r = product(x, x)
        x = multiply_symmetric(product(r, r, r, C, B), x, A)
    return x


def polynomial_of_gram(x: Tensor, steps: int) -> Tensor:
    """Return the product Q [n, m, m] of the steps' P. R is stored multiplied by SPREAD."""
    r = product(x, x, scale=SPREAD)
    q = None
    for step in range(steps):
        p = product(r, r, r, C / SPREAD**2, B / SPREAD, A)
        q = p if q is None else product(q, p)
        if step + 1 < steps:
            r = product(product(p, r), p)
    assert q is not None
    return q


def product(
    a: Tensor, b: Tensor, c: Tensor | None = None, scale: float = 1.0, keep: float = 0.0, diagonal: float = 0.0
) -> Tensor:
    """Return scale a b^T + keep c + diagonal I of a, b [n, m, k]; the diagonal is rounded twice."""
    added, factor = (a.new_zeros(1, 1, 1), 0.0) if c is None else (c, keep)
    out = torch.baddbmm(added, a, b.mT, beta=factor, alpha=scale)
    if diagonal:
        out.diagonal(dim1=1, dim2=2).add_(diagonal)
    return out


def multiply_symmetric(q: Tensor, x: Tensor, keep: float = 0.0) -> Tensor:
    """Return q x + keep x, of a symmetric q, in x's order in memory."""
    if not x.is_contiguous():  # x^T q is (q x)^T
        rows = x.mT
        return (torch.baddbmm(rows, rows, q, beta=keep) if keep else torch.bmm(rows, q)).mT
    return torch.baddbmm(x, q, x, beta=keep) if keep else torch.bmm(q, x)
