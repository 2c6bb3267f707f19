"""Pipeline schedules as lists, made by pure functions. No torch.

The executor runs the list, docs/parallelism.py times and draws it, and tests check it without a
process group. A rank holds `chunks` stages: chunk c of rank r is stage c * pp + r, so a
micro-batch passes all ranks once per chunk; in a V-shaped schedule it turns back at the last rank.
In every schedule a chunk's backward passes come in micro-batch order, so that gradients are always
added in the same order.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal, NamedTuple

ScheduleName = Literal["1f1b", "gpipe", "zero-bubble", "zbv"]
# the gradients of weights are computed in passes of their own
SPLIT_BACKWARD = ("zero-bubble", "zbv")
V_SHAPED = ("zbv",)  # rank r has the stages r and 2 pp - 1 - r
Op = Literal["F", "B", "I", "W"]  # I and W: backward for activations, and later for weights


class Action(NamedTuple):
    op: Op
    chunk: int
    microbatch: int


def most_sent(name: ScheduleName, pp: int, chunks: int) -> int:
    """Return how many gradients of a rank may be on their way to other ranks.

    So many that a rank never waits: before it sends one more, it has received what the first one's
    receiver computed after it.
    """
    return max(2 * chunks, -(-pp // 2)) if name == "zero-bubble" and chunks > 1 else 2 * chunks


def schedule(
    name: ScheduleName, pp: int, rank: int, microbatches: int, chunks: int = 1
) -> list[Action]:
    """Return one rank's actions: GPipe, 1F1B, zero-bubble (ZB-H1) or ZBV.

    With several chunks 1F1B is Megatron's interleaved 1F1B.
    """
    if name == "gpipe" and chunks > 1:
        raise ValueError(f"gpipe has one chunk of layers on each rank, not {chunks}")
    if name == "zbv":
        return v_schedule(pp, rank, microbatches)
    if chunks > 1 and microbatches % pp:
        raise ValueError(
            f"interleaving needs micro-batches ({microbatches}) that are a multiple of the stages ({pp})"
        )
    total, is_split = microbatches * chunks, name in SPLIT_BACKWARD
    if name == "gpipe":
        ahead = total
    elif chunks == 1:
        ahead = pp - rank - 1  # as many as the first micro-batch needs to come back
    # Megatron's: twice as far, since forward and backward of a step belong to different chunks
    else:
        ahead = (1 if is_split else 2) * (pp - rank - 1) + (chunks - 1) * pp

    def forward(k: int) -> Action:
        """Return the k-th: rounds of pp micro-batches, each through all chunks before the next."""
        if chunks == 1:
            return Action("F", 0, k)
        turn, offset = divmod(k, pp * chunks)
        return Action("F", offset // pp, turn * pp + offset % pp)

    def backward(op: Op, k: int) -> Action:
        _, chunk, microbatch = forward(k)
        return Action(op, chunks - 1 - chunk, microbatch)

    actions = [forward(k) for k in range(min(ahead, total))]
    for k in range(total):
        if ahead + k < total:
            actions.append(forward(ahead + k))
        actions.append(backward("I" if is_split else "B", k))
        # the first stages wait least, the last ones have the most to fill in
        if is_split and k >= rank:
            actions.append(backward("W", k - rank))
    return actions + [backward("W", k) for k in range(max(total - rank, 0), total) if is_split]


def v_schedule(pp: int, rank: int, microbatches: int) -> list[Action]:
    """Return one rank's actions of ZBV, whose ranks run their two stages in turn.

    The list is that of enough micro-batches to fill the pipeline, without those beyond the step's.
    """
    filling, counts, actions = max(2 * pp - 1, microbatches), Counter[str](), list[Action]()

    def add(*passes: str) -> None:
        """Append passes such as "F0", a forward pass of chunk 0, of their next micro-batches."""
        for name in passes:
            actions.append(Action(name[0], int(name[1]), counts[name]))  # type: ignore[arg-type]
            counts[name] += 1

    add(*["F0"] * (2 * (pp - rank) - 1))
    add(*["F1", "F0"] * rank)
    add(*["F1", "I1", "W1"] * (pp - rank))
    while counts["F1"] < counts["F0"] or counts["F0"] < filling:
        add(*["F0"] * (counts["F0"] < filling), "I0", "W0", "F1", "I1", "W1")
    add(*["I0", "I1"] * rank)
    add(*["I0", "W0"] * (pp - rank))
    add(*["W1"] * (counts["I1"] - counts["W1"]), *["W0"] * (counts["I0"] - counts["W0"]))
    return [action for action in actions if action.microbatch < microbatches]


def stages_of(name: ScheduleName, rank: int, size: int, chunks: int) -> list[int]:
    """Return the numbers of a rank's stages."""
    is_v = name in V_SHAPED and size > 1  # without a pipeline, the schedule has no effect
    return [rank, 2 * size - 1 - rank] if is_v else [chunk * size + rank for chunk in range(chunks)]
