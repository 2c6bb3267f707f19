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
        """Return the JSON values of all ranks, in their order, on every rank."""
        if self.size == 1:
            return [value]
        import torch
        import torch.distributed as dist

        pulse.tick()
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = list(torch.empty(self.size, dtype=torch.int64))
        dist.all_gather(lengths, torch.tensor(text.numel()), group=self.group)
        padded = torch.zeros(int(max(lengths)), dtype=torch.uint8)
        padded[: text.numel()] = text
        texts = list(torch.empty(self.size, padded.numel(), dtype=torch.uint8))
        dist.all_gather(texts, padded, group=self.group)
        pulse.tick()
        return [json.loads(bytes(row[:n].numpy())) for row, n in zip(texts, lengths, strict=True)]

    def wait(self) -> None:
        """Wait until every rank is here."""
        self.gather(None)

    def run_on_lead(self, act: Callable[[], Any]) -> Any:
        """Call `act` on rank 0; give its result, a JSON value, or its error to every rank."""
        return self.run_on_all(act if self.is_lead else lambda: None)[0]

    def run_lead_first(self, act: Callable[[], T]) -> T:
        """Call `act` on rank 0 first, so that the others find what it made."""
        results: list[T] = []
        self.run_on_lead(lambda: results.append(act()))
        return results[0] if results else act()

    def run_on_all(self, act: Callable[[], Any]) -> list[Any]:
        """Call `act` on every rank; return all results, JSON values, or raise the first error."""
        if self.size == 1:
            return [act()]
        defect = None
        try:
            outcome = {"value": act()}
        except UserError as error:
            outcome = {"error": str(error), "status": error.status, "kind": type(error).__name__}
        except Exception as error:  # a defect: its traceback appears here, its message on the other ranks
            defect = error
            outcome = {"error": f"rank {self.rank}: {type(error).__name__}: {error}", "status": UNEXPECTED, "kind": ""}
        outcomes = self.gather(outcome)
        if defect is not None:
            raise defect
        for other in outcomes:
            if "error" in other:
                raise _rebuild_error(other)
        return [other["value"] for other in outcomes]


ALONE = Team()


def _rebuild_error(outcome: dict[str, Any]) -> UserError:
    """Rebuild another rank's error, with its class."""
    kind = next((k for k in UserError.__subclasses__() if k.__name__ == outcome["kind"]), UserError)
    error = kind.__new__(kind)
    UserError.__init__(error, outcome["error"], outcome["status"], everywhere=True)
    return error
