"""The progress of long work: a bar on a terminal, the speed, and lines that were skipped."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


def new_bar(
    *columns: str, total: int | None, file: TextIO | None = None, **fields: Any
) -> tuple[Progress, TaskID]:
    """Make a progress bar, to be started, of rich's columns by the names below, or of templates."""
    from rich import progress as rich
    from rich.console import Console

    kinds: dict[str, type[rich.ProgressColumn]] = {
        "bar": rich.BarColumn,
        "bytes": rich.DownloadColumn,
        "count": rich.MofNCompleteColumn,
        "left": rich.TimeRemainingColumn,
        "percent": rich.TaskProgressColumn,
        "speed": rich.TransferSpeedColumn,
    }
    shown = [kinds[column]() if column in kinds else rich.TextColumn(column) for column in columns]
    # Lines printed meanwhile go above the bar on a terminal, and unchanged into a pipe.
    console = Console(file=file or sys.stderr)
    bar = rich.Progress(
        *shown, console=console, transient=True, redirect_stdout=sys.stdout.isatty()
    )
    return bar, bar.add_task("", total=total, **fields)


@contextmanager
def progress_bar(
    description: str, total: int | None, of: str = "bytes"
) -> Iterator[Callable[[float], None]]:
    """Show a bar of bytes, of a "count" or its "percent" on a terminal; yield what advances it."""
    # A log gets no bar, and neither does a single item.
    if not sys.stderr.isatty() or (total is not None and total < 2 and of != "percent"):
        yield lambda count: None
        return
    columns = ("bytes", "speed") if of == "bytes" else (of,)
    bar, task = new_bar("{task.description}", "bar", *columns, "left", total=total)
    bar.update(task, description=description)
    with bar:
        yield lambda count: bar.advance(task, count)


class Clock:
    """Measures bytes per second from its creation."""

    def __init__(self) -> None:
        self.start = time.perf_counter()

    def speed(self, count: int) -> str:
        seconds = max(time.perf_counter() - self.start, 1e-9)
        return f"{count / 1e6 / seconds:,.1f} MB/s"


def duration(seconds: float) -> str:
    """Return a time in words: 5.0 s, 3 min 05 s, or 2 h 05 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


class SkippedLines(dict[str, tuple[int, str]]):
    """The number of bad lines of each kind, and the place of the first; `lines` counts all."""

    lines = 0

    def count(self, kind: str, count: int, place: str) -> None:
        before, first = self.get(kind, (0, place))
        self[kind] = (before + count, first)

    def __str__(self) -> str:
        total = 0
        kinds = []
        for kind, (count, place) in self.items():
            total += count
            kinds.append(f"{count:,} {kind}, first {place}")
        return f"{total:,} bad {'line' if total == 1 else 'lines'}: {'; '.join(kinds)}"
