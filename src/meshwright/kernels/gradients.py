"""Where a kernel leaves the gradient of a parameter: in .grad, or added to a full-precision total.

Autograd returns gradients in the weights' format, and the parameter store then adds each to its
float32 total: two more passes over memory and one more launch for each parameter. A parameter with
the attribute `sink` lets the kernels write into that total directly; they then return None as its
gradient. Without one (ZeRO 3, custom models, tests) they return the gradient as usual.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from meshwright.kernels import columns
from meshwright.kernels.products import multiply_into, product


class Sink(Protocol):
    """The place of one parameter's gradient in a parameter store."""

    def begin(self) -> tuple[Tensor, bool]:
        """Return the total, shaped as the parameter, and whether to add to it, or overwrite it."""

    def end(self) -> None:
        """Note that the total includes this gradient, or one of its parts, one for each use."""


def sink_of(parameter: Tensor) -> Sink | None:
    """Return the parameter's sink, but none to the compiler, which adds no gradients itself."""
    return None if torch.compiler.is_compiling() else getattr(parameter, "sink", None)


def from_product(parameter: Tensor, grad: Tensor, x: Tensor) -> Tensor | None:
    """Give a matrix the gradient grad^T x, from [N, out] and [N, in]."""
    sink = sink_of(parameter)
    if sink is None:
        return product(grad.t(), x).view_as(parameter)
    total, adds = sink.begin()
    multiply_into(total.view(grad.shape[1], x.shape[1]), grad.t(), x, adds)
    sink.end()
    return None


def from_columns(parameter: Tensor | None, partials: Tensor) -> Tensor | None:
    """Give a vector the gradient partials.sum(0), from float32 partial sums [n, *its shape]."""
    return from_several([parameter], partials.view(1, len(partials), -1))[0]


def from_rows(parameter: Tensor | None, grad: Tensor) -> Tensor | None:
    """Give a linear map's bias the sum of the rows of its outputs' gradient [..., C]."""
    return None if parameter is None else from_columns(parameter, columns.column_sums(grad))


def from_several(parameters: Sequence[Tensor | None], partials: Tensor) -> list[Tensor | None]:
    """Do `from_columns` for up to three vectors of one length, from partial sums [k, n, C].

    A parameter that is None needs no gradient; its sums may be anything.
    """
    out: list[Tensor | None] = []
    places: list[tuple[Tensor, bool] | None] = []
    for parameter in parameters:
        sink = None if parameter is None else sink_of(parameter)
        if sink is not None:
            total, adds = sink.begin()
            places.append((total.view(-1), adds))
            out.append(None)
        elif parameter is not None:
            grad = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            places.append((grad.view(-1), False))
            out.append(grad)
        else:
            places.append(None)
            out.append(None)
    columns.reduce_into(places, partials)
    for parameter in parameters:
        if parameter is not None and (sink := sink_of(parameter)) is not None:
            sink.end()
    return out
