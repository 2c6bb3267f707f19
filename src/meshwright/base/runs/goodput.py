"""Goodput: the share of a run's wall-clock time that went into steps which count.

Time runs from the beginning of the first attempt to the last row, through all attempts. A step
counts if it was applied and not undone by a later start or rollback. The pause after an attempt
that reached its end, or was stopped by hand, is left out, and no recovery follows it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.base.progress import duration
from meshwright.base.runs.history import Attempt, History

# Beginnings of the reasons after which a run pauses because someone wanted it to.
WANTED_ENDS = ("all iterations done", "SIGINT", "kill switch ", "--exit-interval ")


@dataclass(frozen=True)
class Goodput:
    """Seconds of a run."""

    wall: float
    good: float  # in steps that count
    lost: dict[str, float]  # by what they went into, together with `good` all of `wall`
    recoveries: list[float]  # from the last row of an attempt to the first step of the next

    @property
    def share(self) -> float:
        return self.good / self.wall

    @property
    def mean_recovery(self) -> float | None:
        return sum(self.recoveries) / len(self.recoveries) if self.recoveries else None

    def line(self) -> str:
        total = f"goodput {100 * self.share:.1f} %: {duration(self.good)} of {duration(self.wall)} in steps that count"
        lost = [
            f"{name} {duration(seconds)}"
            for name, seconds in self.lost.items()
            if seconds >= 1e-3 * self.wall
        ]
        parts = [total, *([", ".join(lost)] if lost else [])]
        if self.mean_recovery is not None:
            number = (
                f"{len(self.recoveries)} recoveries, each"
                if len(self.recoveries) > 1
                else "1 recovery,"
            )
            parts.append(
                f"{number} {duration(self.mean_recovery)} from the last row to the next step"
            )
        return "; ".join(parts)


def read_goodput(history: History) -> Goodput | None:
    """Return the goodput of a run, if all its attempts are dated."""
    good = sum(s.ms for s in history.steps if not s.skipped) / 1e3
    return measure_goodput(
        history.attempts, good, sum(s.ms for s in history.steps if s.skipped) / 1e3
    )


def measure_goodput(attempts: Sequence[Attempt], good: float, skipped: float) -> Goodput | None:
    """Return the goodput from the seconds of steps that count and of those not applied."""
    if not attempts or not all(a.start.get("time") for a in attempts):
        return None
    pairs = [(a, b) for a, b in itertools.pairwise(attempts) if not is_wanted(a)]
    lost = {
        "start-up": sum(a.startup for a in attempts),
        "down": sum(max(0.0, b.begun - a.latest) for a, b in pairs),
        "steps undone": max(0.0, sum(a.steps for a in attempts) - good - skipped),
        "steps not applied": skipped,
    }
    for kind in sorted({kind for a in attempts for kind in a.pauses}):
        lost[kind] = sum(a.pauses.get(kind, 0.0) for a in attempts)
    wall = sum(a.latest - a.begun for a in attempts) + lost["down"]
    lost["other"] = max(0.0, wall - good - sum(lost.values()))
    recoveries = [b.first - a.latest for a, b in pairs if b.first]
    return Goodput(wall, good, lost, recoveries) if wall > 0 else None


def is_wanted(attempt: Attempt) -> bool:
    """Return whether an attempt ended as someone wanted it to."""
    return str((attempt.end or {}).get("reason")).startswith(WANTED_ENDS)
