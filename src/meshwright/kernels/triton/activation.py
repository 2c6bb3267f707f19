"""The activation of activation.py as two Triton kernels: one pass over memory each.

Tests compare them with the plain reference in Triton's interpreter, and on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.fp8 import Into, fp8_arguments
from meshwright.kernels.grid import ACTIVATION_ROWS, activation_rows, cdiv
from meshwright.kernels.triton.fp8 import encode, raise_amax, store_rounded

GATES = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu", "liglu": "identity"}


class BackwardTile(NamedTuple):
    """Shape of the backward kernel's work: a program goes through `rows`, `step` at a time."""

    columns: int = 128
    step: int = 16
    rows: int = ACTIVATION_ROWS[0]
    stages: int = 2
    warps: int = 4


# Of the forward kernel.
BLOCK = 2048
WARPS = 4
# Of the backward kernel: SMALL if there are few rows, for more programs.
TILE = BackwardTile()
SMALL = BackwardTile(rows=ACTIVATION_ROWS[1])


@triton.jit
def value_and_slope(x, KIND: tl.constexpr):
    """Return f(x) and f'(x) in float32; NaN stays NaN."""
    if KIND == "gelu-tanh":
        # tanh(z) = 2 sigmoid(2z) - 1, so f(x) = x (1 + tanh(z)) / 2 = x sigmoid(2z)
        # with 2z = 1.5957691216057308 (x + 0.044715 x^3), whose factor is 2 sqrt(2 / pi).
        exponent = -1.5957691216057308 * (x + 0.044715 * x * x * x)
        s = 1.0 / (1.0 + tl.exp(exponent))
        value = x * s
        # The derivative of 2z is its factor times (1 + 3 x 0.044715 x^2).
        slope = s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        return value, slope
    elif KIND == "gelu":
        # x times the normal distribution, whose density is exp(-x^2 / 2) / sqrt(2 pi).
        normal = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        value = x * normal
        slope = normal + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
        return value, slope
    elif KIND == "silu":
        s = 1.0 / (1.0 + tl.exp(-x))
        value = x * s
        slope = s + x * s * (1.0 - s)
        return value, slope
    elif KIND == "relu":
        return tl.where(x <= 0.0, 0.0, x), tl.where(x <= 0.0, 0.0, 1.0)
    elif KIND == "squared-relu":
        y = tl.where(x <= 0.0, 0.0, x)
        return y * y, 2.0 * y
    else:
        tl.static_assert(KIND == "identity")
        return x, tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def _activation_forward(
    u,
    a,
    columns,
    blocks,
    scale,
    amax,
    LARGEST: tl.constexpr,
    WIDE: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute a [rows, columns] = f(u), or f(gate) * up of u [rows, 2 columns].

    A program computes one of a row's blocks. Bytes moved: u once, a once. With a scale a is fp8, a
    byte an element, of numbers rounded to u's format, and raises the amax, if any. For tanh's GELU
    of 32,768 x 4,096 bfloat16 an H200 moves 4.1 of its 4.8 TB/s, with fp8 3.0.
    """
    row = (tl.program_id(0) // blocks).to(tl.int64)
    block = (tl.program_id(0) % blocks).to(tl.int64)
    c = block * BLOCK + tl.arange(0, BLOCK)
    inside = c < columns
    at = row * columns + c
    if GATED:
        gate = u + row * columns + at  # row * 2 columns + c
        x = tl.load(gate, mask=inside, other=0.0).to(tl.float32)
        y, _ = value_and_slope(x, KIND)
        y *= tl.load(gate + columns, mask=inside, other=0.0).to(tl.float32)
    else:
        x = tl.load(u + at, mask=inside, other=0.0).to(tl.float32)
        y, _ = value_and_slope(x, KIND)
    if scale is None:
        tl.store(a + at, y.to(a.dtype.element_ty), mask=inside)
    else:
        rounded = y.to(u.dtype.element_ty).to(tl.float32)
        q, size = encode(rounded, tl.load(scale), LARGEST, WIDE)
        tl.store(a + at, q, mask=inside)
        if amax is not None:
            raise_amax(amax, tl.max(size, 0))  # a masked element is f(0) = 0


@triton.jit
def _activation_backward(
    u,
    da,
    du,
    partials,
    rows,
    columns,
    scale,
    amax,
    LARGEST: tl.constexpr,
    WIDE: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    SUMMED: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute du = da f'(u), or (da up f'(gate), da f(gate)), and float32 sums of its columns.

    A program computes ROWS x COLUMNS of da and writes their sums to its row of `partials`. Bytes
    moved: u, da and du once; partial sums are 4 / (3 ROWS) of the three in a 16-bit format. du may
    be fp8, as a of `_activation_forward`. An H200 moves 4.0 of its 4.8 TB/s as above, with fp8 3.7.
    """
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1).to(tl.int64)
    width = columns * 2 if GATED else columns
    total = tl.zeros((STEP, COLUMNS), tl.float32)
    total_up = tl.zeros((STEP, COLUMNS), tl.float32)
    high = tl.zeros((STEP, COLUMNS), tl.float32)
    by = 1.0 if scale is None else tl.load(scale)
    is_column = c < columns
    for start in tl.range(0, ROWS, STEP, num_stages=STAGES):
        row = part * ROWS + start + tl.arange(0, STEP)
        inside = (row < rows)[:, None] & is_column[None, :]
        at = row[:, None] * width + c[None, :]
        at_grad = row[:, None] * columns + c[None, :]
        grad = tl.load(da + at_grad, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(u + at, mask=inside, other=0.0).to(tl.float32)
        value, slope = value_and_slope(x, KIND)
        if GATED:
            # `grad` becomes that of f(gate).
            of_up = grad * value
            high = store_rounded(
                du + at + columns, of_up, inside, by, high, u, scale is not None, LARGEST, WIDE
            )
            grad *= tl.load(u + at + columns, mask=inside, other=0.0).to(tl.float32)
            if SUMMED:
                total_up += of_up
        grad *= slope
        high = store_rounded(du + at, grad, inside, by, high, u, scale is not None, LARGEST, WIDE)
        if SUMMED:
            total += grad
    if amax is not None:
        raise_amax(amax, tl.max(tl.max(high, 1), 0))
    if SUMMED:
        sums = partials + part * width + c
        tl.store(sums, tl.sum(total, 0), mask=is_column)
        if GATED:
            tl.store(sums + columns, tl.sum(total_up, 0), mask=is_column)


def forward(kind: str, u: Tensor, into: Into | None = None) -> Tensor:
    """Return the activation of u."""
    u = u.contiguous()
    gated = kind in GATES
    width = u.shape[-1] // 2 if gated else u.shape[-1]
    a = u.new_empty(*u.shape[:-1], width) if into is None else into.out
    columns = a.shape[-1] if gated else a.numel()  # without a gate the rows do not matter
    blocks = cdiv(columns, BLOCK)
    with torch.accelerator.device_index(u.device.index):
        _activation_forward[(a.numel() // columns * blocks,)](
            u,
            a if into is None else a.view(torch.uint8),
            columns,
            blocks,
            *fp8_arguments(into),
            GATES.get(kind, kind),
            gated,
            BLOCK,
            num_warps=WARPS,
        )
    return a


def backward(
    kind: str,
    u: Tensor,
    grad: Tensor,
    summed: bool,
    into: Into | None = None,
    tile: BackwardTile | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of u and, if asked for, partial sums [n, F or 2F] of its columns."""
    u = u.contiguous()
    grad = grad.contiguous()
    columns = grad.shape[-1]
    rows = grad.numel() // columns
    tile = tile or (TILE if activation_rows(rows) == TILE.rows else SMALL)
    parts = cdiv(rows, tile.rows)
    du = torch.empty_like(u) if into is None else into.out
    partials = torch.empty(
        parts if summed else 0, u.shape[-1], dtype=torch.float32, device=u.device
    )
    with torch.accelerator.device_index(u.device.index):
        _activation_backward[cdiv(columns, tile.columns), parts](
            u,
            grad,
            du if into is None else du.view(torch.uint8),
            partials,
            rows,
            columns,
            *fp8_arguments(into),
            GATES.get(kind, kind),
            kind in GATES,
            summed,
            tile.columns,
            tile.step,
            tile.rows,
            tile.stages,
            num_warps=tile.warps,
        )
    return du, partials if summed else None
