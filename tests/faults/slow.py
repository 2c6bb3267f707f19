"""What is slow in a rank: its disk, the storage, the reading of data, or the wait for a lease.

All processes of a run share a clock, on which seconds and minutes pass while something is slow; on
the real one it is a hundredth of them. torch's own time-outs, which C++ measures, are shortened as
much, and so are the pauses of the watchdog. So nothing waits for minutes, and what happens does not
depend on how busy the machine is: right time-outs are hours or days.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SPEED = 100
JUMPS = 20  # of the clock, in what takes long
KINDS = ("disk", "storage", "data")


class Clock:
    """The real clock and what was added to it, by any process that opened the same file."""

    def __init__(self, path: Path) -> None:
        self.real, self.sleep = time.monotonic, time.sleep
        with path.open("a+b") as file:
            file.truncate(8)
            self.added = mmap.mmap(file.fileno(), 8)

    def monotonic(self) -> float:
        return self.real() + float(struct.unpack("d", self.added)[0])

    def take(self, seconds: float) -> None:
        for _ in range(JUMPS):
            self.sleep(seconds / SPEED / JUMPS)
            self.added[:] = struct.pack("d", struct.unpack("d", self.added)[0] + seconds / JUMPS)


@dataclasses.dataclass(frozen=True)
class Slow:
    """What takes how many seconds in a launch, on rank 0 or on both."""

    kind: str
    seconds: float
    everywhere: bool
    clock: Path
    seed: int

    def begin(self, rank: int) -> None:
        """Make this process slow."""
        import torch.distributed as dist

        from meshwright.base.storage.store import BucketObjects
        from meshwright.checkpoint import lease
        from meshwright.runtime.ranks import gloo, watchdog
        from meshwright.training import setup

        clock, rng = Clock(self.clock), random.Random(self.seed)
        time.monotonic = clock.monotonic
        lease.time = SimpleNamespace(  # type: ignore[assignment]
            sleep=clock.take, monotonic=clock.monotonic, strftime=time.strftime, time=time.time
        )
        watchdog.SIGN_SECONDS /= SPEED
        make, init = gloo.make_group, dist.init_process_group
        gloo.make_group = lambda store, rank, size, timeout: make(
            store, rank, size, timeout / SPEED
        )
        dist.init_process_group = lambda *a, timeout, **more: init(
            *a, timeout=timeout / SPEED, **more
        )
        if rank and not self.everywhere:
            return

        def slowly(act: Callable[..., Any], share: float) -> Callable[..., Any]:
            def do(*args: Any, **named: Any) -> Any:
                if rng.random() < share:
                    clock.take(self.seconds)
                return act(*args, **named)

            return do

        if self.kind == "disk":
            os.fsync = slowly(os.fsync, 0.1)
        elif self.kind == "storage":
            BucketObjects.put = slowly(BucketObjects.put, 0.2)  # type: ignore[method-assign]
        else:
            setup.open_files = slowly(setup.open_files, 1.0)
