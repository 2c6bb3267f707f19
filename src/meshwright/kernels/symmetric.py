"""Batched products that are known to be symmetric, such as X X^T or those of matrices that commute.

From NVIDIA's Hopper on, whose tiles and speed the kernel is made for, it computes the lower
triangle and mirrors it; its plain reference computes all of the product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.base import device as devices
from meshwright.kernels.references import reference

SMALLEST = 256  # rows; the kernel's tiles leave out nothing of a smaller product
MULTIPLE = 16  # of the rows and columns of what the kernel takes


def symmetric_product(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    scale: float = 1.0,
    keep: float = 0.0,
    diagonal: float = 0.0,
) -> Tensor:
    """Return scale a b^T + keep c + diagonal I, for a, b [n, m, k] whose product is symmetric."""
    # The kernel is Hopper's, needs sizes that its loads can divide, and gains on large ones only.
    _, m, k = a.shape
    is_halved = (
        m >= SMALLEST and m % MULTIPLE == k % MULTIPLE == 0 and devices.is_hopper_or_later(a.device)
    )
    multiply = half_product if is_halved else half_product.plain  # type: ignore[attr-defined]
    return multiply(a, b, c, scale, keep, diagonal)


@reference("symmetric.half_product")
def half_product(
    a: Tensor, b: Tensor, c: Tensor | None, scale: float, keep: float, diagonal: float
) -> Tensor:
    """Return the same from one half of the products; this reference computes both.

    The kernel rounds once, the reference a second time where it adds the diagonal.
    """
    added, factor = (a.new_zeros(1, 1, 1), 0.0) if c is None else (c, keep)
    out = torch.baddbmm(added, a, b.mT, beta=factor, alpha=scale)
    if diagonal:
        out.diagonal(dim1=1, dim2=2).add_(diagonal)
    return out
