"""Expected failures, the best interval between checkpoints, and the goodput that is left.

Failures come at random with a constant rate, so the times between them are exponential. Young
(1974) and Daly (2006, "A higher order estimate of the optimum checkpoint interval") give the
interval and the time that a run then takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.apps.plan.saving import SaveTime


@dataclass(frozen=True)
class Interruptions:
    """What a run loses time to, in seconds."""

    between: float  # mean time between failures of the whole run
    stall: float  # the time that a checkpoint stops training
    restart: float  # from a failure to the first new step, without the steps done again
    written: float = 0.0  # from the end of the stall until the checkpoint can be loaded

    @property
    def interval(self) -> float:
        """Seconds of training between checkpoints that lose the least: Daly's higher order.

        A save in the background must end before the next begins.
        """
        share = self.stall / (2 * self.between)
        best = self.between
        if share < 1:
            youngs = math.sqrt(2 * self.stall * self.between)  # the first order
            best = youngs * (1 + math.sqrt(share) / 3 + share / 9) - self.stall
        return max(best, self.written)

    def goodput(self, interval: float) -> float:
        """Return the share of the time that goes into steps which count."""
        # Daly's model: failures are a Poisson process, and a segment is repeated until none hits.
        try:
            segment = math.expm1((interval + self.stall) / self.between)
            recovery = math.exp((self.restart + self.written) / self.between)
        except OverflowError:  # the run would never come to its next checkpoint
            return 0.0
        lost = segment * recovery
        return interval / (self.between * lost)


@dataclass(frozen=True)
class ExpectedGoodput:
    """The goodput of a run with the best save interval, or with the given one."""

    hours_between_failures: float  # of the whole run
    save_interval: int  # steps
    share: float
    failures: float | None  # expected until the end; None if the run has no length
    best_interval: int  # steps


def expect(
    losses: Interruptions, step: float, seconds: float | None, save_interval: int | None = None
) -> ExpectedGoodput:
    """Return the goodput of a run whose steps take `step`, and together `seconds`."""
    best = max(1, round(losses.interval / step))
    chosen = save_interval or best
    share = losses.goodput(chosen * step)
    failures = None
    if seconds is not None:
        failures = seconds / share / losses.between if share else math.inf
    return ExpectedGoodput(losses.between / 3600, chosen, share, failures, best)


def losses_of(save: SaveTime, world: int, mtbf: float, restart_minutes: float) -> Interruptions:
    """Return what a run on so many devices loses, from the hours between failures of one."""
    return Interruptions(
        mtbf * 3600 / world, save.stall, 60 * restart_minutes, save.seconds - save.stall
    )
