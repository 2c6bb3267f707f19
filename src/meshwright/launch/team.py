"""What all ranks of a run tell one another beside tensors: small JSON values, and one outcome for what one rank did.

`Team()` is the team of one process: everything here then returns at once and sends nothing. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from meshwright.errors import UNEXPECTED, UserError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


T = TypeVar("T")


@dataclass(frozen=True)
class Team:
    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = None  # of all ranks, on the host's network

    @property
    def is_lead(self) -> bool:
        """Rank 0 writes the files and speaks."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """The JSON value of each rank, on every rank, by rank."""
        if self.size == 1:
            return [value]
        import torch
        import torch.distributed as dist

        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = list(torch.empty(self.size, dtype=torch.int64))
        dist.all_gather(lengths, torch.tensor(mine.numel()), group=self.group)
        padded = torch.zeros(int(max(lengths)), dtype=torch.uint8)
        padded[: mine.numel()] = mine
        table = list(torch.empty(self.size, padded.numel(), dtype=torch.uint8))
        dist.all_gather(table, padded, group=self.group)
        return [json.loads(bytes(row[:n].numpy())) for row, n in zip(table, lengths, strict=True)]

    def wait(self) -> None:
        """Until every rank is here."""
        self.gather(None)

    def run_on_lead(self, act: Callable[[], Any]) -> Any:
        """What rank 0's act returns, a JSON value, on every rank; its error likewise."""
        return self.run_on_all(act if self.is_lead else lambda: None)[0]

    def run_lead_first(self, act: Callable[[], T]) -> T:
        """Rank 0 acts, then the others, so that they find what it has made; what a rank returns is its own."""
        made: list[T] = []
        self.run_on_lead(lambda: made.append(act()))
        return made[0] if made else act()

    def run_on_all(self, act: Callable[[], Any]) -> list[Any]:
        """Every rank acts; what they returned, JSON values. The first one's error is everybody's."""
        if self.size == 1:
            return [act()]
        defect = None
        try:
            told = {"value": act()}
        except UserError as error:
            told = {"error": str(error), "status": error.status, "kind": type(error).__name__}
        except Exception as error:  # a defect: shown with its traceback here, told to the others, who would wait
            defect = error
            told = {"error": f"rank {self.rank}: {type(error).__name__}: {error}", "status": UNEXPECTED, "kind": ""}
        everybody = self.gather(told)
        if defect is not None:
            raise defect
        for one in everybody:
            if "error" in one:
                raise rebuilt(one)
        return [one["value"] for one in everybody]


ALONE = Team()


def rebuilt(told: dict[str, Any]) -> UserError:
    """Another rank's error, of the same class."""
    kind = next((k for k in UserError.__subclasses__() if k.__name__ == told["kind"]), UserError)
    error = kind.__new__(kind)
    UserError.__init__(error, told["error"], told["status"], everywhere=True)
    return error
