"""Pipeline schedules as lists, made by pure functions. No torch.

The executor runs the list, docs/parallelism.py times and draws it, and tests check it without a
process group. A rank holds `chunks` stages: chunk c of rank r is stage c * pp + r, so a
micro-batch passes all ranks once per chunk. In every schedule a chunk's backward passes come in
micro-batch order, so that gradients are always added in the same order.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["1f1b", "gpipe", "zero-bubble", "zbv"]
OWN = ("1f1b", "gpipe")  # the others are torch's
V_SHAPED = ("zbv",)  # rank r has the stages r and 2 pp - 1 - r


class Action(NamedTuple):
    op: Literal["F", "B", "I", "W"]  # I and W: backward for activations, and later for weights
    chunk: int
    microbatch: int


def schedule(kind: Kind, pp: int, rank: int, microbatches: int, chunks: int = 1) -> list[Action]:
    """Return one rank's actions: GPipe, 1F1B or, with several chunks, Megatron's interleaved 1F1B.

    The other kinds are torch's; see pipeline.py.
    """
    if kind == "gpipe" and chunks > 1:
        raise ValueError(f"gpipe has one chunk of layers on each rank, not {chunks}")
    if chunks > 1 and microbatches % pp:
        raise ValueError(f"interleaving needs micro-batches ({microbatches}) that are a multiple of the stages ({pp})")
    total = microbatches * chunks
    if kind == "gpipe":
        ahead = total
    elif chunks == 1:
        ahead = pp - rank - 1  # as many as the first micro-batch needs to come back
    else:  # Megatron's: twice as far, since forward and backward of a step belong to different chunks
        ahead = 2 * (pp - rank - 1) + (chunks - 1) * pp
    ahead = min(ahead, total)

    def forward(k: int) -> Action:
        """Return the k-th: rounds of pp micro-batches, each through all chunks before the next."""
        if chunks == 1:
            return Action("F", 0, k)
        turn, place = divmod(k, pp * chunks)
        return Action("F", place // pp, turn * pp + place % pp)

    def backward(k: int) -> Action:
        _, chunk, microbatch = forward(k)
        return Action("B", chunks - 1 - chunk, microbatch)

    actions = [forward(k) for k in range(ahead)]
    for k in range(total - ahead):
        actions += [forward(ahead + k), backward(k)]
    return actions + [backward(k) for k in range(total - ahead, total)]


def stages_of(kind: Kind, rank: int, size: int, chunks: int) -> list[int]:
    """Return the numbers of a rank's stages."""
    is_v = kind in V_SHAPED and size > 1  # without a pipeline, the kind has no effect
    return [rank, 2 * size - 1 - rank] if is_v else [chunk * size + rank for chunk in range(chunks)]
