"""`*.origin.json`: what files were made from, so that other ones never replace them in silence."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.errors import LOCKED, UserError
from meshwright.files import replacing

SMALL = 1 << 26  # bytes; a longer file is known by the time of its last change, not by its SHA-256


def state_of(path: str | Path) -> list[Any]:
    """Return size and SHA-256 of a file, or its time if it is large; something new for a pipe."""
    if not os.path.exists(path):  # such as `-`
        return [time.time_ns()]
    about = os.stat(path)
    if not stat.S_ISREG(about.st_mode):
        return [time.time_ns()]
    if about.st_size > SMALL:
        return [about.st_size, about.st_mtime_ns]
    with open(path, "rb") as file:
        return [about.st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def digest_of(paths: Sequence[str | Path]) -> str:
    """Return a hash of the names and states of files, in their order."""
    states = [[Path(path).name, *state_of(path)] for path in paths]
    return hashlib.sha256(json.dumps(states).encode()).hexdigest()


def write(record: Path, made_from: dict[str, Any], sizes: dict[str, int]) -> None:
    """Record the origin of files that have these names and sizes, or will have them next."""
    with replacing(record) as file:
        file.write(json.dumps({"made_from": made_from, "bytes": sizes}, indent=1).encode() + b"\n")


def is_done(record: Path, made_from: dict[str, Any], files: Sequence[Path], overwrite: bool, flag: str) -> bool:
    """Return whether these files were made from this already, and are unchanged.

    Raise UserError if they are there and were made from something else, unless `overwrite`; `flag`
    names them. Files of which some are missing are those of an interrupted command.
    """
    there = [file for file in files if file.exists()]
    if overwrite or not there:
        return False
    try:
        known = json.loads(record.read_text(encoding="utf-8"))
        before, sizes = dict(known["made_from"]), {str(name): int(size) for name, size in known["bytes"].items()}
    except (OSError, AttributeError, KeyError, TypeError, ValueError, RecursionError):
        before, sizes = {}, {}
    if before == made_from:
        if len(there) < len(files):
            return False
        if {file.name: file.stat().st_size for file in files} == sizes:
            return True
    other = [name for name in made_from if before.get(name) != made_from[name]]
    how = f"made with other {' and '.join(other)}" if before and other else "and nothing says how they were made"
    names = " and ".join(map(str, there))
    message = f"{names} {'exists' if len(there) == 1 else 'exist'} already, {how}: they are kept"
    raise UserError(f"{message}; add --overwrite to replace them, or choose another {flag}", LOCKED)
