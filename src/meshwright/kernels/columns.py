"""Sums of columns, which the gradients of biases and norm weights are.

Kernels sum some rows each, into one row of a small float32 matrix of partial sums (float64 for
float64); `reduce_into` then sums that matrix. Nothing is added atomically, so that the same inputs
give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.kernels.twins import is_triton

Place = tuple[Tensor, bool]  # a vector, and whether to add to it, or overwrite it


def with_sums(x: Tensor, partials: Tensor) -> Tensor:
    """Keep partial sums [n, C] of x [..., C] with it, for the next function that needs them."""
    x.column_sums = partials, x._version  # type: ignore[attr-defined]
    return x


def column_sums(x: Tensor) -> Tensor:
    """Return partial sums [n, C] of the rows of x [..., C]; those kept with an unchanged x."""
    kept, version = getattr(x, "column_sums", (None, 0))
    if isinstance(kept, Tensor) and version == x._version:
        return kept
    matrix = x.reshape(-1, x.shape[-1])
    if is_triton(matrix):
        from meshwright.kernels.columns_triton import column_sums

        return column_sums(matrix)
    return matrix.sum(0, keepdim=True, dtype=torch.promote_types(matrix.dtype, torch.float32))


def reduce_into(places: Sequence[Place | None], partials: Tensor) -> None:
    """Write or add partials[i].sum(0), from [k, n, C], to the i-th of up to three vectors."""
    if is_triton(partials):
        from meshwright.kernels.columns_triton import reduce_into

        return reduce_into(places, partials)
    for place, rows in zip(places, partials, strict=True):
        if place is not None:
            total, adds = place
            total.add_(rows.sum(0)) if adds else total.copy_(rows.sum(0))
