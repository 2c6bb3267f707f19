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

from meshwright import device
from meshwright.errors import UserError
from meshwright.runs.history import DAMAGED, Record, explain_damage, kept_until, read_settings

COLUMNS = "iteration consumed_samples loss grad_norm lr ms tokens_per_second skipped mfu memory time".split()
NEEDED = COLUMNS[:-3]  # the others are unknown on some devices or to older versions, which is NaN here
BLOCK = 8 << 20  # bytes that one process reads at a time
PIECE = 1 << 18  # bytes that are parsed at a time: the objects of more would not stay in the caches
MUCH = 8 * BLOCK  # bytes that are worth starting processes for
HEAD = 256  # bytes at the start of the file that must stay the same

Steps = npt.NDArray[np.float64]  # [number, COLUMNS]
Part = Steps | dict[str, Any] | str  # steps, another row, or what is wrong with a line


def parse(data: bytes) -> list[Part]:
    """Return the content of whole lines, in order."""
    try:
        rows: list[Any] = orjson.loads(b"[" + data.rstrip(b"\n").replace(b"\n", b",") + b"]")
        events = list(map(operator.itemgetter("event"), rows))
    except (ValueError, TypeError, KeyError):
        return [part for line in data.splitlines() for part in parse_line(line)]
    out: list[Part] = []
    begin = 0
    for other in [i for i, event in enumerate(events) if event != "step"]:
        out += [*parse_steps(rows[begin:other]), rows[other]]
        begin = other + 1
    return out + parse_steps(rows[begin:])


def parse_steps(rows: list[dict[str, Any]]) -> list[Part]:
    """Return the numbers of steps; row by row if one of them lacks some."""
    try:
        if rows and "time" not in rows[0]:
            rows = [{"time": None, **row} for row in rows]
        return [np.array(list(map(operator.itemgetter(*COLUMNS), rows)), dtype=np.float64)] if rows else []
    except DAMAGED:
        return [part for row in rows for part in parse_line(orjson.dumps(row))]


def parse_line(line: bytes) -> Iterator[Part]:
    """Yield what one line says; json also reads what orjson does not, such as lone surrogates."""
    try:
        row = json.loads(line)
        if row["event"] != "step":
            yield row
            return
        known = [row[name] for name in NEEDED] + [row.get(name) for name in COLUMNS[len(NEEDED) :]]
        yield np.array([known], dtype=np.float64)
    except DAMAGED as error:
        yield explain_damage(error)


def parse_range(path: str, begin: int, end: int) -> list[Part]:
    """Return the content of the lines in a range of a file."""
    with open(path, "rb") as file:
        file.seek(begin)
        data = file.read(end - begin)
    out, at = list[Part](), 0
    while at < len(data):
        after = data.find(b"\n", min(at + PIECE, len(data)) - 1) + 1 or len(data)
        out += parse(data[at:after])
        at = after
    return out


class Follower:
    """One run: its steps in columns, and its other rows. Others read it while they hold `lock`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path, self.lock = folder, folder / "metrics.jsonl", threading.Lock()
        self.seen: tuple[int, ...] = ()  # device, inode, size, time of the file at the last look
        self.size = self.offset = 0  # of the file, and of what has been read: up to the end of a line
        self.problem = ""
        self.clear()

    def clear(self) -> None:
        """Forget everything: the file is another one."""
        self.head, self.offset, self.count = b"", 0, 0
        self.columns: Steps = np.empty((len(COLUMNS), 0))
        self.record, self.settings, self.damage = Record(), dict[str, dict[str, Any]](), list[str]()

    def column(self, name: str) -> Steps:
        return self.columns[COLUMNS.index(name), : self.count]

    @property
    def updated(self) -> float:
        """Seconds since 1970 of the newest row."""
        return self.seen[3] / 1e9 if self.seen else 0.0

    def look(self, published: Callable[[], None]) -> None:
        """Read what is new, and call `published` after each part of it."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            if self.seen:  # moved aside for a new run
                with self.lock:
                    self.clear()
                    self.seen, self.size = (), 0
                published()
            return
        with file:
            status = os.fstat(file.fileno())
            now = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
            if now == self.seen:
                return
            head = file.read(HEAD)
            is_other = now[:2] != self.seen[:2] or status.st_size < self.offset or not head.startswith(self.head)
            with self.lock:
                if self.seen and is_other:
                    self.clear()
                self.head, self.size = head, status.st_size
            # Of a file that grew during this look, the rest is read at the next one.
            self.seen = now
            for parts, end in self.parts(file):
                with self.lock:
                    self.take(parts)
                    self.offset = end
                published()
        if self.problem:
            self.problem = ""
            published()

    def parts(self, file: Any) -> Iterator[tuple[list[Part], int]]:
        """Yield what follows the part that has been read, with the place where it ends."""
        ends = list(line_ends(file, self.offset, self.size))
        ranges = list(zip([self.offset, *ends], ends, strict=False))
        with contextlib.ExitStack() as held:
            parsed: Iterator[list[Part]] = itertools.starmap(parse_range, ((str(self.path), *r) for r in ranges))
            workers = min(device.cores(), 8)
            if workers > 1 and self.size - self.offset > MUCH:
                spawn = multiprocessing.get_context("spawn")  # a fork would copy this program's threads' locks
                pool = held.enter_context(ProcessPoolExecutor(workers, mp_context=spawn))
                parsed = pool.map(parse_range, itertools.repeat(str(self.path)), *zip(*ranges, strict=True))
            yield from zip(parsed, ends, strict=True)

    def take(self, parts: list[Part]) -> None:
        """Add parsed lines; with the lock."""
        for part in parts:
            if isinstance(part, np.ndarray):
                self.add_steps(part)
                continue
            try:
                if isinstance(part, str):
                    raise ValueError(part)
                self.record.take(part)
                if (kept := kept_until(part)) is not None:
                    self.count = int(np.searchsorted(self.column("iteration"), kept, "right"))
                if part["event"] == "start":
                    self.read_settings()
            except DAMAGED as error:
                self.damage = [*self.damage[-9:], explain_damage(error)]

    def add_steps(self, new: Steps) -> None:
        new = new[np.isfinite(new[:, 0])]
        if not len(new):
            return
        if (np.diff(new[:, 0]) <= 0).any():  # edited by hand: the last row of an iteration counts
            _, at = np.unique(new[::-1, 0], return_index=True)
            new = new[len(new) - 1 - at]
        self.count = int(np.searchsorted(self.column("iteration"), new[0, 0]))
        after = self.count + len(new)
        if after > self.columns.shape[1]:
            grown = np.empty((len(COLUMNS), max(after, 2 * self.columns.shape[1], 1024)))
            grown[:, : self.count] = self.columns[:, : self.count]
            self.columns = grown
        self.columns[:, self.count : after] = new.T
        self.count = after
        first, last = new[[0, -1], COLUMNS.index("time")].tolist()
        seconds = float(new[:, COLUMNS.index("ms")].sum()) / 1e3
        self.record.took_steps(int(new[-1, 0]), seconds, (first, last) if first > 0 and last > 0 else None)

    def read_settings(self) -> None:
        with contextlib.suppress(UserError, OSError):  # half written by a foreign copy: the next start reads it
            self.settings = read_settings(self.folder)

    def setting(self, name: str) -> Any:
        return next((group[name] for group in self.settings.values() if name in group), None)


def line_ends(file: Any, begin: int, size: int) -> Iterator[int]:
    """Yield ends of lines about BLOCK bytes apart, at last that of the last complete line."""
    while begin < size:
        file.seek(min(begin + BLOCK, size) - 1)
        file.readline()  # to the end of the line, which may be half written
        end = min(file.tell(), size)
        if end == size:
            end = begin + last_line_end(file, begin, size)
            if end > begin:
                yield end
            return
        yield end
        begin = end


def last_line_end(file: Any, begin: int, size: int) -> int:
    """Return the number of bytes after `begin` that are whole lines."""
    file.seek(begin)
    data: bytes = file.read(size - begin)
    return data.rfind(b"\n") + 1
