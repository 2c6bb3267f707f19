"""Name the ranks that the others wait for, while the run goes on.

A rank's own time of a step goes from the moment at which all ranks have met in the step before to
the moment at which its own gradients are there: its wait for data, forward and backward, but not
the wait for the other data-parallel ranks' sums. The times are read on the clock of the device
(kernels/clock.py), with the loss, so that nothing waits for them. Ranks that wait for each other
within a step (tensor, context and pipeline ranks; ZeRO 3) have one time, but waits of their own for
data.

Every --log-interval steps each rank gives its means to its watchdog, which takes them to the store
and, on rank 0, reads all others'. So no rank waits for this either.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

from meshwright.runtime.ranks.watchdog import Watchdog

# A rank is slow from SLOW times the median on, until it is below WELL times the median.
SLOW, WELL = 1.5, 1.25
LEAST_MS = 2.0  # smaller differences are noise


@dataclass(frozen=True)
class Lag:
    """A rank that is slow, or was until now."""

    rank: int
    host: str
    ms: float  # its own time of a step
    data_ms: float  # of which it waits for data
    median: float
    is_slow: bool

    @property
    def ratio(self) -> float:
        return self.ms / self.median

    def facts(self) -> dict[str, Any]:
        """Return the columns of a row in metrics.jsonl."""
        return {
            "rank": self.rank,
            "host": self.host,
            "slow": self.is_slow,
            "text": str(self),
            "ratio": round(self.ratio, 3),
            "ms": round(self.ms, 3),
            "data_ms": round(self.data_ms, 3),
            "median_ms": round(self.median, 3),
        }

    def __str__(self) -> str:
        who = f"rank {self.rank} ({self.host})"
        times = f"{self.ratio:.1f} x the median step time"
        if not self.is_slow:
            return f"{who} is no longer slow: {times}"
        text = f"{who} takes {times}: {self.ms:.1f} ms"
        # A smaller share is not what makes the rank slow.
        if self.data_ms > self.ms / 4:
            text += f", {self.data_ms:.1f} ms of it for data"
        return f"{text}; the median is {self.median:.1f} ms"


class Stragglers:
    """The times of this rank and, on rank 0, the comparison."""

    def __init__(self, watchdog: Watchdog, log_interval: int) -> None:
        self.watchdog, self.log_interval = watchdog, log_interval
        self.met: float | None = None  # when all ranks met in the last step, in ns
        self.steps, self.ms, self.data_ms = 0, 0.0, 0.0
        self.slow: set[int] = set()

    def note(self, iteration: int, data_ms: float, arrived: float, met: float) -> None:
        """Count a step; its times are in nanoseconds."""
        before, self.met = self.met, met
        if before is not None:  # the first step after a pause has no beginning
            self.steps += 1
            self.ms += (arrived - before) / 1e6
            self.data_ms += data_ms
        if self.steps and iteration % self.log_interval == 0:
            self.watchdog.post((iteration, self.ms / self.steps, self.data_ms / self.steps))
            self.steps, self.ms, self.data_ms = 0, 0.0, 0.0

    def pause(self) -> None:
        """Forget when the last step ended: ranks do different work before the next."""
        self.met = None

    def changes(self) -> list[tuple[int, Lag]]:
        """Return the ranks that have become slow or are no longer slow, each with the iteration."""
        board = self.watchdog.take_board()
        if board is None:
            return []
        iteration = max(at for _, at, _, _ in board)
        # median_low: of two ranks the faster one is the measure, or neither would be slow.
        median = max(statistics.median_low(ms for _, _, ms, _ in board), 1e-3)
        data_median = statistics.median_low(data for _, _, _, data in board)
        out = []
        for rank, (host, _, ms, data) in enumerate(board):
            # Ranks that wait for each other within a step differ in their waits for data alone.
            more = max(ms - median, data - data_median)
            bound = (WELL if rank in self.slow else SLOW) - 1
            is_slow = math.isfinite(more) and more > max(bound * median, LEAST_MS)
            if is_slow != (rank in self.slow):
                self.slow ^= {rank}
                out.append((iteration, Lag(rank, host, ms, data, median, is_slow)))
        return out
