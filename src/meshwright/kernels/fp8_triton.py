"""The cast to fp8 of fp8.py as one Triton kernel: both layouts and the amax in one read.

Only cast and transpose are in it: a kernel that also computed an activation's gradient stored wrong
bytes on a GPU, right as it was in Triton's interpreter. benchmarks/gpu_fp8.py compares every byte.
"""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, WARPS = 64, 128, 4  # of a tile


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    x,
    out,
    turned,
    scale,
    amax,
    rows,
    columns,
    padded,
    LARGEST: tl.constexpr,
    WIDE: tl.constexpr,
    RECORDED: tl.constexpr,
    TURNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write x * scale in fp8 as it lies and transposed, and raise the amax.

    In: x [rows, columns], scale [1] float32. Out, as bytes: out [rows, columns], turned [columns,
    padded], whose columns from `rows` on are 0; amax [1] float32. Moves 2 + 1 + 1 bytes an element
    of bfloat16, without `turned` 2 + 1.
    """
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    here = (r < rows)[:, None] & (c < columns)[None, :]
    at = r[:, None] * columns + c[None, :]
    value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    size = tl.abs(value)
    finite = size < float("inf")  # False for NaN too
    if RECORDED:
        high = tl.max(tl.max(tl.where(finite, size, 0.0), 1), 0)
        if high > tl.load(amax):  # a stale value only costs an atomic that changes nothing
            tl.atomic_max(amax, high, sem="relaxed")
    scaled = tl.minimum(tl.maximum(value * tl.load(scale), -LARGEST), LARGEST)
    if WIDE:
        q = scaled.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        q = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    q = tl.where(finite, q, 0x7F).to(tl.uint8)  # NaN in both formats
    tl.store(out + at, q, mask=here)
    if TURNED:
        to = c[:, None] * padded + r[None, :]
        tl.store(turned + to, tl.trans(q), mask=(c < columns)[:, None] & (r < padded)[None, :])


def quantise(x: Tensor, scale: Tensor, amax: Tensor | None, out: Tensor, turned: Tensor | None, largest: float) -> None:
    """Fill `out` [N, C] and `turned` [C, padded N] with x [N, C] * scale; raise any amax."""
    x = x.contiguous()
    rows, columns = x.shape
    padded = rows if turned is None else turned.shape[1]
    grid = (triton.cdiv(padded, ROWS), triton.cdiv(columns, COLUMNS))
    flags = (largest, out.dtype is torch.float8_e5m2, amax is not None, turned is not None, ROWS, COLUMNS)
    on = contextlib.nullcontext() if x.device.type == "cpu" else torch.accelerator.device_index(x.device.index)
    with on:
        _kernel[grid](
            x,
            out.view(torch.uint8),
            (out if turned is None else turned).view(torch.uint8),
            scale,
            scale if amax is None else amax,
            rows,
            columns,
            padded,
            *flags,
            num_warps=WARPS,
        )
