"""The output of a command: log lines, which scripts read too, and notices. One rank prints them."""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
from typing import Literal

_stream: Literal["stdout", "stderr"] | None = "stdout"


def set_stream(stream: Literal["stdout", "stderr"] | None) -> None:
    """Choose where this process prints its lines; None: it prints nothing, notices included."""
    global _stream
    _stream = stream


def say(line: str = "") -> None:
    """Print one line immediately. If the reader of stdout is gone, the run continues without it."""
    if _stream is None:
        return
    try:
        # One write: a thread that saves prints too.
        print(f"{line}\n", end="", file=getattr(sys, _stream), flush=True)
    except UnicodeEncodeError:  # a folder's name may have letters that the encoding lacks
        say(line.encode("ascii", "backslashreplace").decode())
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1 if _stream == "stdout" else 2)
        if isinstance(error, BrokenPipeError):
            notice("the reader of the log is gone; the run continues")
        else:
            notice(f"standard output: {error.strerror}; the log continues in metrics.jsonl only")


def notice(line: str) -> None:
    """Print a line for people, which no script reads, on stderr."""
    if _stream is not None:
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr, flush=True)


def say_time(event: str) -> None:
    say(f"[{event}] datetime: {datetime.datetime.now():%Y-%m-%d %H:%M:%S} ")


def say_arguments(values: dict[str, object]) -> None:
    """Print all settings as Megatron does."""
    say("------------------------ arguments ------------------------")
    for name in sorted(values, key=str.lower):
        say(f"  {name} {'.' * (48 - len(name))} {values[name]}")
    say("-------------------- end of arguments ---------------------")
