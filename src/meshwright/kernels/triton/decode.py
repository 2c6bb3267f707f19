"""The kernels of decode.py in Triton.

A kernel of one row takes 2 to 5 us, of which its bytes need 0.5 to 2.5: the rest is its start, and
the time in which it waits for the row. So a kernel lets the next one start at once (programmatic
dependent launch, from Hopper on). That one loads its weights, and only then waits, in `_await_row`,
until the kernels before it have ended. It reads their results after that, and writes nothing
before.

Tests compare the kernels with the plain reference in Triton's interpreter, and on a GPU.
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
from meshwright.kernels.qk_norm import HeadNorms
from meshwright.kernels.triton.activation import GATES, value_and_slope

LAUNCH: dict[bool, dict[str, bool]] = {False: {}, True: {"launch_pdl": True}}
NO_NORM = (None, None, 0.0, 0.0, False)  # in the place of NormWeights
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
    # What no kernel before this one writes: the parameters.
    # A tile of weights [COLUMNS, BLOCK], as they lie; BLOCK is all inputs, rounded up.
    n = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, BLOCK)[None, :]
    is_column = n < columns
    known = k < WIDTH
    inside = is_column[:, None] & known
    at = weight + n[:, None] * WIDTH + k
    w = tl.load(at, mask=inside, other=0.0)
    if GATED:
        up = tl.load(at + tl.cast(columns, tl.int64) * WIDTH, mask=inside, other=0.0)
    if norm_weight is not None:
        scale = tl.load(norm_weight + k, mask=known, other=0.0).to(tl.float32) + plus
        if norm_bias is not None:
            shift = tl.load(norm_bias + k, mask=known, other=0.0).to(tl.float32)
    if bias is not None:
        added = tl.load(bias + n, mask=is_column, other=0.0).to(tl.float32)
        if GATED:
            added_up = tl.load(bias + columns + n, mask=is_column, other=0.0).to(tl.float32)
    # The row, and its norm.
    _await_row(EARLY)
    y = tl.load(x + k, mask=known, other=0.0)
    if residual is not None:
        kept = tl.load(residual + n, mask=is_column, other=0.0).to(tl.float32)
    if norm_weight is not None:
        f = y.to(tl.float32)
        if CENTERS:
            mean = tl.sum(f, 1)[:, None] / WIDTH
            f = tl.where(known, f - mean, 0.0)
        variance = tl.sum(f * f, 1)[:, None] / WIDTH
        f = f / tl.sqrt(variance + eps) * scale
        if norm_bias is not None:
            f += shift
        y = f.to(w.dtype)
    # The product, and what follows it; each step rounds to the format of the network.
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
def _load_pairs(at, d, inside, HALF: tl.constexpr):
    """Load the elements d, and for each the other one of its pair (i, i + HALF), if it has one."""
    own = tl.load(at + d, mask=inside, other=0.0)
    partner = own
    if HALF > 0:
        place = tl.where(d < HALF, d + HALF, d - HALF)
        # What is loaded twice comes from the cache the second time.
        partner = tl.load(at + place, mask=inside & (d < 2 * HALF), other=0.0)
    return own, partner


@triton.jit
def _load_norm(weight, bias, plus, d, known, HALF: tl.constexpr):
    """Load the factors of a norm and what it adds, for the elements d and for their partners."""
    scale, scale_partner = _load_pairs(weight, d, known, HALF)
    scale = scale.to(tl.float32) + plus
    scale_partner = scale_partner.to(tl.float32) + plus
    shift = tl.zeros_like(scale)
    shift_partner = shift
    if bias is not None:
        shift, shift_partner = _load_pairs(bias, d, known, HALF)
    return scale, scale_partner, shift.to(tl.float32), shift_partner.to(tl.float32)


@triton.jit
def _load_heads(
    at,
    d,
    inside,
    norm,
    cos,
    sin,
    eps,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    CENTERS: tl.constexpr,
):
    """Load the elements d of heads, normalise them if there is a norm, and rotate their pairs."""
    x, partner = _load_pairs(at, d, inside, HALF)
    if norm is not None:
        scale, scale_partner, shift, shift_partner = norm
        f = x.to(tl.float32)
        g = partner.to(tl.float32)
        if CENTERS:
            mean = tl.sum(f, 1)[:, None] / DIM
            f = tl.where(inside, f - mean, 0.0)
            g -= mean
        variance = tl.sum(f * f, 1)[:, None] / DIM
        deviation = tl.sqrt(variance + eps)
        # Rounded before the rotation, as in the plain network.
        x = (f / deviation * scale + shift).to(x.dtype)
        partner = (g / deviation * scale_partner + shift_partner).to(x.dtype)
    if HALF > 0:
        turns = d < 2 * HALF
        is_first = d < HALF
        pair = tl.where(is_first, d, d - HALF)
        # Columns that do not turn have the cosine 1 and the sine 0.
        c = tl.load(cos + pair, mask=turns, other=1.0)
        s = tl.load(sin + pair, mask=turns, other=0.0)
        s = tl.where(is_first, -s, s)
        rotated = x.to(tl.float32) * c + partner.to(tl.float32) * s
        x = rotated.to(x.dtype)
    return x


@triton.jit
def _add_up(base, HEADS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """Return the attention [HEADS, WIDTH] of parts that each have a maximum and sums."""
    h = tl.arange(0, HEADS)
    d = tl.arange(0, WIDTH)
    high = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    acc = tl.zeros((HEADS, WIDTH), tl.float32)
    # Other programs wrote the parts: ".cg" reads them past this multiprocessor's own cache.
    for i in tl.static_range(PARTS):
        # A part: its heads' maxima, their sums of exponentials, and of values weighted by these.
        theirs = base + i * (HEADS * (WIDTH + 2))
        sums = theirs + 2 * HEADS + h[:, None] * WIDTH
        sums = sums + d[None, :]
        peak = tl.load(theirs + h, cache_modifier=".cg")
        added = tl.load(theirs + HEADS + h, cache_modifier=".cg")
        more = tl.load(sums, cache_modifier=".cg")
        # Bring both sums to the higher of the two maxima.
        higher = tl.maximum(high, peak)
        fade = tl.exp(high - higher)
        share = tl.exp(peak - higher)
        total = total * fade + added * share
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
    k = tl.load(keys + at, mask=known, other=0.0)
    v = tl.load(values + at, mask=known, other=0.0)
    return k, v


@triton.jit
def _add_block(q, k, v, start, end, high, total, acc, scale, BLOCK: tl.constexpr):
    """Add the attention to a block of places to the sums of a softmax with the maximum `high`.

    One query is multiplied by the ordinary units, which need no copy of keys and values in shared
    memory.
    """
    known = start + tl.arange(0, BLOCK) < end
    if q.shape[0] == 1:
        products = q.to(tl.float32) * k.to(tl.float32)
        scores = tl.sum(products, 1) * scale
        scores = tl.where(known, scores, float("-inf"))
        higher = tl.maximum(high, tl.max(scores, 0))
        p = tl.exp(scores - tl.max(higher, 0))
        weighted = p[:, None] * v.to(tl.float32)
        more = tl.sum(weighted, 0)[None, :]
        added = tl.sum(p, 0)
    else:
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(known[None, :], scores, float("-inf"))
        higher = tl.maximum(high, tl.max(scores, 1))
        p = tl.exp(scores - higher[:, None])
        more = tl.dot(p.to(v.dtype), v, input_precision="ieee")
        added = tl.sum(p, 1)
    # The sums so far are relative to `high`; they fade by what the maximum rose.
    fade = tl.exp(high - higher)
    total = total * fade + added
    acc = acc * fade[:, None] + more
    return higher, total, acc


@triton.jit
def _attend(
    qkv,
    keys,
    values,
    slots,
    used,
    cos,
    sin,
    q_weight,
    q_bias,
    k_weight,
    k_bias,
    out,
    partials,
    counters,
    scale,
    eps,
    plus,
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
    CENTERS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Attend with the queries of one row and group to `chunk` places of its text.

    The first block of the cache is read before the row is there: a step changes neither `slots` nor
    `used` before it chooses a token, and no earlier place of the cache. With `q_weight` the row's
    queries and its key are normalised.
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
    # This part's places of the row's text, and the first block of them.
    slot = tl.load(slots + row).to(tl.int64)
    length = tl.load(used + slot).to(tl.int32)
    first = slot * room * (GROUPS * DIM) + group * DIM
    keys += first
    values += first
    begin = part * chunk
    end = tl.minimum((part + 1) * chunk, length)
    k, v = _load_block(keys, values, begin, end, GROUPS, DIM, WIDTH, BLOCK)
    d_row = d[None, :]
    known = (d < DIM)[None, :]
    q_norm = None
    k_norm = None
    if q_weight is not None:
        q_norm = _load_norm(q_weight, q_bias, plus, d_row, known, HALF)
        k_norm = _load_norm(k_weight, k_bias, plus, d_row, known, HALF)
    # The row's queries, key and value.
    _await_row(EARLY)
    head = qkv + (row.to(tl.int64) * GROUPS + group) * ((PER_GROUP + 2) * DIM)
    cos += length * HALF
    sin += length * HALF
    inside = (h < PER_GROUP)[:, None] & known
    at_q = head + h[:, None] * DIM
    at_k = head + PER_GROUP * DIM
    q = _load_heads(at_q, d_row, inside, q_norm, cos, sin, eps, DIM, HALF, CENTERS)
    k_new = _load_heads(at_k, d_row, known, k_norm, cos, sin, eps, DIM, HALF, CENTERS)
    v_new = tl.load(head + (PER_GROUP + 1) * DIM + d_row, mask=known, other=0.0)
    # The first part begins with the new place, whose value has the weight exp(score - high) = 1;
    # the others begin with nothing.
    is_first = part == 0
    at = tl.cast(length, tl.int64) * (GROUPS * DIM) + d_row
    if is_first:
        tl.store(keys + at, k_new, mask=known)
        tl.store(values + at, v_new, mask=known)
    score = tl.sum(q.to(tl.float32) * k_new.to(tl.float32), 1) * scale
    high = tl.where(is_first, score, float("-inf"))
    total = tl.where(is_first, 1.0, 0.0) + tl.zeros((HEADS,), tl.float32)
    acc = tl.where(is_first, v_new.to(tl.float32), 0.0) + tl.zeros((HEADS, WIDTH), tl.float32)
    if begin < end:
        high, total, acc = _add_block(q, k, v, begin, end, high, total, acc, scale, BLOCK)
    for start in tl.range(begin + BLOCK, end, BLOCK, num_stages=STAGES):
        k, v = _load_block(keys, values, start, end, GROUPS, DIM, WIDTH, BLOCK)
        high, total, acc = _add_block(q, k, v, start, end, high, total, acc, scale, BLOCK)
    # One part divides its sums; of several, the last one to end does so for all.
    unit = row * GROUPS + group
    o = out + (unit * PER_GROUP).to(tl.int64) * DIM + h[:, None] * DIM + d_row
    if PARTS > 1:
        base = partials + (unit * PARTS).to(tl.int64) * (HEADS * (WIDTH + 2))
        mine = base + part * (HEADS * (WIDTH + 2))
        tl.store(mine + h, high)
        tl.store(mine + HEADS + h, total)
        tl.store(mine + 2 * HEADS + h[:, None] * WIDTH + d_row, acc)
        tl.debug_barrier()  # all stores of this program come before its count
        done = tl.atomic_add(counters + unit, 1, sem="acq_rel", scope="gpu")
        if done == PARTS - 1:
            whole = _add_up(base, HEADS, WIDTH, PARTS)
            tl.store(o, whole.to(out.dtype.element_ty), mask=inside)
            tl.store(counters + unit, 0)
    else:
        whole = acc / total[:, None]
        tl.store(o, whole.to(out.dtype.element_ty), mask=inside)


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
    inside = c < width
    x = tl.load(wte + token * width + c, mask=inside, other=0.0)
    if wpe is not None:
        place = tl.load(used + slot)
        added = tl.load(wpe + place * width + c, mask=inside, other=0.0)
        y = x.to(tl.float32) + added.to(tl.float32)
        x = y.to(x.dtype)
    tl.store(out + row.to(tl.int64) * width + c, x, mask=inside)


# The numbers of draws.py, as int64: masks of 34, 37, 33 and 52 bits, the factors, and 2^-52.
@triton.jit
def _mix_int64(x):
    x = x ^ ((x >> 30) & 17179869183)
    x = x * -4658895280553007687
    x = x ^ ((x >> 27) & 137438953471)
    x = x * -7723592293110705685
    return x ^ ((x >> 31) & 8589934591)


@triton.jit
def _gumbel(key, position, token):
    """Return the variables of draws.py, float64; all arguments are int64."""
    row = _mix_int64(key + position * -7046029254386353131)
    bits = _mix_int64(row + token * -3372029247567499371)
    bits = (bits >> 12) & 4503599627370495
    u = (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16
    exponential = -tl.log(1.0 - u)
    return -tl.log(exponential)


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
    at = row.to(tl.int64) * stride + c
    x = tl.load(logits + at, mask=c < vocab, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))  # a NaN is as bad
    slot = tl.load(slots + row)
    goes_on = tl.load(active + slot) != 0
    place = tl.load(used + slot) + goes_on.to(tl.int64)
    if keys is not None:
        by = tl.load(temperatures + slot)
        noise = _gumbel(tl.load(keys + slot), place, c.to(tl.int64))
        drawn = x.to(tl.float64) / tl.where(by > 0, by, 1.0) + noise
        x = tl.where(by > 0, drawn, x.to(tl.float64))
    # This part's largest, the first of equals: 2147483647 is above every place.
    peak = tl.max(x, 0)
    best = tl.min(tl.where(x == peak, c, 2147483647), 0)
    peaks += row * PARTS
    places += row * PARTS
    tl.store(peaks + part, peak)
    tl.store(places + part, best)
    tl.debug_barrier()  # all stores of this program come before its count
    done = tl.atomic_add(counters + row, 1, sem="acq_rel", scope="gpu")
    if done == tl.num_programs(1) - 1:
        # The last program: the largest of all parts, read past this multiprocessor's own cache.
        i = tl.arange(0, PARTS)
        inside = i < tl.num_programs(1)
        every = tl.load(peaks + i, mask=inside, other=float("-inf"), cache_modifier=".cg")
        firsts = tl.load(places + i, mask=inside, other=2147483647, cache_modifier=".cg")
        highest = tl.max(every, 0)
        token = tl.min(tl.where(every == highest, firsts, 2147483647), 0).to(tl.int64)
        is_finite = (highest < float("inf")) & (highest > float("-inf"))
        # The row's state for the next step, and what the host is told.
        tl.store(tokens + slot, tl.where(is_finite, token, 0))
        tl.store(used + slot, place)
        has_room = place + 1 < tl.load(limits + slot)
        stays = goes_on & is_finite & (token != eod) & has_room
        tl.store(active + slot, stays.to(tl.int8))
        chosen = tl.where(is_finite, token, BAD)
        tl.store(report + row, tl.where(goes_on, chosen, NONE))
        tl.store(counters + row, 0)


def embed(state: TextState, slots: Tensor, wte: Tensor, wpe: Tensor | None) -> Tensor:
    """Return the embeddings of the slots' last tokens."""
    b = len(slots)
    width = wte.shape[1]
    block = 1024
    out = wte.new_empty(b, width)
    early = devices.is_hopper_or_later(wte.device)
    with torch.accelerator.device_index(wte.device.index):
        _embed_tokens[b, cdiv(width, block)](
            state.token, state.used, slots, wte, wpe, out, width, block, early
        )
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
    # Largest logits are compared as they are; with noise, which is float64, as float64.
    peaks = logits.new_empty(b, parts, dtype=torch.float32 if draws is None else torch.float64)
    places = slots.new_empty(b, parts, dtype=torch.int32)
    report = torch.empty_like(slots)
    early = devices.is_hopper_or_later(logits.device)
    temperatures, keys = draws or (None, None)
    with torch.accelerator.device_index(logits.device.index):
        _choose_tokens[b, cdiv(vocab, block)](
            logits,
            slots,
            state.token,
            state.used,
            state.limit,
            state.active.view(torch.int8),
            temperatures,
            keys,
            report,
            peaks,
            places,
            counters(state.used, max(COUNTERS, power_of_2(b))),
            vocab,
            logits.stride(0),
            eod,
            NONE,
            BAD,
            parts,
            block,
            early,
            **LAUNCH[early],
        )
    return report


def linear_of_row(
    x: Tensor, layer: DecodeLinear, residual: Tensor | None, tile: LinearTile | None = None
) -> Tensor:
    """Return f(norm(x) W^T + bias) + residual of one row."""
    k = x.shape[1]
    gated = layer.kind in GATES
    n = layer.weight.shape[0] // (1 + gated)
    tile = tile or tile_of(n, k, devices.processors(x.device), gated)
    out = x.new_empty(1, n) if residual is None else torch.empty_like(residual)
    norm_weight, norm_bias, eps, plus, centers = layer.norm or NO_NORM
    early = devices.is_hopper_or_later(x.device)
    with torch.accelerator.device_index(x.device.index):
        _decode_linear[(cdiv(n, tile.columns),)](
            x,
            layer.weight,
            layer.bias,
            norm_weight,
            norm_bias,
            residual,
            out,
            n,
            eps,
            plus,
            k,
            GATES.get(layer.kind, layer.kind),
            gated,
            tile.columns,
            max(16, power_of_2(k)),
            centers,
            early,
            num_warps=tile.warps,
            **LAUNCH[early],
        )
    return out


@lru_cache
def tile_of(columns: int, inner: int, processors: int, gated: bool = False) -> LinearTile:
    """Return a tile that leaves two programs or more for each multiprocessor, if it can be.

    A thread holds 128 weights or fewer, of a program's 65,536.
    """
    inner = max(16, power_of_2(inner))
    width = 16
    while width > 1 and (width * inner > 16384 or columns // width < 2 * processors):
        width //= 2
    # 32 threads of a warp x 128 weights.
    warps = width * inner * (1 + gated) // 4096
    return LinearTile(width, min(16, max(4, warps)))


def attend(
    qkv: Tensor,
    texts: CachedTexts,
    sizes: HeadSizes,
    rotation: tuple[Tensor, Tensor] | None,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Return the attention of new tokens, and add their keys and values to the cache."""
    b = len(qkv)
    groups, per_group, dim = sizes
    units = b * groups
    # tl.dot multiplies 16 rows and columns or more; one query goes without it.
    heads = 1 if per_group == 1 else max(16, power_of_2(per_group))
    width = max(16, power_of_2(dim))
    tile, parts, chunk = attend_tile(
        texts.longest, units, heads, width, devices.processors(qkv.device)
    )
    out = qkv.new_empty(b, groups * per_group * dim)
    # Of each part a maximum and a sum for each head, and the weighted values.
    count = units * parts * heads * (width + 2) if parts > 1 else 0
    partials = out.new_empty(count, dtype=torch.float32)
    cos, sin = rotation if rotation is not None else (partials, partials)  # which nothing reads
    half = 0 if rotation is None else cos.shape[-1]
    vectors = (None,) * 4 if norms is None else norms.vectors
    _, _, eps, plus, centers = NO_NORM if norms is None else norms.q
    early = devices.is_hopper_or_later(qkv.device)
    with torch.accelerator.device_index(qkv.device.index):
        _attend[b, groups, parts](
            qkv,
            texts.keys,
            texts.values,
            texts.slots,
            texts.used,
            cos,
            sin,
            *vectors,
            out,
            partials,
            counters(texts.used, COUNTERS),
            dim**-0.5,
            eps,
            plus,
            texts.keys.shape[1],
            chunk,
            groups,
            per_group,
            dim,
            half,
            heads,
            width,
            tile.places,
            parts,
            tile.stages,
            centers,
            early,
            num_warps=tile.warps,
            **LAUNCH[early],
        )
    return out


@lru_cache
def attend_tile(
    longest: int, units: int, heads: int, width: int, processors: int
) -> tuple[AttendTile, int, int]:
    """Return the tile, and in how many parts of how many places each row and group is divided."""
    # One query of few rows: a program has a multiprocessor to itself, and takes a longer block of
    # places, which 16,384 numbers of the keys fill.
    is_wide = heads == 1 and units <= processors
    places = 64
    if is_wide:
        places = max(places, min(16384 // width, power_of_2(longest)))
    # About two programs for each multiprocessor, of whole blocks each.
    wanted = max(1, 2 * processors // units)
    parts = min(cdiv(longest, places), wanted)
    chunk = cdiv(cdiv(longest, parts), places) * places
    warps = max(4, places * width // 2048)
    tile = AttendTile(places, warps, stages=1 if is_wide else 2)
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
