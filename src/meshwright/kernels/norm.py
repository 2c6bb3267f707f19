"""The addition to the residual stream and the norm after it, as one function with two outputs.

    x = residual + dropout(pending + bias)          y = norm(x)

Hand-written because torch has no such function: apart, these are four passes over the activations
in each direction, and backward keeps two inputs more. Here backward keeps x and, for each row, its
mean and the reciprocal of its deviation; the dropout's mask is computed again. Statistics and sums
are float32 (float64 for float64); y is computed from x as it is stored.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright import device as devices
from meshwright.kernels import dropout, gradients


class NormWeights(NamedTuple):
    """A norm's parameters: LayerNorm, or RMSNorm without a bias."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    plus: float = 0.0  # added to the weight; 1 with --apply-layernorm-1p


class Join(NamedTuple):
    """What is added, [N, width] and [width]; `rows` are hashes [N], or None without dropout."""

    residual: Tensor | None
    pending: Tensor
    bias: Tensor | None
    rows: Tensor | None
    p: float

    @property
    def adds(self) -> bool:
        """Whether x differs from pending."""
        return not (self.residual is None and self.bias is None and self.rows is None)


class Saved(NamedTuple):
    """What backward needs of the forward pass, and which gradients it must return."""

    x: Tensor
    mean: Tensor | None  # None for RMSNorm
    rstd: Tensor
    rows: Tensor | None
    weight: Tensor
    p: float
    plus: float
    of_residual: bool
    of_bias: bool
    dtype: torch.dtype  # of pending


def add_norm(
    residual: Tensor | None, pending: Tensor, bias: Tensor | None, rows: Tensor | None, p: float, norm: NormWeights
) -> tuple[Tensor, Tensor]:
    """Return x, in the residual's format if there is one, and y, in the weight's.

    `rows` [*pending.shape[:-1]] are the hashes of dropout.py; None is no dropout.
    """
    return _AddNorm.apply(residual, pending, bias, rows if p else None, p, *norm)  # type: ignore[no-any-return,no-untyped-call]


def norm(x: Tensor, weights: NormWeights) -> Tensor:
    """Return the norm of x, in the weight's format."""
    return add_norm(None, x, None, None, 0.0, weights)[1]


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
        join = Join(_rows(residual), _rows(pending), bias, None if rows is None else rows.reshape(-1), p)
        x, y, mean, rstd = _forward(join, weights)
        x = x.view(shape) if join.adds else pending
        ctx.save_for_backward(x, mean, rstd, join.rows, weights.weight)
        ctx.set_materialize_grads(False)
        ctx.rest = p, weights.plus, residual is not None, bias is not None, pending.dtype
        ctx.parameters = weights.weight, weights.bias, bias
        return x, y.view(shape)

    @staticmethod
    def backward(ctx: Any, dx: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *others = ctx.saved_tensors
        saved = Saved(_rows(x), *others, *ctx.rest)
        dy = torch.zeros(x.shape, dtype=saved.weight.dtype, device=x.device) if dy is None else dy
        of_residual, of_pending, partials = _backward(_rows(dx), _rows(dy), saved)
        needed = [ctx.needs_input_grad[i] for i in (5, 6, 2)]
        parameters = [t if is_needed else None for t, is_needed in zip(ctx.parameters, needed, strict=True)]
        of_weight, of_shift, of_bias = gradients.from_several(parameters, partials)
        of_residual = None if of_residual is None else of_residual.view(x.shape)
        return of_residual, of_pending.view(x.shape), of_bias, None, None, of_weight, of_shift, None, None


def _rows(x: Any) -> Any:
    return None if x is None else x.reshape(-1, x.shape[-1]).contiguous()


def is_triton(x: Tensor) -> bool:
    return devices.has_kernels(x.device) and x.dtype is not torch.float64


def _forward(join: Join, norm: NormWeights) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    if not is_triton(join.pending):
        return plain_forward(join, norm)
    from meshwright.kernels.norm_triton import forward

    return forward(join, norm)


def _backward(dx: Tensor | None, dy: Tensor, saved: Saved) -> tuple[Tensor | None, Tensor, Tensor]:
    if not is_triton(saved.x):
        return plain_backward(dx, dy, saved)
    from meshwright.kernels.norm_triton import backward

    return backward(dx, dy, saved)


def upcast(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()


def plain_forward(join: Join, norm: NormWeights) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return x and y [N, width], and the rows' means, None for RMSNorm, and 1 / deviations [N]."""
    x = upcast(join.pending)
    if join.bias is not None:
        x = x + join.bias
    if join.rows is not None:
        x = dropout.plain(x, join.rows, join.p)
    kept = join.pending if join.residual is None else join.residual
    x = (x if join.residual is None else join.residual + x).to(kept.dtype)
    z, mean = upcast(x), None
    if norm.bias is not None:
        mean = z.mean(1)
        z = z - mean[:, None]
    rstd = (z.square().mean(1) + norm.eps).rsqrt()
    y = z * rstd[:, None] * (norm.weight + norm.plus if norm.plus else norm.weight)
    return x, (y if norm.bias is None else y + norm.bias).to(norm.weight.dtype), mean, rstd


def plain_backward(dx: Tensor | None, dy: Tensor, saved: Saved) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the gradients of residual, pending, and [3, 1, width]: norm weight and bias, bias."""
    z, dy = upcast(saved.x), upcast(dy)
    z = (z if saved.mean is None else z - saved.mean[:, None]) * saved.rstd[:, None]
    wanted = dy * (saved.weight + saved.plus if saved.plus else saved.weight)
    grad = wanted - z * (wanted * z).mean(1, keepdim=True)
    if saved.mean is not None:
        grad = grad - wanted.mean(1, keepdim=True)
    grad = grad * saved.rstd[:, None]
    if dx is not None:
        grad = grad + dx
    of_pending = grad if saved.rows is None else dropout.plain(grad, saved.rows, saved.p)
    partials = torch.stack([(dy * z).sum(0), dy.sum(0), of_pending.sum(0)])[:, None]
    of_residual = grad.to(saved.x.dtype) if saved.of_residual else None
    if of_residual is not None and saved.rows is None and saved.dtype is of_residual.dtype:
        return of_residual, of_residual, partials
    return of_residual, of_pending.to(saved.dtype), partials
