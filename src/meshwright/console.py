"""What a command tells while it works: lines for people and for their scripts, and notices. One process of a run speaks."""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
from typing import Literal

_to: Literal["stdout", "stderr"] | None = "stdout"


def set_stream(to: Literal["stdout", "stderr"] | None) -> None:
    """Where this process says its lines; None: another one tells."""
    global _to
    _to = to


def say(line: str = "") -> None:
    """One line, at once: the documents' scripts pipe it into tee. A training outlives its reader."""
    if _to is None:
        return
    try:
        print(f"{line}\n", end="", file=getattr(sys, _to), flush=True)  # at once: a thread that saves speaks too
    except UnicodeEncodeError:  # a folder's name may have letters that the encoding does not
        say(line.encode("ascii", "backslashreplace").decode())
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1 if _to == "stdout" else 2)
        gone = isinstance(error, BrokenPipeError)
        notice(
            "the reader of the log is gone; the run goes on"
            if gone
            else f"standard output: {error.strerror}; the log goes on in metrics.jsonl alone"
        )


def notice(line: str) -> None:
    """What a person should know and no script waits for, on stderr."""
    if _to is not None:
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr, flush=True)


def say_time(what: str) -> None:
    say(f"[{what}] datetime: {datetime.datetime.now():%Y-%m-%d %H:%M:%S} ")


def say_arguments(values: dict[str, object]) -> None:
    say("------------------------ arguments ------------------------")
    for name in sorted(values, key=str.lower):
        say(f"  {name} {'.' * (48 - len(name))} {values[name]}")
    say("-------------------- end of arguments ---------------------")
