"""Find the inputs of `preprocess`: files, patterns, folders of tables, pipes."""

from __future__ import annotations

import glob
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from meshwright.data.prepare import containers, tables
from meshwright.errors import BAD_DATA, IO, UserError


@dataclass(frozen=True)
class Input:
    """A file or a pipe; its first bytes decide the kind. `bytes` is on disk, 0 for a pipe."""

    path: str
    kind: Literal["lines", "stream", "parquet", "arrow"]
    bytes: int = 0


def find_inputs(patterns: list[str]) -> list[str]:
    """Return files and `-` as given, and the matches of patterns sorted; raise if there is none."""
    found = []
    for pattern in patterns:
        matches = [pattern] if pattern == "-" or Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
        if not matches:
            raise UserError(f"--input {pattern} does not exist", BAD_DATA)
        found += matches
    return found


def inspect_inputs(paths: list[str]) -> list[Input]:
    """Return the kind and size of each path; a folder stands for the tables in it."""
    return [one for path in paths for one in ([Input("-", "stream")] if path == "-" else _inspect(path))]


def _inspect(path: str) -> list[Input]:
    if os.path.isdir(path):
        found = tables.find_tables(path)
        if not found:
            raise UserError(f"--input {path} cannot be read: Is a directory without a .parquet or .arrow file", IO)
        return [one for table in found for one in _inspect(table)]
    try:
        about = os.stat(path)
        if not stat.S_ISREG(about.st_mode):
            return [Input(path, "stream")]  # what is read from a pipe here would be lost
        with open(path, "rb") as file:
            start = file.read(containers.HEAD)
    except OSError as error:
        raise UserError(f"--input {path} cannot be read: {error.strerror}", IO) from None
    if other := containers.foreign_encoding(start):
        raise UserError(f"--input {path} {other} {path} > {path}.utf8", BAD_DATA)
    kind = containers.kind_of(start)
    if kind in ("parquet", "arrow"):
        return [Input(path, cast(Any, kind), about.st_size)]
    if kind == "legacy arrow":
        return [Input(path, "arrow" if path.endswith(".arrow") else "lines", about.st_size)]
    return [Input(path, "stream" if kind else "lines", about.st_size)]
