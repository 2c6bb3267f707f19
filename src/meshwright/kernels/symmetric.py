"""Batched matrix products that are known to be symmetric: only half of each is computed.

Hand-written because cuBLAS has no batched product of half-precision matrices that leaves out half
of a symmetric result (syrk takes one matrix, of float32 or float64). On CUDA a Triton kernel
computes the lower triangle and mirrors it; its plain twin computes the full product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright import device as devices

SMALLEST = 256  # rows; below, all of a product is four tiles of the kernel


def symmetric_product(
    a: Tensor, b: Tensor, c: Tensor | None = None, scale: float = 1.0, keep: float = 0.0, diagonal: float = 0.0
) -> Tensor:
    """Return scale a b^T + keep c + diagonal I, for a, b [n, m, k] whose product is symmetric."""
    if is_halved(a):
        from meshwright.kernels.triton.symmetric import symmetric_product

        return symmetric_product(a, b, c, scale, keep, diagonal)
    return full_product(a, b, c, scale, keep, diagonal)


def is_halved(a: Tensor) -> bool:
    """Return whether the Triton kernel runs."""
    return devices.has_kernels(a.device) and a.dtype is torch.float16 and a.shape[1] >= SMALLEST


def full_product(a: Tensor, b: Tensor, c: Tensor | None, scale: float, keep: float, diagonal: float) -> Tensor:
    """Compute all of the product; the diagonal is rounded twice."""
    added, factor = (a.new_zeros(1, 1, 1), 0.0) if c is None else (c, keep)
    out = torch.baddbmm(added, a, b.mT, beta=factor, alpha=scale)
    if diagonal:
        out.diagonal(dim1=1, dim2=2).add_(diagonal)
    return out
