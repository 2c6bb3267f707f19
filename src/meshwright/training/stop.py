"""What ends a run before its last step: a signal, the clock, or a file that appears."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from meshwright.errors import DONE, SIGINT, SIGTERM
from meshwright.settings.schema import Training


class Ending:
    """Asked after every step; a signal also cuts a validation short, for a grace of seconds may be running."""

    def __init__(self, t: Training, began: float, saves: bool = True) -> None:
        self.t, self.began, self.saves = t, began, saves  # time.perf_counter() of the command's start
        self.signal: signal.Signals | None = None

    def take(self, number: int) -> None:
        """A signal that another rank got."""
        self.signal = signal.Signals(number)

    def reason(self) -> str | None:
        """In the words of the log's last line."""
        if self.signal is not None:
            return self.signal.name
        if self.t.kill_switch_path and Path(self.t.kill_switch_path).exists():
            return f"kill switch {self.t.kill_switch_path}"
        minutes = (time.perf_counter() - self.began) / 60
        if self.t.exit_duration_in_mins and minutes > self.t.exit_duration_in_mins:
            return f"{minutes:.2f} minutes, more than --exit-duration-in-mins {self.t.exit_duration_in_mins:g}"
        return None

    @property
    def status(self) -> int:
        return DONE if self.signal is None else SIGINT if self.signal is signal.SIGINT else SIGTERM

    @contextlib.contextmanager
    def catching(self) -> Iterator[None]:
        """Note the first SIGTERM or SIGINT; the second one ends the process at once."""

        def note(number: int, frame: FrameType | None) -> None:
            number = signal.SIGTERM if number == signal.SIGHUP else number  # the terminal is gone
            if self.signal is not None:
                os._exit(SIGINT if number == signal.SIGINT else SIGTERM)
            self.signal = signal.Signals(number)
            if os.environ.get("LOCAL_RANK", "0") != "0":  # a launcher passes it to all
                return
            with contextlib.suppress(OSError):  # not print: it may be what was interrupted
                name = self.signal.name
                then = "and saving" if self.saves else "(there is no --save: nothing is kept)"
                os.write(2, f"{name}: finishing this step {then}; once more to stop at once\n".encode())

        before = {}
        if self.t.exit_signal_handler:
            caught = [signal.SIGTERM, signal.SIGINT]
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup wants it
                caught.append(signal.SIGHUP)
            before = {n: signal.signal(n, note) for n in caught}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
