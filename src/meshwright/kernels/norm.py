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
from meshwright.kernels.references import reference, upcast


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
        # Without an addition x is the input itself, not a copy.
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
        if dy is None:  # only x was used
            dy = torch.zeros(x.shape, dtype=saved.weight.dtype, device=x.device)
        weight, shift, bias = ctx.parameters
        parameters = [
            weight if ctx.needs_input_grad[5] else None,
            shift if ctx.needs_input_grad[6] else None,
            bias if ctx.needs_input_grad[2] else None,
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
    flat = None if rows is None else rows.reshape(-1)
    return Operands(as_rows(residual), as_rows(pending), bias, flat, p)


def differentiate(
    dx: Tensor | None,
    dy: Tensor,
    saved: SavedRows,
    parameters: Sequence[Tensor | None],
    shape: torch.Size,
) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of residual, pending, the norm's weight and bias, and the added bias.

    Pending's comes with its column sums, in case a product has added a bias to pending before.
    """
    of_residual, of_pending, partials = backward(as_rows(dx), as_rows(dy), saved)
    of_weight, of_shift, of_bias = gradients.from_several(parameters, partials)
    if of_residual is not None:
        of_residual = of_residual.view(shape)
    of_pending = gradients.with_sums(of_pending.view(shape), partials[2])
    return of_residual, of_pending, of_weight, of_shift, of_bias


@reference("norm.forward", of=lambda operands, *_: operands.pending)
def forward(
    operands: Operands, norm: NormWeights, into: Into | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return x and y [N, width], the rows' means (None for RMSNorm) and 1 / deviations [N]."""
    # The addition; what follows reads x as it is stored.
    x = upcast(operands.pending)
    if operands.bias is not None:
        x = x + operands.bias
    if operands.rows is not None:
        x = dropout.mask_and_scale(x, operands.rows, operands.p)
    stored = operands.pending
    if operands.residual is not None:
        stored = operands.residual
        x = stored + x
    x = x.to(stored.dtype)
    # The norm.
    z = upcast(x)
    mean = None
    if norm.centers:
        mean = z.mean(1)
        z = z - mean[:, None]
    rstd = (z.square().mean(1) + norm.eps).rsqrt()
    weight = norm.weight + norm.plus if norm.plus else norm.weight
    y = z * rstd[:, None] * weight
    if norm.bias is not None:
        y = y + norm.bias
    y = y.to(norm.weight.dtype)
    if into is not None:
        y = into.fill(y)
    return x, y, mean, rstd


@reference("norm.backward", of=lambda dx, dy, saved: saved.x)
def backward(
    dx: Tensor | None, dy: Tensor, saved: SavedRows
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the gradients of residual and pending, and partial sums [3, n, width].

    They add up to the gradients of the norm's weight, its bias, and the added bias.
    """
    # The normalised rows again, and the gradient of these.
    z = upcast(saved.x)
    dy = upcast(dy)
    if saved.mean is not None:
        z = z - saved.mean[:, None]
    z = z * saved.rstd[:, None]
    weight = saved.weight + saved.plus if saved.plus else saved.weight
    wanted = dy * weight
    # The gradient of x: that through the norm, and that of x itself. The norm's output does not
    # change with the rows' scale nor, for LayerNorm, with their mean: these parts are taken out.
    grad = wanted - z * (wanted * z).mean(1, keepdim=True)
    if saved.mean is not None:
        grad = grad - wanted.mean(1, keepdim=True)
    grad = grad * saved.rstd[:, None]
    if dx is not None:
        grad = grad + dx
    of_pending = grad
    if saved.rows is not None:
        of_pending = dropout.mask_and_scale(grad, saved.rows, saved.p)
    partials = torch.stack([(dy * z).sum(0), dy.sum(0), of_pending.sum(0)])[:, None]
    of_residual = grad.to(saved.x.dtype) if saved.of_residual else None
    # Without dropout both are the same numbers: one tensor for the two, as the Triton kernel has.
    if of_residual is not None and saved.rows is None and saved.dtype is of_residual.dtype:
        return of_residual, of_residual, partials
    return of_residual, of_pending.to(saved.dtype), partials
