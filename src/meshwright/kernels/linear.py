"""Linear maps: in float32 where a CPU would take long, and with a weight gradient to be deferred.

CPUs without instructions for float16 multiply it many times as slowly as float32, so
`affine` and `product` compute in float32 there. Zero-bubble pipelines defer weight gradients.

Hand-written because torch's own split (torch.distributed.pipelining._backward) runs a recomputed
layer again for each weight, and fires no hooks. A deferred gradient is kept as its two factors.
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
def deferred() -> Iterator[Waiting]:
    """Make `linear` append weight gradients to the yielded list instead of computing them."""
    global _waiting
    _waiting = []
    try:
        yield _waiting
    finally:
        _waiting = None


def is_deferred() -> bool:
    return _waiting is not None


def is_slow(x: Tensor) -> bool:
    return x.dtype is torch.float16 and x.device.type == "cpu"


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b."""
    return (a.float() @ b.float()).half() if is_slow(a) else a @ b


def affine(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return F.linear."""
    if is_slow(x):
        return _InFloat32.apply(x, weight, bias)  # type: ignore[no-any-return,no-untyped-call]
    return F.linear(x, weight, bias)


class _InFloat32(torch.autograd.Function):
    """F.linear of float16, which keeps no copy in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).half()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        of_weight = product(flat.t(), x.reshape(-1, x.shape[-1]))
        return product(grad, weight), of_weight, flat.sum(0) if ctx.biased else None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, parameter: list[Tensor]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter, ctx.biased = parameter[0], bias is not None
        return affine(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        assert _waiting is not None
        _waiting.append((ctx.parameter, flat, x.reshape(-1, x.shape[-1])))
        return product(grad, weight), None, flat.sum(0) if ctx.biased else None, None


def linear(x: Tensor, parameter: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear, in which a parameter of more than two dimensions is a stack of matrices."""
    weight = parameter.flatten(0, -2)
    if _waiting is None or not x.requires_grad:
        return affine(x, weight, bias)
    return _Linear.apply(x, weight.detach(), bias, [parameter])  # type: ignore[no-any-return,no-untyped-call]


def compute(waiting: Waiting) -> None:
    """Compute the deferred weight gradients."""
    for parameter, grad, x in waiting:
        parameter.backward(product(grad.t(), x).view_as(parameter))  # type: ignore[no-untyped-call]
    waiting.clear()
