"""A linear map whose weight's gradient can be computed later than its input's, as zero-bubble pipelines want it.

Hand-written because torch's own split (torch.distributed.pipelining._backward) runs a recomputed layer once more for each
weight, and fires no hooks. Weights gradients wait in `waiting`, which holds the products' two factors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Waiting = list[tuple[Tensor, Tensor, Tensor]]  # parameter, gradient of the outputs [N, out], inputs [N, in]
_waiting: Waiting | None = None


@contextlib.contextmanager
def later() -> Iterator[Waiting]:
    """Within, `linear` leaves the weights' gradients in the list that it gives."""
    global _waiting
    _waiting = []
    try:
        yield _waiting
    finally:
        _waiting = None


def is_later() -> bool:
    return _waiting is not None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, parameter: list[Tensor]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter, ctx.biased = parameter[0], bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        assert _waiting is not None
        _waiting.append((ctx.parameter, flat, x.reshape(-1, x.shape[-1])))
        return grad @ weight, None, flat.sum(0) if ctx.biased else None, None


def linear(x: Tensor, parameter: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear; a parameter of more than two dimensions is several matrices of outputs, one below the other."""
    weight = parameter.flatten(0, -2)
    if _waiting is None or not x.requires_grad:
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight.detach(), bias, [parameter])  # type: ignore[no-any-return,no-untyped-call]


def compute(waiting: Waiting) -> None:
    """The gradients of weights that waited."""
    for parameter, grad, x in waiting:
        parameter.backward((grad.t() @ x).view_as(parameter))  # type: ignore[no-untyped-call]
    waiting.clear()
