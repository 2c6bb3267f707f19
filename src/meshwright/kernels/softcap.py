"""The bound of the logits, cap * tanh(logits / cap), as in Gemma 2 (Riviere et al. 2024).

Hand-written because torch's three operations round three times in 16 bits, and keep one more tensor
of the logits' size. Arithmetic is in at least float32; backward overwrites the unbounded logits,
which nothing else needs, with their gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from meshwright.kernels.cross_entropy import PORTION
from meshwright.kernels.references import reference, upcast


def softcap(logits: Tensor, cap: float) -> Tensor:
    """Return the logits between -cap and cap; backward overwrites those that are given."""
    return _Softcap.apply(logits.contiguous(), cap)  # type: ignore[no-any-return,no-untyped-call]


class _Softcap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, cap: float) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.cap = cap
        return bound(logits, cap)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        overwrite(logits, grad.contiguous(), ctx.cap)
        return logits, None


def portions(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(x.view(-1).split(PORTION) for x in tensors), strict=True)  # type: ignore[no-untyped-call]


@reference("softcap.bound")
def bound(logits: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(logits / cap)."""
    out = torch.empty_like(logits)
    for x, y in portions(logits, out):
        y.copy_((upcast(x) / cap).tanh_().mul_(cap))
    return out


@reference("softcap.overwrite")
def overwrite(logits: Tensor, grad: Tensor, cap: float) -> None:
    """Set the logits to the gradient of `bound`, (1 - tanh^2) * grad."""
    for x, g in portions(logits, grad):
        tanh = (upcast(x) / cap).tanh_()
        x.copy_((1 - tanh.square_()).mul_(upcast(g)))
