"""The formats of moments.py: the same codes bit for bit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels import moments
from meshwright.kernels.dropout import MASK
from meshwright.kernels.grid import cdiv
from meshwright.kernels.moments import INT8, UINT8, PlaceDraws
from meshwright.kernels.triton.dropout import mix

BLOCK = 2048
WARPS = 8
SIGNED: tl.constexpr = tl.constexpr(INT8[0])
UNSIGNED: tl.constexpr = tl.constexpr(UINT8[0])
NOTHING: tl.constexpr = tl.constexpr(moments.NOTHING)


@triton.jit
def draw(position, name, step):
    """Return 32 random bits for uint32 positions, from hashes of names and a float32 step."""
    number = step.to(tl.int32).to(tl.uint32, bitcast=True)
    key = mix(mix(number ^ 0x9E3779B9) ^ name)
    return mix(position ^ key)


@triton.jit
def draw_blocks(parts, places, step, row, some, compact):
    """Return 32 random bits, int32, for elements of blocks, as moments.draw_blocks does."""
    part = tl.load(parts + row, mask=some, other=0)
    return draw_part(places + 5 * part[:, None], step, compact)


@triton.jit
def load_unsigned(at):
    return tl.load(at).to(tl.uint32, bitcast=True)


@triton.jit
def draw_part(place, step, at):
    """Return 32 random bits, int32, for elements of a part whose place is there in memory."""
    # A Place: the hash of the name, first, low, run and gap.
    name = load_unsigned(place)
    first = load_unsigned(place + 1)
    low = load_unsigned(place + 2)
    run = load_unsigned(place + 3)
    gap = load_unsigned(place + 4)
    # As moments.draw_blocks; unsigned numbers wrap around by themselves.
    local = at.to(tl.uint32) + low
    position = local + first + local // run * gap
    bits = draw(position, name, tl.load(step))
    return bits.to(tl.int32, bitcast=True)


@triton.jit
def expand(code):
    """Return what was loaded from a state, in float32."""
    if code.dtype == tl.int8 or code.dtype == tl.uint8:
        is_signed: tl.constexpr = code.dtype == tl.int8
        least: tl.constexpr = SIGNED if is_signed else UNSIGNED
        largest: tl.constexpr = 127 if is_signed else 255
        # As moments.expanded.
        size = code.to(tl.int32) & largest
        normal = ((size + (least + 126) * 4) << 21).to(tl.float32, bitcast=True)
        small = size.to(tl.float32) * 2.0 ** (least - 2)
        value = tl.where(size < 4, small, normal)
        if is_signed:
            value = tl.where(code < 0, -value, value)
    else:
        value = code.to(tl.float32)
    return value


@triton.jit
def compress(x, draws, dtype: tl.constexpr):
    """Return float32 numbers as a state of this format stores them; draws are int32 of 16 bits."""
    if dtype == tl.bfloat16:
        upper = (x.to(tl.int32, bitcast=True) + draws) >> 16
        code = upper.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        is_signed: tl.constexpr = dtype == tl.int8
        least: tl.constexpr = SIGNED if is_signed else UNSIGNED
        largest: tl.constexpr = 127 if is_signed else 255
        size = tl.abs(x)
        # As in moments.rounded: 21 bits, of which the lowest 5 are the middle of their range.
        draws = (draws << 5) + 16
        # As in moments.encoded: codes without an implicit 1, and those with one.
        low = tl.minimum(size, 2.0**least)
        small = low * 2.0 ** (2 - least) + draws.to(tl.float32) * 2.0**-21
        small = small.to(tl.int32)
        upper = (size.to(tl.int32, bitcast=True) + draws) >> 21
        normal = upper - (least + 126) * 4
        number = tl.where(size < 2.0**least, small, normal)
        number = tl.minimum(number, largest)
        if is_signed:
            code = tl.where(x < 0, number - 128, number)
            code = code.to(tl.int8)
        else:
            code = tl.where(size > NOTHING, tl.maximum(number, 1), number)
            code = code.to(tl.uint8)
    return code


@triton.jit(do_not_specialize=["name", "first", "low", "run", "gap", "size"])
def _store(
    values,
    code,
    step,
    skipped,
    name,
    first,
    low,
    run,
    gap,
    size,
    SECOND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Round float32 values, which are consecutive in a part of a parameter.

    Moves 4 bytes an element, and 1 or 2 of the code.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    local = (at + low).to(tl.uint32)
    rows = local // tl.cast(run, tl.uint32)
    position = local + tl.cast(first, tl.uint32) + rows * tl.cast(gap, tl.uint32)
    bits = draw(position, tl.cast(name, tl.uint32), tl.load(step)).to(tl.int32, bitcast=True)
    if SECOND:
        bits = bits >> 16
    x = tl.load(values + at, mask=at < size, other=0.0)
    if tl.load(skipped) == 0.0:
        rounded = compress(x, bits & 0xFFFF, code.dtype.element_ty)
        tl.store(code + at, rounded, mask=at < size)


def store(
    values: Tensor, code: Tensor, draws: PlaceDraws, skipped: Tensor, is_second: bool = False
) -> None:
    """Round values into `code` unless `skipped` is not 0."""
    assert values.is_contiguous() and code.is_contiguous()
    numbers = [x & MASK for x in draws.place]
    with torch.accelerator.device_index(values.device.index):
        _store[(cdiv(values.numel(), BLOCK),)](
            values,
            code,
            draws.step,
            skipped,
            *numbers,
            values.numel(),
            is_second,
            BLOCK,
            num_warps=WARPS,
        )
