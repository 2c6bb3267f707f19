"""The rows of a run's metrics.jsonl: one JSON object a line, appended as the run goes on."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from meshwright.base.errors import UnfitFile
from meshwright.base.files import open_plain

METRICS = "metrics.jsonl"
TAIL_BYTES = 1 << 16  # that are read to find the last step
ROW_LIMIT = 16 << 20  # bytes of a row; a file with a hole has a longer one
ROWS_LIMIT = 4 * ROW_LIMIT  # bytes that are read at once

# Raised for a row that no run writes.
DAMAGED = (ValueError, TypeError, KeyError, OverflowError, AttributeError, RecursionError)


class DamagedRow(ValueError):
    """What is wrong with a row, in words."""


def explain_damage(error: Exception) -> str:
    """Say what is wrong with a row at which reading raised one of DAMAGED."""
    if isinstance(error, DamagedRow):
        return str(error)
    if isinstance(error, KeyError):
        return f"{error} is missing"
    is_text = isinstance(error, json.JSONDecodeError | UnicodeDecodeError | RecursionError)
    return "it is not JSON" if is_text else "a value is not of the kind that its column has"


def read_lines(folder: Path) -> Iterator[bytes]:
    """Yield the lines of metrics.jsonl; raise UnfitFile for one that no run writes."""
    with open_plain(folder / METRICS, folder) as file:
        while line := read_line(file, folder):
            yield line


def read_line(file: BinaryIO, folder: Path) -> bytes:
    """Return the next line, or the rest of one."""
    line = file.readline(ROW_LIMIT)
    if len(line) == ROW_LIMIT and not line.endswith(b"\n"):
        at = file.tell() - ROW_LIMIT
        raise UnfitFile(
            folder / METRICS,
            f"no row ends within {ROW_LIMIT:,} bytes of byte {at:,}; no run writes that",
        )
    return line


def read_new_rows(folder: Path, begin: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Return the complete rows after `begin` bytes of metrics.jsonl, and where the next one begins.

    At most ROWS_LIMIT bytes are read. Lines that are not rows are skipped: one at `begin` may be
    the rest of a line.
    """
    try:
        with open_plain(folder / METRICS, folder) as file:
            file.seek(begin)
            data = file.read(ROWS_LIMIT)
    except OSError:
        return [], begin
    # The last row may be half written.
    complete = data[: data.rfind(b"\n") + 1]
    rows = []
    for line in complete.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
            if isinstance(row, dict) and "event" in row:
                rows.append(row)
    return rows, begin + len(complete)


def read_rows(folder: Path) -> list[dict[str, Any]]:
    rows, end = read_new_rows(folder)
    while (later := read_new_rows(folder, end))[1] > end:
        rows = rows + later[0]
        end = later[1]
    return rows


def read_last_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows at the end of metrics.jsonl."""
    try:
        size = os.path.getsize(folder / METRICS)
    except OSError:
        return []
    return read_new_rows(folder, max(size - TAIL_BYTES, 0))[0]


def find_last_time(folder: Path) -> float:
    """Return when the last row was written, in seconds since 1970; 0 if there is none."""
    for row in reversed(read_last_rows(folder)):
        with contextlib.suppress(*DAMAGED):
            return float(row["time"])
    return 0.0


def find_last_step(folder: Path) -> tuple[int, str] | None:
    """Return the last logged step of a run, and how its attempt ended; None if there is none."""
    rows = read_last_rows(folder)
    ended = ""
    # The newest attempt's end comes after its last step, if it has one.
    for row in reversed(rows):
        with contextlib.suppress(*DAMAGED):
            if row["event"] == "end" and not ended:
                ended = f"ended after step {int(row['iteration']):,} ({row['reason']})"
            elif row["event"] == "step":
                return int(
                    row["iteration"]
                ), ended or f"was killed after step {int(row['iteration']):,}"
    return None


def holds_steps(folder: Path) -> bool:
    """Return whether a run logged a step in the folder."""
    try:
        return any(b'"event": "step"' in line for line in read_lines(folder))
    except FileNotFoundError:
        return False
