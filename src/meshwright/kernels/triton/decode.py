"""The kernels of decode.py in Triton.

A kernel of one row takes 2 to 5 us, of which its bytes need 0.5 to 2.5: the rest is its start, and
the time in which it waits for the row. So a kernel lets the next one start at once (programmatic
dependent launch, from Hopper on), which loads its weights and waits only then, in `_await_row`,
until the kernels before it have ended. What those write is read after it, and nothing is written
before it.

Tests compare the kernels with the plain twin in Triton's interpreter, and on a GPU.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from meshwright.base import device as devices
from meshwright.kernels.decode import BAD, NONE, CachedTexts, DecodeLinear, Draws, TextState
from meshwright.kernels.grid import cdiv, power_of_2
from meshwright.kernels.heads import HeadSizes
from meshwright.kernels.triton.activation import GATES, value_and_slope

LAUNCH: dict[bool, dict[str, bool]] = {False: {}, True: {"launch_pdl": True}}
COUNTERS = 4096  # attention is divided only where rows x groups are fewer than the multiprocessors


@triton.jit
def _start_next(EARLY: tl.constexpr):
    """Let the next kernel's programs start where there is room for them."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _await_row(EARLY: tl.constexpr):
    """Wait until the kernels before this one have ended and their results can be read."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


class LinearTile(NamedTuple):
    """Shape of a program's work in `linear`: `columns` outputs, with all inputs."""

    columns: int
    warps: int = 4


class AttendTile(NamedTuple):
    """Shape of a program's work in `attend`: places of the cache at a time."""

    places: int
    warps: int = 4
    stages: int = 2  # blocks in flight, in shared memory


@triton.jit
def _decode_linear(
    x,
    weight,
    bias,
    norm_weight,
    norm_bias,
    residual,
    out,
    columns,
    eps,
    plus,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    CENTERS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute out [columns] = f(norm(x) W^T + bias) + residual, by the ordinary units.

    A program loads the weights of COLUMNS at once, and computes the norm for itself. Bytes moved:
    W once; x and the norm's weights, once per program, come from the L2 cache.
    """
    _start_next(EARLY)
    n = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, BLOCK)[None, :]
    is_column = n < columns
    known = k < WIDTH
    at = weight + n[:, None] * WIDTH + k
    w = tl.load(at, mask=is_column[:, None] & known, other=0.0)
    if GATED:
        up = tl.load(
            at + tl.cast(columns, tl.int64) * WIDTH, mask=is_column[:, None] & known, other=0.0
        )
    if norm_weight is not None:
        scale = tl.load(norm_weight + k, mask=known, other=0.0).to(tl.float32) + plus
        if norm_bias is not None:
            shift = tl.load(norm_bias + k, mask=known, other=0.0).to(tl.float32)
    if bias is not None:
        added = tl.load(bias + n, mask=is_column, other=0.0).to(tl.float32)
        if GATED:
            added_up = tl.load(bias + columns + n, mask=is_column, other=0.0).to(tl.float32)
    _await_row(EARLY)
    y = tl.load(x + k, mask=known, other=0.0)
    if residual is not None:
        kept = tl.load(residual + n, mask=is_column, other=0.0).to(tl.float32)
    if norm_weight is not None:
        f = y.to(tl.float32)
        if CENTERS:
            f = tl.where(known, f - tl.sum(f, 1)[:, None] / WIDTH, 0.0)
        f = f / tl.sqrt(tl.sum(f * f, 1)[:, None] / WIDTH + eps) * scale
        if norm_bias is not None:
            f += shift
        y = f.to(w.dtype)
    acc = tl.sum(w.to(tl.float32) * y.to(tl.float32), 1)
    if bias is not None:
        acc += added
    form: tl.constexpr = weight.dtype.element_ty
    if KIND != "":
        acc, _ = value_and_slope(acc.to(form).to(tl.float32), KIND)
    if GATED:
        more = tl.sum(up.to(tl.float32) * y.to(tl.float32), 1)
        if bias is not None:
            more += added_up
        acc *= more.to(form).to(tl.float32)
    if residual is not None:
        acc = acc.to(form).to(tl.float32) + kept
    tl.store(out + n, acc.to(out.dtype.element_ty), mask=is_column)


@triton.jit
def _rotated(head, d, inside, cos, sin, HALF: tl.constexpr):
    """Load the elements d of heads, and rotate the pairs (i, i + HALF)."""
    x = tl.load(head + d, mask=inside, other=0.0)
    if HALF > 0:
        turns = d < 2 * HALF
        pair = tl.where(d < HALF, d, d - HALF)
        other = tl.load(
            head + tl.where(d < HALF, d + HALF, d - HALF), mask=inside & turns, other=0.0
        )
        s = tl.load(sin + pair, mask=turns, other=0.0)
        y = x.to(tl.float32) * tl.load(cos + pair, mask=turns, other=1.0)
        x = (y + other.to(tl.float32) * tl.where(d < HALF, -s, s)).to(x.dtype)
    return x


@triton.jit
def _add_up(base, HEADS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """Return the attention [HEADS, WIDTH] of parts that each have a maximum and sums."""
    h = tl.arange(0, HEADS)
    d = tl.arange(0, WIDTH)
    high = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    acc = tl.zeros((HEADS, WIDTH), tl.float32)
    for i in tl.static_range(PARTS):
        theirs = base + i * (HEADS * (WIDTH + 2))
        peak = tl.load(theirs + h, cache_modifier=".cg")
        higher = tl.maximum(high, peak)
        fade = tl.exp(high - higher)
        share = tl.exp(peak - higher)
        total = total * fade + tl.load(theirs + HEADS + h, cache_modifier=".cg") * share
        more = tl.load(theirs + 2 * HEADS + h[:, None] * WIDTH + d[None, :], cache_modifier=".cg")
        acc = acc * fade[:, None] + more * share[:, None]
        high = higher
    return acc / total[:, None]


@triton.jit
def _load_block(
    keys,
    values,
    start,
    end,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Load keys and values [BLOCK, WIDTH] of a group from the place `start` on."""
    s = start + tl.arange(0, BLOCK)
    d = tl.arange(0, WIDTH)
    at = s.to(tl.int64)[:, None] * (GROUPS * DIM) + d[None, :]
    known = (s < end)[:, None] & (d < DIM)[None, :]
    return tl.load(keys + at, mask=known, other=0.0), tl.load(values + at, mask=known, other=0.0)


@triton.jit
def _add_block(q, k, v, start, end, high, total, acc, scale, BLOCK: tl.constexpr):
    """Add the attention to a block of places to the sums of a softmax with the maximum `high`.

    One query is multiplied by the ordinary units, which need no copy of keys and values in shared
    memory.
    """
    known = start + tl.arange(0, BLOCK) < end
    if q.shape[0] == 1:
        scores = tl.where(
            known, tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * scale, float("-inf")
        )
        higher = tl.maximum(high, tl.max(scores, 0))
        p = tl.exp(scores - tl.max(higher, 0))
        more = tl.sum(p[:, None] * v.to(tl.float32), 0)[None, :]
        added = tl.sum(p, 0)
    else:
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(known[None, :], scores, float("-inf"))
        higher = tl.maximum(high, tl.max(scores, 1))
        p = tl.exp(scores - higher[:, None])
        more = tl.dot(p.to(v.dtype), v, input_precision="ieee")
        added = tl.sum(p, 1)
    fade = tl.exp(high - higher)
    return higher, total * fade + added, acc * fade[:, None] + more


@triton.jit
def _attend(
    qkv,
    keys,
    values,
    slots,
    used,
    cos,
    sin,
    out,
    partials,
    counters,
    scale,
    room,
    chunk,
    GROUPS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Attend with the queries of one row and group to `chunk` places of its text.

    The first block of the cache is read before the row is there: a step changes neither `slots` nor
    `used` before it chooses a token, and no earlier place of the cache.
    The first part adds the new key and value to the cache, and begins its sums with them. Each of
    several parts writes its sums to `partials`, and the last one to end adds them up, in their
    order; it sets the counter back to 0. Bytes moved: the row's keys and values once.
    """
    _start_next(EARLY)
    row = tl.program_id(0)
    group = tl.program_id(1)
    part = tl.program_id(2)
    h = tl.arange(0, HEADS)
    d = tl.arange(0, WIDTH)
    slot = tl.load(slots + row).to(tl.int64)
    length = tl.load(used + slot).to(tl.int32)
    first = slot * room * (GROUPS * DIM) + group * DIM
    keys += first
    values += first
    begin = part * chunk
    end = tl.minimum((part + 1) * chunk, length)
    k, v = _load_block(keys, values, begin, end, GROUPS, DIM, WIDTH, BLOCK)
    _await_row(EARLY)
    head = qkv + (row.to(tl.int64) * GROUPS + group) * ((PER_GROUP + 2) * DIM)
    cos += length * HALF
    sin += length * HALF
    inside = (h < PER_GROUP)[:, None] & (d < DIM)[None, :]
    q = _rotated(head + h[:, None] * DIM, d[None, :], inside, cos, sin, HALF)
    k_new = _rotated(head + PER_GROUP * DIM, d[None, :], (d < DIM)[None, :], cos, sin, HALF)
    v_new = tl.load(head + (PER_GROUP + 1) * DIM + d[None, :], mask=(d < DIM)[None, :], other=0.0)
    is_first = part == 0
    at = tl.cast(length, tl.int64) * (GROUPS * DIM) + d[None, :]
    if is_first:
        tl.store(keys + at, k_new, mask=(d < DIM)[None, :])
        tl.store(values + at, v_new, mask=(d < DIM)[None, :])
    high = tl.where(
        is_first, tl.sum(q.to(tl.float32) * k_new.to(tl.float32), 1) * scale, float("-inf")
    )
    total = tl.where(is_first, 1.0, 0.0) + tl.zeros((HEADS,), tl.float32)
    acc = tl.where(is_first, v_new.to(tl.float32), 0.0) + tl.zeros((HEADS, WIDTH), tl.float32)
    if begin < end:
        high, total, acc = _add_block(q, k, v, begin, end, high, total, acc, scale, BLOCK)
    for start in tl.range(begin + BLOCK, end, BLOCK, num_stages=STAGES):
        k, v = _load_block(keys, values, start, end, GROUPS, DIM, WIDTH, BLOCK)
        high, total, acc = _add_block(q, k, v, start, end, high, total, acc, scale, BLOCK)
    if PARTS > 1:
        unit = row * GROUPS + group
        base = partials + (unit * PARTS).to(tl.int64) * (HEADS * (WIDTH + 2))
        mine = base + part * (HEADS * (WIDTH + 2))
        tl.store(mine + h, high)
        tl.store(mine + HEADS + h, total)
        tl.store(mine + 2 * HEADS + h[:, None] * WIDTH + d[None, :], acc)
        tl.debug_barrier()  # all stores of this program come before its count
        done = tl.atomic_add(counters + unit, 1, sem="acq_rel", scope="gpu")
        if done == PARTS - 1:
            o = out + (unit * PER_GROUP).to(tl.int64) * DIM + h[:, None] * DIM + d[None, :]
            tl.store(o, _add_up(base, HEADS, WIDTH, PARTS).to(out.dtype.element_ty), mask=inside)
            tl.store(counters + unit, 0)
    else:
        o = (
            out
            + ((row * GROUPS + group) * PER_GROUP).to(tl.int64) * DIM
            + h[:, None] * DIM
            + d[None, :]
        )
        tl.store(o, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _embed_tokens(
    tokens, used, slots, wte, wpe, out, width, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    """Write wte[token] + wpe[place] of a row. Bytes moved: these rows once."""
    _start_next(EARLY)
    row = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row)
    token = tl.load(tokens + slot)
    x = tl.load(wte + token * width + c, mask=c < width, other=0.0)
    if wpe is not None:
        place = tl.load(used + slot)
        y = x.to(tl.float32) + tl.load(wpe + place * width + c, mask=c < width, other=0.0).to(
            tl.float32
        )
        x = y.to(x.dtype)
    tl.store(out + row.to(tl.int64) * width + c, x, mask=c < width)


@triton.jit
def _mix_int64(x):
    x = (x ^ ((x >> 30) & 17179869183)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 137438953471)) * -7723592293110705685
    return x ^ ((x >> 31) & 8589934591)


@triton.jit
def _gumbel(key, position, token):
    """Return the variables of draws.py, float64; all arguments are int64."""
    h = _mix_int64(_mix_int64(key + position * -7046029254386353131) + token * -3372029247567499371)
    u = (((h >> 12) & 4503599627370495).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(-tl.log(1.0 - u))


@triton.jit
def _choose_tokens(
    logits,
    slots,
    tokens,
    used,
    limits,
    active,
    temperatures,
    keys,
    report,
    peaks,
    places,
    counters,
    vocab,
    stride,
    eod,
    NONE: tl.constexpr,
    BAD: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Find a row's largest logit, the first of equals, and advance the row's state.

    With `keys` a row of a temperature above 0 adds its random variables first. Each part of the
    logits has a program; the last one to end compares the parts' largest and sets the counter back
    to 0. Bytes moved: the logits once.
    """
    _await_row(EARLY)
    row = tl.program_id(0)
    part = tl.program_id(1)
    c = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * stride + c, mask=c < vocab, other=float("-inf")).to(
        tl.float32
    )
    x = tl.where(x == x, x, float("inf"))  # a NaN is as bad
    slot = tl.load(slots + row)
    goes_on = tl.load(active + slot) != 0
    place = tl.load(used + slot) + goes_on.to(tl.int64)
    if keys is not None:
        by = tl.load(temperatures + slot)
        drawn = x.to(tl.float64) / tl.where(by > 0, by, 1.0) + _gumbel(
            tl.load(keys + slot), place, c.to(tl.int64)
        )
        x = tl.where(by > 0, drawn, x.to(tl.float64))
    peak = tl.max(x, 0)
    tl.store(peaks + row * PARTS + part, peak)
    tl.store(places + row * PARTS + part, tl.min(tl.where(x == peak, c, 2147483647), 0))
    tl.debug_barrier()  # all stores of this program come before its count
    if tl.atomic_add(counters + row, 1, sem="acq_rel", scope="gpu") == tl.num_programs(1) - 1:
        i = tl.arange(0, PARTS)
        inside = i < tl.num_programs(1)
        every = tl.load(
            peaks + row * PARTS + i, mask=inside, other=float("-inf"), cache_modifier=".cg"
        )
        at = tl.load(places + row * PARTS + i, mask=inside, other=2147483647, cache_modifier=".cg")
        peak = tl.max(every, 0)
        best = tl.min(tl.where(every == peak, at, 2147483647), 0).to(tl.int64)
        is_finite = (peak < float("inf")) & (peak > float("-inf"))
        tl.store(tokens + slot, tl.where(is_finite, best, 0))
        tl.store(used + slot, place)
        stays = goes_on & is_finite & (best != eod) & (place + 1 < tl.load(limits + slot))
        tl.store(active + slot, stays.to(tl.int8))
        tl.store(report + row, tl.where(goes_on, tl.where(is_finite, best, BAD), NONE))
        tl.store(counters + row, 0)


def embed(state: TextState, slots: Tensor, wte: Tensor, wpe: Tensor | None) -> Tensor:
    """Return the embeddings of the slots' last tokens."""
    out = wte.new_empty(len(slots), wte.shape[1])
    grid = len(slots), cdiv(wte.shape[1], 1024)
    with torch.accelerator.device_index(wte.device.index):
        numbers = wte.shape[1], 1024, devices.is_hopper_or_later(wte.device)
        _embed_tokens[grid](state.token, state.used, slots, wte, wpe, out, *numbers)
    return out


def choose_tokens(
    logits: Tensor,
    vocab: int,
    slots: Tensor,
    state: TextState,
    eod: int,
    draws: Draws | None = None,
) -> Tensor:
    """Choose tokens, advance the rows, and return what to report."""
    b = len(logits)
    block = 2048
    parts = power_of_2(cdiv(vocab, block))
    peaks = logits.new_empty(b, parts, dtype=torch.float32 if draws is None else torch.float64)
    places = slots.new_empty(b, parts, dtype=torch.int32)
    report = torch.empty_like(slots)
    with torch.accelerator.device_index(logits.device.index):
        texts = (
            state.token,
            state.used,
            state.limit,
            state.active.view(torch.int8),
            *(draws or (None, None)),
        )
        scratch = report, peaks, places, counters(state.used, max(COUNTERS, power_of_2(b)))
        early = devices.is_hopper_or_later(logits.device)
        numbers = vocab, logits.stride(0), eod, NONE, BAD, parts, block, early
        _choose_tokens[b, cdiv(vocab, block)](
            logits, slots, *texts, *scratch, *numbers, **LAUNCH[early]
        )
    return report


def linear_of_row(
    x: Tensor, layer: DecodeLinear, residual: Tensor | None = None, tile: LinearTile | None = None
) -> Tensor:
    """Return f(norm(x) W^T + bias) + residual of one row."""
    (_, k), gated = x.shape, layer.kind in GATES
    n = layer.weight.shape[0] // (1 + gated)
    tile = tile or tile_of(n, k, devices.processors(x.device), gated)
    out = x.new_empty(1, n) if residual is None else torch.empty_like(residual)
    with torch.accelerator.device_index(x.device.index):
        norm_weight, norm_bias, eps, plus, centers = layer.norm or (None, None, 0.0, 0.0, False)
        tensors = x, layer.weight, layer.bias, norm_weight, norm_bias, residual, out
        early = devices.is_hopper_or_later(x.device)
        constants = (
            GATES.get(layer.kind, layer.kind),
            gated,
            tile.columns,
            max(16, power_of_2(k)),
            centers,
            early,
        )
        numbers = n, eps, plus, k
        _decode_linear[(cdiv(n, tile.columns),)](
            *tensors, *numbers, *constants, num_warps=tile.warps, **LAUNCH[early]
        )
    return out


@lru_cache
def tile_of(columns: int, inner: int, processors: int, gated: bool = False) -> LinearTile:
    """Return a tile that leaves two programs or more for each multiprocessor, if it can be.

    A thread holds 128 weights or fewer, of a program's 65,536.
    """
    inner = max(16, power_of_2(inner))
    width = next(
        (w for w in (16, 8, 4, 2) if w * inner <= 16384 and columns // w >= 2 * processors), 1
    )
    return LinearTile(width, min(16, max(4, width * inner * (1 + gated) // 4096)))


def attend(
    qkv: Tensor, texts: CachedTexts, sizes: HeadSizes, rotation: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Return the attention of new tokens, and add their keys and values to the cache."""
    b, (groups, per_group, dim) = len(qkv), sizes
    heads = 1 if per_group == 1 else max(16, power_of_2(per_group))
    width = max(16, power_of_2(dim))
    tile, parts, chunk = attend_tile(
        texts.longest, b * groups, heads, width, devices.processors(qkv.device)
    )
    out = qkv.new_empty(b, groups * per_group * dim)
    partials = out.new_empty(
        b * groups * parts * heads * (width + 2) if parts > 1 else 0, dtype=torch.float32
    )
    cos, sin = rotation if rotation is not None else (partials, partials)
    with torch.accelerator.device_index(qkv.device.index):
        tensors = *texts[:4], cos, sin, out, partials, counters(texts.used, COUNTERS)
        numbers = dim**-0.5, texts.keys.shape[1], chunk
        half = 0 if rotation is None else cos.shape[-1]
        early = devices.is_hopper_or_later(qkv.device)
        constants = (
            groups,
            per_group,
            dim,
            half,
            heads,
            width,
            tile.places,
            parts,
            tile.stages,
            early,
        )
        _attend[b, groups, parts](
            qkv, *tensors, *numbers, *constants, num_warps=tile.warps, **LAUNCH[early]
        )
    return out


@lru_cache
def attend_tile(
    longest: int, units: int, heads: int, width: int, processors: int
) -> tuple[AttendTile, int, int]:
    """Return the tile, and in how many parts of how many places each row and group is divided."""
    is_wide = heads == 1 and units <= processors
    places = max(64, min(16384 // width, power_of_2(longest))) if is_wide else 64
    parts = min(cdiv(longest, places), max(1, 2 * processors // units))
    chunk = cdiv(cdiv(longest, parts), places) * places
    tile = AttendTile(places, max(4, places * width // 2048), 1 if is_wide else 2)
    return tile, cdiv(longest, chunk), chunk


_counters = WeakTensorKeyDictionary()  # of a decoder's `used`, by their number


def counters(used: Tensor, number: int) -> Tensor:
    """Return counters that are 0 before and after each kernel, and never move.

    Each decoder has its own, known by its tensor `used`: several may run at once, in their streams.
    """
    own = _counters.setdefault(used, {})
    if number not in own:
        with torch.inference_mode(False):
            own[number] = torch.zeros(number, dtype=torch.int32, device=used.device)
    return own[number]  # type: ignore[no-any-return]
