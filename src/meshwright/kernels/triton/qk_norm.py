"""The normalised heads of qk_norm.py as two Triton kernels: one pass over memory each.

Slots, tiles and angles are those of heads.py beside this file. A program has whole heads of some
positions, so that their norms are taken in registers. Tests compare the kernels with the plain
reference in Triton's interpreter, and on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.fp8 import Into, fp8_arguments
from meshwright.kernels.heads import HeadSizes, Rotation
from meshwright.kernels.qk_norm import HeadNorms, PackedGradients
from meshwright.kernels.triton.fp8 import raise_amax, store_rounded
from meshwright.kernels.triton.heads import (
    TILE,
    SlotTile,
    _move_slot,
    angles_of,
    empty_qk,
    parts_of,
    shape_of,
    with_strides,
)

# Backward keeps a head, its gradient and up to three sums of each in registers: with 16 heads of
# 128, RMSNorm and RoPE a thread takes 72 (sm_90, Triton 3.9), with 32 positions 154.
PACK_TILE = SlotTile(step=16)
WIDE_WARPS = 8  # of heads of more than 128 numbers


@triton.jit
def _load_head(at, pairs, others, HALF: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr):
    """Return the first and second numbers of a head's pairs, and its rest; 0 where masked."""
    c = tl.arange(0, PAIRS)[None, :]
    rest = 2 * HALF + tl.arange(0, REST)[None, :]
    a = tl.load(at + c, mask=pairs, other=0.0).to(tl.float32)
    b = tl.load(at + HALF + c, mask=pairs, other=0.0).to(tl.float32)
    z = tl.load(at + rest, mask=others, other=0.0).to(tl.float32)
    return a, b, z


@triton.jit
def _locate_heads(
    length,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    STEP: tl.constexpr,
):
    """Return this program's positions [STEP], and the columns of heads that lie there.

    The columns are those of the pairs' first numbers [1, PAIRS] and of the rest [1, REST]; two
    masks say which of a head's pairs and which of its rest there are.
    """
    position = tl.program_id(1) * STEP + tl.arange(0, STEP)
    c = tl.arange(0, PAIRS)[None, :]
    rest = 2 * HALF + tl.arange(0, REST)[None, :]
    is_position = (position < length)[:, None]
    return position, c, rest, is_position & (c < HALF), is_position & (rest < DIM)


@triton.jit
def _load_vector(
    at, DIM: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr
):
    """Return a norm's weight or bias as `_load_head` returns heads."""
    pairs = (tl.arange(0, PAIRS) < HALF)[None, :]
    others = (2 * HALF + tl.arange(0, REST) < DIM)[None, :]
    return _load_head(at, pairs, others, HALF, PAIRS, REST)


@triton.jit
def _load_angles(cos, sin, at, pairs):
    """Return the cosines and sines of pairs."""
    x = tl.load(cos + at, mask=pairs, other=1.0)
    y = tl.load(sin + at, mask=pairs, other=0.0)
    return x, y


@triton.jit
def _store_sums(
    at, a, b, z, DIM: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr
):
    """Write the sums of columns whose rows are parts of heads, as `_load_head` returns them."""
    c = tl.arange(0, PAIRS)
    rest = 2 * HALF + tl.arange(0, REST)
    tl.store(at + c, tl.sum(a, 0), mask=c < HALF)
    tl.store(at + HALF + c, tl.sum(b, 0), mask=c < HALF)
    tl.store(at + rest, tl.sum(z, 0), mask=rest < DIM)


@triton.jit
def _sum_heads(a, b, z):
    """Return the sum of each head's numbers [STEP, 1]."""
    return (tl.sum(a + b, 1) + tl.sum(z, 1))[:, None]


@triton.jit
def _center(a, b, z, pairs, others, DIM: tl.constexpr):
    """Return the parts of heads less the mean of each; what is masked stays 0."""
    mean = _sum_heads(a, b, z) / DIM
    a = tl.where(pairs, a - mean, 0.0)
    b = tl.where(pairs, b - mean, 0.0)
    z = tl.where(others, z - mean, 0.0)
    return a, b, z


@triton.jit
def _standardise(a, b, z, pairs, others, eps, DIM: tl.constexpr, CENTERS: tl.constexpr):
    """Return the parts of heads of mean 0 (LayerNorm) and mean square 1, and each row's factor."""
    if CENTERS:
        a, b, z = _center(a, b, z, pairs, others, DIM)
    squares = _sum_heads(a * a, b * b, z * z)
    rstd = 1.0 / tl.sqrt(squares / DIM + eps)
    return a * rstd, b * rstd, z * rstd, rstd


@triton.jit
def _norm_heads(
    qkv,
    q,
    k,
    cos,
    sin,
    q_weight,
    q_shift,
    k_weight,
    k_shift,
    batches,
    length,
    eps,
    PLUS: tl.constexpr,
    CENTERS: tl.constexpr,
    GROUPS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    TURNS: tl.constexpr,
    OWN: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    STEP: tl.constexpr,
    SAMPLES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write q [tokens, heads, DIM] and k [tokens, groups, DIM] of qkv, normalised and rotated.

    The norms' shifts may be None; without TURNS nothing is rotated. Bytes moved: those of
    `_rotate_heads`.
    """
    # A program for each query of a group, and one for its key.
    group = tl.program_id(0) // (PER_GROUP + 1)
    member = tl.program_id(0) % (PER_GROUP + 1)
    is_query = member < PER_GROUP
    row: tl.constexpr = GROUPS * (PER_GROUP + 2) * DIM
    source = qkv + (group * (PER_GROUP + 2) + member) * DIM
    target = tl.where(is_query, q + (group * PER_GROUP + member) * DIM, k + group * DIM)
    target_row = tl.where(is_query, GROUPS * PER_GROUP * DIM, GROUPS * DIM)
    position, c, rest, pairs, others = _locate_heads(length, DIM, HALF, PAIRS, REST, STEP)
    angle = position[:, None] * HALF + c
    weight = tl.where(is_query, q_weight, k_weight)
    w_a, w_b, w_z = _load_vector(weight, DIM, HALF, PAIRS, REST)
    w_a += PLUS
    w_b += PLUS
    w_z += PLUS
    if q_shift is not None:
        shift = tl.where(is_query, q_shift, k_shift)
        s_a, s_b, s_z = _load_vector(shift, DIM, HALF, PAIRS, REST)
    if TURNS and not OWN:
        x, y = _load_angles(cos, sin, angle, pairs)
    first = tl.program_id(2) * SAMPLES
    for sample in tl.range(first, tl.minimum(first + SAMPLES, batches), num_stages=STAGES):
        token = (tl.cast(sample, tl.int64) * length + position)[:, None]
        if TURNS and OWN:
            own = sample * length * HALF + angle
            x, y = _load_angles(cos, sin, own, pairs)
        a, b, z = _load_head(source + token * row, pairs, others, HALF, PAIRS, REST)
        a, b, z, _ = _standardise(a, b, z, pairs, others, eps, DIM, CENTERS)
        a *= w_a
        b *= w_b
        z *= w_z
        if q_shift is not None:
            a += s_a
            b += s_b
            z += s_z
        if TURNS:
            a, b = a * x - b * y, b * x + a * y
        to = target + token * target_row
        out = q.dtype.element_ty
        tl.store(to + c, a.to(out), mask=pairs)
        tl.store(to + HALF + c, b.to(out), mask=pairs)
        tl.store(to + rest, z.to(out), mask=others)


@triton.jit
def _pack_normed_heads(
    dq,
    dk,
    dv,
    qkv,
    cos,
    sin,
    q_weight,
    k_weight,
    packed,
    partials,
    of_q,
    of_k,
    q_batch,
    q_row,
    q_head,
    k_batch,
    k_row,
    k_head,
    v_batch,
    v_row,
    v_head,
    batches,
    length,
    eps,
    scale,
    amax,
    LARGEST: tl.constexpr,
    WIDE: tl.constexpr,
    PLUS: tl.constexpr,
    CENTERS: tl.constexpr,
    SHIFTED: tl.constexpr,
    GROUPS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    TURNS: tl.constexpr,
    OWN: tl.constexpr,
    SUMMED: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    STEP: tl.constexpr,
    SAMPLES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the gradient of qkv [tokens, columns], and sums: of its columns, and for the norms.

    of_q [1 or 2, n, DIM] and of_k, of fewer rows, take the sums of a program for the norm's weight
    and, if SHIFTED, its bias. Bytes moved: those of `_pack_heads`, and queries and keys once more.
    """
    group = tl.program_id(0) // (PER_GROUP + 2)
    member = tl.program_id(0) % (PER_GROUP + 2)
    slot = tl.program_id(0) * DIM
    row: tl.constexpr = GROUPS * (PER_GROUP + 2) * DIM
    part = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    sums = partials + part * row + slot
    if member == PER_GROUP + 1:
        # A value: nothing turns.
        _move_slot(
            dv + group.to(tl.int64) * v_head,
            v_batch.to(tl.int64),
            v_row.to(tl.int64),
            packed + slot,
            tl.cast(length, tl.int64) * row,
            row,
            sums,
            cos,
            sin,
            0,
            -1.0,
            batches,
            length,
            scale,
            amax,
            LARGEST,
            WIDE,
            DIM,
            HALF,
            OWN,
            SUMMED,
            PAIRS,
            REST,
            STEP,
            SAMPLES,
            STAGES,
        )
    else:
        FP8: tl.constexpr = scale is not None
        by = 1.0 if scale is None else tl.load(scale)
        is_query = member < PER_GROUP
        query = group * PER_GROUP + member
        of_query = dq + query.to(tl.int64) * q_head
        of_key = dk + group.to(tl.int64) * k_head
        source = tl.where(is_query, of_query, of_key)
        source_batch = tl.where(is_query, q_batch, k_batch).to(tl.int64)
        source_row = tl.where(is_query, q_row, k_row).to(tl.int64)
        position, c, rest, pairs, others = _locate_heads(length, DIM, HALF, PAIRS, REST, STEP)
        angle = position[:, None] * HALF + c
        weight = tl.where(is_query, q_weight, k_weight)
        w_a, w_b, w_z = _load_vector(weight, DIM, HALF, PAIRS, REST)
        w_a += PLUS
        w_b += PLUS
        w_z += PLUS
        if TURNS and not OWN:
            x, y = _load_angles(cos, sin, angle, pairs)
        high_a = tl.zeros((STEP, PAIRS), tl.float32)
        high_z = tl.zeros((STEP, REST), tl.float32)
        weight_a = tl.zeros((STEP, PAIRS), tl.float32)
        weight_b = tl.zeros((STEP, PAIRS), tl.float32)
        weight_z = tl.zeros((STEP, REST), tl.float32)
        shift_a = tl.zeros((STEP, PAIRS), tl.float32)
        shift_b = tl.zeros((STEP, PAIRS), tl.float32)
        shift_z = tl.zeros((STEP, REST), tl.float32)
        total_a = tl.zeros((STEP, PAIRS), tl.float32)
        total_b = tl.zeros((STEP, PAIRS), tl.float32)
        total_z = tl.zeros((STEP, REST), tl.float32)
        first = tl.program_id(2) * SAMPLES
        for sample in tl.range(first, tl.minimum(first + SAMPLES, batches), num_stages=STAGES):
            sample = tl.cast(sample, tl.int64)
            token = (sample * length + position)[:, None]
            if TURNS and OWN:
                own = sample * length * HALF + angle
                x, y = _load_angles(cos, sin, own, pairs)
            # The head again, and its gradient, turned back by its angle.
            a, b, z = _load_head(qkv + slot + token * row, pairs, others, HALF, PAIRS, REST)
            a, b, z, rstd = _standardise(a, b, z, pairs, others, eps, DIM, CENTERS)
            at = source + sample * source_batch + position.to(tl.int64)[:, None] * source_row
            d_a, d_b, d_z = _load_head(at, pairs, others, HALF, PAIRS, REST)
            if TURNS:
                d_a, d_b = d_a * x + d_b * y, d_b * x - d_a * y
            weight_a += d_a * a
            weight_b += d_b * b
            weight_z += d_z * z
            if SHIFTED:
                shift_a += d_a
                shift_b += d_b
                shift_z += d_z
            # As in `_norm_backward`, with w = dy * weight:
            #     dx = (w - z mean(w z) - mean(w)) * rstd, of which RMSNorm lacks the last mean.
            d_a *= w_a
            d_b *= w_b
            d_z *= w_z
            along = _sum_heads(d_a * a, d_b * b, d_z * z) / DIM
            if CENTERS:
                d_a, d_b, d_z = _center(d_a, d_b, d_z, pairs, others, DIM)
            d_a = (d_a - a * along) * rstd
            d_b = (d_b - b * along) * rstd
            d_z = (d_z - z * along) * rstd
            to = packed + slot + token * row
            to_a = to + c
            high_a = store_rounded(to_a, d_a, pairs, by, high_a, dq, FP8, LARGEST, WIDE)
            to_b = to + HALF + c
            high_a = store_rounded(to_b, d_b, pairs, by, high_a, dq, FP8, LARGEST, WIDE)
            to_z = to + rest
            high_z = store_rounded(to_z, d_z, others, by, high_z, dq, FP8, LARGEST, WIDE)
            if SUMMED:
                total_a += d_a
                total_b += d_b
                total_z += d_z
        if amax is not None:
            high = tl.maximum(tl.max(tl.max(high_a, 1), 0), tl.max(tl.max(high_z, 1), 0))
            raise_amax(amax, high)
        if SUMMED:
            _store_sums(sums, total_a, total_b, total_z, DIM, HALF, PAIRS, REST)
        # This program's row of each matrix of sums: part by part, and head by head.
        heads = tl.where(is_query, GROUPS * PER_GROUP, GROUPS)
        head = tl.where(is_query, query, group)
        own_sums = tl.where(is_query, of_q, of_k) + (part * heads + head) * DIM
        _store_sums(own_sums, weight_a, weight_b, weight_z, DIM, HALF, PAIRS, REST)
        if SHIFTED:
            matrix = (tl.num_programs(1) * tl.num_programs(2)).to(tl.int64) * heads * DIM
            _store_sums(own_sums + matrix, shift_a, shift_b, shift_z, DIM, HALF, PAIRS, REST)


def norm_qk(
    qkv: Tensor, sizes: HeadSizes, rotation: Rotation | None, norms: HeadNorms
) -> tuple[Tensor, Tensor]:
    """Return the queries [B, T, heads, head_dim] and keys [B, T, groups, head_dim]."""
    qkv = qkv.contiguous()
    b, t, _ = qkv.shape
    groups, per_group, dim = sizes
    q, k = empty_qk(qkv, sizes)
    cos, sin = angles_of(rotation, qkv)
    tile = widened(TILE, dim)
    with torch.accelerator.device_index(qkv.device.index):
        programs = groups * (per_group + 1), *parts_of(b, t, tile)
        _norm_heads[programs](
            qkv,
            q,
            k,
            cos,
            sin,
            *norms.vectors,
            b,
            t,
            norms.q.eps,
            norms.q.plus,
            norms.q.centers,
            groups,
            per_group,
            **shape_with(rotation, dim, tile),
        )
    return q, k


def pack(
    grads: Sequence[Tensor],
    qkv: Tensor,
    sizes: HeadSizes,
    rotation: Rotation | None,
    norms: HeadNorms,
    summed: bool,
    into: Into | None = None,
    tile: SlotTile | None = None,
) -> PackedGradients:
    """Return the gradient of qkv and partial sums; those of its columns if asked for."""
    (dq, dk, dv), strides = with_strides(grads)
    qkv = qkv.contiguous()
    b, t, _, _ = dq.shape
    groups, per_group, dim = sizes
    tile = tile or widened(PACK_TILE, dim)
    packed = torch.empty_like(qkv) if into is None else into.out
    cos, sin = angles_of(rotation, dq)
    parts = parts_of(b, t, tile)
    count = math.prod(parts)
    vectors = 1 if norms.q.bias is None else 2
    partials = dq.new_empty(count if summed else 0, qkv.shape[-1], dtype=torch.float32)
    of_q = dq.new_empty(vectors, count * groups * per_group, dim, dtype=torch.float32)
    of_k = dq.new_empty(vectors, count * groups, dim, dtype=torch.float32)
    with torch.accelerator.device_index(dq.device.index):
        programs = groups * (per_group + 2), *parts
        _pack_normed_heads[programs](
            dq,
            dk,
            dv,
            qkv,
            cos,
            sin,
            norms.q.weight,
            norms.k.weight,
            packed if into is None else packed.view(torch.uint8),
            partials,
            of_q,
            of_k,
            *strides,
            b,
            t,
            norms.q.eps,
            *fp8_arguments(into),
            norms.q.plus,
            norms.q.centers,
            vectors == 2,
            groups,
            per_group,
            SUMMED=summed,
            **shape_with(rotation, dim, tile),
        )
    return PackedGradients(packed, partials if summed else None, of_q, of_k)


def shape_with(rotation: Rotation | None, dim: int, tile: SlotTile) -> dict[str, Any]:
    """Return the constants of both kernels; heads that do not turn are two halves, too."""
    half, own = dim // 2, False
    if rotation is not None:
        half, own = rotation[0].shape[-1], len(rotation[0]) > 1
    return shape_of(dim, half, own, tile) | {"TURNS": rotation is not None}


def widened(tile: SlotTile, dim: int) -> SlotTile:
    """Return the tile with as many warps as heads of this width need."""
    return tile._replace(warps=WIDE_WARPS) if dim > 128 else tile
