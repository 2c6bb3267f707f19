"""Save in the background: a step waits for a copy of its tensors in host memory, not for the disk.

A thread of each rank writes its copy and communicates over a process group of its own, because a
save's messages must not come between those of a step. One save is in flight at a time.
"""

from __future__ import annotations

import datetime
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from meshwright.base import device as devices
from meshwright.base import host
from meshwright.base.console import notice, say
from meshwright.checkpoint.sources import TensorBoxes
from meshwright.runtime.ranks.team import Team

# for the slowest rank's disk; if a rank dies, its launcher ends all
PATIENCE = datetime.timedelta(days=1)
ALIGNED = 64  # bytes


class Background:
    def __init__(self, team: Team, device: torch.device) -> None:
        self.team = team
        self.device = device
        self.memory: torch.Tensor | None = None  # holds the copies, kept from save to save
        self.flying: Future[Any] | None = None
        self.pool: ThreadPoolExecutor | None = None

    def fits(self, named: TensorBoxes) -> bool:
        """Return whether every machine has memory for the copies; all ranks call this together."""
        if self.memory is not None:
            return True
        # The ranks of a machine share its memory.
        copies = self.team.gather([socket.gethostname(), copy_size(named)])
        needed = sum(size for host, size in copies if host == socket.gethostname())
        free = host.free_host_memory()
        machines = self.team.gather([needed, free])
        lacking = next(((n, f) for n, f in machines if n > 0.9 * f), None)
        if lacking:
            say(
                f" > background saving needs {lacking[0]:,} bytes of host memory, {lacking[1]:,} are free: "
                "training waits for each save"
            )
        return lacking is None

    def begin(self, named: TensorBoxes, write: Callable[[TensorBoxes, Team], Any]) -> None:
        """Copy the tensors and have a thread `write` them. The previous save must have ended."""
        assert self.flying is None
        if self.pool is None:
            self.pool = ThreadPoolExecutor(1, "save")
            self.team = self.team.clone(PATIENCE)
        self.flying = self.pool.submit(write, self.copy(named), self.team)

    def copy(self, named: TensorBoxes) -> TensorBoxes:
        if self.memory is None:
            self.memory = devices.allocate_pinned(copy_size(named), self.device)
        out = {}
        at = 0
        for name, (shape, boxes, tensor) in named.items():
            size = tensor.numel() * tensor.element_size()
            copy = self.memory[at : at + size].view(tensor.dtype).view(tensor.shape)
            copy.copy_(tensor, non_blocking=True)
            out[name] = (shape, boxes, copy)
            at += aligned_size(tensor)
        # The next step changes the tensors.
        devices.synchronize(self.device)
        return out

    @property
    def failed(self) -> bool:
        return (
            self.flying is not None and self.flying.done() and self.flying.exception() is not None
        )

    def wait(self) -> None:
        """Wait for the save in flight, and raise its failure."""
        # The save is forgotten first, so that its failure is reported once.
        flying = self.flying
        self.flying = None
        if flying is not None:
            flying.result()

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown()
        if self.flying is not None and self.failed:  # the run ends for another reason
            notice(f"the save in flight failed: {self.flying.exception()}")


def copy_size(named: TensorBoxes) -> int:
    return sum(aligned_size(tensor) for _, _, tensor in named.values())


def aligned_size(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGNED) * ALIGNED
