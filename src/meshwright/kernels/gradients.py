"""Where a kernel leaves the gradient of a parameter: in .grad, or added to a full-precision total.

Autograd returns gradients in the weights' format, and the parameter store then adds each to its
float32 total: two more passes over memory and one more launch for each parameter. A parameter with
the attribute `main_grad` lets the kernels write into that total directly; they then return None as
its gradient. Without one (ZeRO 3, custom models, tests) they return the gradient as usual.

The gradients of biases and norm weights are sums of columns. Kernels sum some rows each, into one
row of a small float32 matrix of partial sums (float64 for float64); `reduce_into` then sums that
matrix. Nothing is added atomically, so that the same inputs give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from meshwright.kernels.matmul import multiply_into, product
from meshwright.kernels.references import reference

Total = tuple[Tensor, bool]  # a vector, and whether to add to it, or overwrite it


class MainGrad(Protocol):
    """The place of one parameter's gradient in a parameter store."""

    def begin(self) -> tuple[Tensor, bool]:
        """Return the total, shaped as the parameter, and whether to add to it, or overwrite it."""

    def end(self) -> None:
        """Note that the total has this gradient, or a part of it: there is one for each use."""


def main_grad_of(parameter: Tensor) -> MainGrad | None:
    """Return the parameter's main_grad; none to the compiler, which adds no gradients."""
    return None if torch.compiler.is_compiling() else getattr(parameter, "main_grad", None)


def from_product(parameter: Tensor, grad: Tensor, x: Tensor) -> Tensor | None:
    """Give a matrix the gradient grad^T x, from [N, out] and [N, in]."""
    main_grad = main_grad_of(parameter)
    if main_grad is None:
        return product(grad.t(), x).view_as(parameter)
    total, adds = main_grad.begin()
    multiply_into(total.view(grad.shape[1], x.shape[1]), grad.t(), x, adds)
    main_grad.end()
    return None


def from_columns(parameter: Tensor | None, partials: Tensor) -> Tensor | None:
    """Give a vector the gradient partials.sum(0), from float32 partial sums [n, *its shape]."""
    return from_several([parameter], partials.view(1, len(partials), -1))[0]


def from_rows(parameter: Tensor | None, grad: Tensor) -> Tensor | None:
    """Give a linear map's bias the sum of the rows of its outputs' gradient [..., C]."""
    return None if parameter is None else from_columns(parameter, column_sums(grad))


def of_bias(ctx: Any, grad: Tensor) -> Tensor | None:
    """Do `from_rows` for the third input of a function, which is `ctx.bias`, if it needs one."""
    return from_rows(ctx.bias, grad) if ctx.needs_input_grad[2] else None


def from_several(parameters: Sequence[Tensor | None], partials: Tensor) -> list[Tensor | None]:
    """Do `from_columns` for up to three vectors of one length, from partial sums [k, n, C].

    A parameter that is None needs no gradient; its sums may be anything.
    """
    out: list[Tensor | None] = []
    places: list[Total | None] = []
    # Each vector's sums go into its total, or into a new gradient in its own format.
    for parameter in parameters:
        place = grad = None
        main_grad = None if parameter is None else main_grad_of(parameter)
        if main_grad is not None:
            total, adds = main_grad.begin()
            place = total.view(-1), adds
        elif parameter is not None:
            grad = torch.empty_like(parameter, requires_grad=False)
            place = grad.view(-1), False
        places.append(place)
        out.append(grad)
    # One launch for all of them.
    reduce_into(places, partials)
    for parameter in parameters:
        if parameter is not None and (main_grad := main_grad_of(parameter)) is not None:
            main_grad.end()
    return out


def with_sums(x: Tensor, partials: Tensor) -> Tensor:
    """Keep partial sums [n, C] of x [..., C] with it, for the next function that needs them."""
    x.column_sums = partials, x._version  # type: ignore[attr-defined]
    return x


def column_sums(x: Tensor) -> Tensor:
    """Return partial sums [n, C] of the rows of x [..., C]; those kept with an unchanged x."""
    # A write in place raises the version: the sums would be those of what x was.
    sums, version = getattr(x, "column_sums", (None, 0))
    if isinstance(sums, Tensor) and version == x._version:
        return sums
    return sum_rows(x.reshape(-1, x.shape[-1]))


@reference("gradients.sum_rows")
def sum_rows(matrix: Tensor) -> Tensor:
    """Return partial sums [n, C] of the rows of a matrix [N, C]."""
    return matrix.sum(0, keepdim=True, dtype=torch.promote_types(matrix.dtype, torch.float32))


@reference("gradients.reduce_into", of=lambda totals, partials: partials)
def reduce_into(totals: Sequence[Total | None], partials: Tensor) -> None:
    """Write or add partials[i].sum(0), from [k, n, C], to the i-th of up to three vectors."""
    for vector, rows in zip(totals, partials, strict=True):
        if vector is not None:
            total, adds = vector
            total.add_(rows.sum(0)) if adds else total.copy_(rows.sum(0))


def clip_and_check(
    squares: Tensor, loss: Tensor, scale: float | Tensor, clip: float | Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients' norm, the factor that clips them, and whether norm and loss are finite.

    `squares` is the sum of the squared gradients, which still hold `scale`; a `clip` of 0 does not
    clip. The first two results are of the format `dtype`.
    """
    norm = (squares.sqrt() / scale).to(dtype)
    # As torch.nn.utils.clip_grad_norm_, with its 1e-6.
    shrink = (clip / (norm + 1e-6)).clamp(max=1.0) if clip else torch.ones_like(norm)
    return norm, shrink, norm.float().isfinite() & loss.isfinite()
