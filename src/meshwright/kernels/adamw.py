"""AdamW over flat buffers: the gradients' norm, the clip factor and the update in three launches.

Hand-written because torch's fused AdamW reads the weight decay from the host, so that a CUDA graph
would keep the first step's; it also writes the gradients back, takes one launch per list of tensors
and leaves the lower-precision weights to another pass. Bytes moved for each element with bfloat16
weights: 30, where torch's update and copy move 38.

A flat buffer consists of blocks of 128 elements. A table int32 [2, n] names those that take part:
16 * block + kind, and the block of the lower-precision weights. Each kind has a factor of the
learning rate and one of the weight decay. The state is compact: its block i belongs to the i-th
entry, so elements that another rule updates need none, and one launch serves any number of pieces.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.kernels import gradients, moments
from meshwright.kernels.references import reference

BLOCK = 128
KIND_BITS = 4
KINDS = 1 << KIND_BITS
# Elements of a decision, float32 [37]. FINITE is 1, or 0 in a step that must change nothing. From
# OF_KINDS on, a decay and a step size for each kind.
NORM, SHRINK, FINITE, FACTOR, INVERSE_ROOT, OF_KINDS = range(6)
DECISION = OF_KINDS + 2 * KINDS


class FlatRange(NamedTuple):
    """Elements of a flat buffer, at multiples of BLOCK."""

    begin: int
    end: int
    kind: int = 0
    target: int = 0  # first element of their weights


class AdamWBuffers(NamedTuple):
    """The memory of one update; gradients and masters are laid out alike."""

    gradients: Tensor
    exp_avg: Tensor  # [128 n], compact; it and exp_avg_sq may have the formats of moments.py
    exp_avg_sq: Tensor
    master: Tensor
    weights: Tensor | None  # a copy in a lower precision, if there is one


class AdamWConstants(NamedTuple):
    """The constants of the rule."""

    beta1: float
    beta2: float
    eps: float
    is_cautious: bool = False  # no decay of elements whose update has the other sign


def make_constants(
    settings: AdamWConstants,
    clip: float,
    device: torch.device,
    kinds: Sequence[tuple[float, float]],
) -> Tensor:
    """Return the constants of the decision, float64 [35].

    They are the logarithms of the betas, the largest norm (0 does not clip), and the factors of
    rate and decay of each kind.
    """
    if len(kinds) > KINDS:
        raise ValueError(
            f"AdamW over flat buffers has {KINDS} kinds of parameters, not {len(kinds)}"
        )
    logarithms = [math.log(beta) if beta else -math.inf for beta in settings[:2]]
    factors = list(itertools.chain(*kinds))
    unused = [0.0] * 2 * (KINDS - len(kinds))
    values = [*logarithms, clip, *factors, *unused]
    return torch.tensor(values, dtype=torch.float64, device=device)


def make_table(ranges: list[FlatRange], device: torch.device) -> Tensor:
    rows = [torch.empty(2, 0, dtype=torch.int64)]
    for r in ranges:
        blocks = torch.arange((r.end - r.begin) // BLOCK)
        source = (blocks + r.begin // BLOCK) * KINDS + r.kind
        target = blocks + r.target // BLOCK
        rows.append(torch.stack([source, target]))
    table = torch.cat(rows, 1)
    return table.to(device, torch.int32)


@reference("adamw.sum_squares")
def sum_squares(x: Tensor, table: Tensor) -> Tensor:
    """Return the sum of squares of the table's blocks, float64 []; the same bits every time."""
    blocks = table[0].long() >> KIND_BITS
    return x.view(-1, BLOCK)[blocks].double().square().sum()


@reference("adamw.decide", of=lambda constants, numbers, step: step)
def decide(constants: Tensor, numbers: tuple[Tensor, ...], step: Tensor) -> Tensor:
    """Count a step if the norm and the loss are finite; return the decision.

    `numbers` are tensors []: the sum of squared gradients, the loss, and as float64 the learning
    rate, the weight decay and the loss scale, by which the gradients are still multiplied. `step`
    is Adam's t, float32 [].
    """
    total, loss, lr, weight_decay, scale = (x.double() for x in numbers)
    log1, log2, clip = constants[:3]
    rate, decay = constants[3:].view(KINDS, 2).unbind(1)
    norm, shrink, is_finite = gradients.clip_and_check(total, loss, scale, clip, torch.float64)
    step += is_finite
    # Adam's corrections, from beta^t = exp(t log beta).
    t = step.double().clamp(min=1.0)  # 0 if no step was finite yet
    correction1 = 1 - (t * log1).exp()
    correction2 = 1 - (t * log2).exp()
    # The decay and the step size of each kind.
    rates = lr * rate
    decays = rates * (weight_decay * decay)
    of_kinds = torch.stack([decays, rates / correction1], 1)
    # In the order of NORM, SHRINK, FINITE, FACTOR and INVERSE_ROOT.
    of_all = torch.stack(
        [
            norm,
            shrink,
            is_finite.double(),
            shrink / scale,
            correction2.rsqrt(),
        ]
    )
    return torch.cat([of_all, of_kinds.view(-1)]).float()


@reference("adamw.update_blocks", of=lambda buffers, *_: buffers.master)
def update_blocks(
    buffers: AdamWBuffers,
    table: Tensor,
    settings: AdamWConstants,
    decision: Tensor,
    draws: moments.BlockDraws | None = None,
) -> None:
    """Apply AdamW to the table's blocks, as torch.optim.AdamW does, if the step is finite.

    With `draws`, the moments have fewer bits.
    """
    if not decision[FINITE]:
        return
    table = table.long()
    decision = decision.to(buffers.master.dtype)
    # The table's blocks in the flat buffers, and the decay and step size of each.
    blocks = table[0] >> KIND_BITS
    kinds = table[0] & (KINDS - 1)
    decay, size = decision[OF_KINDS:].view(KINDS, 2)[kinds].unbind(1)
    master = buffers.master.view(-1, BLOCK)
    # The state is compact: its blocks are the table's, in order.
    stored = [x.view(-1, BLOCK) for x in (buffers.exp_avg, buffers.exp_avg_sq)]
    old = [moments.expanded(x, master.dtype) for x in stored]
    g = buffers.gradients.view(-1, BLOCK)[blocks] * decision[FACTOR]
    factors = decay[:, None], size[:, None], decision[INVERSE_ROOT]
    master[blocks], m, v = advance(master[blocks], g, old, settings, *factors)
    # One draw of 32 bits rounds both moments.
    if draws is not None:
        first, second = moments.halves(moments.draw_blocks(draws))
        m = moments.rounded(m, stored[0].dtype, first)
        v = moments.rounded(v, stored[1].dtype, second)
    stored[0].copy_(m)
    stored[1].copy_(v)
    if buffers.weights is not None:
        buffers.weights.view(-1, BLOCK)[table[1]] = master[blocks].to(buffers.weights.dtype)


def advance(
    weight: Tensor,
    gradient: Tensor,
    state: list[Tensor],
    constants: AdamWConstants,
    decay: Tensor,
    size: Tensor,
    root: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the new weight and moments.

    `decay` and `size` are the decay and step size of a decision, with Adam's first correction;
    `root` is its second one, 1 / sqrt(1 - beta2^t).
    """
    m = state[0].lerp(gradient, 1 - constants.beta1)
    v = (state[1] * constants.beta2).addcmul_(gradient, gradient, value=1 - constants.beta2)
    update = m / v.sqrt().mul_(root).add_(constants.eps)
    # The decay is of the weight before the update, as AdamW has it.
    decayed = weight * decay
    if constants.is_cautious:
        decayed = torch.where(update * weight >= 0, decayed, 0.0)
    return (weight - decayed).sub_(update.mul_(size)), m, v
