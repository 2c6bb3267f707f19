"""The sums of gradients.py as two Triton kernels, in a fixed order.

Used on CUDA only; tests compare them with the plain reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.base import device as devices
from meshwright.kernels.gradients import Total
from meshwright.kernels.grid import SUM_COLUMNS, SUM_ROWS, cdiv, power_of_2, sum_slab, summed_rows

STAGES = 3  # of `_sum_rows`: loads in flight; its tile is in grid.py
# Of a program of `_reduce_columns` at least: 32 bytes, which memory moves at once.
REDUCED_COLUMNS = 8
REDUCED_ROWS = 1024  # at most
REDUCED = 4096  # elements of its tile, if that is large enough


@triton.jit
def _sum_rows(
    matrix,
    partials,
    stride,
    count,
    width,
    slab,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sum `slab` rows of a matrix [N, C] (any float) in each column: one row of partials (float32).

    Bytes moved: N C of the matrix's format; the partial sums are less than a hundredth of that.
    For 32,768 x 4,096 bfloat16 an H200 moves 4.0 of its 4.8 TB/s.
    """
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1) * slab
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(0, slab, ROWS, num_stages=STAGES):
        row = first + start + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None] * stride + c[None, :]
        inside = (row < count)[:, None] & (c < width)[None, :]
        total += tl.load(matrix + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(partials + tl.program_id(1).to(tl.int64) * width + c, tl.sum(total, 0), mask=c < width)


def sum_rows(matrix: Tensor) -> Tensor:
    """Return partial sums [n, C]; each covers a multiple of ROWS rows."""
    if matrix.stride(1) != 1:
        matrix = matrix.contiguous()
    count, width = matrix.shape
    # The grid: tiles of columns, and slabs of rows, each of which leaves a row of partial sums.
    slab = sum_slab(count, width, devices.processors(matrix.device))
    across = cdiv(width, SUM_COLUMNS)
    n = summed_rows(count, slab)
    partials = torch.empty(n, width, dtype=torch.float32, device=matrix.device)
    with torch.accelerator.device_index(matrix.device.index):
        _sum_rows[(across, n)](
            matrix,
            partials,
            matrix.stride(0),
            count,
            width,
            slab,
            SUM_COLUMNS,
            SUM_ROWS,
            STAGES,
            num_warps=4,
        )
    return partials


@triton.jit
def _reduce_vector(
    partials, total, count, width, ADDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    if total is not None:
        c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, count, ROWS):
            row = start + tl.arange(0, ROWS)
            inside = (row < count)[:, None] & (c < width)[None, :]
            at = row.to(tl.int64)[:, None] * width + c[None, :]
            sums += tl.load(partials + at, mask=inside, other=0.0)
        out = tl.sum(sums, 0)
        # Add to the total, or begin it.
        if ADDS:
            old = tl.load(total + c, mask=c < width, other=0.0)
            out += old.to(tl.float32)
        tl.store(total + c, out.to(total.dtype.element_ty), mask=c < width)


@triton.jit
def _reduce_columns(
    partials,
    first,
    second,
    third,
    count,
    width,
    ADD_1: tl.constexpr,
    ADD_2: tl.constexpr,
    ADD_3: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write or add the column sums of partials [k, n, C] (float32) to k <= 3 vectors [C].

    A program reads all rows of its few columns at once, which takes less time than step by step.
    Bytes moved: 4 k n C, from the L2 cache if they were just written, and 4 or 8 C for each vector.
    """
    which = tl.program_id(1)
    partials += which.to(tl.int64) * count * width
    if which == 0:
        _reduce_vector(partials, first, count, width, ADD_1, ROWS, COLUMNS)
    elif which == 1:
        _reduce_vector(partials, second, count, width, ADD_2, ROWS, COLUMNS)
    else:
        _reduce_vector(partials, third, count, width, ADD_3, ROWS, COLUMNS)


def reduce_into(totals: Sequence[Total | None], partials: Tensor) -> None:
    """Write or add partials[i].sum(0) to the i-th vector, in one launch."""
    k, n, width = partials.shape
    # The kernel takes three vectors; those that are None are left out.
    vectors: list[Tensor | None] = [None] * 3
    adds = [False] * 3
    for i, total in enumerate(totals):
        if total is not None:
            vectors[i], adds[i] = total
    # Few rows leave room for more columns in a tile.
    rows = min(REDUCED_ROWS, power_of_2(n))
    columns = max(REDUCED_COLUMNS, min(128, REDUCED // rows))
    with torch.accelerator.device_index(partials.device.index):
        _reduce_columns[(cdiv(width, columns), k)](
            partials,
            *vectors,
            n,
            width,
            *adds,
            rows,
            columns,
            num_warps=4 if rows * columns <= REDUCED else 8,
        )
