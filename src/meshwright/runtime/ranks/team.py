"""Exchange of small JSON values, and of the outcome of an action, between all ranks of a run.

The ranks are the nodes of a tree, so that no rank has more than a few connections and messages. A
group of all of them would have each rank open a socket to every other, and read the addresses of
all from the store. `Team()` is the team of one process, which sends nothing. Nothing is pickled.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

from meshwright.base.errors import UNEXPECTED, UserError
from meshwright.runtime.ranks.heartbeat import heartbeat

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup


T = TypeVar("T")
BRANCHES = 16  # ranks of a group of the tree


@dataclass(frozen=True)
class Team:
    """The ranks of a run. `groups` connect this one to others, from the leaves of the tree up.

    It is the first rank in all of its groups but the last. Without `groups`, torch's group of all
    ranks serves, which must then be no more than BRANCHES.
    """

    rank: int = 0
    size: int = 1
    groups: tuple[ProcessGroup, ...] = ()
    timeout: timedelta = timedelta(minutes=10)  # after which torch gives up waiting for a rank
    store: Store | None = None  # of this run alone
    # their numbers
    clones: Iterator[int] = field(default_factory=itertools.count, compare=False, repr=False)

    @property
    def is_rank_0(self) -> bool:
        """Whether this is rank 0, which writes the files and prints the log."""
        return self.rank == 0

    def clone(self, timeout: timedelta) -> Team:
        """Return a team with connections of its own, as a thread needs; every rank calls this."""
        if self.size == 1:
            return self
        from torch._C._distributed_c10d import PrefixStore

        store = PrefixStore(f"clone {next(self.clones)}", self.store)  # type: ignore[arg-type]
        return dataclasses.replace(self, groups=connect_tree(store, self.rank, self.size, timeout))

    # Values

    def merge(self, value: T, combine: Callable[[list[T]], T]) -> T:
        """Return the combination of all ranks' JSON values, in their order, on every rank.

        `combine` gets some ranks' values, or combinations of neighbours. What a rank receives does
        not grow with their number, unless the combinations do.
        """
        merged: T = self._send_down(self._send_up(value, combine))
        return merged

    def gather(self, value: Any) -> list[Any]:
        """Return the JSON values of all ranks, in their order, on every rank.

        For small values alone: what a rank receives grows with the number of ranks. `merge`,
        `collect`, `deal`, `run_on_all` and `run_on_rank_0` cost most ranks the same in any run.
        """
        return self.merge([value], _concatenate)

    def total(self, number: int) -> int:
        """Return the sum of a number over all ranks."""
        return self.merge(number, sum)

    def wait(self) -> None:
        """Wait until every rank is here."""
        self.merge(None, lambda values: None)

    # Actions

    def run_on_rank_0(self, act: Callable[[], Any]) -> Any:
        """Call `act` on rank 0; give its result, a JSON value, or its error to every rank."""
        if self.size == 1:
            return act()
        outcome, defect = self._try(act) if self.is_rank_0 else ({}, None)
        return _settle(self._send_down(outcome), defect)

    def run_rank_0_first(self, act: Callable[[], T]) -> T:
        """Call `act` on rank 0 first, so that the others find what it made."""
        results: list[T] = []
        self.run_on_rank_0(lambda: results.append(act()))
        return results[0] if results else act()

    def run_on_all(self, act: Callable[[], T]) -> T:
        """Call `act` on every rank; return this rank's result, or raise the first error of any."""
        if self.size == 1:
            return act()
        results: list[T] = []
        # Only the outcome travels: a result need not be JSON.
        outcome, defect = self._try(lambda: results.append(act()))
        _settle(self.merge(outcome, _first_error_or(lambda values: None)), defect)
        return results[0]

    def collect(self, act: Callable[[], Any]) -> list[Any]:
        """Do what run_on_all does, but return all results, JSON values, on rank 0 alone."""
        return self.collect_merged(lambda: [act()], _concatenate)

    def collect_merged(self, act: Callable[[], T], combine: Callable[[list[T]], T]) -> T:
        """Do what run_on_all does, but return the combination, as of `merge`, on rank 0 alone."""
        if self.size == 1:
            return act()
        outcome, defect = self._try(act)
        outcome = self._send_up(outcome, _first_error_or(combine))
        collected = outcome.pop("value", None)
        _settle(self._send_down(outcome), defect)
        return cast(T, collected if self.is_rank_0 else combine([]))

    def deal(self, act: Callable[[], list[Any]]) -> Any:
        """Call `act` on rank 0, which returns a JSON value for each rank; return this rank's."""
        if self.size == 1:
            return act()[0]
        dealt: list[Any] = []
        self.run_on_rank_0(lambda: dealt.extend(act()))
        for level, group in reversed(list(enumerate(self._connections))):
            below = BRANCHES**level  # ranks that get their values through one of the group
            if group.rank():
                dealt = _receive(group, 0)
            else:
                for number in range(1, group.size()):
                    _send(group, number, dealt[number * below : (number + 1) * below])
        heartbeat.tick()
        return dealt[0]

    # Tensors of the host, of one size on all ranks

    def broadcast(self, x: torch.Tensor) -> None:
        """Replace a tensor by rank 0's."""
        for group in reversed(self._connections):
            if group.rank():
                group.recv([x], 0, 0).wait()
            else:
                for number in range(1, group.size()):
                    group.send([x], number, 0).wait()
        heartbeat.tick()

    def sum(self, x: torch.Tensor) -> None:
        """Replace a tensor by its sum over all ranks."""
        for group in self._connections:
            if group.rank():
                group.send([x], 0, 0).wait()
                continue
            other = x.new_empty(x.shape)
            for number in range(1, group.size()):
                group.recv([other], number, 0).wait()
                x += other
        self.broadcast(x)

    # The tree

    @property
    def _connections(self) -> tuple[ProcessGroup, ...]:
        if self.groups or self.size == 1:
            return self.groups
        import torch.distributed as dist

        return (dist.group.WORLD,)  # type: ignore[return-value]

    def _send_up(self, value: T, combine: Callable[[list[T]], T]) -> T:
        """Return the combination of all ranks' values on rank 0, and of some on the others."""
        heartbeat.tick()
        for group in self._connections:
            if group.rank():
                _send(group, 0, value)
            else:
                others = [_receive(group, number) for number in range(1, group.size())]
                value = combine([value, *others])
        heartbeat.tick()
        return value

    def _send_down(self, value: Any) -> Any:
        """Return rank 0's JSON value on every rank."""
        heartbeat.tick()
        for group in reversed(self._connections):
            if group.rank():
                value = _receive(group, 0)
            else:
                for number in range(1, group.size()):
                    _send(group, number, value)
        heartbeat.tick()
        return value

    def _try(self, act: Callable[[], Any]) -> tuple[dict[str, Any], Exception | None]:
        """Return the outcome of an action for the other ranks, and the error if it is a defect."""
        try:
            return {"value": act()}, None
        except UserError as error:
            return {
                "error": error.args[0],
                "status": error.status,
                "kind": type(error).__name__,
            }, None
        # a defect: its traceback appears here, its message on the other ranks
        except Exception as error:
            text = f"rank {self.rank}: {type(error).__name__}: {error}"
            return {"error": text, "status": UNEXPECTED, "kind": ""}, error


ALONE = Team()


def connect_tree(store: Any, rank: int, size: int, timeout: timedelta) -> tuple[ProcessGroup, ...]:
    """Connect the groups of this rank, as all ranks do at once."""
    from torch._C._distributed_c10d import PrefixStore

    from meshwright.runtime.ranks import gloo

    groups = []
    for ranks in tree_of(rank, size):
        own = PrefixStore(f"tree/{ranks.start}-{ranks.step}", store)
        groups.append(gloo.make_group(own, ranks.index(rank), len(ranks), timeout))
    return tuple(groups)


def tree_of(rank: int, size: int) -> list[range]:
    """Return the ranks of the groups that a rank is in, from the leaves of the tree up."""
    groups = []
    step = 1
    while step < size and rank % step == 0:
        # The group has every `step`-th rank; its first rank is in one of the next level, too.
        first = rank - rank % (step * BRANCHES)
        groups.append(range(first, min(first + step * BRANCHES, size), step))
        step *= BRANCHES
    return groups


def _concatenate(lists: list[list[Any]]) -> list[Any]:
    return [value for values in lists for value in values]


def _first_error_or(
    combine: Callable[[list[Any]], Any],
) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
    """Return what combines outcomes: the first error, else the combination of their values."""

    def act(outcomes: list[dict[str, Any]]) -> dict[str, Any]:
        # The first in the order of the ranks, so that all raise the same.
        failed = next((outcome for outcome in outcomes if "error" in outcome), None)
        return failed or {"value": combine([outcome["value"] for outcome in outcomes])}

    return act


def _send(group: ProcessGroup, number: int, value: Any) -> None:
    import torch

    # The length goes first: whoever receives must have a tensor of that size.
    data = bytearray(json.dumps(value).encode())
    text = torch.frombuffer(data, dtype=torch.uint8)
    group.send([torch.tensor([text.numel()])], number, 0).wait()
    group.send([text], number, 0).wait()


def _receive(group: ProcessGroup, number: int) -> Any:
    import torch

    length = torch.empty(1, dtype=torch.int64)
    group.recv([length], number, 0).wait()
    text = torch.empty(int(length), dtype=torch.uint8)
    group.recv([text], number, 0).wait()
    return json.loads(bytes(text.numpy()))


def _settle(outcome: dict[str, Any], defect: Exception | None) -> Any:
    """Return the value of an action, or raise its error."""
    if defect is not None:
        raise defect
    if "error" in outcome:
        raise _rebuild_error(outcome)
    return outcome.get("value")


def _rebuild_error(outcome: dict[str, Any]) -> UserError:
    """Rebuild another rank's error, with its class."""
    # A subclass may take other arguments, so its constructor is passed over.
    kind = next((k for k in UserError.__subclasses__() if k.__name__ == outcome["kind"]), UserError)
    error = kind.__new__(kind)
    UserError.__init__(error, outcome["error"], outcome["status"], everywhere=True)
    return error
