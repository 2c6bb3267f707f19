"""Where a kernel leaves the gradient of a parameter: in .grad, or added to a full-precision total.

Autograd returns gradients in the weights' format, and the parameter store then adds each to its
float32 total: two more passes over memory and one more launch for each parameter. A parameter with
the attribute `sink` lets the kernels write into that total directly; they then return None as its
gradient. Without one (ZeRO 3, custom models, tests) they return the gradient as usual.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from meshwright import device as devices


class Sink(Protocol):
    """The place of one parameter's gradient in a parameter store."""

    def begin(self) -> tuple[Tensor, bool]:
        """Return the total, shaped as the parameter, and whether to add to it, or overwrite it."""

    def end(self) -> None:
        """Note that the total includes this gradient."""


def sink_of(parameter: Tensor) -> Sink | None:
    return getattr(parameter, "sink", None)


def from_product(parameter: Tensor, grad: Tensor, x: Tensor) -> Tensor | None:
    """Give a matrix the gradient grad^T x, from [N, out] and [N, in]."""
    sink = sink_of(parameter)
    if sink is None:
        return (grad.t() @ x).view_as(parameter)
    total, adds = sink.begin()
    multiply_into(total.view(grad.shape[1], x.shape[1]), grad.t(), x, adds)
    sink.end()
    return None


def multiply_into(total: Tensor, a: Tensor, b: Tensor, adds: bool) -> None:
    """Set the total to a @ b, or add it; a GPU does not round the product to the inputs' format."""
    if devices.has_kernels(a.device) and a.dtype in (torch.bfloat16, torch.float16) and total.dtype is torch.float32:
        aten: Any = torch.ops.aten
        if adds:
            aten.addmm.dtype_out(total, a, b, torch.float32, out=total)
        else:
            aten.mm.dtype_out(a, b, torch.float32, out=total)
    elif adds:
        total.add_(a @ b)
    else:
        total.copy_(a @ b)


def from_columns(parameter: Tensor | None, partials: Tensor) -> Tensor | None:
    """Give a vector the gradient partials.sum(0), from float32 partial sums [n, *its shape]."""
    if parameter is None:
        return None
    sink = sink_of(parameter)
    if sink is None:
        return partials.sum(0).to(parameter.dtype).view_as(parameter)
    total, adds = sink.begin()
    summed = partials.sum(0).view_as(total)
    total.add_(summed) if adds else total.copy_(summed)
    sink.end()
    return None
