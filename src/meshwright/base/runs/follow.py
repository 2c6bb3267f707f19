"""metrics.jsonl of a run that goes on, read as it grows.

A run of a million steps has some hundreds of megabytes of rows. They are parsed in blocks, on
several cores if there is much to read, and the numbers of steps are kept in columns.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import operator
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from meshwright.base import host
from meshwright.base.errors import TOO_OLD, UserError
from meshwright.base.files import open_plain
from meshwright.base.runs.amounts import tokens_read
from meshwright.base.runs.goodput import Goodput, measure_goodput
from meshwright.base.runs.history import (
    Record,
    final_loss,
    final_steps,
    flat_settings,
    kept_until,
    read_settings,
)
from meshwright.base.runs.rows import DAMAGED, METRICS, DamagedRow, explain_damage, read_line

COLUMNS = (
    "iteration",
    "consumed_samples",
    "loss",
    "grad_norm",
    "lr",
    "ms",
    "tokens_per_second",
    "skipped",
    "time",
    "mfu",
    "memory",
    "length",
)
NEEDED = COLUMNS[:-3]
# The others are NaN here where they are unknown: mfu and memory on some devices, and the length of
# samples, which rows state only where it changes.
TASK_BYTES = 8 << 20  # read by one process at a time
# Parsed at a time: the objects of more would not stay in the caches.
PARSED_BYTES = 1 << 18
PARALLEL_BYTES = 8 * TASK_BYTES  # from which on several processes read
HEAD_BYTES = 256  # at the start of the file, which must stay the same

Steps = npt.NDArray[np.float64]  # [number, COLUMNS]
Parsed = Steps | dict[str, Any] | str  # steps, another row, or what is wrong with a line


def parse_rows(data: bytes) -> list[Parsed]:
    """Return the content of complete lines, in order."""
    try:
        # Parse all lines as one list: a call for each of a million lines would take longer.
        rows: list[Any] = orjson.loads(b"[" + data.rstrip(b"\n").replace(b"\n", b",") + b"]")
        events = list(map(operator.itemgetter("event"), rows))
    except (ValueError, TypeError, KeyError):
        return [part for line in data.splitlines() for part in parse_line(line)]
    out: list[Parsed] = []
    begin = 0
    # Steps between two other rows become one array.
    for other in [i for i, event in enumerate(events) if event != "step"]:
        out += [*parse_steps(rows[begin:other]), rows[other]]
        begin = other + 1
    return out + parse_steps(rows[begin:])


def parse_steps(rows: list[dict[str, Any]]) -> list[Parsed]:
    """Return the numbers of steps; row by row if one of them lacks some."""
    if not rows:
        return []
    # A run writes the last column, "length", in all of its rows or in none.
    with_length = sum("length" in row for row in rows)
    if with_length in (0, len(rows)):
        names = COLUMNS if with_length else COLUMNS[:-1]
        with contextlib.suppress(*DAMAGED):
            numbers = np.full((len(rows), len(COLUMNS)), np.nan)
            numbers[:, : len(names)] = list(map(operator.itemgetter(*names), rows))
            return [numbers]
    return [part for row in rows for part in parse_line(orjson.dumps(row))]


def parse_line(line: bytes) -> Iterator[Parsed]:
    """Yield what one line says; json also reads what orjson does not, such as lone surrogates."""
    try:
        row = json.loads(line)
        if row["event"] != "step":
            yield row
            return
        if "time" not in row:
            raise DamagedRow(f"it {TOO_OLD}")
        numbers = [row[name] for name in NEEDED]
        numbers += [row.get(name) for name in COLUMNS[len(NEEDED) :]]
        yield np.array([numbers], dtype=np.float64)
    except DAMAGED as error:
        yield explain_damage(error)


def parse_range(path: str, begin: int, end: int) -> list[Parsed]:
    """Return the content of the lines in a range of a file."""
    with open(path, "rb") as file:
        file.seek(begin)
        data = file.read(end - begin)
    out = list[Parsed]()
    at = 0
    while at < len(data):
        # A part has about PARSED_BYTES and ends with a line.
        after = data.find(b"\n", min(at + PARSED_BYTES, len(data)) - 1) + 1 or len(data)
        out += parse_rows(data[at:after])
        at = after
    return out


class RunTail:
    """A run as it grows: its steps in columns, and its other rows. Read it while holding `lock`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / METRICS
        self.lock = threading.Lock()
        # device, inode, size and time of the file when it was last read
        self.file_state: tuple[int, ...] = ()
        # of the file, and of what has been read: up to the end of a line
        self.size = self.offset = 0
        self.problem = ""
        self.clear()

    def clear(self) -> None:
        """Forget all rows, because the file is another one."""
        self.head = b""
        self.offset = 0
        self.count = 0
        self.columns: Steps = np.empty((len(COLUMNS), 0))
        self.record = Record()
        self.damage = list[str]()
        self.settings: dict[str, Any] = {}

    def column(self, name: str) -> Steps:
        return self.columns[COLUMNS.index(name), : self.count]

    @property
    def updated(self) -> float:
        """Seconds since 1970 of the newest row."""
        return self.file_state[3] / 1e9 if self.file_state else 0.0

    def read_new(self, published: Callable[[], None]) -> None:
        """Read what the file has gained, and call `published` after each part of it."""
        try:
            file = open_plain(self.path, self.folder)
        except FileNotFoundError:
            if self.file_state:  # moved aside for a new run
                with self.lock:
                    self.clear()
                    self.file_state = ()
                    self.size = 0
                published()
            return
        with file:
            status = os.fstat(file.fileno())
            # A file that has not changed since it was last read is not read again.
            state = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
            if state == self.file_state:
                return
            head = file.read(HEAD_BYTES)
            is_other = state[:2] != self.file_state[:2] or status.st_size < self.offset
            with self.lock:
                # Another file under this name, or a shorter one, is another run.
                if self.file_state and (is_other or not head.startswith(self.head)):
                    self.clear()
                self.head = head
                self.size = status.st_size
            # What the file gains while it is read here is read by the next call.
            self.file_state = state
            for parsed, end in self.parse_new(file):
                with self.lock:
                    self.take(parsed)
                    self.offset = end
                published()
        if self.problem:
            self.problem = ""
            published()

    def parse_new(self, file: Any) -> Iterator[tuple[list[Parsed], int]]:
        """Yield what has not been read, in parts, with the offset at which each one ends."""
        ends = list(line_ends(file, self.offset, self.size, self.folder))
        ranges = list(zip([self.offset, *ends], ends, strict=False))
        with contextlib.ExitStack() as stack:
            parsed: Iterator[list[Parsed]] = itertools.starmap(
                parse_range, ((str(self.path), *r) for r in ranges)
            )
            workers = min(host.cores(), 8)
            if workers > 1 and self.size - self.offset > PARALLEL_BYTES:
                # a fork would copy this program's threads' locks
                spawn = multiprocessing.get_context("spawn")
                pool = stack.enter_context(ProcessPoolExecutor(workers, mp_context=spawn))
                parsed = pool.map(
                    parse_range, itertools.repeat(str(self.path)), *zip(*ranges, strict=True)
                )
            yield from zip(parsed, ends, strict=True)

    def take(self, parsed: list[Parsed]) -> None:
        """Add parsed lines; with the lock."""
        for content in parsed:
            if isinstance(content, np.ndarray):
                self.add_steps(content)
                continue
            try:
                if isinstance(content, str):
                    raise DamagedRow(content)
                self.record.take(content)
                # A start or a rollback undoes steps.
                if (kept := kept_until(content)) is not None:
                    self.count = int(np.searchsorted(self.column("iteration"), kept, "right"))
                if content["event"] == "start":
                    self.read_settings()
            except DAMAGED as error:
                self.damage = [*self.damage[-9:], explain_damage(error)]

    def add_steps(self, new: Steps) -> None:
        """Append rows of steps; they replace what is there of their iterations and later ones."""
        new = new[np.isfinite(new[:, 0])]
        if not len(new):
            return
        iterations = new[:, 0]
        if (np.diff(iterations) <= 0).any():  # edited by hand: an iteration's last row counts
            _, at = np.unique(iterations[::-1], return_index=True)
            new = new[len(new) - 1 - at]
            iterations = new[:, 0]
        kept = int(np.searchsorted(self.column("iteration"), iterations[0]))
        after = kept + len(new)

        # Room doubles, so that appending stays cheap however long the run is.
        room = self.columns.shape[1]
        if after > room:
            grown = np.empty((len(COLUMNS), max(after, 2 * room, 1024)))
            grown[:, :kept] = self.columns[:, :kept]
            self.columns = grown
        self.columns[:, kept:after] = new.T
        self.count = after

        first, last = new[[0, -1], COLUMNS.index("time")].tolist()
        seconds = float(new[:, COLUMNS.index("ms")].sum()) / 1e3
        self.record.take_steps(int(iterations[-1]), seconds, (first, last))

    def read_settings(self) -> None:
        # half written by a foreign copy: the next start reads it
        with contextlib.suppress(UserError, OSError):
            self.settings = flat_settings(read_settings(self.folder))

    def final_loss(self) -> tuple[float, int]:
        """Return the mean training loss at the end, and of how many steps."""
        iteration = int(self.column("iteration")[-1])
        interval = self.settings.get("log_interval")
        last = -2 * final_steps(iteration, interval)  # half of them may have been skipped
        losses = self.column("loss")[last:]
        is_applied = self.column("skipped")[last:] == 0
        applied = losses[is_applied].tolist()
        return final_loss(applied, iteration, interval)

    def tokens_read(self) -> Steps | None:
        """Return the tokens read by the end of each step; None if they are unknown."""
        samples = self.column("consumed_samples")
        return tokens_read(self.column("iteration"), samples, self.column("length"), self.settings)

    def goodput(self) -> Goodput | None:
        is_applied = self.column("skipped") == 0
        ms = self.column("ms")
        good = float(ms[is_applied].sum()) / 1e3
        skipped = float(ms[~is_applied].sum()) / 1e3
        return measure_goodput(self.record.attempts, good, skipped)


def line_ends(file: Any, begin: int, size: int, folder: Path) -> Iterator[int]:
    """Yield ends of lines about TASK_BYTES bytes apart, at last that of the last complete line."""
    while begin < size:
        file.seek(min(begin + TASK_BYTES, size) - 1)
        read_line(file, folder)  # to the end of the line, which may be half written
        end = min(file.tell(), size)
        if end == size:
            end = begin + last_line_end(file, begin, size)
            if end > begin:
                yield end
            return
        yield end
        begin = end


def last_line_end(file: Any, begin: int, size: int) -> int:
    """Return the number of bytes of complete lines after `begin`."""
    file.seek(begin)
    data: bytes = file.read(size - begin)
    return data.rfind(b"\n") + 1
