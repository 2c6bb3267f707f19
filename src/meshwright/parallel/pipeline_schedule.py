"""Pipeline schedules as lists, made by pure functions. No torch.

The executor runs the list, docs/parallelism.py times and draws it, and tests check it without a
process group. A rank holds `chunks` stages: chunk c of rank r is stage c * pp + r, so a
micro-batch passes all ranks once per chunk. In every schedule a chunk's backward passes come in
micro-batch order, so that gradients are always added in the same order.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

ScheduleName = Literal["1f1b", "gpipe"]
Op = Literal["F", "B"]  # forward and backward


class Action(NamedTuple):
    op: Op
    chunk: int
    microbatch: int


def most_sent(chunks: int) -> int:
    """Return how many gradients of a rank may be on their way to other ranks.

    So many that a rank never waits: before it sends one more, it has received what the first one's
    receiver computed after it.
    """
    return 2 * chunks


def schedule(
    name: ScheduleName, pp: int, rank: int, microbatches: int, chunks: int = 1
) -> list[Action]:
    """Return one rank's actions: GPipe or 1F1B.

    With several chunks 1F1B is Megatron's interleaved 1F1B.
    """
    if name == "gpipe" and chunks > 1:
        raise ValueError(f"gpipe has one chunk of layers on each rank, not {chunks}")
    if chunks > 1 and microbatches % pp:
        raise ValueError(
            f"interleaving needs micro-batches ({microbatches}) that are a multiple of the stages ({pp})"
        )
    total = microbatches * chunks
    # Forward passes before the first backward one.
    if name == "gpipe":
        ahead = total
    elif chunks == 1:
        ahead = pp - rank - 1  # as many as the first micro-batch needs to come back
    else:
        # Megatron's: twice as far, since forward and backward of a step belong to different chunks.
        ahead = 2 * (pp - rank - 1) + (chunks - 1) * pp

    def forward(k: int) -> Action:
        """Return the k-th: rounds of pp micro-batches, each through all chunks before the next."""
        if chunks == 1:
            return Action("F", 0, k)
        turn, offset = divmod(k, pp * chunks)
        return Action("F", offset // pp, turn * pp + offset % pp)

    def backward(k: int) -> Action:
        _, chunk, microbatch = forward(k)
        return Action("B", chunks - 1 - chunk, microbatch)

    # Then one forward and one backward pass in turn, until forward passes run out.
    actions = [forward(k) for k in range(min(ahead, total))]
    for k in range(total):
        if ahead + k < total:
            actions.append(forward(ahead + k))
        actions.append(backward(k))
    return actions


def stages_of(rank: int, size: int, chunks: int) -> list[int]:
    """Return the numbers of a rank's stages."""
    return [chunk * size + rank for chunk in range(chunks)]
