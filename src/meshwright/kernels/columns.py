"""Sums of columns, which the gradients of biases and norm weights are.

Kernels sum some rows each, into one row of a small float32 matrix of partial sums (float64 for
float64); `reduce_into` then sums that matrix. Nothing is added atomically, so that the same inputs
give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.kernels.twins import twin

Total = tuple[Tensor, bool]  # a vector, and whether to add to it, or overwrite it


def with_sums(x: Tensor, partials: Tensor) -> Tensor:
    """Keep partial sums [n, C] of x [..., C] with it, for the next function that needs them."""
    x.column_sums = partials, x._version  # type: ignore[attr-defined]
    return x


def column_sums(x: Tensor) -> Tensor:
    """Return partial sums [n, C] of the rows of x [..., C]; those kept with an unchanged x."""
    sums, version = getattr(x, "column_sums", (None, 0))
    if isinstance(sums, Tensor) and version == x._version:
        return sums
    return sum_rows(x.reshape(-1, x.shape[-1]))


@twin("columns.sum_rows")
def sum_rows(matrix: Tensor) -> Tensor:
    """Return partial sums [n, C] of the rows of a matrix [N, C]."""
    return matrix.sum(0, keepdim=True, dtype=torch.promote_types(matrix.dtype, torch.float32))


@twin("columns.reduce_into", of=lambda totals, partials: partials)
def reduce_into(totals: Sequence[Total | None], partials: Tensor) -> None:
    """Write or add partials[i].sum(0), from [k, n, C], to the i-th of up to three vectors."""
    for vector, rows in zip(totals, partials, strict=True):
        if vector is not None:
            total, adds = vector
            total.add_(rows.sum(0)) if adds else total.copy_(rows.sum(0))
