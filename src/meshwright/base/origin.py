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

from meshwright.base import files
from meshwright.base.errors import LOCKED, UserError

SMALL = 1 << 24  # bytes in all; up to here files are known by their contents
SAMPLES = 1 << 12, 8  # bytes of a sample of a longer file, and their number


def digest_of(paths: Sequence[str | Path]) -> str:
    """Return a hash of the names and states of files, in their order.

    A few small files are read in full: written anew with the same content, they count as the same.
    Reading more of them would take a good part of the time that encoding them takes; then size and
    time of the last change decide, and samples, in case a program has reset the time. A pipe never
    counts as unchanged.
    """
    abouts = [_stat(path) for path in paths]
    is_small = sum(about.st_size for about in abouts if about) <= SMALL
    states = [
        [os.path.basename(path), *_state_of(path, about, is_small)]
        for path, about in zip(paths, abouts, strict=True)
    ]
    return _hash_json(states)


def inputs_of(paths: Sequence[str | Path]) -> dict[str, Any]:
    """Return what identifies inputs, and enough about their names to say what has changed."""
    names = [os.path.basename(path) for path in paths]
    return {
        "files": len(names),
        "first": names[:3],
        "names": _hash_json(names),
        "content": digest_of(paths),
    }


def _hash_json(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _changed(name: str, before: Any, now: Any) -> str:
    """Name one thing that differs, and how, as far as the record knows."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return name
    if name == "settings":
        flags = []
        for key in sorted({*before, *now}):
            if before.get(key) != now.get(key):
                flags.append(f"--{key.replace('_', '-')}")
        return f"{name} ({' '.join(flags)})"

    # Inputs: the same ones read otherwise, the same names, or others.
    if before.get("content") == now["content"]:
        kinds = " and ".join(now.get("readers") or before.get("readers") or ["them"])
        return f"{name} (the same files, but another release read {kinds} in another way)"
    if before.get("names") == now["names"]:
        return f"{name} (of the same names, but changed)"
    then = _listed(before)
    these = _listed(now)
    if then == these:
        return f"{name} (others of the same first names)"
    return f"{name} ({then} then, {these} now)"


def _listed(inputs: dict[str, Any]) -> str:
    """Name the first of the inputs that a record lists; the file may be damaged."""
    number = inputs.get("files")
    first = inputs.get("first")
    names = " ".join(map(str, first)) if isinstance(first, list) else "?"
    if not names.isprintable():
        names = names.encode("unicode_escape").decode()
    if isinstance(number, int) and number > 3:
        return f"{number:,} files, {names} ..."
    return names


def _stat(path: str | Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:  # such as `-`
        return None


def _state_of(path: str | Path, about: os.stat_result | None, is_small: bool) -> list[Any]:
    if about is None and "://" in str(path):  # its name holds its revision
        return [str(path)]
    if about is None or not stat.S_ISREG(about.st_mode):
        # This state never comes again, so that the input counts as changed.
        return [time.time_ns()]
    size = about.st_size
    if is_small:
        return [size, files.sha256(path)]
    # Only larger files are sampled: there may be very many small ones to open.
    if size < 1 << 20:
        return [size, about.st_mtime_ns]
    return [size, about.st_mtime_ns, files.sample(path, *SAMPLES)]


def write_origin(record: Path, made_from: dict[str, Any], sizes: dict[str, int]) -> None:
    """Record the origin of files that have these names and sizes, or will have them next."""
    with files.replacing(record) as file:
        file.write(json.dumps({"made_from": made_from, "bytes": sizes}, indent=1).encode() + b"\n")


def read_origin(record: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return what files were made from, and their sizes; nothing if that is unknown or damaged."""
    try:
        recorded = json.loads(files.read_small(record, files.RECORD_LIMIT))
        sizes = {str(name): int(size) for name, size in recorded["bytes"].items()}
        return dict(recorded["made_from"]), sizes
    except (OSError, AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return {}, {}


def is_done(
    record: Path, made_from: dict[str, Any], paths: Sequence[Path], overwrite: bool, flag: str
) -> bool:
    """Return whether these files were made from this already, and are unchanged.

    Raise UserError if they exist and were made from something else, unless `overwrite`; `flag`
    names them. Files of which some are missing are those of an interrupted command.
    """
    existing = [path for path in paths if path.exists()]
    if overwrite or not existing:
        return False

    before, sizes = read_origin(record)
    # The same origin: done, if all files are there in the sizes that were noted.
    if before == made_from:
        if len(existing) < len(paths):
            return False
        if {path.name: path.stat().st_size for path in paths} == sizes:
            return True
    # Another origin, or an unknown one.
    changes = [
        _changed(name, before.get(name), now)
        for name, now in made_from.items()
        if before.get(name) != now
    ]
    how = "and nothing says how they were made"
    if before and changes:
        how = f"made with other {' and '.join(changes)}"
    names = " and ".join(map(str, existing))
    message = f"{names} {'exists' if len(existing) == 1 else 'exist'} already, {how}: they are kept"
    replace = "add --overwrite to replace them"
    if flag == "--output-prefix":  # token files
        replace += ", as Megatron's tools do unasked"
    raise UserError(f"{message}; {replace}, or choose another {flag}", LOCKED)
