"""The addition to the residual stream and the norm after it, as one function with two outputs.

    x = residual + dropout(pending + bias)          y = norm(x)

Hand-written because torch has no such function: apart, these are four passes over the activations
in each direction, and backward keeps two inputs more. Here backward keeps x and, for each row, its
mean and the reciprocal of its deviation; the dropout's mask is computed again. Statistics and sums
are float32 (float64 for float64); y is computed from x as it is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.kernels import columns, gradients
from meshwright.kernels.fp8 import Into
from meshwright.kernels.norm_plain import Join, NormWeights, Saved, plain_backward, plain_forward
from meshwright.kernels.twins import is_triton


def add_norm(
    residual: Tensor | None, pending: Tensor, bias: Tensor | None, rows: Tensor | None, p: float, norm: NormWeights
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
        weights, shape = NormWeights(*norm), pending.shape
        join = join_of(residual, pending, bias, rows, p)
        x, y, mean, rstd = forward(join, weights)
        x = x.view(shape) if join.adds else pending
        ctx.save_for_backward(x, mean, rstd, join.rows, weights.weight)
        ctx.set_materialize_grads(False)
        ctx.rest = p, weights.plus, residual is not None, pending.dtype
        ctx.parameters = weights.weight, weights.bias, bias
        return x, y.view(shape)

    @staticmethod
    def backward(ctx: Any, dx: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *others = ctx.saved_tensors
        saved = Saved(flat(x), *others, *ctx.rest)
        dy = torch.zeros(x.shape, dtype=saved.weight.dtype, device=x.device) if dy is None else dy
        needed = [ctx.needs_input_grad[i] for i in (5, 6, 2)]
        parameters = [t if is_needed else None for t, is_needed in zip(ctx.parameters, needed, strict=True)]
        of_residual, of_pending, of_weight, of_shift, of_bias = differentiate(dx, dy, saved, parameters, x.shape)
        return of_residual, of_pending, of_bias, None, None, of_weight, of_shift, None, None


def flat(x: Any) -> Any:
    return None if x is None else x.reshape(-1, x.shape[-1]).contiguous()


def join_of(residual: Tensor | None, pending: Tensor, bias: Tensor | None, rows: Tensor | None, p: float) -> Join:
    return Join(flat(residual), flat(pending), bias, None if rows is None else rows.reshape(-1), p)


def differentiate(
    dx: Tensor | None, dy: Tensor, saved: Saved, parameters: Sequence[Tensor | None], shape: torch.Size
) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of residual, pending, and of the norm's weight, its bias, the bias.

    Pending's comes with its column sums, in case a product has added a bias to pending before.
    """
    of_residual, of_pending, partials = backward(flat(dx), flat(dy), saved)
    of_weight, of_shift, of_bias = gradients.from_several(parameters, partials)
    of_residual = None if of_residual is None else of_residual.view(shape)
    return of_residual, columns.with_sums(of_pending.view(shape), partials[2]), of_weight, of_shift, of_bias


def forward(join: Join, norm: NormWeights, into: Into | None = None) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return x and y [N, width], the rows' means (None for RMSNorm) and 1 / deviations [N]."""
    if is_triton(join.pending):
        from meshwright.kernels import norm_triton

        return norm_triton.forward(join, norm, into)
    x, y, mean, rstd = plain_forward(join, norm)
    return x, y if into is None else into.fill(y), mean, rstd


def backward(dx: Tensor | None, dy: Tensor, saved: Saved) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the gradients of residual, pending, and partial sums [3, n, width] of parameters'."""
    if not is_triton(saved.x):
        return plain_backward(dx, dy, saved)
    from meshwright.kernels import norm_triton

    return norm_triton.backward(dx, dy, saved)
