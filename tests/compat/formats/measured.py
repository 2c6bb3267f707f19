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
from typing import Any

from meshwright.base.errors import BAD_DATA, UserError

SECONDS = 60  # for all the work of a child, which is killed then
ALLOWANCE = 2 << 30  # bytes of addresses beyond those of the parent: larger requests fail in the child alone


def anonymous(process: int | str) -> int:
    return in_status("RssAnon", process)


def in_status(field: str, process: int | str) -> int:
    text = Path(f"/proc/{process}/status").read_text()
    found = re.search(rf"{field}:\s+(\d+) kB", text)  # missing once the process has ended
    return int(found[1]) * 1024 if found else 0


def in_child(work: Callable[[], Iterable[Any]], seconds: int = SECONDS) -> tuple[list[Any], str, int]:
    """Return what the work yields, how the child ended if not well, and the bytes that it took."""
    reads, writes = os.pipe()
    began = time.monotonic()
    with warnings.catch_warnings(action="ignore"):  # about threads, which pytest-xdist has
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
    before, most, ended, lines = anonymous(child), 0, 0, bytearray()
    while not ended:
        most = max(most, anonymous(child) - before)
        ended, status, _ = os.wait4(child, os.WNOHANG)
        lines += drained(reads)
        if not ended and time.monotonic() - began > seconds:
            os.kill(child, 9)
        time.sleep(0.01)
    lines += drained(reads)
    os.close(reads)
    end = f"killed by signal {status}" if status & 127 else f"exit {status >> 8}" if status else ""
    return [json.loads(line) for line in lines.splitlines()], end, most


def drained(pipe: int) -> bytes:
    try:
        return os.read(pipe, 1 << 20)
    except BlockingIOError:
        return b""


def outcome_of(open_it: Callable[[], Any]) -> tuple[str, str, float]:
    """Return how opening a file ended: kind, text of the error, CPU seconds."""
    began = time.process_time()
    try:
        open_it()
        kind, text = "opened", ""
    except UserError as error:
        kind, text = "refused" if error.status == BAD_DATA else f"status {error.status}", str(error)
    except BaseException as error:
        kind, text = type(error).__name__, str(error)
    return kind, text[:2000], time.process_time() - began
