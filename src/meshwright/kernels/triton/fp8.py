"""The cast to fp8 of fp8.py as Triton kernels, and the parts of it that other kernels share.

A kernel that also computed an activation's gradient, cast it and transposed it stored wrong bytes
on a GPU, right as it was in Triton's interpreter. So kernels that compute something write only
rows, and transposition is in a kernel of its own, or in that which only casts.
benchmarks/gpu_fp8.py compares every byte, and times the shapes of tiles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.fp8 import LARGEST
from meshwright.kernels.grid import cdiv

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes


class CastTile(NamedTuple):
    """Shape of a program's work.

    A transposition goes through shared memory, which moves bytes as slowly as words. So as many
    rows as a word has bytes are first packed, in registers: a word of the transposed matrix.
    """

    rows: int = 128
    columns: int = 128
    warps: int = 8
    pack: int = 4  # bytes of a word
    down: bool = True  # neighbouring programs take tiles one below the other, not side by side


# A thread of the cast takes 63 registers for 32 numbers, and 124 for 64 (sm_90, Triton 3.6).
CAST = CastTile(rows=64, columns=64, warps=4)
TRANSPOSE = CastTile(rows=64, columns=128, warps=4, pack=1)


@triton.jit
def encode(value, scale, LARGEST: tl.constexpr, WIDE: tl.constexpr):
    """Return the bytes of value * scale in fp8, clamped, and |value|, which is 0 if not finite."""
    size = tl.abs(value)
    finite = size < float("inf")  # False for NaN too
    scaled = tl.minimum(tl.maximum(value * scale, -LARGEST), LARGEST)
    if WIDE:
        q = scaled.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        q = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    # 0x7F is NaN in both formats.
    return tl.where(finite, q, 0x7F).to(tl.uint8), tl.where(finite, size, 0.0)


@triton.jit
def raise_amax(amax, high):
    """Raise the amax [1] to a number."""
    if high > tl.load(amax):  # a stale value only costs an atomic that changes nothing
        tl.atomic_max(amax, high, sem="relaxed")


@triton.jit
def store_rounded(
    at, value, mask, by, high, like, FP8: tl.constexpr, LARGEST: tl.constexpr, WIDE: tl.constexpr
):
    """Store numbers rounded to the format of `like`, or then to fp8; return the raised amaxes."""
    rounded = value.to(like.dtype.element_ty)
    if FP8:
        q, size = encode(rounded.to(tl.float32), by, LARGEST, WIDE)
        tl.store(at, q, mask=mask)
        return tl.maximum(high, size)
    else:
        tl.store(at, rounded, mask=mask)
        return high


@triton.jit
def _fp8_cast(
    x,
    out,
    transposed,
    scale,
    amax,
    rows,
    columns,
    padded,
    LARGEST: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PACK: tl.constexpr,
    DOWN: tl.constexpr,
):
    """Write x * scale in fp8 as it lies and transposed, and raise the amax.

    In: x [rows, columns], scale [1] float32. Out: out [rows, columns] as bytes; amax [1] float32,
    or None; transposed [columns, padded] as words, whose bytes from `rows` on are 0, or None. Moves
    2 + 1 + 1 bytes an element of bfloat16, without `transposed` 2 + 1.
    """
    i = tl.program_id(0 if DOWN else 1)
    j = tl.program_id(1 if DOWN else 0)
    _fp8_cast_tile(
        x,
        out,
        transposed,
        scale,
        amax,
        i,
        j,
        rows,
        columns,
        padded,
        LARGEST,
        WIDE,
        ROWS,
        COLUMNS,
        PACK,
    )


@triton.jit
def _fp8_cast_tile(
    x,
    out,
    transposed,
    scale,
    amax,
    i,
    j,
    rows,
    columns,
    padded,
    LARGEST: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PACK: tl.constexpr,
):
    first = i.to(tl.int64) * (ROWS // PACK) + tl.arange(0, ROWS // PACK)
    c = j.to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    # Rows are taken in groups of PACK; `first` counts the groups.
    by = tl.load(scale)
    high = tl.zeros((ROWS // PACK, COLUMNS), tl.float32)
    if transposed is not None:
        word = tl.zeros((ROWS // PACK, COLUMNS), transposed.dtype.element_ty)
    is_column = c < columns
    # PACK rows below one another become the bytes of a word, the first one the lowest.
    for k in tl.static_range(PACK):
        r = first * PACK + k
        inside = (r < rows)[:, None] & is_column[None, :]
        at = r[:, None] * columns + c[None, :]
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        q, size = encode(value, by, LARGEST, WIDE)
        high = tl.maximum(high, size)
        tl.store(out + at, q, mask=inside)
        if transposed is not None:
            word |= q.to(transposed.dtype.element_ty) << (8 * k)
    if amax is not None:
        raise_amax(amax, tl.max(tl.max(high, 1), 0))
    if transposed is not None:
        to = c[:, None] * (padded // PACK) + first[None, :]
        mask = is_column[:, None] & (first < padded // PACK)[None, :]
        tl.store(transposed + to, tl.trans(word), mask=mask)


@triton.jit
def _fp8_cast_many(
    table,
    owners,
    x,
    out,
    transposed,
    scale,
    amax,
    LARGEST: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PACK: tl.constexpr,
):
    """Do what `_fp8_cast` does for each matrix of a table; moves the same bytes.

    In: table int64 [n, 7]: where x, out and transposed are, in elements from the first matrix's;
    the index of scale and amax; rows, columns, first program. owners int32 [programs]: each
    program's row. Places, rows and columns are multiples of 16, so that threads load and store 16
    bytes at once.
    """
    program = tl.program_id(0)
    row = table + tl.load(owners + program).to(tl.int64) * 7
    x += tl.multiple_of(tl.load(row), 16)
    out += tl.multiple_of(tl.load(row + 1), 16)
    transposed += tl.multiple_of(tl.load(row + 2), 16)
    index = tl.load(row + 3)
    rows = tl.multiple_of(tl.load(row + 4), 16)
    columns = tl.multiple_of(tl.load(row + 5), 16)
    tile = program - tl.load(row + 6)
    down = (rows + ROWS - 1) // ROWS
    _fp8_cast_tile(
        x,
        out,
        transposed,
        scale + index,
        amax + index,
        tile % down,
        tile // down,
        rows,
        columns,
        rows,
        LARGEST,
        WIDE,
        ROWS,
        COLUMNS,
        PACK,
    )


@triton.jit
def _fp8_transpose(
    q,
    transposed,
    rows,
    columns,
    padded,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PACK: tl.constexpr,
    DOWN: tl.constexpr,
):
    """Transpose bytes q [rows, columns] to words transposed [columns, padded], padded with zeros.

    Moves 1 + 1 bytes an element: for 32,768 x 4,096 3.7 TB/s of an H200's 4.8.
    """
    i = tl.program_id(0 if DOWN else 1).to(tl.int64)
    j = tl.program_id(1 if DOWN else 0).to(tl.int64)
    first = i * (ROWS // PACK) + tl.arange(0, ROWS // PACK)
    c = j * COLUMNS + tl.arange(0, COLUMNS)
    is_column = c < columns
    word = tl.zeros((ROWS // PACK, COLUMNS), transposed.dtype.element_ty)
    for k in tl.static_range(PACK):
        r = first * PACK + k
        inside = (r < rows)[:, None] & is_column[None, :]
        # Beyond the last row are zeros, which become the padding.
        byte = tl.load(q + r[:, None] * columns + c[None, :], mask=inside, other=0)
        word |= byte.to(transposed.dtype.element_ty) << (8 * k)
    to = c[:, None] * (padded // PACK) + first[None, :]
    mask = is_column[:, None] & (first < padded // PACK)[None, :]
    tl.store(transposed + to, tl.trans(word), mask=mask)


def quantise(
    x: Tensor, scale: Tensor, amax: Tensor | None, out: Tensor, transposed: Tensor | None
) -> None:
    """Fill `out` [N, C] and `transposed` [C, padded N] with x [N, C] * scale; raise any amax."""
    x = x.contiguous()
    words = None if transposed is None else transposed.view(WORDS[CAST.pack])
    rows, columns = x.shape
    padded = rows if transposed is None else transposed.shape[1]
    with torch.accelerator.device_index(x.device.index):
        _fp8_cast[_grid(CAST, padded, columns)](
            x,
            out.view(torch.uint8),
            words,
            scale,
            amax,
            rows,
            columns,
            padded,
            LARGEST[out.dtype],
            out.dtype is torch.float8_e5m2,
            CAST.rows,
            CAST.columns,
            CAST.pack,
            CAST.down,
            num_warps=CAST.warps,
        )


# x, both its layouts, and the index of its scale and amax
WeightCast = tuple[Tensor, Tensor, Tensor, int]


class WeightCasts(NamedTuple):
    """Casts whose tensors stay where they are, as the device reads them."""

    key: tuple[int, ...]
    table: Tensor
    owners: Tensor


def prepare_casts(casts: Sequence[WeightCast], earlier: WeightCasts | None) -> WeightCasts:
    """Return the casts on their device; those of `earlier` if no tensor has moved."""
    key = (*CAST, *(t.data_ptr() for cast in casts for t in cast[:3]))
    if earlier is not None and earlier.key == key:
        return earlier
    rows = []
    owners = []
    first = 0
    bases = casts[0][:3]
    for n, (*tensors, index) in enumerate(casts):
        # How far each tensor is from the first cast's, in the elements that the kernel sees.
        sizes = tensors[0].element_size(), 1, CAST.pack
        distances = []
        for tensor, base, size in zip(tensors, bases, sizes, strict=True):
            distances.append((tensor.data_ptr() - base.data_ptr()) // size)
        shape = tensors[0].shape
        programs = math.prod(_grid(CAST, *shape))
        rows.append([*distances, index, *shape, first])
        owners.append(torch.full((programs,), n, dtype=torch.int32))
        first += programs
    device = casts[0][0].device
    table = torch.tensor(rows, dtype=torch.int64, device=device)
    return WeightCasts(key, table, torch.cat(owners).to(device))


def quantise_many(like: WeightCast, prepared: WeightCasts, scale: Tensor, amax: Tensor) -> None:
    """Do what `quantise` does for matrices in the formats of one, with sizes in multiples of 16."""
    x, out, transposed, _ = like
    with torch.accelerator.device_index(x.device.index):
        _fp8_cast_many[(len(prepared.owners),)](
            prepared.table,
            prepared.owners,
            x,
            out.view(torch.uint8),
            transposed.view(WORDS[CAST.pack]),
            scale,
            amax,
            LARGEST[out.dtype],
            out.dtype is torch.float8_e5m2,
            CAST.rows,
            CAST.columns,
            CAST.pack,
            num_warps=CAST.warps,
        )


def transpose_into(q: Tensor, transposed: Tensor) -> None:
    """Fill `transposed` [C, padded N] with q [N, C]."""
    tile = TRANSPOSE
    rows, columns = q.shape
    padded = transposed.shape[1]
    words = transposed.view(WORDS[tile.pack])
    with torch.accelerator.device_index(q.device.index):
        _fp8_transpose[_grid(tile, padded, columns)](
            q.view(torch.uint8),
            words,
            rows,
            columns,
            padded,
            tile.rows,
            tile.columns,
            tile.pack,
            tile.down,
            num_warps=tile.warps,
        )


def _grid(tile: CastTile, rows: int, columns: int) -> tuple[int, int]:
    down = cdiv(rows, tile.rows)
    across = cdiv(columns, tile.columns)
    return (down, across) if tile.down else (across, down)
