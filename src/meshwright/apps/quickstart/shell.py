"""Run commands of Meshwright as a shell would: print each line, show the result, keep a log."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from meshwright.base.errors import DONE, SIGTERM, UNEXPECTED, UserError
from meshwright.base.files import own_file
from meshwright.base.python310 import NEW_GROUP

SHOWN_LINES = 20  # of a training's log; all of them say how fast it is


@dataclass(frozen=True)
class LoggedInterval:
    """A log line of a training: how far it is, how fast and how good."""

    iteration: int
    total: int  # iterations
    seconds: float  # of one step
    tokens_per_second: float
    loss: float = math.nan
    left: str = ""

    def __str__(self) -> str:
        """Return what a newcomer wants to see."""
        return "   ".join(
            (
                f"iteration {self.iteration:>6} of {self.total}",
                f"loss {self.loss:.3f}",
                f"{self.tokens_per_second:,.0f} tokens/s",
                f"{self.left} left",
            )
        )


# Read in Megatron's lines, as the trial has no run folder with a metrics.jsonl.
STEP_LINE = re.compile(
    r" iteration +(\d+)/ +(\d+) .*per iteration \(ms\): ([\d.]+) .*lm loss: (\S+) .*tokens per second: (\d+)"
    r" .*ETA: (\S+)"
)


def read_step_line(line: str) -> LoggedInterval | None:
    if (values := STEP_LINE.match(line)) is None:
        return None
    iteration, total, ms, loss, speed, left = values.groups()
    return LoggedInterval(
        int(iteration), int(total), float(ms) / 1000, float(speed), float(loss), left
    )


def call(
    log: Path,
    argv: list[str],
    show: Callable[[str], str | None] = str,
    stop: Callable[[LoggedInterval], str | None] | None = None,
) -> str:
    """Run `meshwright ARGV` in a process and return what it printed on stdout.

    `show` turns each line into what the user sees, or None. After a log line for which `stop`
    returns a reason, the process gets SIGTERM.
    """
    print(f"$ {shlex.join(['meshwright', *argv])}", flush=True)
    printed = ""
    expected = DONE
    with (
        open(log, "a", encoding="utf-8", buffering=1, opener=own_file) as everything,
        subprocess.Popen(
            [sys.executable, "-m", "meshwright", *argv],
            stdout=subprocess.PIPE,
            stderr=everything,
            encoding="utf-8",
            errors="replace",
            env=environment(),
            **NEW_GROUP,
        ) as child,
    ):
        assert child.stdout
        try:
            for line in child.stdout:
                # What it says goes to the log, to the caller, and in short to the user.
                printed += line
                everything.write(line)
                if (shown := show(line.rstrip("\n"))) is not None:
                    print(f"  {shown}", flush=True)
                at = read_step_line(line) if stop else None
                if stop is None or at is None or at.iteration == at.total:
                    continue
                if reason := stop(at):
                    print(f"  -> {reason}", flush=True)
                    child.send_signal(signal.SIGTERM)
                    stop, expected = None, SIGTERM  # a second one would end it immediately
            status = child.wait()
        except BaseException:
            # Ctrl-C reaches only this process. The child, in a group of its own, is told here and
            # waited for: it saves first.
            child.send_signal(signal.SIGINT)
            try:
                child.wait()
            finally:
                child.kill()
            raise
    if status not in (expected, DONE):  # a training may end before the signal arrives
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:])
        message = (
            f"`meshwright {argv[0]}` ended with exit status {status}; the end of {log}:\n{tail}"
        )
        raise UserError(message, status if status > 0 else UNEXPECTED)
    return printed


def environment() -> dict[str, str]:
    """Return the environment of a command: at most eight threads, enough for models of this size.

    Log lines have the form that is read here, whatever the user's environment asks for.
    """
    few = {"OMP_NUM_THREADS": "8"} if (os.cpu_count() or 1) > 8 else {}
    ours = {
        "PYTHONUNBUFFERED": "1",
        "PYTHONIOENCODING": "utf-8",
        "MESHWRIGHT_LOG_FORMAT": "megatron",
    }
    # The user's number of threads counts, the form of the log does not.
    return few | os.environ | ours


class TrainingLines:
    """A function of log lines: the part that a newcomer wants to see, or None."""

    def __init__(self) -> None:
        self.total = 0
        self.shown = 0
        self.validated = ""
        self.saved = ""

    def __call__(self, line: str) -> str | None:
        if interval := read_step_line(line):
            self.total = interval.total
            before = self.shown
            self.shown = SHOWN_LINES * interval.iteration // interval.total
            return str(interval) if self.shown > before else None
        if at := re.match(r" validation loss at (.*?) \| lm loss value: (\S+) ", line):
            # The last step is validated twice: at its interval, and at the end.
            is_again = at[1].startswith("the end") and self.validated == f"iteration {self.total}"
            self.validated = at[1]
            return (
                f"validation loss at {at[1]}: {float(at[2]):.3f}{', on other batches' * is_again}"
            )
        if "successfully" in line and line != self.saved:  # the last step may be saved twice
            self.saved = line
            return line.strip()
        return None


@contextlib.contextmanager
def step(title: str) -> Iterator[None]:
    print(f"\n{title}", flush=True)
    start = time.perf_counter()
    yield
    print(f"  ({time.perf_counter() - start:.1f} s)", flush=True)
