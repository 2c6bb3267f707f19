"""The elementwise passes of muon.py as three Triton kernels, each one launch for all matrices.

Gradients, moments and weights lie anywhere in memory, so the kernels read their addresses from a
table. All are float32, contiguous and of one shape; moments may have one of the formats of
moments.py.

_muon_advance    in: gradient, moment; out: moment, look-ahead in bfloat16, squares per block
                 bytes moved per element: 4 + 4 read, 4 + 2 written
_muon_normalise  in: look-ahead, norms; out: their quotient in float16
                 bytes moved per element: 2 read, 2 written
_muon_subtract   in: weight, update (bfloat16 or float16); out: weight, its copy in 16 bits
                 bytes moved per element: 4 + 2 read, 4 + 2 written
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.dropout import MASK, as_int32
from meshwright.kernels.grid import cdiv
from meshwright.kernels.moments import Place, PlaceDraws
from meshwright.kernels.muon import SMALLEST_NORM
from meshwright.kernels.triton import moments as formats

BLOCK = 4096
WARPS = 8
FORMATS = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int8: tl.int8,
}
MOST_TABLES = 4096


@triton.jit
def _muon_advance(
    gradients,
    moments,
    out,
    squares,
    scale,
    skipped,
    places,
    step,
    size,
    momentum,
    FORMAT: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gradient = tl.multiple_of(tl.load(gradients + n).to(tl.pointer_type(tl.float32)), ALIGNED)
    moment = tl.multiple_of(tl.load(moments + n).to(tl.pointer_type(FORMAT)), ALIGNED)
    # new = lerp(old, now, 1 - momentum), and Nesterov's look-ahead lerp(now, new, momentum).
    now = tl.load(gradient + at, mask=inside, other=0.0) / tl.load(scale)
    old = formats.expand(tl.load(moment + at, mask=inside, other=0))
    new = old + (now - old) * (1.0 - momentum)
    ahead = (new - (new - now) * (1.0 - momentum)).to(tl.bfloat16)
    # Moments of fewer bits are rounded at random, by a hash of each element's place.
    if places is not None:
        bits = formats.draw_part(places + 5 * n, step, at)
        kept = formats.compress(new, bits & 0xFFFF, FORMAT)
    else:
        kept = new
    if tl.load(skipped) == 0.0:
        tl.store(moment + at, kept, mask=inside)
    tl.store(out + n * size + at, ahead, mask=inside)
    # The norm is that of the rounded numbers, which Newton-Schulz reads.
    rounded = tl.where(inside, ahead.to(tl.float32), 0.0)
    tl.store(squares + n * tl.num_programs(0) + block, tl.sum(rounded * rounded, 0))


@triton.jit
def _muon_normalise(x, norms, out, stride, size, SMALLEST: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    # Norms, their lower bound and quotients are each rounded to the format of x, as in torch.
    form: tl.constexpr = x.dtype.element_ty
    rounded = tl.load(norms + n).to(form).to(tl.float32)
    norm = tl.maximum(rounded, SMALLEST, propagate_nan=tl.PropagateNan.ALL)
    norm = norm.to(form).to(tl.float32)
    value = tl.load(x + n * stride + at, mask=inside, other=0.0)
    quotient = tl.div_rn(value.to(tl.float32), norm)
    quotient = quotient.to(form)
    to = out + n * size + at
    tl.store(to, quotient.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _muon_subtract(
    weights,
    updates,
    decay,
    rate,
    skipped,
    copies,
    size,
    CAUTIOUS: tl.constexpr,
    FORMAT: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    weight = tl.multiple_of(tl.load(weights + n).to(tl.pointer_type(tl.float32)), ALIGNED)
    # Weights lie anywhere, updates one after the other.
    old = tl.load(weight + at, mask=inside, other=0.0)
    update = tl.load(updates + n * size + at, mask=inside, other=0.0).to(tl.float32)
    # `kept` is the factor of the weight: 1 where a cautious decay leaves it out.
    kept = tl.load(decay)
    if CAUTIOUS:
        kept = tl.where(update * old >= 0.0, kept, 1.0)
    new = old * kept - update * tl.load(rate)
    if tl.load(skipped) == 0.0:
        tl.store(weight + at, new, mask=inside)
        if copies is not None:
            copy = tl.multiple_of(tl.load(copies + n).to(tl.pointer_type(FORMAT)), ALIGNED)
            tl.store(copy + at, new.to(FORMAT), mask=inside)


def advance(
    gradients: list[Tensor],
    moments: list[Tensor],
    scale: Tensor,
    skipped: Tensor,
    momentum: float,
    draws: list[PlaceDraws] | None = None,
) -> tuple[Tensor, Tensor]:
    """Update the moments; return the look-ahead [n, *shape] and its norms [n]."""
    first = gradients[0]
    n = len(gradients)
    blocks = cdiv(first.numel(), BLOCK)
    out = torch.empty(n, *first.shape, dtype=torch.bfloat16, device=first.device)
    squares = torch.empty(n, blocks, dtype=torch.float32, device=first.device)
    with torch.accelerator.device_index(first.device.index):
        dtype = moments[0].dtype
        places = step = None
        if draws is not None:
            places = _places(first.device, tuple(d.place for d in draws))
            step = draws[0].step
        _muon_advance[(blocks, n)](
            addresses(gradients),
            addresses(moments, dtype),
            out,
            squares,
            scale,
            skipped,
            places,
            step,
            first.numel(),
            float(momentum),
            FORMATS[dtype],
            alignment(*gradients, *moments),
            BLOCK,
            num_warps=WARPS,
        )
    return out, squares.sum(1).sqrt()


def normalise(x: Tensor, norms: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x [n, r, c] / its norms [n] in a format. Matrices may be some rows of larger ones."""
    assert x[0].is_contiguous()
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    size = x[0].numel()
    with torch.accelerator.device_index(x.device.index):
        _muon_normalise[(cdiv(size, BLOCK), len(x))](
            x,
            norms,
            out,
            x.stride(0),
            size,
            SMALLEST_NORM,
            BLOCK,
            num_warps=WARPS,
        )
    return out


def subtract(
    weights: list[Tensor],
    updates: Tensor,
    decay: Tensor,
    rate: Tensor,
    skipped: Tensor,
    is_cautious: bool = False,
    copies: list[Tensor] | None = None,
) -> None:
    """Set each weight, and its copy in another format, to decay * weight - rate * its update."""
    copies = copies or []
    dtype = copies[0].dtype if copies else torch.float32
    size = weights[0].numel()
    assert updates.is_contiguous() and updates[0].numel() == size
    with torch.accelerator.device_index(weights[0].device.index):
        _muon_subtract[(cdiv(size, BLOCK), len(weights))](
            addresses(weights),
            updates,
            decay,
            rate,
            skipped,
            addresses(copies, dtype) if copies else None,
            size,
            is_cautious,
            FORMATS[dtype],
            alignment(*weights, *copies),
            BLOCK,
            num_warps=WARPS,
        )


def addresses(tensors: list[Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a table of the addresses [n] on the device."""
    assert all(x.is_contiguous() and x.dtype is dtype for x in tensors)
    return _table(tensors[0].device, tuple(x.data_ptr() for x in tensors))


@functools.lru_cache(MOST_TABLES)
def _table(device: torch.device, addresses: tuple[int, ...]) -> Tensor:
    """Copy a table to the device and keep it: CUDA graphs read it, and cannot make it.

    The flat buffers of ZeRO 0 to 2 never move, so a run has a few tables of 8 bytes a matrix. With
    ZeRO 3, whose updates are in no graph, gradients may move, and old tables must go.
    """
    return torch.tensor(addresses, dtype=torch.int64).to(device)


@functools.cache
def _places(device: torch.device, places: tuple[Place, ...]) -> Tensor:
    """Copy places to the device once and for all, as `_table` does."""
    return as_int32(torch.tensor(places, dtype=torch.int64) & MASK).to(device)


def alignment(*tensors: Tensor) -> int:
    """Return the bytes that divide all addresses: 16, which a thread reads at once, or fewer."""
    if all(x.data_ptr() % 16 == 0 for x in tensors):
        return 16
    return min(x.element_size() for x in tensors)
