"""Pipeline schedules as lists, made by pure functions. No torch.

The executor runs the list, `simulate` times it, docs/parallelism.py draws it, and tests check it
without a process group. A rank holds `chunks` stages: chunk c of rank r is stage c * pp + r, so a
micro-batch passes all ranks once per chunk. In every schedule a chunk's backward passes come in
micro-batch order, so that gradients are always added in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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


Message = tuple[str, int, int]  # F or B, the stage that makes it, micro-batch


def happening(lists: list[list[Action]], stages: list[list[int]]) -> Iterator[tuple[int, int, Message | None, Message]]:
    """Yield all ranks' actions in a possible order of execution; RuntimeError on a deadlock.

    Each is (rank, place in its list, message it waits for, message it sends). `stages` holds the
    stage numbers of each rank's chunks.
    """
    last = max(max(mine) for mine in stages)
    done: set[Message] = set()
    places = [0] * len(lists)
    while any(place < len(todo) for place, todo in zip(places, lists, strict=True)):
        moved = False
        for rank, todo in enumerate(lists):
            for op, chunk, microbatch in todo[places[rank] :]:
                stage, need = stages[rank][chunk], None
                if op == "F" and stage:
                    need = ("F", stage - 1, microbatch)
                elif op in "BI":
                    need = ("B", stage + 1, microbatch) if stage < last else ("F", stage, microbatch)
                if need is not None and need not in done:
                    break
                made = ("B" if op == "I" else op, stage, microbatch)
                done.add(made)
                yield rank, places[rank], need, made
                places[rank] += 1
                moved = True
        if not moved:
            raise RuntimeError(f"the schedule deadlocks: {len(lists)} ranks are at {places}")


@dataclass(frozen=True)
class Timeline:
    total: float
    bubble: float  # share of the ranks' time spent waiting
    live: list[int]  # per rank: most (chunk, micro-batch) pairs whose activations are held at once
    spans: list[dict[Action, tuple[float, float]]]  # per rank: start and end of each action


def simulate(
    kind: Kind, pp: int, microbatches: int, chunks: int = 1, forward: float = 1.0, backward: float = 2.0
) -> Timeline:
    """Run all ranks' lists against a clock.

    `forward` and `backward` are the times of one micro-batch on all chunks of a rank.
    """
    lists = [schedule(kind, pp, rank, microbatches, chunks) for rank in range(pp)]
    cost = {"F": forward / chunks, "B": backward / chunks}
    done: dict[Message, float] = {}  # message -> time
    spans: list[dict[Action, tuple[float, float]]] = [{} for _ in lists]
    clock, held, live = [0.0] * pp, [0] * pp, [0] * pp
    for rank, place, need, made in happening(lists, [stages_of(kind, rank, pp, chunks) for rank in range(pp)]):
        action = lists[rank][place]
        start = max(clock[rank], done[need] if need else 0.0)
        clock[rank] = done[made] = start + cost[action.op]
        spans[rank][action] = (start, clock[rank])
        held[rank] += 1 if action.op == "F" else -1
        live[rank] = max(live[rank], held[rank])
    total = max(clock)
    return Timeline(total, 1 - microbatches * (forward + backward) / total, live, spans)


def stages_of(kind: Kind, rank: int, size: int, chunks: int) -> list[int]:
    """Return the numbers of a rank's stages."""
    return [rank, 2 * size - 1 - rank] if kind in V_SHAPED else [chunk * size + rank for chunk in range(chunks)]
