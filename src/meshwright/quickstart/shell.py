"""Run commands of Meshwright as a shell would: print each line, show the result, keep a log."""

from __future__ import annotations

import contextlib
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

from meshwright.errors import DONE, SIGTERM, UNEXPECTED, UserError


@dataclass(frozen=True)
class Logged:
    """A log line of a training."""

    iteration: int
    of: int
    seconds: float  # of one step
    tokens_per_second: float


STEP = re.compile(r" iteration +(\d+)/ +(\d+) .*per iteration \(ms\): ([\d.]+) .*tokens per second: (\d+)")


def logged(line: str) -> Logged | None:
    at = STEP.match(line)
    return Logged(int(at[1]), int(at[2]), float(at[3]) / 1000, float(at[4])) if at else None


def call(
    log: Path,
    argv: list[str],
    show: Callable[[str], str | None] = str,
    stop: Callable[[Logged], str | None] | None = None,
) -> str:
    """Run `meshwright ARGV` in a process and return what it printed on stdout.

    `show` turns each line into what the user sees, or None. After a log line for which `stop`
    returns a reason, the process gets SIGTERM.
    """
    print(f"$ {shlex.join(['meshwright', *argv])}", flush=True)
    printed, expected = "", DONE
    with (
        open(log, "a", encoding="utf-8", buffering=1) as everything,
        subprocess.Popen(
            [sys.executable, "-m", "meshwright", *argv],
            stdout=subprocess.PIPE,
            stderr=everything,
            encoding="utf-8",
            errors="replace",
            env=environment(),
            process_group=0,
        ) as child,
    ):
        assert child.stdout
        try:
            for line in child.stdout:
                printed += line
                everything.write(line)
                if (shown := show(line.rstrip("\n"))) is not None:
                    print(f"  {shown}", flush=True)
                if stop and (at := logged(line)) and at.iteration < at.of and (reason := stop(at)):
                    print(f"  -> {reason}", flush=True)
                    child.send_signal(signal.SIGTERM)
                    stop, expected = None, SIGTERM  # a second one would end it immediately
            status = child.wait()
        except BaseException:  # Ctrl-C reaches only this process; the child, in its own group, saves first
            child.send_signal(signal.SIGINT)
            try:
                child.wait()
            finally:
                child.kill()
            raise
    if status != expected:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:])
        message = f"`meshwright {argv[0]}` ended with exit status {status}; the end of {log}:\n{tail}"
        raise UserError(message, status if status > 0 else UNEXPECTED)
    return printed


def environment() -> dict[str, str]:
    """Return the environment of a command: at most eight threads, which is enough here."""
    few = {"OMP_NUM_THREADS": "8"} if (os.cpu_count() or 1) > 8 else {}
    return {**few, **os.environ, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}


def shorten(line: str) -> str | None:
    """Return the part of a training's log line that a newcomer wants to see, or None."""
    if at := re.match(r" iteration +(\d+)/ +(\d+) .*lm loss: (\S+) .*tokens per second: (\d+) .*ETA: (\S+)", line):
        return f"iteration {at[1]:>6} of {at[2]}   loss {float(at[3]):.3f}   {int(at[4]):,} tokens/s   {at[5]} left"
    if at := re.match(r" validation loss at (.*?) \| lm loss value: (\S+) ", line):
        return f"validation loss at {at[1]}: {float(at[2]):.3f}"
    return line.strip() if "successfully" in line or line.startswith("exiting") else None


@contextlib.contextmanager
def step(title: str) -> Iterator[None]:
    print(f"\n{title}", flush=True)
    start = time.perf_counter()
    yield
    print(f"  ({time.perf_counter() - start:.1f} s)", flush=True)
