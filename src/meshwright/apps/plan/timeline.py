"""The lists of a pipeline schedule, run against a clock. No torch, no second schedule.

The lists are those that `parallel/pipeline.py` executes. `simulate` gives each action its start and
end; `makespan` the end alone, from a few rounds of micro-batches where a step has many.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.parallel.pipeline_schedule import (
    Action,
    ScheduleName,
    schedule,
    stages_of,
)

Message = tuple[str, int, int]  # F or B, the stage that makes it, micro-batch
ROUNDS = 4  # of as many micro-batches as ranks, after which a pipeline repeats itself, to 1 %


class StageTimes(NamedTuple):
    """Seconds of a micro-batch in each stage, in model order, and of a message between ranks."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    message: float = 0.0

    @classmethod
    def even(
        cls, pp: int, chunks: int = 1, forward: float = 1.0, backward: float = 2.0
    ) -> StageTimes:
        """Return equal times; `forward` and `backward` are of all chunks of a rank."""
        return cls((forward / chunks,) * pp * chunks, (backward / chunks,) * pp * chunks)


@dataclass(frozen=True)
class Timeline:
    total: float
    bubble: float  # share of the ranks' time spent waiting
    live: list[int]  # per rank: most (chunk, micro-batch) pairs whose activations are held at once
    spans: list[dict[Action, tuple[float, float]]]  # per rank: start and end of each action


def happening(
    lists: list[list[Action]], stages: list[list[int]]
) -> Iterator[tuple[int, int, Message | None, Message]]:
    """Yield all ranks' actions in a possible order of execution; RuntimeError on a deadlock.

    Each is (rank, place in its list, message it waits for, message it sends). `stages` holds the
    stage numbers of each rank's chunks.
    """
    last = max(max(mine) for mine in stages)
    done: set[Message] = set()
    places = [0] * len(lists)
    total = sum(map(len, lists))
    # Each rank runs as far as it can, again and again, until all lists are at their end.
    while len(done) < total:
        moved = False
        for rank, todo in enumerate(lists):
            for place in range(places[rank], len(todo)):
                op, chunk, microbatch = todo[place]
                stage = stages[rank][chunk]
                # A forward pass needs the stage before, a backward pass the one after; the last
                # stage turns its own forward pass around.
                need = None
                if op == "F" and stage:
                    need = ("F", stage - 1, microbatch)
                elif op == "B" and stage < last:
                    need = ("B", stage + 1, microbatch)
                elif op == "B":
                    need = ("F", stage, microbatch)
                if need is not None and need not in done:
                    break
                made = (op, stage, microbatch)
                done.add(made)
                places[rank] = place + 1
                moved = True
                yield rank, place, need, made
        if not moved:
            raise RuntimeError(f"the schedule deadlocks: {len(lists)} ranks are at {places}")


def simulate(
    kind: ScheduleName, pp: int, microbatches: int, chunks: int = 1, times: StageTimes | None = None
) -> Timeline:
    """Run all ranks' lists against a clock; without times, a rank's passes take 1 and 2.

    A rank asks for a message when it needs it, so its transfer counts from then on.
    """
    times = times or StageTimes.even(pp, chunks)
    lists = [schedule(kind, pp, rank, microbatches, chunks) for rank in range(pp)]
    stages = [stages_of(rank, pp, chunks) for rank in range(pp)]
    rank_of = {stage: rank for rank, mine in enumerate(stages) for stage in mine}
    cost = {"F": times.forward, "B": times.backward}
    done: dict[Message, float] = {}  # message -> time
    spans: list[dict[Action, tuple[float, float]]] = [{} for _ in lists]
    clock = [0.0] * pp
    held = [0] * pp
    live = [0] * pp
    busy = 0.0
    for rank, place, need, made in happening(lists, stages):
        action = lists[rank][place]
        start = clock[rank]
        if need is not None:
            start = max(start, done[need])
            if rank_of[need[1]] != rank:
                start += times.message
        spent = cost[action.op][made[1]]
        clock[rank] = done[made] = start + spent
        busy += spent
        spans[rank][action] = (start, clock[rank])
        # A forward pass keeps activations until the backward pass of the same micro-batch.
        held[rank] += 1 if action.op == "F" else -1
        live[rank] = max(live[rank], held[rank])
    total = max(clock)
    return Timeline(total, 1 - busy / (pp * total), live, spans)


class Node(NamedTuple):
    """An action in the order of all ranks' execution, by numbers for `_total`."""

    rank: int
    cost: int  # place in forward and backward, one after the other
    need: int  # place of the action whose message it waits for, or -1
    is_sent: bool  # whether that comes from another rank


@functools.lru_cache(256)
def order(kind: ScheduleName, pp: int, microbatches: int, chunks: int) -> tuple[Node, ...]:
    """Return the actions of all ranks in an order in which they can be executed."""
    lists = [schedule(kind, pp, rank, microbatches, chunks) for rank in range(pp)]
    stages = [stages_of(rank, pp, chunks) for rank in range(pp)]
    rank_of = {stage: rank for rank, mine in enumerate(stages) for stage in mine}
    first = {"F": 0, "B": pp * chunks}
    places: dict[Message, int] = {}
    nodes: list[Node] = []
    for rank, place, need, made in happening(lists, stages):
        waits = -1
        is_sent = False
        if need is not None:
            waits = places[need]
            is_sent = rank_of[need[1]] != rank
        cost = first[lists[rank][place].op] + made[1]
        places[made] = len(nodes)
        nodes.append(Node(rank, cost, waits, is_sent))
    return tuple(nodes)


def makespan(
    kind: ScheduleName, pp: int, microbatches: int, chunks: int, times: StageTimes
) -> float:
    """Return the seconds of all micro-batches' passes.

    Beyond some rounds every further one takes as long as the one before.
    """
    rest = max(0, (microbatches - ROUNDS * pp) // pp - 1)
    few = microbatches - rest * pp
    total = _total(kind, pp, few, chunks, times)
    # What one round more takes, for each round that was left out.
    return total + rest * (total - _total(kind, pp, few - pp, chunks, times)) if rest else total


@functools.lru_cache(1 << 14)
def _total(kind: ScheduleName, pp: int, microbatches: int, chunks: int, times: StageTimes) -> float:
    # The same as `simulate`, without spans: a search asks for thousands of these.
    costs = (*times.forward, *times.backward)
    message = times.message
    clock = [0.0] * pp
    ends = list[float]()
    for rank, cost, need, is_sent in order(kind, pp, microbatches, chunks):
        start = clock[rank]
        if need >= 0:
            start = max(start, ends[need])
            if is_sent:
                start += message
        clock[rank] = start = start + costs[cost]
        ends.append(start)
    return max(clock)
