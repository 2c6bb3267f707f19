"""The start of a run: seconds of each phase up to the first step, and what is waited for."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from meshwright.console import say
from meshwright.ranks.pulse import pulse

PATIENCE = 2.0  # seconds until the log says what is waited for


class Startup:
    """Times the phases. Only a rank that `prints` says what it waits for."""

    def __init__(self, prints: bool) -> None:
        self.began, self.prints = time.perf_counter(), prints
        self.seconds: dict[str, float] = {}
        self.timer: threading.Timer | None = None

    @contextlib.contextmanager
    def phase(self, name: str, doing: str) -> Iterator[None]:
        """Time the block; after some time the log says `doing`, as in "importing torch"."""
        begun = time.perf_counter()
        self.wait(doing)
        try:
            yield
        finally:
            self.end_wait()
            self.seconds[name] = round(time.perf_counter() - begun, 3)

    def wait(self, doing: str) -> None:
        self.end_wait()
        pulse.enter("startup", 0, doing)
        if self.prints:
            self.timer = threading.Timer(PATIENCE, say, (f" > {doing} ...",))
            self.timer.daemon = True
            self.timer.start()

    def end_wait(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def line(self) -> str:
        """Return the phases that took a tenth of a second or more."""
        long = [f"{name} {taken:.1f}" for name, taken in self.seconds.items() if taken >= 0.1]
        seconds = time.perf_counter() - self.began
        return f" > ready to train after {seconds:.1f} s{': ' if long else ''}{', '.join(long)}"
