"""The kernels of adamw.py: sum of squares, decision, update."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.adamw import (
    BLOCK,
    DECISION,
    KIND_BITS,
    KINDS,
    OF_KINDS,
    AdamWBuffers,
    AdamWConstants,
)
from meshwright.kernels.grid import cdiv
from meshwright.kernels.moments import BlockDraws
from meshwright.kernels.triton import moments

ROWS = 16  # blocks of a program
WARPS = 8
PROGRAMS = 2048  # of the sum of squares


@triton.jit
def _sum_squares(
    x, table, partials, count, ROWS: tl.constexpr, BLOCK: tl.constexpr, KIND_BITS: tl.constexpr
):
    """Sum the squares of every PROGRAMS-th tile of 16 blocks.

    In: x float32 [128 per block], table int32 [2, count]. Out: partials float64 [programs], to be
    added in any fixed order. Moves 4 bytes an element: of 355 million 4.4 TB/s of an H200's 4.8. A
    lane adds few float32 numbers; lanes are added in float64.
    """
    columns = tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    program = tl.program_id(0)
    for first in range(program * ROWS, count, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        some = row < count
        entry = tl.load(table + row, mask=some, other=0)
        block = entry >> KIND_BITS
        at = block.to(tl.int64)[:, None] * BLOCK + columns[None, :]
        value = tl.load(x + at, mask=some[:, None], other=0.0)
        total += value * value
    of_rows = tl.sum(total.to(tl.float64), 1)
    tl.store(partials + program, tl.sum(of_rows, 0))


@triton.jit
def _adamw_decide(
    squares,
    loss,
    lr,
    weight_decay,
    scale,
    step,
    constants,
    decision,
    KINDS: tl.constexpr,
    OF_KINDS: tl.constexpr,
):
    """Turn a step's numbers into the update's factors: one program.

    In: squares, loss (of any format), lr, weight_decay, scale: float64 []; constants float64 [35].
    In and out: step float32 []. Out: decision float32 [37].
    """
    # The gradients' norm, the factor that clips it, and whether the step counts.
    s = tl.load(scale)
    norm = tl.sqrt(tl.load(squares)) / s
    clip = tl.load(constants + 2)
    clipped = tl.minimum(clip / (norm + 1e-6), 1.0)
    shrink = tl.where(clip > 0, clipped, 1.0)
    infinity = float("inf")
    has_norm = tl.abs(norm.to(tl.float32)) < infinity
    has_loss = tl.abs(tl.load(loss)) < infinity
    is_finite = has_norm & has_loss
    # Adam's corrections, from beta^t = exp(t log beta).
    t = tl.load(step) + is_finite.to(tl.float32)
    tl.store(step, t)
    t = tl.maximum(t, 1.0).to(tl.float64)  # 0 if no step was finite yet
    power1 = tl.exp(t * tl.load(constants))
    power2 = tl.exp(t * tl.load(constants + 1))
    root = 1.0 / tl.sqrt(1.0 - power2)
    tl.store(decision, norm.to(tl.float32))
    tl.store(decision + 1, shrink.to(tl.float32))
    tl.store(decision + 2, is_finite.to(tl.float32))
    tl.store(decision + 3, (shrink / s).to(tl.float32))
    tl.store(decision + 4, root.to(tl.float32))
    # The decay and the step size of each kind.
    kind = 2 * tl.arange(0, KINDS)
    rates = tl.load(lr) * tl.load(constants + 3 + kind)
    decays = tl.load(weight_decay) * tl.load(constants + 4 + kind)
    sizes = rates / (1.0 - power1)
    tl.store(decision + OF_KINDS + kind, (rates * decays).to(tl.float32))
    tl.store(decision + OF_KINDS + 1 + kind, sizes.to(tl.float32))


@triton.jit
def _adamw_update(
    gradients,
    exp_avg,
    exp_avg_sq,
    master,
    weights,
    table,
    decision,
    parts,
    places,
    step,
    count,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    EPS: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND_BITS: tl.constexpr,
    OF_KINDS: tl.constexpr,
):
    """Apply AdamW to 16 blocks.

    In: gradients; in and out: exp_avg, exp_avg_sq, master, all float32; out: weights, if not None.
    Moves 28 bytes an element, and 2 more with 16-bit weights: for 355 million 4.1 TB/s of an H200's
    4.8. If the step is not finite, it reads and writes nothing. With `parts`, the moments have
    fewer bits, and are rounded by draws for the blocks' places.
    """
    # Where the blocks are: in the state one after the other, in the flat buffers by the table.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_finite = tl.load(decision + 2) > 0.5
    some = row < tl.where(is_finite, count, 0)
    entry = tl.load(table + row, mask=some, other=0)
    columns = tl.arange(0, BLOCK)[None, :]
    mask = some[:, None]
    compact = row.to(tl.int64)[:, None] * BLOCK + columns
    kind = decision + OF_KINDS + 2 * (entry & ((1 << KIND_BITS) - 1))
    at = (entry >> KIND_BITS).to(tl.int64)[:, None] * BLOCK + columns
    # The clip factor and the loss scale are in one factor of the gradient.
    g = tl.load(gradients + at, mask=mask, other=0.0) * tl.load(decision + 3)
    m = moments.expand(tl.load(exp_avg + compact, mask=mask, other=0))
    v = moments.expand(tl.load(exp_avg_sq + compact, mask=mask, other=0))
    p = tl.load(master + at, mask=mask, other=0.0)
    # The update, as advance in adamw.py.
    m += (g - m) * (1.0 - BETA1)
    v = v * BETA2 + g * g * (1.0 - BETA2)
    root = tl.load(decision + 4)
    update = tl.div_rn(m, tl.sqrt_rn(v) * root + EPS)
    decay = tl.load(kind)[:, None]
    if CAUTIOUS:
        p -= tl.where(update * p >= 0.0, p * decay, 0.0)
    else:
        p -= p * decay
    p -= tl.load(kind + 1)[:, None] * update
    if parts is not None:
        # One draw of 32 bits rounds both.
        bits = moments.draw_blocks(parts, places, step, row, some, compact)
        first = moments.compress(m, bits & 0xFFFF, exp_avg.dtype.element_ty)
        tl.store(exp_avg + compact, first, mask=mask)
        second = moments.compress(v, (bits >> 16) & 0xFFFF, exp_avg_sq.dtype.element_ty)
        tl.store(exp_avg_sq + compact, second, mask=mask)
    else:
        tl.store(exp_avg + compact, m, mask=mask)
        tl.store(exp_avg_sq + compact, v, mask=mask)
    tl.store(master + at, p, mask=mask)
    if weights is not None:
        target = tl.load(table + count + row, mask=some, other=0)
        at = target.to(tl.int64)[:, None] * BLOCK + columns
        tl.store(weights + at, p.to(weights.dtype.element_ty), mask=mask)


def sum_squares(x: Tensor, table: Tensor) -> Tensor:
    """Return the sum of squares of the table's blocks."""
    programs = max(1, min(PROGRAMS, cdiv(table.shape[1], ROWS)))
    partials = torch.empty(programs, dtype=torch.float64, device=x.device)
    with torch.accelerator.device_index(x.device.index):
        _sum_squares[(programs,)](
            x, table, partials, table.shape[1], ROWS, BLOCK, KIND_BITS, num_warps=WARPS
        )
    return partials.sum()


def decide(constants: Tensor, numbers: tuple[Tensor, ...], step: Tensor) -> Tensor:
    decision = torch.empty(DECISION, dtype=torch.float32, device=step.device)
    with torch.accelerator.device_index(step.device.index):
        _adamw_decide[(1,)](*numbers, step, constants, decision, KINDS, OF_KINDS, num_warps=1)
    return decision


def update_blocks(
    buffers: AdamWBuffers,
    table: Tensor,
    settings: AdamWConstants,
    decision: Tensor,
    draws: BlockDraws | None = None,
) -> None:
    """Apply AdamW to some blocks if the step is finite."""
    count = table.shape[1]
    drawn = draws or (None, None, None)
    with torch.accelerator.device_index(decision.device.index):
        _adamw_update[(cdiv(count, ROWS),)](
            *buffers,
            table,
            decision,
            *drawn,
            count,
            *settings,
            ROWS,
            BLOCK,
            KIND_BITS,
            OF_KINDS,
            num_warps=WARPS,
        )
