"""What Linux says of a running process; elsewhere it says nothing."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def inspect_process(pid: int) -> tuple[str, int, dict[str, str]]:
    """Return a process's name, its parent and the variables that it was started with.

    Those of another user's process, such as Slurm's daemon, cannot be read; they count as none.
    """
    # The file has `pid (name) state parent ...`, and the name may hold brackets.
    name, _, rest = read_proc(pid, "stat").partition(b" (")[2].rpartition(b") ")
    pairs = (pair.partition("=") for pair in os.fsdecode(read_proc(pid, "environ")).split("\0"))
    fields = rest.split()
    return (
        os.fsdecode(name),
        int(fields[1]) if len(fields) > 1 else 0,
        {key: value for key, _, value in pairs},
    )


def read_proc(pid: int, file: str) -> bytes:
    """Return a file of /proc about a process, or nothing."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{file}").read_bytes()
    return b""
