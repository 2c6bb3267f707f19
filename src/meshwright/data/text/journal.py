"""`<prefix>.progress`: what an interrupted `preprocess` had done; the same command continues there.

The file holds a hash of the command and its inputs, and a state. It is replaced in one step, so
that a kill leaves a complete one. Nothing is forced to the disk: if the files are shorter than
noted after a loss of power, the run starts from the beginning.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

from meshwright.base.errors import IO, LOCKED, UserError
from meshwright.base.files import RECORD_LIMIT, lock, own_file, read_small
from meshwright.data.files.writer import PART_ENDINGS
from meshwright.data.text import limits

VERSION = 9  # of the format of a state
NOTE_EVERY = 0.5  # seconds
# seconds; forked workers share the lock of a killed command until they have ended too
PATIENCE = 2.0


class Journal:
    """The progress of a command; `state` is what to continue from."""

    def __init__(self, path: Path, identity: dict[str, Any], stderr: TextIO) -> None:
        self.path = path
        self.is_kept = True
        self.noted = time.monotonic()
        # One name is enough: only the owner of the lock writes it.
        self.temporary = Path(f"{path}.tmp")
        named = {"version": VERSION, "piece": limits.PIECE, **identity}
        content = json.dumps(named, sort_keys=True, default=str)
        self.digest = hashlib.sha256(content.encode()).hexdigest()

        # What is there, if it is of the same command.
        self.state: dict[str, Any] | None = None
        try:
            record = json.loads(read_small(path, RECORD_LIMIT))
            self.state = record["state"] if record["command"] == self.digest else None
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            pass
        if self.state is None and path.exists():
            print(
                f"{path} is of another command, or its input has changed since; starting over",
                file=stderr,
            )
            # The journal goes now, since the files that it describes are about to change.
            path.unlink()

    def is_due(self) -> bool:
        # Noting more often would cost more than it saves after a kill.
        return time.monotonic() - self.noted >= NOTE_EVERY

    def note(self, state: dict[str, Any]) -> None:
        # The file is renamed once complete, so that a kill leaves this state or the one before.
        with open(self.temporary, "w", opener=own_file) as file:
            file.write(json.dumps({"command": self.digest, "state": state}))
        os.replace(self.temporary, self.path)
        self.state = state
        self.noted = time.monotonic()


@contextmanager
def open_journal(path: Path, identity: dict[str, Any], stderr: TextIO) -> Iterator[Journal]:
    """Lock the output, and open its journal; at the end remove it unless it `is_kept`."""
    prefix = str(path).removesuffix(".progress")
    with ExitStack() as stack:
        # Only the owner of the lock may read and remove the journal.
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock(Path(f"{path}.lock"), PATIENCE))
            journal = Journal(path, identity, stderr)
        except BlockingIOError as error:
            raise UserError(
                f"another process is writing {prefix}: {error.strerror}; wait for it", LOCKED
            ) from None
        except OSError as error:
            message = (
                f"{prefix} cannot be written: {error.strerror}; choose another --output-prefix"
            )
            raise UserError(message, IO) from None
        try:
            yield journal
        finally:
            if not journal.is_kept:
                path.unlink(missing_ok=True)
                journal.temporary.unlink(missing_ok=True)


def has_parts(prefix: str, lengths: list[int], itemsize: int) -> bool:
    """Return whether an interrupted writer's files hold so many tokens, sequences and documents."""
    # A token takes `itemsize` bytes, a sequence's length 4 (int32), a document's border 8 (int64).
    # A part may be longer than was noted: the writer cuts it.
    parts = zip(PART_ENDINGS, lengths, (itemsize, 4, 8), strict=True)
    try:
        for part, length, size in parts:
            if os.path.getsize(f"{prefix}{part}.tmp") < length * size:
                return False
    except OSError:
        return False
    return True
