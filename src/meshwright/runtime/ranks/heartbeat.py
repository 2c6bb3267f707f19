"""What this rank is doing: a phase, a step and a count of progress, which the watchdog reads.

The thread that runs the training writes it: `enter` begins a phase, `tick` counts progress within
one, such as a chunk of a file that was written. A `tick` costs 0.05 microseconds; an `enter` costs
about 7 where a watchdog runs, which reads the phase of a stopped process from a file in memory. A
step has seven of them.
"""

from __future__ import annotations

import contextlib
import os

# In the order in which a step passes through them.
PHASES = (
    "startup",
    "data",
    "forward-backward",
    "optimizer",
    "log",
    "validation",
    "samples",
    "scores",
    "save",
    "end",
)
PHASE_BYTES = 120


class Heartbeat:
    def __init__(self) -> None:
        self.phase = PHASES[0]
        self.step = 0
        self.ticks = 0
        self.doing = ""  # what of the startup
        # a file in memory, whose first PHASE_BYTES tell neighbours the phase of a stopped process
        self.shown_in = -1

    def enter(self, phase: str, step: int | None = None, doing: str = "") -> None:
        self.phase = phase
        self.doing = doing
        self.step = self.step if step is None else step
        self.ticks += 1
        if self.shown_in >= 0:
            with contextlib.suppress(OSError):
                os.pwrite(self.shown_in, str(self).encode()[:PHASE_BYTES].ljust(PHASE_BYTES), 0)

    def __str__(self) -> str:
        return f"{self.phase}{self.doing and f', {self.doing}'}{f' of step {self.step}' if self.step else ''}"

    def tick(self) -> None:
        self.ticks += 1


heartbeat = Heartbeat()
