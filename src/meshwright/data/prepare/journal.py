"""What an interrupted run of `preprocess` had done, so that the same command goes on there.

One line of JSON for each state, the first line telling what it belongs to. A kill leaves at worst an incomplete last line.
Nothing is forced to the disk: after a loss of power the parts may be shorter than noted, and then all begins anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from meshwright.data.format.writer import PARTS
from meshwright.data.prepare.text import PIECE
from meshwright.errors import IO, LOCKED, UserError
from meshwright.files import open_locked

VERSION = 1  # of what a state says
SECONDS = 0.5  # between two notes
LONGEST = 1 << 18  # bytes, then it begins anew


class Journal:
    """`state` is the last one noted, None if there is nothing to go on with. Holds the lock on the output."""

    def __init__(self, path: str, identity: dict[str, Any], stderr: TextIO) -> None:
        self.path, self.is_kept = path, True
        told = {"version": VERSION, "piece": PIECE, **identity}
        self.belongs = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()
        self.file = locked(path)
        lines = self.file.read().splitlines()
        self.state: dict[str, Any] | None = None
        if lines and lines[0] == self.belongs:
            self.state = _last_whole(lines[1:])
        elif lines:
            print(f"{path} is of another command, or its input has changed since: beginning anew", file=stderr)
        if self.state is None:
            self._begin()
        self.at = time.monotonic()

    def _begin(self) -> None:
        """What stood behind the first line is overwritten, or older than what comes: either is skipped or true."""
        self.file.seek(0)
        self._write(self.belongs)
        self.file.truncate()

    def is_due(self) -> bool:
        return time.monotonic() - self.at >= SECONDS

    def note(self, state: dict[str, Any]) -> None:
        if self.file.tell() > LONGEST:
            self._begin()
        self._write(json.dumps(state))
        self.state, self.at = state, time.monotonic()

    def _write(self, line: str) -> None:
        self.file.write(line + "\n")
        self.file.flush()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self.is_kept:
            Path(self.path).unlink(missing_ok=True)
        self.file.close()


def locked(path: str) -> TextIO:
    """Open the file, locked so that no other process writes this output."""
    prefix = path.removesuffix(".progress")
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return os.fdopen(open_locked(path)[0], "r+", encoding="utf-8")
    except BlockingIOError:
        raise UserError(f"another process is writing {prefix}; wait for it", LOCKED) from None
    except OSError as error:
        raise UserError(f"{prefix} cannot be written: {error.strerror}; choose another --output-prefix", IO) from None


def _last_whole(lines: list[str]) -> dict[str, Any] | None:
    for line in reversed(lines):
        try:
            state: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:
            continue
        return state
    return None


def is_there(prefix: str, lengths: tuple[int, int, int], itemsize: int) -> bool:
    """Whether an interrupted writer's parts have at least these tokens, sequences and documents."""
    try:
        sizes = [os.path.getsize(f"{prefix}{part}.tmp") for part in PARTS]
    except OSError:
        return False
    needed = [length * size for length, size in zip(lengths, (itemsize, 4, 8), strict=True)]
    return all(have >= want for have, want in zip(sizes, needed, strict=True))
