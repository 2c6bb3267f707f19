"""The dropout of dropout.py as one Triton kernel: the same mask bit for bit, in one read and write.

Used on CUDA only; tests compare it with the plain twin.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def kept(row_hash, columns, threshold):  # type: ignore[no-untyped-def]
    """Return dropout.keep's mask, from int32 hashes and column numbers that broadcast."""
    h = columns.to(tl.uint32) + 0x9E3779B9  # dropout._mix of the column number
    h = h ^ (h >> 16)
    h = h * 0x7FEB352D
    h = h ^ (h >> 15)
    h = h * 0x846CA68B
    h = h ^ (h >> 16)
    h = h + row_hash.to(tl.uint32, bitcast=True)
    h = h ^ (h >> 16)
    h = h * 0x7FEB352D
    h = h ^ (h >> 15)
    h = h * 0x846CA68B
    return h.to(tl.int32, bitcast=True) >= threshold


def threshold_of(p: float) -> int:
    """Return the least signed hash that is kept; the share p of all hashes lies below it."""
    return round(p * 2**32) - 2**31


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(x, rows, out, columns, threshold, scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    keep = kept(tl.load(rows + row), c, threshold)
    at = row.to(tl.int64) * columns + c
    value = tl.load(x + at, mask=c < columns)
    tl.store(out + at, tl.where(keep, value * scale, 0.0).to(value.dtype), mask=c < columns)


def drop(x: Tensor, rows: Tensor, p: float) -> Tensor:
    """Return x * keep / (1 - p)."""
    x = x.contiguous()
    out, columns = torch.empty_like(x), x.shape[-1]
    block = triton.next_power_of_2(columns)
    warps = min(8, max(1, block // 256))
    with torch.accelerator.device_index(x.device.index):
        _kernel[(x.numel() // columns,)](
            x, rows.contiguous(), out, columns, threshold_of(p), 1.0 / (1.0 - p), block, num_warps=warps
        )
    return out
