"""The dropout of dropout.py in Triton: the same hashes and masks bit for bit, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.dropout import start_number
from meshwright.kernels.grid import cdiv, power_of_2


@triton.jit
def shuffled(h):
    """Apply dropout.shuffled to uint32."""
    h = h ^ (h >> 16)
    h = h * 0x7FEB352D
    h = h ^ (h >> 15)
    return h * 0x846CA68B


@triton.jit
def mix(h):
    """Apply dropout.mix to uint32."""
    h = shuffled(h)
    return h ^ (h >> 16)


@triton.jit
def keep_mask(row_hash, columns, threshold):
    """Return dropout.keep's mask, from int32 hashes and column numbers that broadcast."""
    h = mix(columns.to(tl.uint32) + 0x9E3779B9) + row_hash.to(tl.uint32, bitcast=True)
    return shuffled(h).to(tl.int32, bitcast=True) >= threshold


@triton.jit
def _mix_in(h, coordinate):
    """Mix 64 bits into a hash: the lower 32, then the upper ones."""
    low = coordinate.to(tl.uint32) + h
    h = mix(low.to(tl.uint32))
    high = coordinate >> 32
    return mix(h ^ high.to(tl.uint32) ^ 0x85EBCA6B)


@triton.jit
def _site_rows(samples, columns, out, count, start, BLOCK: tl.constexpr):
    """Hash some rows at one site.

    In: samples and columns int64 [count], the hash `start` of the seed. Out: int32 [sites, count].
    Moves 20 bytes a row and site.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    sample = tl.load(samples + i, mask=inside, other=0)
    column = tl.load(columns + i, mask=inside, other=0)
    # dropout.rows
    h = _mix_in(start, sample)
    h = _mix_in(h, column)
    # dropout.at_site.
    site = tl.program_id(1)
    key = site.to(tl.uint32) * 0x9E3779B9 + 0x7F4A7C15
    h = mix(h ^ key)
    at = site.to(tl.int64) * count + i
    tl.store(out + at, h.to(tl.int32, bitcast=True), mask=inside)


def threshold_of(p: float) -> int:
    """Return the least signed hash that is kept; the share p of all hashes lies below it."""
    return round(p * 2**32) - 2**31


@triton.jit
def _drop(x, rows, out, columns, threshold, scale, BLOCK: tl.constexpr):
    # A program drops in one row, whose hash is already that of a site.
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    inside = c < columns
    at = row.to(tl.int64) * columns + c
    value = tl.load(x + at, mask=inside)
    row_hash = tl.load(rows + row)
    keep = keep_mask(row_hash, c, threshold)
    kept = tl.where(keep, value * scale, 0.0)
    tl.store(out + at, kept.to(value.dtype), mask=inside)


def site_rows(seed: int, count: int, samples: Tensor, columns: Tensor) -> Tensor:
    """Return the hashes of rows at sites 0 to count - 1."""
    samples, columns = torch.broadcast_tensors(samples, columns)
    # One sample for all columns would stay a view of one element.
    flat_samples = samples.flatten().contiguous()
    flat_columns = columns.flatten().contiguous()
    n = len(flat_samples)
    block = 512
    out = torch.empty(count, n, dtype=torch.int32, device=samples.device)
    with torch.accelerator.device_index(samples.device.index):
        _site_rows[(cdiv(n, block), count)](
            flat_samples, flat_columns, out, n, start_number(seed), block, num_warps=4
        )
    return out.view(count, *samples.shape)


def drop(x: Tensor, rows: Tensor, p: float) -> Tensor:
    """Return x * keep / (1 - p)."""
    x = x.contiguous()
    out = torch.empty_like(x)
    columns = x.shape[-1]
    block = power_of_2(columns)
    warps = min(8, max(1, block // 256))
    with torch.accelerator.device_index(x.device.index):
        _drop[(x.numel() // columns,)](
            x,
            rows.contiguous(),
            out,
            columns,
            threshold_of(p),
            1.0 / (1.0 - p),
            block,
            num_warps=warps,
        )
    return out
