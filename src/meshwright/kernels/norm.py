"""The addition to the residual stream and the norm after it, as one function with two outputs.

    x = residual + dropout(pending + bias)          y = norm(x)

Hand-written because torch has no such function: apart, these are four passes over the activations
in each direction, and backward keeps two inputs more. Here backward keeps x and, for each row, its
mean and the reciprocal of its deviation; the dropout's mask is computed again. Statistics and sums
are float32 (float64 for float64); y is computed from x as it is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.kernels import dropout, gradients
from meshwright.kernels.fp8 import Into
from meshwright.kernels.twins import twin, upcast


class NormWeights(NamedTuple):
    """A norm's parameters. LayerNorm centers the rows, RMSNorm does not and has no bias."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    plus: float = 0.0  # added to the weight; 1 with --apply-layernorm-1p
    centers: bool = True  # the rows' means are subtracted: LayerNorm


class Operands(NamedTuple):
    """Operands of the addition, [N, width] or [width]; `rows` are dropout's hashes [N], or None."""

    residual: Tensor | None
    pending: Tensor
    bias: Tensor | None
    rows: Tensor | None
    p: float

    @property
    def adds(self) -> bool:
        """Whether x differs from pending."""
        return not (self.residual is None and self.bias is None and self.rows is None)


class SavedRows(NamedTuple):
    """The tensors that backward needs, and which gradients it must return."""

    x: Tensor
    mean: Tensor | None  # None for RMSNorm
    rstd: Tensor
    rows: Tensor | None
    weight: Tensor
    p: float
    plus: float
    of_residual: bool
    dtype: torch.dtype  # of pending


def add_norm(
    residual: Tensor | None,
    pending: Tensor,
    bias: Tensor | None,
    rows: Tensor | None,
    p: float,
    norm: NormWeights,
) -> tuple[Tensor, Tensor]:
    """Return x, in the residual's format if there is one, and y, in the weight's.

    `rows` [*pending.shape[:-1]] are the hashes of dropout.py; None is no dropout.
    """
    return _AddNorm.apply(residual, pending, bias, rows if p else None, p, *norm)  # type: ignore[no-any-return,no-untyped-call]


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        residual: Tensor | None,
        pending: Tensor,
        bias: Tensor | None,
        rows: Tensor | None,
        p: float,
        *norm: Any,
    ) -> tuple[Tensor, Tensor]:
        weights = NormWeights(*norm)
        shape = pending.shape
        operands = operands_of(residual, pending, bias, rows, p)
        x, y, mean, rstd = forward(operands, weights)
        x = x.view(shape) if operands.adds else pending
        ctx.save_for_backward(x, mean, rstd, operands.rows, weights.weight)
        ctx.set_materialize_grads(False)
        ctx.rest = p, weights.plus, residual is not None, pending.dtype
        ctx.parameters = weights.weight, weights.bias, bias
        return x, y.view(shape)

    @staticmethod
    def backward(ctx: Any, dx: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *others = ctx.saved_tensors
        saved = SavedRows(as_rows(x), *others, *ctx.rest)
        dy = torch.zeros(x.shape, dtype=saved.weight.dtype, device=x.device) if dy is None else dy
        needed = [ctx.needs_input_grad[i] for i in (5, 6, 2)]
        parameters = [
            t if is_needed else None for t, is_needed in zip(ctx.parameters, needed, strict=True)
        ]
        of_residual, of_pending, of_weight, of_shift, of_bias = differentiate(
            dx, dy, saved, parameters, x.shape
        )
        return of_residual, of_pending, of_bias, None, None, of_weight, of_shift, None, None, None


def as_rows(x: Any) -> Any:
    """Return x [..., C] as a contiguous matrix [N, C]; None stays."""
    return None if x is None else x.reshape(-1, x.shape[-1]).contiguous()


def operands_of(
    residual: Tensor | None, pending: Tensor, bias: Tensor | None, rows: Tensor | None, p: float
) -> Operands:
    return Operands(
        as_rows(residual), as_rows(pending), bias, None if rows is None else rows.reshape(-1), p
    )


def differentiate(
    dx: Tensor | None,
    dy: Tensor,
    saved: SavedRows,
    parameters: Sequence[Tensor | None],
    shape: torch.Size,
) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of residual, pending, and of the norm's weight, its bias, the bias.

    Pending's comes with its column sums, in case a product has added a bias to pending before.
    """
    of_residual, of_pending, partials = backward(as_rows(dx), as_rows(dy), saved)
    of_weight, of_shift, of_bias = gradients.from_several(parameters, partials)
    of_residual = None if of_residual is None else of_residual.view(shape)
    return (
        of_residual,
        gradients.with_sums(of_pending.view(shape), partials[2]),
        of_weight,
        of_shift,
        of_bias,
    )


@twin("norm.forward", of=lambda operands, *_: operands.pending)
def forward(
    operands: Operands, norm: NormWeights, into: Into | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return x and y [N, width], the rows' means (None for RMSNorm) and 1 / deviations [N]."""
    x = upcast(operands.pending)
    if operands.bias is not None:
        x = x + operands.bias
    if operands.rows is not None:
        x = dropout.mask_and_scale(x, operands.rows, operands.p)
    stored = operands.pending if operands.residual is None else operands.residual
    x = (x if operands.residual is None else operands.residual + x).to(stored.dtype)
    z = upcast(x)
    mean = None
    if norm.centers:
        mean = z.mean(1)
        z = z - mean[:, None]
    rstd = (z.square().mean(1) + norm.eps).rsqrt()
    y = z * rstd[:, None] * (norm.weight + norm.plus if norm.plus else norm.weight)
    y = (y if norm.bias is None else y + norm.bias).to(norm.weight.dtype)
    return x, y if into is None else into.fill(y), mean, rstd


@twin("norm.backward", of=lambda dx, dy, saved: saved.x)
def backward(
    dx: Tensor | None, dy: Tensor, saved: SavedRows
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the gradients of residual and pending, and partial sums [3, n, width].

    The three are those of the norm's weight, of its bias and of the bias.
    """
    z = upcast(saved.x)
    dy = upcast(dy)
    z = (z if saved.mean is None else z - saved.mean[:, None]) * saved.rstd[:, None]
    wanted = dy * (saved.weight + saved.plus if saved.plus else saved.weight)
    grad = wanted - z * (wanted * z).mean(1, keepdim=True)
    if saved.mean is not None:
        grad = grad - wanted.mean(1, keepdim=True)
    grad = grad * saved.rstd[:, None]
    if dx is not None:
        grad = grad + dx
    of_pending = grad if saved.rows is None else dropout.mask_and_scale(grad, saved.rows, saved.p)
    partials = torch.stack([(dy * z).sum(0), dy.sum(0), of_pending.sum(0)])[:, None]
    of_residual = grad.to(saved.x.dtype) if saved.of_residual else None
    if of_residual is not None and saved.rows is None and saved.dtype is of_residual.dtype:
        return of_residual, of_residual, partials
    return of_residual, of_pending.to(saved.dtype), partials
