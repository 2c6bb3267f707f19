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
        return run.column("consumed_samples") * scale_of(run)
    return np.cumsum(run.column("ms")) / 1e3 if axis == "time" else run.column("iteration")


def scale_of(run: RunTail) -> int:
    """Return the tokens of a sample, or 1 if that is unknown, to count samples."""
    length = run.settings.get("seq_length")
    return length if isinstance(length, int) and length > 0 else 1


def loss_units(runs: Sequence[RunTail]) -> tuple[str, list[float]]:
    """Return the unit in which the runs' losses are drawn together, and the factor of each.

    It is "" where they are comparable as they are: nats per token of one vocabulary. Runs of
    several are drawn in bits per byte ("bits") if all say how many bytes a token has, and are
    "mixed" otherwise.
    """
    sizes = [bytes_per_token(run) for run in runs]
    known = [size for size in sizes if size]
    is_one = len({vocabulary_of(run) for run in runs}) < 2 and max(known, default=1) < 1.01 * min(
        known, default=1
    )
    if not is_one and len(known) == len(runs):
        return "bits", [1 / (math.log(2) * size) for size in known]
    return "" if is_one else "mixed", [1.0] * len(runs)


def bytes_per_token(run: RunTail) -> float:
    """Return about how many bytes of text a token stands for, 0 if the run does not say it."""
    size = run.record.attempts[-1].start.get("bytes_per_token") if run.record.attempts else None
    return float(size) if isinstance(size, int | float) and 0 < size < math.inf else 0.0


def vocabulary_of(run: RunTail) -> str:
    """Return what the settings say of the vocabulary."""
    return repr(
        [run.settings.get(n) for n in ("tokenizer", "tokenizer_type", "vocab_file", "vocab_size")]
    )


def curves(run: RunTail, view: View, loss_factor: float = 1.0) -> dict[str, Any]:
    """Return what is drawn of a run, as lists; the caller holds its lock.

    Each line has the points "x", "y", and if it is smoothed their median "mx", "my", which is of
    "width" steps. Where a number is not finite, "bad" has the place.
    """
    x = positions(run, view.axis)
    shown_steps = (int(np.searchsorted(x, view.begin)), int(np.searchsorted(x, view.end, "right")))
    half = round(view.smooth * (shown_steps[1] - shown_steps[0]) / 2)
    lines = {}
    for name in DRAWN:
        y = run.column(name) * (loss_factor if name == "loss" else UNITS.get(name, 1.0))
        lines[name] = curve_line(x, y, shown_steps, half if name in SMOOTH else 0, view.points)
        if name in UNITS:
            lines[name]["bad"] = []  # unknown on this device
    record, places = run.record, Places(run, x)
    checks: dict[str, list[tuple[int, float]]] = {}
    for v in record.validations:
        checks.setdefault(v.title, []).append((v.iteration, v.loss * loss_factor))
        if v.ema_loss is not None:
            checks.setdefault(f"{v.title}, average", []).append(
                (v.iteration, v.ema_loss * loss_factor)
            )
    return {
        "range": [float(x[0]), float(x[-1])] if len(x) else None,
        "lines": {name: drawn for name, drawn in lines.items() if drawn["x"] or drawn["bad"]},
        "checks": {name: places.points(values) for name, values in checks.items()},
        "scores": {
            name: places.points(sorted(v.items())) | {"unit": describe_column(name)}
            for name, v in record.scores.items()
            if v
        },
        "resumed": [places.at(i) for i in record.resumed_at() if places.knows(i)],
    }


class Places:
    """The positions of iterations on the x-axis."""

    def __init__(self, run: RunTail, x: Steps) -> None:
        self.iterations, self.x = run.column("iteration"), x
        self.is_step = x is self.iterations or np.shares_memory(x, self.iterations)

    def knows(self, iteration: int) -> bool:
        return len(self.x) > 0 and iteration < self.iterations[-1]

    def at(self, iteration: int) -> float:
        """Return the place of the last step up to `iteration`."""
        if self.is_step:
            return float(iteration)
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
    """Return one line of the steps where[0] to where[1], and one point beyond on each side."""
    begin, end = max(shown_steps[0] - 1, 0), min(shown_steps[1] + 1, len(x))
    finite = np.isfinite(y[begin:end])
    bad, shown = x[begin:end][~finite], (x[begin:end][finite], y[begin:end][finite])
    out: dict[str, Any] = {"bad": short(bad[:: max(1, -(-len(bad) // points))])}
    out["x"], out["y"] = map(short, plot.thin(*shown, points))
    if half and len(shown[0]) > 20:
        # The median at the borders of what is shown reads the steps beyond them.
        first, last = max(begin - half, 0), min(end + half, len(x))
        is_finite = np.isfinite(y[first:last])
        stride = max(1, 2 * half // MEDIANS)
        wide = x[first:last][is_finite][::stride], y[first:last][is_finite][::stride]
        mx, my = plot.running_median(*wide, max(1, half // stride))
        inside = (mx >= shown[0][0]) & (mx <= shown[0][-1])
        out |= {"mx": short(mx[inside]), "my": short(np.asarray(my)[inside]), "width": 2 * half + 1}
    return out


def short(values: Steps) -> list[Any]:
    """Return numbers with up to eight digits, which halve the size of an answer."""
    if len(values) and (values == np.rint(values)).all() and np.abs(values).max() < 2**53:
        integers: list[Any] = values.astype(np.int64).tolist()
        return integers
    return [float(f"{v:.8g}") for v in values]
