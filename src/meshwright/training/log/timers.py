"""Wall-clock timers of the set-up and of the parts of a step, printed as Megatron prints them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from meshwright.console import say
from meshwright.ranks.team import Team
from meshwright.training.log.startup import Startup


class Timers:
    """The times of this rank; --timing-log-level selects those within a step."""

    def __init__(
        self, level: int, option: str, device: torch.device, team: Team, startup: Startup | None = None
    ) -> None:
        self.level, self.option, self.team, self.device = level, option, team, device
        self.startup = startup or Startup(prints=False)
        self.phases: dict[str, float] = {}  # ms, of the set-up
        self.steps: dict[str, float] = {}  # ms, summed since the last log line
        self.before: dict[str, float] = {}  # the same sums before the last step

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the set-up."""
        start = time.perf_counter()
        yield
        self.phases[name] = 1e3 * (time.perf_counter() - start)

    @contextlib.contextmanager
    def time(self, name: str, level: int) -> Iterator[None]:
        """Time a phase of a step, and add it to the sum for the next log line."""
        if level > self.level or not self.level:
            yield
            return
        self._wait()
        start = time.perf_counter()
        yield
        self._wait()
        self.steps[name] = self.steps.get(name, 0.0) + 1e3 * (time.perf_counter() - start)

    def _wait(self) -> None:
        """Wait for this rank's own work.

        Waiting for the whole device would include what other ranks are yet to send, and they may be
        waiting for work that this rank has not launched.
        """
        if self.device.type != "cpu":
            torch.accelerator.current_stream(self.device).synchronize()

    def times_of_step(self) -> dict[str, float]:
        """Return the times since the last call."""
        new = {name: ms - self.before.get(name, 0.0) for name, ms in self.steps.items()}
        self.before = dict(self.steps)
        return new

    def print_means(self, steps: int) -> None:
        if self.steps:
            self._print({name: ms / steps for name, ms in self.steps.items()})
        self.steps.clear()
        self.before.clear()

    def print_phases(self, *names: str) -> None:
        self._print({name: self.phases[name] for name in names})

    def _print(self, times: dict[str, float]) -> None:
        titles = {"minmax": "(min, max) time", "max": "max time", "all": "times"}
        say(f"{titles[self.option]} across ranks (ms):", is_figure=True)
        everyone = self.team.gather(times)
        for name in times:
            ms = [times_of_rank.get(name, 0.0) for times_of_rank in everyone]
            ranks = "".join(f"\n     rank {rank:2d}: {of_rank:.2f}" for rank, of_rank in enumerate(ms))
            value = {"minmax": f": ({min(ms):.2f}, {max(ms):.2f})", "max": f": {max(ms):.2f}", "all": f":{ranks}"}
            say(f"    {name} {'.' * (47 - len(name))}{value[self.option]}", is_figure=True)
