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
        parts = [total]
        lost = [
            f"{name} {duration(seconds)}"
            for name, seconds in self.lost.items()
            if seconds >= 1e-3 * self.wall
        ]
        if lost:
            parts.append(", ".join(lost))
        if self.mean_recovery is not None:
            count = len(self.recoveries)
            number = f"{count} recoveries, each" if count > 1 else "1 recovery,"
            mean = duration(self.mean_recovery)
            parts.append(f"{number} {mean} from the last row to the next step")
        return "; ".join(parts)


def read_goodput(history: History) -> Goodput | None:
    """Return the goodput of a run, if all its attempts are dated."""
    applied = [step.ms for step in history.steps if not step.skipped]
    others = [step.ms for step in history.steps if step.skipped]
    return measure_goodput(
        history.attempts,
        sum(applied) / 1e3,
        sum(others) / 1e3,
    )


def measure_goodput(attempts: Sequence[Attempt], good: float, skipped: float) -> Goodput | None:
    """Return the goodput from the seconds of steps that count and of those not applied."""
    if not attempts or not all(attempt.start.get("time") for attempt in attempts):
        return None

    # The pauses that nobody wanted.
    pauses = []
    recoveries = []
    for before, after in itertools.pairwise(attempts):
        if is_wanted(before):
            continue
        # If the clock was set back meanwhile, the pause is unknown.
        pause = max(0.0, after.begun - before.latest)
        pauses.append(pause)
        if after.first:
            recoveries.append(pause + max(0.0, after.first - after.begun))
    down = sum(pauses)

    # What else took time within the attempts; the rest of it is `other`.
    steps = sum(attempt.steps for attempt in attempts)
    lost = {
        "start-up": sum(attempt.startup for attempt in attempts),
        "down": down,
        "steps undone": max(0.0, steps - good - skipped),
        "steps not applied": skipped,
    }
    for kind in sorted({kind for attempt in attempts for kind in attempt.pauses}):
        lost[kind] = sum(attempt.pauses.get(kind, 0.0) for attempt in attempts)
    wall = sum(attempt.latest - attempt.begun for attempt in attempts) + down
    if not wall > 0:  # nor if a damaged row made it NaN
        return None
    lost["other"] = max(0.0, wall - good - sum(lost.values()))
    return Goodput(wall, good, lost, recoveries)


def is_wanted(attempt: Attempt) -> bool:
    """Return whether an attempt ended as someone wanted it to."""
    return str((attempt.end or {}).get("reason")).startswith(WANTED_ENDS)
