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
    tokens: int
    seconds: float
    seeds: int

    @property
    def loss(self) -> float:
        chosen = self.training if self.held_out is None else self.held_out
        return math.inf if chosen is None or math.isnan(chosen) else chosen


def swept_points(runs: Sequence[SweepRun]) -> list[SweptPoint]:
    """Return the swept, finished ones first, by their loss."""
    groups: dict[tuple[tuple[str, str], ...], list[SweepRun]] = {}
    for run in runs:
        groups.setdefault(tuple((n, v) for n, v in run.point.items() if n != "seed"), []).append(
            run
        )
    listed = [_mean_of(dict(key), members) for key, members in groups.items()]
    return sorted(listed, key=lambda o: (STATES.index(o.state), o.loss))


def _mean_of(point: Point, runs: list[SweepRun]) -> SweptPoint:
    held_out, training, tokens, seconds = [], [], 0, 0.0
    for run in runs:
        if (tail := run.tail) is None or not tail.count:
            continue
        if checks := tail.record.mean_validations():
            held_out.append(checks[-1][1])
        training.append(tail.final_loss()[0])
        length, samples = (
            tail.settings.get("seq_length", 1),
            float(tail.column("consumed_samples")[-1]),
        )
        # not of a log or settings that are no run's
        if isinstance(length, int) and max(length, samples) < MOST_STEPS:
            tokens = max(tokens, int(samples) * length)
        seconds += wall_time(tail.record.attempts)[1]
    return SweptPoint(
        point=point,
        state=max((run.state for run in runs), key=STATES.index),
        held_out=statistics.fmean(held_out) if held_out else None,
        spread=statistics.stdev(held_out)
        if len(held_out) > 1 and all(map(math.isfinite, held_out))
        else None,
        training=statistics.fmean(training) if training else None,
        tokens=tokens,
        seconds=seconds,
        seeds=len(runs),
    )


def axes_of(swept: Sequence[SweptPoint]) -> list[str]:
    """Return the settings in which the points differ, or all of a single point."""
    names = list(dict.fromkeys(name for o in swept for name in o.point))
    return [n for n in names if len({o.point.get(n) for o in swept}) > 1] or names


def table(swept: Sequence[SweptPoint]) -> list[str]:
    names, has_seeds = axes_of(swept), any(o.seeds > 1 for o in swept)
    head = [spelling(name)[2:] for name in names]
    rows = [
        [*head, "held-out", *["+-", "seeds"] * has_seeds, "training", "tokens", "time", "state"]
    ]
    for o in swept:
        more = ["" if o.spread is None else f"{o.spread:.4f}", str(o.seeds)] * has_seeds
        losses = ["" if x is None else f"{x:.4f}" for x in (o.held_out, o.training)]
        figures = [losses[0], *more, losses[1], f"{o.tokens:,}", duration(o.seconds), o.state]
        rows.append([*(o.point.get(name, "") for name in names), *figures])
    return align_columns(rows, to_the_right=True)


def picture(swept: Sequence[SweptPoint], title: str) -> str:
    """Return an SVG: a panel for each axis, the loss over its values.

    Points that differ in that axis alone are joined by a line, if there are not too many lines.
    Runs that were stopped are hollow. Scales are logarithmic where the values are.
    """
    import matplotlib
    from matplotlib.figure import Figure

    shown = [o for o in swept if math.isfinite(o.loss)]
    names = [n for n in axes_of(shown) if len({o.point.get(n) for o in shown}) > 1] if shown else []
    names = names[:MOST_PANELS]
    columns = min(max(len(names), 1), 2)
    height = -(-len(names) // columns) or 1
    figure = Figure(figsize=(5.2 * columns, 3.6 * height), layout="constrained")
    figure.patch.set_visible(False)
    with matplotlib.rc_context({"text.parse_math": False}):  # a $ in a value is a $
        for number, name in enumerate(names, 1):
            axes = figure.add_subplot(height, columns, number)
            _draw_panel(axes, shown, name)
            if number % columns == 1 or columns == 1:
                axes.set_ylabel(
                    "held-out loss" if shown[0].held_out is not None else "training loss",
                    color=plot.INK,
                )
        return plot.svg_of(figure, title)


def _draw_panel(axes: Axes, shown: Sequence[SweptPoint], name: str) -> None:
    texts = list(dict.fromkeys(o.point.get(name, "") for o in shown))
    numbers = _numbers(texts)
    places = dict(zip(texts, numbers or map(float, range(len(texts))), strict=True))
    plot.style(axes, spelling(name)[2:])
    lines: dict[str, list[SweptPoint]] = {}
    for o in shown:
        others = ", ".join(f"{spelling(n)[2:]} {v}" for n, v in o.point.items() if n != name)
        lines.setdefault(others, []).append(o)
    joins = len(lines) <= MOST_LINES
    differing = axes_of([members[0] for members in lines.values()])
    for members, colour in zip(lines.values(), itertools.cycle(COLOURS), strict=False):
        pairs = sorted((places[o.point.get(name, "")], o.loss, o.state) for o in members)
        x, y = [p[0] for p in pairs], [p[1] for p in pairs]
        label = ", ".join(
            f"{spelling(n)[2:]} {members[0].point.get(n, '')}" for n in differing if n != name
        )
        colour = colour if joins else plot.LINE
        if joins:
            axes.plot(x, y, color=colour, lw=1.2, label=label or None)
        for place, loss, state in pairs:
            axes.plot(
                place, loss, "o", ms=4.5, color=colour, mfc=colour if state == "done" else "none"
            )
    _scale(axes, texts, numbers)
    if joins and len(lines) > 1:
        axes.legend(fontsize=7, frameon=False, labelcolor=plot.INK)


def _scale(axes: Axes, texts: Sequence[str], numbers: Sequence[float]) -> None:
    """Put ticks at the values, or decades where there are many."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    if numbers and is_logarithmic(numbers):
        axes.set_xscale("log")
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
