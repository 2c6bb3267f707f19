"""Compute the curves of one range for the page, thinned without losing their extremes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from meshwright.apps.pages import plot
from meshwright.base.runs.follow import RunTail, Steps
from meshwright.training.tasks import describe_column

Axis = Literal["step", "tokens", "time"]
SMOOTH = ("loss", "grad_norm", "tokens_per_second", "ms")  # as on the page of `report`
DRAWN = ("loss", "lr", "grad_norm", "tokens_per_second", "ms", "mfu", "memory")
UNITS = {"mfu": 100.0, "memory": 2.0**-30}  # percent, GiB
MEDIANS = 1000  # steps that stand for all those of a wide median


@dataclass(frozen=True)
class View:
    """The part of the x-axis that is shown, and how."""

    axis: Axis = "step"
    begin: float = -math.inf
    end: float = math.inf
    points: int = 1000  # per line at most
    smooth: float = 0.04  # width of the running median, as a share of the steps shown


def positions(run: RunTail, axis: Axis) -> Steps:
    """Return where each step lies: iterations, tokens (or samples), or seconds spent in steps."""
    if axis == "tokens":
        tokens = run.tokens_read()
        return run.column("consumed_samples") if tokens is None else tokens
    if axis == "time":
        return np.cumsum(run.column("ms")) / 1e3
    return run.column("iteration")


def loss_units(runs: Sequence[RunTail]) -> tuple[str, list[float]]:
    """Return the unit in which the runs' losses are drawn together, and the factor of each.

    It is "" where they are comparable as they are: nats per token of one vocabulary. Runs of
    several are drawn in bits per byte ("bits") if all say how many bytes a token has, and are
    "mixed" otherwise.
    """
    known = [size for run in runs if (size := bytes_per_token(run))]
    vocabularies = {vocabulary_of(run) for run in runs}
    # Runs on samples of one text measure slightly different bytes per token.
    are_sizes_equal = not known or max(known) < 1.01 * min(known)
    unchanged = [1.0] * len(runs)
    if len(vocabularies) < 2 and are_sizes_equal:
        return "", unchanged
    if len(known) < len(runs):
        return "mixed", unchanged
    # From nats per token: 1 / ln 2 bits for a nat, and so many bytes for a token.
    return "bits", [1 / (math.log(2) * size) for size in known]


def bytes_per_token(run: RunTail) -> float:
    """Return about how many bytes of text a token stands for, 0 if the run does not say it."""
    attempts = run.record.attempts
    size = attempts[-1].start.get("bytes_per_token") if attempts else None
    if isinstance(size, int | float) and 0 < size < math.inf:
        return float(size)
    return 0.0


def vocabulary_of(run: RunTail) -> str:
    """Return what the settings say of the vocabulary."""
    names = ("tokenizer", "tokenizer_type", "vocab_file", "vocab_size")
    return repr([run.settings.get(name) for name in names])


def curves(run: RunTail, view: View, loss_factor: float = 1.0) -> dict[str, Any]:
    """Return what is drawn of a run, as lists; the caller holds its lock.

    Each line has the points "x", "y", and if it is smoothed their median "mx", "my", which is of
    "width" steps. Where a number is not finite, "bad" has the place.
    """
    x = positions(run, view.axis)
    begin = int(np.searchsorted(x, view.begin))
    end = int(np.searchsorted(x, view.end, "right"))
    # A share of what is shown, so that a closer look is smoothed less.
    half = round(view.smooth * (end - begin) / 2)
    lines = {}
    for name in DRAWN:
        factor = loss_factor if name == "loss" else UNITS.get(name, 1.0)
        width = half if name in SMOOTH else 0
        line = curve_line(x, run.column(name) * factor, (begin, end), width, view.points)
        if name in UNITS:
            line["bad"] = []  # unknown on this device
        if line["x"] or line["bad"]:
            lines[name] = line

    record = run.record
    places = Places(run, x)
    # Validations in the unit of the losses, a line for each set and for its average.
    checks: dict[str, list[tuple[int, float]]] = {}
    for v in record.validations:
        checks.setdefault(v.title, []).append((v.iteration, v.loss * loss_factor))
        if v.ema_loss is not None:
            averages = checks.setdefault(f"{v.title}, average", [])
            averages.append((v.iteration, v.ema_loss * loss_factor))
    scores = {}
    for name, by_step in record.scores.items():
        if by_step:
            points = places.points(sorted(by_step.items()))
            scores[name] = points | {"unit": describe_column(name)}
    return {
        "range": [float(x[0]), float(x[-1])] if len(x) else None,
        "lines": lines,
        "checks": {name: places.points(values) for name, values in checks.items()},
        "scores": scores,
        "resumed": [places.at(i) for i in record.resumed_at() if places.knows(i)],
    }


class Places:
    """The positions of iterations on the x-axis."""

    def __init__(self, run: RunTail, x: Steps) -> None:
        self.iterations = run.column("iteration")
        self.x = x
        self.is_step = x is self.iterations or np.shares_memory(x, self.iterations)

    def knows(self, iteration: int) -> bool:
        return len(self.x) > 0 and iteration < self.iterations[-1]

    def at(self, iteration: int) -> float:
        """Return the place of the last step up to `iteration`."""
        if self.is_step:
            return float(iteration)
        # A validation lies between two steps, and belongs to the one before.
        n = int(np.searchsorted(self.iterations, iteration, "right"))
        return float(self.x[n - 1]) if n else 0.0

    def points(self, values: Iterable[tuple[int, float]]) -> dict[str, list[Any]]:
        finite = [(i, y) for i, y in values if math.isfinite(y)]
        return {
            "x": [self.at(i) for i, _ in finite],
            "y": [y for _, y in finite],
            "step": [i for i, _ in finite],
        }


def curve_line(
    x: Steps, y: Steps, shown_steps: tuple[int, int], half: int, points: int
) -> dict[str, Any]:
    """Return one line of the steps shown_steps[0] to [1], and one point beyond on each side."""
    # The points, of which those that are not finite have a place and no height.
    first, last = shown_steps
    begin = max(first - 1, 0)
    end = min(last + 1, len(x))
    near_x = x[begin:end]
    near_y = y[begin:end]
    is_finite = np.isfinite(near_y)
    bad = near_x[~is_finite]
    stride = max(1, -(-len(bad) // points))
    shown_x = near_x[is_finite]
    thin_x, thin_y = plot.thin(shown_x, near_y[is_finite], points)
    line: dict[str, Any] = {
        "bad": short(bad[::stride]),
        "x": short(thin_x),
        "y": short(thin_y),
    }
    if not half or len(shown_x) <= 20:
        return line

    # The median at the borders of what is shown reads the steps beyond them. Of a wide one, every
    # so many steps are enough.
    wide = slice(max(begin - half, 0), min(end + half, len(x)))
    is_finite = np.isfinite(y[wide])
    stride = max(1, 2 * half // MEDIANS)
    wide_x = x[wide][is_finite][::stride]
    wide_y = y[wide][is_finite][::stride]
    median_x, median_y = plot.running_median(wide_x, wide_y, max(1, half // stride))
    inside = (median_x >= shown_x[0]) & (median_x <= shown_x[-1])
    line["mx"] = short(median_x[inside])
    line["my"] = short(np.asarray(median_y)[inside])
    line["width"] = 2 * half + 1
    return line


def short(values: Steps) -> list[Any]:
    """Return numbers with up to eight digits, which halve the size of an answer."""
    if not len(values):
        return []
    are_whole = (values == np.rint(values)).all()
    # From 2**53 on, JavaScript has no whole numbers.
    if are_whole and np.abs(values).max() < 2**53:
        integers: list[Any] = values.astype(np.int64).tolist()
        return integers
    return [float(f"{v:.8g}") for v in values]
