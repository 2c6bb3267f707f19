"""`<prefix>.progress`: what an interrupted `preprocess` had done; the same command continues there.

The first line is a hash of the command and its inputs, each further line the JSON of a state; a
kill leaves at worst an incomplete last line. Nothing is forced to the disk: if the files are
shorter than noted after a loss of power, the run starts from the beginning.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from meshwright.data.files.writer import PARTS
from meshwright.data.prepare.plain import PIECE
from meshwright.errors import IO, LOCKED, UserError
from meshwright.files import open_locked

VERSION = 2  # of the format of a state
SECONDS = 0.5  # between two notes
LONGEST = 1 << 18  # bytes of a journal, after which it is rewritten


class Journal:
    """An open journal, which holds the lock on the output; `state` is what to continue from."""

    def __init__(self, path: str, identity: dict[str, Any], stderr: TextIO) -> None:
        self.path, self.is_kept = path, True
        named = {"version": VERSION, "piece": PIECE, **identity}
        self.digest = hashlib.sha256(json.dumps(named, sort_keys=True, default=str).encode()).hexdigest()
        self.file = open_journal(path)
        lines = self.file.read().splitlines()
        self.state: dict[str, Any] | None = None
        if lines and lines[0] == self.digest:
            self.state = _last_complete(lines[1:])
        elif lines:
            print(f"{path} is of another command, or its input has changed since; starting over", file=stderr)
        if self.state is None:
            self._rewrite()
        self.noted = time.monotonic()

    def _rewrite(self) -> None:
        """Start again; a kill before `truncate` leaves older states, which are still true."""
        self.file.seek(0)
        self._write(self.digest)
        self.file.truncate()

    def is_due(self) -> bool:
        return time.monotonic() - self.noted >= SECONDS

    def note(self, state: dict[str, Any]) -> None:
        if self.file.tell() > LONGEST:
            self._rewrite()
        self._write(json.dumps(state))
        self.state, self.noted = state, time.monotonic()

    def _write(self, line: str) -> None:
        self.file.write(line + "\n")
        self.file.flush()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self.is_kept:
            Path(self.path).unlink(missing_ok=True)
        self.file.close()


PATIENCE = 2.0  # seconds; forked workers share the lock of a killed command until they have ended too


def open_journal(path: str) -> TextIO:
    """Open the file, locked so that no other process writes this output."""
    prefix = path.removesuffix(".progress")
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return os.fdopen(open_locked(Path(path), PATIENCE)[0], "r+", encoding="utf-8")
    except BlockingIOError:
        raise UserError(f"another process is writing {prefix}; wait for it", LOCKED) from None
    except OSError as error:
        raise UserError(f"{prefix} cannot be written: {error.strerror}; choose another --output-prefix", IO) from None


def _last_complete(lines: list[str]) -> dict[str, Any] | None:
    for line in reversed(lines):
        try:
            state: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:
            continue
        return state
    return None


def has_parts(prefix: str, lengths: list[int], itemsize: int) -> bool:
    """Return whether an interrupted writer's files hold so many tokens, sequences and documents."""
    try:
        parts = zip(PARTS, lengths, (itemsize, 4, 8), strict=True)
        return all(os.path.getsize(f"{prefix}{part}.tmp") >= length * size for part, length, size in parts)
    except OSError:
        return False
