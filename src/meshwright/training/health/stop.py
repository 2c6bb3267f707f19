"""Reasons to end a run before its last step: a signal, the clock, or a file that appears."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from meshwright.base import console, host
from meshwright.base.errors import DONE, WARNINGS
from meshwright.checkpoint import steps
from meshwright.config.schema import Training
from meshwright.runtime.ranks.team import Team


class StopConditions:
    """The conditions to check after every step; a signal also cuts a validation short.

    `began` is the time.perf_counter() of the run's start; `save` is the folder of its checkpoints,
    if there is one, for the messages to the user.
    """

    def __init__(self, t: Training, began: float, save: str | None = None) -> None:
        self.t, self.began, self.save = t, began, save
        self.signal: signal.Signals | None = None

    def reason(self, has_stepped: bool = True) -> str | None:
        """Return the reason to stop now, as the log and metrics.jsonl name it, or None.

        The clock stops no run that has taken no step (`has_stepped` false): a start that takes
        longer than the minutes would be repeated for ever, and the run would never get on.
        """
        if self.signal is not None:
            return self.signal.name
        if self.t.kill_switch_path and Path(self.t.kill_switch_path).exists():
            return f"kill switch {self.t.kill_switch_path}"
        minutes = (time.perf_counter() - self.began) / 60
        # Each rank looks at its own clock; the first whose time is over decides for all.
        if self.t.exit_duration_in_mins and has_stepped and minutes > self.t.exit_duration_in_mins:
            return f"{minutes:.2f} minutes, more than --exit-duration-in-mins {self.t.exit_duration_in_mins:g}"
        return None

    def agree(self, team: Team, has_failed: bool, has_stepped: bool) -> tuple[str | None, bool]:
        """Return the first reason to stop that any rank has, and whether any has failed to save.

        A signal that another rank received becomes this one's.
        """

        def combine(some: list[list[Any]]) -> list[Any]:
            reasons, numbers, failed = zip(*some, strict=True)
            reason = next(filter(None, reasons), None)
            number = next(filter(None, numbers), None)
            return [reason, number, any(failed)]

        own: list[Any] = [self.reason(has_stepped), self.signal, has_failed]
        reason, number, failed = team.merge(own, combine) if team.size > 1 else own
        # The exit status of all ranks is that of the signal.
        if number is not None and self.signal is None:
            self.signal = signal.Signals(number)
        return reason, failed

    def cuts_short(self, team: Team) -> bool:
        """Return whether a signal ends the work between steps: with one rank alone.

        A signal reaches several ranks at different moments, so they would not agree.
        """
        return team.size == 1 and self.signal is not None

    @property
    def status(self) -> int:
        return DONE if self.signal is None else 128 + self.signal

    def describe_stop(self) -> str:
        """Return from which step a run that is stopped at once will go on."""
        step = None
        with contextlib.suppress(Exception):  # the folder may be gone
            saved = steps.list_steps(self.save) if self.save else []
            step = saved[0] if saved else None
        if step:
            return f"stopped at once; step {step:,} is saved: it goes on from there"
        return "stopped at once; no step is saved"

    @contextlib.contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Note the first signal that asks the run to stop; a second one ends the process at once.

        A scheduler's warning counts as the first, but the first SIGTERM after it still only asks;
        further warnings are ignored. Does nothing outside the main thread, where Python allows no
        signal handlers.
        """
        is_stopping = False

        def note(number: int, frame: FrameType | None) -> None:
            nonlocal is_stopping
            # SIGHUP says that the terminal was closed.
            number = signal.SIGTERM if number == signal.SIGHUP else number
            if is_stopping and number not in WARNINGS:
                print_from_handler(self.describe_stop())
                os._exit(128 + number)
            is_stopping |= number not in WARNINGS
            if self.signal is not None:
                return
            self.signal = signal.Signals(number)
            then = "and saving" if self.save else "(no --save, so nothing is kept)"
            again = "; send it again to stop at once" if is_stopping else ""
            print_from_handler(f"{self.signal.name}: finishing this step {then}{again}")

        caught = set[int]()
        if self.t.exit_signal_handler and threading.current_thread() is threading.main_thread():
            caught = {
                signal.SIGTERM,
                signal.SIGINT,
                *(signal.Signals[name] for name in self.t.exit_signal),
            }
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
                caught.add(signal.SIGHUP)
        with host.handled(caught, note):
            yield


def print_from_handler(line: str) -> None:
    """Print a line from a signal handler, once: a launcher passes the signal to every rank."""
    if os.environ.get("LOCAL_RANK", "0") == "0" and not console.is_quiet():
        with contextlib.suppress(OSError):  # not print, which the signal may have interrupted
            os.write(2, f"{line}\n".encode())
