"""What is given to be read: files, patterns, folders of tables, pipes; each known by its first bytes, whatever its name."""

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
    """`bytes` of a stream are unknown (0) or those of the compressed file."""

    path: str
    kind: Literal["lines", "stream", "parquet", "arrow"]
    bytes: int = 0

    @property
    def is_cut(self) -> bool:
        """Whether its pieces can be read in any order."""
        return self.kind != "stream"


def find_inputs(patterns: list[str]) -> list[str]:
    """Files and `-` as given, patterns in sorted order; all are looked for before work starts."""
    found = []
    for pattern in patterns:
        matches = [pattern] if pattern == "-" or Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
        if not matches:
            raise UserError(f"--input {pattern} does not exist", BAD_DATA)
        found += matches
    return found


def look(paths: list[str]) -> list[Input]:
    """What each is, by its first bytes; a folder is the tables in it."""
    return [one for path in paths for one in ([Input("-", "stream")] if path == "-" else _look(path))]


def _look(path: str) -> list[Input]:
    if os.path.isdir(path):
        found = tables.tables_in(path)
        if not found:
            raise UserError(
                f"--input {path} cannot be read: Is a directory, in which no .parquet or .arrow file is", IO
            )
        return [one for table in found for one in _look(table)]
    try:
        about = os.stat(path)
        if not stat.S_ISREG(about.st_mode):
            return [Input(path, "stream")]  # a pipe must not be read here
        with open(path, "rb") as file:
            start = file.read(containers.HEAD)
    except OSError as error:
        raise UserError(f"--input {path} cannot be read: {error.strerror}", IO) from None
    if other := containers.foreign(start):
        raise UserError(f"--input {path} {other} {path} > {path}.utf8", BAD_DATA)
    kind = containers.kind_of(start)
    if kind in ("parquet", "arrow"):
        return [Input(path, cast(Any, kind), about.st_size)]
    if kind == "legacy arrow":
        return [Input(path, "arrow" if path.endswith(".arrow") else "lines", about.st_size)]
    return [Input(path, "stream" if kind else "lines", about.st_size)]
