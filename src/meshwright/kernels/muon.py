"""The elementwise passes of the Muon update over many matrices of one shape.

`advance` reads the gradients and returns what Newton-Schulz orthogonalises; `apply` takes its
result from the weights. Both leave everything as it was if `skipped` is not 0, which the host
never reads. On CUDA each is one Triton kernel over all matrices; the plain twin takes one matrix
after the other. As in torch, the update is computed in 16 bits; only matrices of float64, by which
layouts are compared, keep their format.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.kernels.twins import is_triton


def advance(
    gradients: list[Tensor], moments: list[Tensor], scale: Tensor, skipped: Tensor, momentum: float
) -> tuple[Tensor, Tensor]:
    """Update the moments; return Nesterov's look-ahead [n, *shape] and its norms [n].

    The gradients are divided by `scale`. The look-ahead is in bfloat16, or in float64 as they are.
    """
    if is_triton(gradients[0]):
        from meshwright.kernels import muon_triton

        return muon_triton.advance(gradients, moments, scale, skipped, momentum)
    return plain_advance(gradients, moments, scale, skipped, momentum)


def apply(weights: list[Tensor], updates: Tensor, kept: Tensor, rate: Tensor, skipped: Tensor) -> None:
    """Set each weight to kept * weight - rate * its update."""
    if is_triton(weights[0]):
        from meshwright.kernels import muon_triton

        muon_triton.apply(weights, updates, kept, rate, skipped)
    else:
        plain_apply(weights, updates, kept, rate, skipped)


def plain_advance(
    gradients: list[Tensor], moments: list[Tensor], scale: Tensor, skipped: Tensor, momentum: float
) -> tuple[Tensor, Tensor]:
    given = gradients[0].dtype
    low, wide = (given, given) if given == torch.float64 else (torch.bfloat16, torch.float32)
    out = gradients[0].new_empty(len(gradients), *gradients[0].shape, dtype=low)
    for gradient, moment, ahead in zip(gradients, moments, out, strict=True):
        now = gradient / scale
        new = moment.lerp(now, 1 - momentum)
        ahead.copy_(now.lerp(new, momentum))
        moment.copy_(torch.where(skipped > 0, moment, new))
    return out, torch.linalg.vector_norm(out, dim=(1, 2), dtype=wide)


def plain_apply(weights: list[Tensor], updates: Tensor, kept: Tensor, rate: Tensor, skipped: Tensor) -> None:
    for weight, update in zip(weights, updates, strict=True):
        weight.copy_(torch.where(skipped > 0, weight, weight * kept - update * rate))
