"""The kernel of embedding.py: sum the rows of each token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.grid import cdiv

# The tile of a program.
ROWS = 16
COLUMNS = 512
WARPS = 4


@triton.jit
def _embedding_add_rows(
    total, rows, ids, order, ends, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Sum the rows of one token, in 512 columns, and add them to its row of the total.

    In: rows [N, width], ids [N] sorted, order [N] (where a sorted one was), ends [N] (the first
    place after the same ids). In and out: total float32 [V, width]. Reads each row once; reads and
    writes 4 bytes an element of the totals of the tokens that occur. Programs of a place that is
    not a token's first do nothing.
    """
    place = tl.program_id(0)
    token = tl.load(ids + place)
    before = tl.load(ids + tl.maximum(place - 1, 0))
    is_first = (place == 0) | (before != token)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < width
    if is_first:
        # The token's rows in the order of the batch, so that their sum is the same each time.
        end = tl.load(ends + place).to(tl.int32)
        added = tl.zeros((COLUMNS,), tl.float32)
        for start in range(place, end, ROWS):
            i = start + tl.arange(0, ROWS)
            row = tl.load(order + i, mask=i < end, other=0)
            row = row.to(tl.int64)
            at = row[:, None] * width + column[None, :]
            mask = (i < end)[:, None] & is_column[None, :]
            value = tl.load(rows + at, mask=mask, other=0.0)
            value = value.to(tl.float32)
            added += tl.sum(value, 0)
        # No other program has this token, so the total needs no atomic.
        target = total + token.to(tl.int64) * width + column
        old = tl.load(target, mask=is_column, other=0.0)
        tl.store(target, old + added, mask=is_column)


def add_rows(total: Tensor, ids: Tensor, rows: Tensor) -> None:
    """Add each of the rows [N, H] to the row of `total` that `ids` [N] names."""
    count, width = rows.shape
    with torch.accelerator.device_index(total.device.index):
        sorted_ids, order = torch.sort(ids.int(), stable=True)
        ends = torch.searchsorted(sorted_ids, sorted_ids, right=True)
        _embedding_add_rows[(count, cdiv(width, COLUMNS))](
            total, rows.contiguous(), sorted_ids, order, ends, width, ROWS, COLUMNS, num_warps=WARPS
        )
