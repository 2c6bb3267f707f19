"""How far a long piece of work over bytes is: a bar on a terminal, and at its end the speed and what was left out."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A call for every so many bytes done. Without a terminal nothing is shown: the result's own line tells the speed."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


class Clock:
    """Bytes a second since it was made."""

    def __init__(self) -> None:
        self.start = time.perf_counter()

    def speed(self, count: int) -> str:
        return f"{count / 1e6 / max(time.perf_counter() - self.start, 1e-9):,.1f} MB/s"


class SkippedLines(dict[str, tuple[int, str]]):
    """Of each kind of bad line how many there were, and the place of the first."""

    def count(self, kind: str, count: int, place: str) -> None:
        before, first = self.get(kind, (0, place))
        self[kind] = (before + count, first)

    def __str__(self) -> str:
        kinds = "; ".join(f"{count:,} {kind}, first {place}" for kind, (count, place) in self.items())
        return f"{sum(count for count, _ in self.values()):,} bad lines: {kinds}"
