"""Batched products that are known to be symmetric, of which one half is computed.

Our own because cuBLAS has no batched product of half-precision matrices that leaves out half of a
symmetric result (syrk takes one matrix, of float32 or float64), and torch.baddbmm copies c first.

Inputs     a, b [n, m, k] in float16 or bfloat16, both row by row or both column by column;
           c [n, m, m] or none
Output     scale a b^T + keep c + diagonal I, [n, m, m], rounded once from float32
Work       m^2 k multiply-adds of a matrix for a full product; here T (T + 1) / 2 of its T^2 tiles,
           T = m / 128, or a few more where tiles are wide: 62 % at m = 1024, 56 % at 2048
Bytes      2 m k for each of a and b (once, if the tiles of a matrix meet in the L2 cache),
           m^2 for the half of c, 2 m^2 written

The part of a tile below the diagonal is stored twice, the second time transposed. Tiles follow each
other row by row, matrix by matrix, so that those in flight share their operands in the L2 cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from meshwright.kernels.grid import cdiv


class SymmetricTiles(NamedTuple):
    """Sizes of the kernel's tiles, and how one is computed; hardware loads them (TMA).

    The fastest of ten that benchmarks/gpu_muon.py timed on an H100.
    """

    rows: int = 128
    columns: int = 256  # a multiple of the rows
    depth: int = 64
    warps: int = 8
    stages: int = 3


TILES = SymmetricTiles()


@triton.jit
def _load(x, batch, row, start, BY_ROW: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """Return rows of a matrix of x [n, m, k] from a column on: [ROWS, DEPTH]."""
    if BY_ROW:
        return x.load([batch, row, start]).reshape(ROWS, DEPTH)
    else:
        return x.load([batch, start, row]).reshape(DEPTH, ROWS).T


@triton.jit
def _symmetric_product(
    a,
    b,
    c,
    out,
    m,
    k,
    scale,
    keep,
    diagonal,
    HAS_C: tl.constexpr,
    WHOLE: tl.constexpr,
    BY_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    # Row i of tiles has those that begin on or below the diagonal.
    i = 0
    j = tl.program_id(0)
    while j > i * ROWS // COLUMNS:
        j -= i * ROWS // COLUMNS + 1
        i += 1
    batch = tl.program_id(1)
    row = i * ROWS
    column = j * COLUMNS
    # The product, summed in float32.
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, k, DEPTH):
        x = _load(a, batch, row, start, BY_ROW, ROWS, DEPTH)
        y = _load(b, batch, column, start, BY_ROW, COLUMNS, DEPTH)
        total = tl.dot(x, y.T, total)
    rows = row + tl.arange(0, ROWS)
    columns = column + tl.arange(0, COLUMNS)
    offset = batch.to(tl.int64) * m * m
    # A wide tile may reach beyond the square on the diagonal, which another tile stores transposed.
    inside = (columns < row + ROWS)[None, :]
    if not WHOLE:
        inside = inside & (rows < m)[:, None] & (columns < m)[None, :]
    at = offset + rows[:, None] * m + columns[None, :]
    # What is added to the product; it is rounded once, behind all of it.
    total *= scale
    if HAS_C:
        total += keep * tl.load(c + at, mask=inside, other=0.0).to(tl.float32)
    total += tl.where(rows[:, None] == columns[None, :], diagonal, 0.0)
    rounded = total.to(out.dtype.element_ty)
    tl.store(out + at, rounded, mask=inside)
    # What lies left of the square on the diagonal has a mirror image above it.
    if column < row:
        mirrored = offset + columns[:, None] * m + rows[None, :]
        below = (columns < row)[:, None]
        if not WHOLE:
            below = below & (rows < m)[None, :]
        tl.store(out + mirrored, rounded.T, mask=below)


def half_product(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    scale: float,
    keep: float,
    diagonal: float,
    tiles: SymmetricTiles | None = None,
) -> Tensor:
    """Return scale a b^T + keep c + diagonal I."""
    n, m, k = a.shape
    tiles = tiles or TILES
    assert a.stride() == b.stride() and (c is None or c.is_contiguous())
    assert max(k, m) * m < 2**31  # offsets within a matrix are 32-bit
    out = torch.empty(n, m, m, dtype=a.dtype, device=a.device)
    grid = count_tiles(m, tiles), n
    by_row = a.is_contiguous()
    assert by_row or a.mT.is_contiguous()
    left = _describe(a, tiles.rows, tiles.depth)
    right = _describe(b, tiles.columns, tiles.depth)
    is_whole = m % tiles.columns == 0
    with torch.accelerator.device_index(a.device.index):
        _symmetric_product[grid](
            left,
            right,
            out if c is None else c,
            out,
            m,
            k,
            float(scale),
            float(keep),
            float(diagonal),
            c is not None,
            is_whole,
            by_row,
            tiles.rows,
            tiles.columns,
            tiles.depth,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
    return out


def count_tiles(m: int, tiles: SymmetricTiles) -> int:
    """Return the tiles of a matrix that begin on or below the diagonal."""
    return sum(i * tiles.rows // tiles.columns + 1 for i in range(cdiv(m, tiles.rows)))


def _describe(x: Tensor, rows: int, depth: int) -> TensorDescriptor:
    """Return a descriptor of tiles of x [n, m, k]; beyond its ends zeros are read."""
    if x.is_contiguous():
        return TensorDescriptor.from_tensor(x, [1, rows, depth])
    return TensorDescriptor.from_tensor(x.mT, [1, depth, rows])
