"""The results of a sweep: a table, best first, and a picture of the loss over each axis."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.apps.pages import plot
from meshwright.apps.pages.styles import COLOURS
from meshwright.apps.tune.points import Point, is_logarithmic
from meshwright.apps.tune.sweep import MOST_STEPS, SweepRun
from meshwright.base.files import replacing
from meshwright.base.progress import duration
from meshwright.base.records import align_columns
from meshwright.base.runs.history import wall_time
from meshwright.base.runs.sweeps import STATES
from meshwright.config.fields import spelling

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE = "sweep.svg"
MOST_LINES = 8  # in a panel; beyond that only points are drawn
MOST_PANELS = 6


@dataclass(frozen=True)
class SweptPoint:
    """The figures of one point: means over its seeds."""

    point: Point  # without the seed
    state: str  # of the run that came least far
    held_out: float | None  # the last validation loss
    spread: float | None  # its standard deviation over the seeds
    training: float | None  # the mean training loss at the end
    tokens: int | None  # None: samples of unknown length
    seconds: float
    seeds: int

    @property
    def loss(self) -> float:
        chosen = self.training if self.held_out is None else self.held_out
        return math.inf if chosen is None or math.isnan(chosen) else chosen


Items = tuple[tuple[str, str], ...]  # of a point


def items_without(point: Point, left_out: str) -> Items:
    """Return a point's other settings, as a key."""
    return tuple((name, value) for name, value in point.items() if name != left_out)


def swept_points(runs: Sequence[SweepRun]) -> list[SweptPoint]:
    """Return the points of these runs, finished ones first, by their loss."""
    # Runs that differ in their seeds alone are one point.
    groups: dict[Items, list[SweepRun]] = {}
    for run in runs:
        groups.setdefault(items_without(run.point, "seed"), []).append(run)
    swept = [_mean_of(dict(values), members) for values, members in groups.items()]
    swept.sort(key=lambda o: (STATES.index(o.state), o.loss))
    return swept


def _mean_of(point: Point, runs: list[SweepRun]) -> SweptPoint:
    held_out = list[float]()
    training = list[float]()
    tokens, seconds = 0, 0.0
    are_tokens_known = True
    for run in runs:
        tail = run.tail
        if tail is None or not tail.count:
            continue
        # The last validation and the end of the training, of each seed that made a step.
        if checks := tail.record.mean_validations():
            held_out.append(checks[-1][1])
        training.append(tail.final_loss()[0])
        read = tail.tokens_read()
        if read is None:
            are_tokens_known = False
        # Files that no run has written may hold any number.
        elif read[-1] < MOST_STEPS:
            tokens = max(tokens, int(read[-1]))
        seconds += wall_time(tail.record.attempts)[1]

    spread = None
    if len(held_out) > 1 and all(map(math.isfinite, held_out)):
        spread = statistics.stdev(held_out)
    return SweptPoint(
        point=point,
        state=max((run.state for run in runs), key=STATES.index),
        held_out=statistics.fmean(held_out) if held_out else None,
        spread=spread,
        training=statistics.fmean(training) if training else None,
        tokens=tokens if are_tokens_known else None,
        seconds=seconds,
        seeds=len(runs),
    )


def axes_of(swept: Sequence[SweptPoint]) -> list[str]:
    """Return the settings in which the points differ, or all of a single point."""
    names = list(dict.fromkeys(name for o in swept for name in o.point))
    return [name for name in names if _differs(swept, name)] or names


def _differs(swept: Sequence[SweptPoint], name: str) -> bool:
    return len({o.point.get(name) for o in swept}) > 1


def table(swept: Sequence[SweptPoint]) -> list[str]:
    names = axes_of(swept)
    has_seeds = any(o.seeds > 1 for o in swept)

    def four_digits(x: float | None) -> str:
        return "" if x is None else f"{x:.4f}"

    rows = [[_flag(name) for name in names]]
    # Columns for the spread only where points have several seeds.
    rows[0] += ["held-out", *(["+-", "seeds"] if has_seeds else [])]
    rows[0] += ["training", "tokens", "time", "state"]
    for o in swept:
        row = [o.point.get(name, "") for name in names]
        row.append(four_digits(o.held_out))
        if has_seeds:
            row += [four_digits(o.spread), str(o.seeds)]
        tokens = "" if o.tokens is None else f"{o.tokens:,}"
        row += [four_digits(o.training), tokens, duration(o.seconds), o.state]
        rows.append(row)
    return align_columns(rows, to_the_right=True)


def _flag(name: str) -> str:
    """Return a setting's flag without its hyphens."""
    return spelling(name)[2:]


def picture(swept: Sequence[SweptPoint], title: str) -> str:
    """Return an SVG: a panel for each axis, the loss over its values.

    Points that differ in that axis alone are joined by a line, if there are not too many lines.
    Runs that were stopped are hollow. Scales are logarithmic where the values are.
    """
    import matplotlib
    from matplotlib.figure import Figure

    shown = [o for o in swept if math.isfinite(o.loss)]
    # A panel for each axis that has several values, in two columns.
    names = [name for name in axes_of(shown) if _differs(shown, name)][:MOST_PANELS]
    columns = min(max(len(names), 1), 2)
    height = -(-len(names) // columns) or 1
    figure = Figure(figsize=(5.2 * columns, 3.6 * height), layout="constrained")
    figure.patch.set_visible(False)
    with matplotlib.rc_context({"text.parse_math": False}):  # a $ in a value is a $
        for number, name in enumerate(names):
            axes = figure.add_subplot(height, columns, number + 1)
            _draw_panel(axes, shown, name)
            if number % columns == 0:
                kind = "training" if shown[0].held_out is None else "held-out"
                axes.set_ylabel(f"{kind} loss", color=plot.INK)
        return plot.svg_of(figure, title)


def _draw_panel(axes: Axes, shown: Sequence[SweptPoint], name: str) -> None:
    # Values that are no numbers are placed in their order.
    texts = list(dict.fromkeys(o.point.get(name, "") for o in shown))
    numbers = _numbers(texts)
    at = numbers or [float(i) for i in range(len(texts))]
    places = dict(zip(texts, at, strict=True))
    plot.style(axes, _flag(name))

    # A line for all points with the same values of the other axes.
    lines: dict[Items, list[SweptPoint]] = {}
    for o in shown:
        lines.setdefault(items_without(o.point, name), []).append(o)
    joins = len(lines) <= MOST_LINES
    differing = axes_of([members[0] for members in lines.values()])
    labelled = [n for n in differing if n != name]
    for members, colour in zip(lines.values(), itertools.cycle(COLOURS), strict=False):
        points = sorted((places[o.point.get(name, "")], o.loss, o.state) for o in members)
        if joins:
            # The legend says by what the lines differ.
            first = members[0].point
            label = ", ".join(f"{_flag(n)} {first.get(n, '')}" for n in labelled)
            x, y, _ = zip(*points, strict=True)
            axes.plot(x, y, color=colour, lw=1.2, label=label or None)
        else:
            colour = plot.LINE
        for place, loss, state in points:
            axes.plot(
                place,
                loss,
                "o",
                ms=4.5,
                color=colour,
                mfc=colour if state == "done" else "none",
            )

    _scale(axes, texts, numbers)
    if joins and len(lines) > 1:
        axes.legend(fontsize=7, frameon=False, labelcolor=plot.INK)


def _scale(axes: Axes, texts: Sequence[str], numbers: Sequence[float]) -> None:
    """Put ticks at the values, or decades where there are many."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    if numbers and is_logarithmic(numbers):
        axes.set_xscale("log")
    # Each value has a tick, unless their labels would overlap.
    if numbers and len(numbers) > 8:
        axes.xaxis.set_major_locator(LogLocator() if is_logarithmic(numbers) else MaxNLocator(6))
        axes.xaxis.set_major_formatter("{x:g}")
    else:
        axes.set_xticks(list(numbers) or range(len(texts)), list(texts))
    axes.xaxis.set_minor_locator(NullLocator())


def _numbers(texts: Sequence[str]) -> list[float]:
    """Return the values of an axis, or nothing if not all of them are finite numbers."""
    try:
        numbers = list(map(float, texts))
    except ValueError:
        return []
    return numbers if all(map(math.isfinite, numbers)) else []


def write_picture(folder: Path, swept: Sequence[SweptPoint]) -> Path:
    path = folder / PICTURE
    with replacing(path) as file:
        file.write(picture(swept, folder.resolve().name).encode())
    return path
