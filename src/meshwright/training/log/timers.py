"""Wall-clock times of the set-up and of the parts of a step, printed as Megatron prints them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from meshwright.base.console import say
from meshwright.config.schema import Logging
from meshwright.runtime.ranks.heartbeat import heartbeat
from meshwright.runtime.ranks.team import Team

if TYPE_CHECKING:
    import torch

PATIENCE = 2.0  # seconds before the log says why nothing happens


class Startup:
    """The times of the set-up. Only a rank that `prints` says what it waits for."""

    def __init__(self, prints: bool = False) -> None:
        self.began, self.prints = time.perf_counter(), prints
        self.seconds: dict[str, float] = {}  # of each phase
        self.megatrons: dict[str, float] = {}  # ms of Megatron's phases, which contain some of ours
        self.timer: threading.Timer | None = None

    @contextlib.contextmanager
    def phase(self, name: str, doing: str) -> Iterator[None]:
        """Time the block; if it takes long, log `doing`, such as "importing torch"."""
        begun = time.perf_counter()
        self.wait(doing)
        try:
            yield
        finally:
            self.end_wait()
            self.seconds[name] = round(time.perf_counter() - begun, 3)

    def wait(self, doing: str, is_over: Callable[[], bool] = lambda: False) -> None:
        """Log `doing` after PATIENCE, unless it is over by then or another wait has begun."""
        self.end_wait()
        heartbeat.enter("startup", 0, doing)
        if self.prints:
            self.timer = threading.Timer(PATIENCE, self.say_unless, (is_over, doing))
            self.timer.daemon = True
            self.timer.start()

    def say_unless(self, is_over: Callable[[], bool], doing: str) -> None:
        if not is_over():
            say(f" > {doing} ...")

    def end_wait(self) -> None:
        """End the thread that waits.

        The thread holds the trainer. If it outlived the training, it would free tensors while
        Python shuts down, which aborts the process.
        """
        if self.timer is not None:
            self.timer.cancel()
            self.timer.join()
            self.timer = None

    @contextlib.contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Time one of Megatron's phases."""
        begun = time.perf_counter()
        yield
        self.megatrons[name] = 1e3 * (time.perf_counter() - begun)

    def print_times(self, g: Logging, team: Team, *names: str) -> None:
        print_times(g.timing_log_option, team, {name: self.megatrons[name] for name in names})

    def line(self) -> str:
        """Return the phases that took a tenth of a second or more."""
        text = f" > ready to train after {time.perf_counter() - self.began:.1f} s"
        long = [f"{name} {taken:.1f}" for name, taken in self.seconds.items() if taken >= 0.1]
        if long:
            text += f": {', '.join(long)}"
        return text


class Timers:
    """The times of the parts of a step on this rank; --timing-log-level selects them."""

    def __init__(self, level: int, option: str, device: torch.device, team: Team) -> None:
        self.level, self.option, self.team, self.device = level, option, team, device
        # Names and levels are Megatron's: phases of a step have level 1, those within them level 2.
        self.steps: dict[str, float] = {}  # ms, summed since the last log line
        self.before: dict[str, float] = {}  # the same sums before the last step

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
            import torch

            torch.accelerator.current_stream(self.device).synchronize()

    def times_of_step(self) -> dict[str, float]:
        """Return the times since the last call."""
        new = {name: ms - self.before.get(name, 0.0) for name, ms in self.steps.items()}
        self.before = dict(self.steps)
        return new

    def print_means(self, steps: int) -> None:
        print_times(self.option, self.team, {name: ms / steps for name, ms in self.steps.items()})
        self.steps.clear()
        self.before.clear()


def print_times(option: str, team: Team, times: dict[str, float]) -> None:
    """Print times in ms; --timing-log-option tells which of the ranks' times."""
    titles = {"minmax": "(min, max) time", "max": "max time", "all": "times"}
    say(f"{titles[option]} across ranks (ms):", is_figure=True)
    everyone = team.gather(times)
    for name in times:
        # On ranks of other pipeline stages a phase may be missing.
        ms = [times_of_rank.get(name, 0.0) for times_of_rank in everyone]
        dots = "." * (47 - len(name))
        if option == "minmax":
            value = f": ({min(ms):.2f}, {max(ms):.2f})"
        elif option == "max":
            value = f": {max(ms):.2f}"
        else:
            ranks = [f"\n     rank {rank:2d}: {of_rank:.2f}" for rank, of_rank in enumerate(ms)]
            value = f":{''.join(ranks)}"
        say(f"    {name} {dots}{value}", is_figure=True)
