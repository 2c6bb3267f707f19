"""Exchange of small JSON values, and of the outcome of an action, between all ranks of a run.

`Team()` is the team of one process, which sends nothing. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from meshwright.errors import UNEXPECTED, UserError
from meshwright.ranks.pulse import pulse

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup


T = TypeVar("T")


@dataclass(frozen=True)
class Team:
    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = None  # of all ranks, through gloo
    timeout: timedelta = timedelta(minutes=10)  # after which torch gives up waiting for a rank
    store: Store | None = None  # of this run alone

    @property
    def is_lead(self) -> bool:
        """Whether this is rank 0, which writes the files and prints the log."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Return the JSON values of all ranks, in their order, on every rank.

        For small values alone: what a rank receives grows with the number of ranks. `collect`,
        `deal`, `run_on_lead` and `total` cost every rank but the lead the same in any run.
        """
        if self.size == 1:
            return [value]
        import torch
        import torch.distributed as dist

        own = self._padded(value)
        texts = list(torch.empty(self.size, own.numel(), dtype=torch.uint8))
        dist.all_gather(texts, own, group=self.group)
        pulse.tick()
        return [_decode(row) for row in texts]

    def total(self, number: int) -> int:
        """Return the sum of a number over all ranks."""
        if self.size == 1:
            return number
        import torch
        import torch.distributed as dist

        pulse.tick()
        total = torch.tensor(number, dtype=torch.int64)
        dist.all_reduce(total, group=self.group)
        return int(total)

    def _gather_on_lead(self, value: Any) -> list[Any]:
        """Return the JSON values of all ranks on rank 0, and nothing on the others."""
        import torch
        import torch.distributed as dist

        own = self._padded(value)
        texts = list(torch.empty(self.size, own.numel(), dtype=torch.uint8)) if self.is_lead else None
        dist.gather(own, texts, group=self.group)
        pulse.tick()
        return [_decode(row) for row in texts or []]

    def _broadcast(self, value: Any) -> Any:
        """Return rank 0's JSON value on every rank."""
        import torch
        import torch.distributed as dist

        pulse.tick()
        text = _encode(value) if self.is_lead else torch.empty(0, dtype=torch.uint8)
        length = torch.tensor(text.numel())
        dist.broadcast(length, 0, group=self.group)
        if not self.is_lead:
            text = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(text, 0, group=self.group)
        pulse.tick()
        return _decode(text)

    def _padded(self, value: Any) -> torch.Tensor:
        """Return the value as text, as long as the longest of all ranks'."""
        import torch
        import torch.distributed as dist

        pulse.tick()
        text = _encode(value)
        longest = torch.tensor(text.numel())
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.group)
        return torch.nn.functional.pad(text, (0, int(longest) - text.numel()))

    def wait(self) -> None:
        """Wait until every rank is here."""
        self.gather(None)

    def run_on_lead(self, act: Callable[[], Any]) -> Any:
        """Call `act` on rank 0; give its result, a JSON value, or its error to every rank."""
        if self.size == 1:
            return act()
        outcome, defect = self._try(act) if self.is_lead else ({}, None)
        outcome = self._broadcast(outcome)
        if defect is not None:
            raise defect
        if "error" in outcome:
            raise _rebuild_error(outcome)
        return outcome["value"]

    def run_lead_first(self, act: Callable[[], T]) -> T:
        """Call `act` on rank 0 first, so that the others find what it made."""
        results: list[T] = []
        self.run_on_lead(lambda: results.append(act()))
        return results[0] if results else act()

    def run_on_all(self, act: Callable[[], Any]) -> list[Any]:
        """Call `act` on every rank; return all results, JSON values, or raise the first error."""
        if self.size == 1:
            return [act()]
        outcome, defect = self._try(act)
        outcomes = self.gather(outcome)
        if defect is not None:
            raise defect
        for other in outcomes:
            if "error" in other:
                raise _rebuild_error(other)
        return [other["value"] for other in outcomes]

    def collect(self, act: Callable[[], Any]) -> list[Any]:
        """Do what run_on_all does, but return the results on rank 0 alone; none on the others."""
        if self.size == 1:
            return [act()]
        outcome, defect = self._try(act)
        outcomes = self._gather_on_lead(outcome)
        failed = self._broadcast(next((other for other in outcomes if "error" in other), None))
        if defect is not None:
            raise defect
        if failed is not None:
            raise _rebuild_error(failed)
        return [other["value"] for other in outcomes]

    def deal(self, act: Callable[[], list[Any]]) -> Any:
        """Call `act` on rank 0, which returns a JSON value for each rank; return this rank's."""
        if self.size == 1:
            return act()[0]
        import torch
        import torch.distributed as dist

        texts: list[torch.Tensor] = []

        def encode() -> int:
            texts.extend(map(_encode, act()))
            return max(text.numel() for text in texts)

        own = torch.empty(self.run_on_lead(encode), dtype=torch.uint8)
        padded = [torch.nn.functional.pad(text, (0, own.numel() - text.numel())) for text in texts]
        dist.scatter(own, padded or None, 0, group=self.group)
        pulse.tick()
        return _decode(own)

    def _try(self, act: Callable[[], Any]) -> tuple[dict[str, Any], Exception | None]:
        """Return the outcome of an action for the other ranks, and the error if it is a defect."""
        try:
            return {"value": act()}, None
        except UserError as error:
            return {"error": str(error), "status": error.status, "kind": type(error).__name__}, None
        except Exception as error:  # a defect: its traceback appears here, its message on the other ranks
            text = f"rank {self.rank}: {type(error).__name__}: {error}"
            return {"error": text, "status": UNEXPECTED, "kind": ""}, error


ALONE = Team()


def _encode(value: Any) -> torch.Tensor:
    import torch

    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(text: torch.Tensor) -> Any:
    return json.loads(bytes(text.numpy()).rstrip(b"\0"))


def _rebuild_error(outcome: dict[str, Any]) -> UserError:
    """Rebuild another rank's error, with its class."""
    kind = next((k for k in UserError.__subclasses__() if k.__name__ == outcome["kind"]), UserError)
    error = kind.__new__(kind)
    UserError.__init__(error, outcome["error"], outcome["status"], everywhere=True)
    return error
