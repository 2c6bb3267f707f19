"""Types that the parts of norm.py share, and its plain twin."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.kernels import dropout
from meshwright.kernels.twins import upcast


class NormWeights(NamedTuple):
    """A norm's parameters: LayerNorm, or RMSNorm without a bias."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    plus: float = 0.0  # added to the weight; 1 with --apply-layernorm-1p


class Join(NamedTuple):
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


class Saved(NamedTuple):
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
