"""The symmetric products of symmetric.py as one Triton kernel.

Inputs     a, b [n, m, k] in float16, any strides; c [n, m, m] or none
Output     scale a b^T + keep c + diagonal I, [n, m, m], accumulated in float32
Work       m^2 k multiply-adds per matrix for a full product; here T (T + 1) / 2 of its T^2 tiles,
           T = m / 128: 56 % at m = 1024, 53 % at 2048
Bytes      2 m k for each of a and b (once, if the tiles of a matrix meet in the L2 cache),
           m^2 for the half of c, 2 m^2 written

A tile below the diagonal is stored twice, the second time transposed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.grid import cdiv


class SymmetricTiles(NamedTuple):
    """Sizes of the kernel's tiles, and how one is computed.

    With 128 registers a thread and 96 KiB of shared memory, two fit a multiprocessor of an H100 or
    H200, so that one computes while the other stores.
    """

    rows: int = 128
    depth: int = 64
    warps: int = 8
    stages: int = 3
    registers: int = 128  # of a thread, at most


TILES = SymmetricTiles()


@triton.jit
def _symmetric_product(
    a,
    b,
    c,
    out,
    m,
    k,
    a_batch,
    a_row,
    a_column,
    b_batch,
    b_row,
    b_column,
    scale,
    keep,
    diagonal,
    HAS_C: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    # Tile t of the lower triangle, row by row: row i has the tiles i (i + 1) / 2 to i (i + 3) / 2.
    t = tl.program_id(0)
    i = ((tl.sqrt(8.0 * t.to(tl.float32) + 1.0) - 1.0) / 2.0).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > t, i - 1, i)  # the root is rounded
    i = tl.where((i + 1) * (i + 2) // 2 <= t, i + 1, i)
    j = t - i * (i + 1) // 2
    batch = tl.program_id(1).to(tl.int64)
    rows, columns = i * ROWS + tl.arange(0, ROWS), j * ROWS + tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)
    # Rows beyond the end are read again from the start: their results are not stored.
    left = a + batch * a_batch + (rows % m)[:, None] * a_row + depth[None, :] * a_column
    right = b + batch * b_batch + (columns % m)[None, :] * b_row + depth[:, None] * b_column
    total = tl.zeros((ROWS, ROWS), tl.float32)
    for start in range(0, k, DEPTH):
        if WHOLE:
            x, y = tl.load(left), tl.load(right)
        else:
            x = tl.load(left, mask=(start + depth < k)[None, :], other=0.0)
            y = tl.load(right, mask=(start + depth < k)[:, None], other=0.0)
        total = tl.dot(x, y, total)
        left += DEPTH * a_column
        right += DEPTH * b_column
    total *= scale
    inside = (rows < m)[:, None] & (columns < m)[None, :]
    at = batch * m * m + rows[:, None] * m + columns[None, :]
    if HAS_C:
        total += keep * tl.load(c + at, mask=inside, other=0.0).to(tl.float32)
    total += tl.where(rows[:, None] == columns[None, :], diagonal, 0.0)
    rounded = total.to(out.dtype.element_ty)
    tl.store(out + at, rounded, mask=inside)
    if i != j:
        mirrored = batch * m * m + columns[:, None] * m + rows[None, :]
        tl.store(out + mirrored, tl.trans(rounded), mask=(columns < m)[:, None] & (rows < m)[None, :])


def symmetric_product(
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
    assert c is None or c.is_contiguous()
    assert max(k, m) * m < 2**31  # offsets within a matrix are 32-bit
    size = tiles or TILES
    out = torch.empty(n, m, m, dtype=a.dtype, device=a.device)
    count = cdiv(m, size.rows)
    options = {} if torch.version.hip else {"maxnreg": size.registers}
    with torch.accelerator.device_index(a.device.index):
        numbers = m, k, *a.stride(), *b.stride(), float(scale), float(keep), float(diagonal)
        constants = c is not None, k % size.depth == 0, size.rows, size.depth
        launch = options | {"num_warps": size.warps, "num_stages": size.stages}
        _symmetric_product[(count * (count + 1) // 2, n)](
            a, b, out if c is None else c, out, *numbers, *constants, **launch
        )
    return out
