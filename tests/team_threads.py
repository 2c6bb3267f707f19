"""A team whose ranks are threads of this process, and what each of them receives."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from meshwright.runtime.ranks.team import Team, tree_of


class Group:
    """A group of threads in the place of gloo's, which counts what each rank receives."""

    def __init__(
        self, lines: dict[tuple[int, int], queue.SimpleQueue[Any]], ranks: range, rank: int
    ) -> None:
        self.lines, self.ranks, self.own, self.received = lines, ranks, rank, list[int]()

    def rank(self) -> int:
        return self.ranks.index(self.own)

    def size(self) -> int:
        return len(self.ranks)

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Any:
        self.lines[self.own, self.ranks[to]].put(tensors[0].clone())
        return SimpleNamespace(wait=lambda: None)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Any:
        tensors[0].copy_(self.lines[self.ranks[source], self.own].get(timeout=100))
        self.received.append(tensors[0].nbytes)
        return SimpleNamespace(wait=lambda: None)


def on_threads(size: int, act: Callable[[Team], Any]) -> tuple[list[Any], list[list[int]]]:
    """Return what `act` returns or raises on each rank, and the bytes of the messages it got."""
    lines = {}
    for rank in range(size):
        for ranks in tree_of(rank, size):
            for other in set(ranks) - {rank}:
                lines[other, rank] = queue.SimpleQueue[Any]()
    trees = [[Group(lines, ranks, rank) for ranks in tree_of(rank, size)] for rank in range(size)]
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = act(Team(rank, size, tuple(trees[rank])))  # type: ignore[arg-type]
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results, [[n for group in tree for n in group.received] for tree in trees]
