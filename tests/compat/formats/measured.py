"""Run work on strangers' files in a child process: what it reports, and its peak memory."""

from __future__ import annotations

import json
import os
import re
import resource
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.base.errors import BAD_DATA, UserError

SECONDS = 300  # for all the work of a child, which is killed then; other programs use the cores too
# bytes of addresses beyond those of the parent: larger requests fail in the child alone
ALLOWANCE = 2 << 30


def anonymous(process: int | str) -> int:
    return in_status("RssAnon", process)


def in_status(field: str, process: int | str) -> int:
    try:
        text = Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = re.search(rf"{field}:\s+(\d+) kB", text)  # missing once the process has ended
    return int(found[1]) * 1024 if found else 0


class Work(NamedTuple):
    """What work in a child yielded, how the child ended if not well, and its peak bytes."""

    results: list[Any]
    end: str
    memory: int
    readers: int  # of the processes that it started: those that read pickles


def in_child(work: Callable[[], Iterable[Any]], seconds: int = SECONDS) -> Work:
    reads, writes = os.pipe()
    began = time.monotonic()
    with warnings.catch_warnings():  # about threads, which pytest-xdist has
        warnings.simplefilter("ignore")
        child = os.fork()
    if not child:
        status = 1
        try:
            os.close(reads)
            limit = in_status("VmSize", "self") + ALLOWANCE
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            with open(writes, "w") as pipe:
                for result in work():
                    pipe.write(json.dumps(result) + "\n")
                    pipe.flush()
            status = 0
        finally:
            os._exit(status)
    os.close(writes)
    os.set_blocking(reads, False)
    before, most, readers, ended, lines = anonymous(child), 0, 0, 0, bytearray()
    while not ended:
        most = max(most, anonymous(child) - before)
        readers = max(readers, sum(map(anonymous, children_of(child))))
        ended, status, _ = os.wait4(child, os.WNOHANG)
        lines += drained(reads)
        if not ended and time.monotonic() - began > seconds:
            os.kill(child, 9)
        time.sleep(0.02)
    lines += drained(reads)
    os.close(reads)
    end = f"killed by signal {status}" if status & 127 else f"exit {status >> 8}" if status else ""
    return Work([json.loads(line) for line in lines.splitlines()], end, most, readers)


def children_of(process: int) -> list[str]:
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        # Until it runs its own program, a child shares the memory of its parent.
        return [
            child
            for child in children
            if b"sandboxed.py" in Path(f"/proc/{child}/cmdline").read_bytes()
        ]
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return []


def drained(pipe: int) -> bytes:
    try:
        return os.read(pipe, 1 << 20)
    except BlockingIOError:
        return b""


def outcome_of(open_it: Callable[[], Any]) -> tuple[str, str, float]:
    """Return how opening a file ended: kind, text of the error, CPU seconds."""
    began = seconds_of_processors()
    try:
        open_it()
        kind, text = "opened", ""
    except UserError as error:
        kind, text = "refused" if error.status == BAD_DATA else f"status {error.status}", str(error)
    except BaseException as error:
        kind, text = type(error).__name__, str(error)
    return kind, text[:2000], seconds_of_processors() - began


def seconds_of_processors() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    return sum(os.times()[:4])
