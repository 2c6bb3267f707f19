"""The comparison of several runs with the first: distances of losses, settings that differ."""

from __future__ import annotations

import bisect
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.apps.pages import plot
from meshwright.apps.pages.html import document, escape, html_table, write_page
from meshwright.apps.pages.runs import differing
from meshwright.apps.pages.styles import style_of
from meshwright.apps.report.page import columns, explain_validations
from meshwright.base.errors import BAD_DATA, DONE, UNEXPECTED, USAGE, UserError
from meshwright.base.progress import duration
from meshwright.base.records import align_columns, json_ready
from meshwright.base.runs.goodput import read_goodput
from meshwright.base.runs.history import (
    History,
    flat_settings,
    read_history,
    read_settings,
    wall_time,
)
from meshwright.base.storage.addresses import shown
from meshwright.config.problem import SettingsError


@dataclass(frozen=True)
class ComparedRun:
    name: str
    history: History
    settings: dict[str, Any]
    unit: str  # "tokens", or "samples" if the sequence length of one of the runs is unknown
    scale: int  # units per sample

    def amount(self, iteration: int) -> int:
        """Return the tokens (or samples) consumed by an iteration."""
        steps = self.history.steps
        at = bisect.bisect_right(steps, iteration, key=lambda s: s.iteration)
        return steps[at - 1].consumed_samples * self.scale if at else 0

    def checks(self) -> list[tuple[int, float]]:
        return self.history.mean_validations()

    def validations(self) -> dict[int, float]:
        """Return iteration -> mean validation loss; of the last one's two the first.

        The one at the end reads other batches.
        """
        return dict(sorted(dict(reversed(self.checks())).items()))

    def final(self, kind: str) -> float:
        """Return the last validation loss, or the mean training loss at the end."""
        return self.checks()[-1][1] if kind == "validation" else self.final_training[0]

    @property
    def final_training(self) -> tuple[float, int]:
        return self.history.final_loss(self.settings.get("log_interval"))

    def reaches(self, loss: float, kind: str) -> int | None:
        """Return the tokens (or samples) after which the loss is first that low, up to rounding."""
        loss += 1e-6 * abs(loss)
        if kind == "validation":
            return next((self.amount(i) for i, x in self.checks() if x <= loss), None)
        x, y = curve(self, "loss", by_amount=True)
        if len(y) > 20:
            x, y = plot.running_median(x, y, len(y) // 100)
        return next((int(n) for n, value in zip(x, y, strict=True) if value <= loss), None)


def compare_runs(
    folders: Sequence[Path], output: Path | None, as_json: bool, tolerance: float | None
) -> int:
    """Print the comparison, write its page, return 1 if losses differ by more than `tolerance`."""
    if tolerance is not None and not tolerance >= 0:
        raise SettingsError(f"{{tolerance={tolerance}}} must be a number of at least 0", USAGE)
    runs = read_runs(folders)
    comparison: dict[str, Any] = {
        "unit": runs[0].unit,
        "runs": [figures(r) for r in runs],
        "settings": differing([r.settings for r in runs]),
        "differences": [difference(runs[0], r) for r in runs[1:]],
        "notes": [*dict.fromkeys(note for r in runs[1:] for note in cautions(runs[0], r))],
    }
    if as_json:
        print(json.dumps(json_ready(comparison), allow_nan=False))
    else:
        print("\n".join(comparison_as_text(comparison)))
    if output or not as_json:
        text = page(runs, comparison)
        target = write_page(output or folders[0] / "compare.html", text, typed=output is not None)
        print(target, file=sys.stderr if as_json else sys.stdout)
    if tolerance is None:
        return DONE
    if not all(d["common_steps"] for d in comparison["differences"]):
        raise SettingsError("{tolerance}: these runs have no iteration in common", BAD_DATA)
    worst = max(abs(d["largest"]["loss"]) for d in comparison["differences"])
    if worst > tolerance:
        print(
            f"the losses differ by {worst:g}, more than --tolerance {tolerance:g}", file=sys.stderr
        )
    return UNEXPECTED if worst > tolerance else DONE


def read_runs(folders: Sequence[Path]) -> list[ComparedRun]:
    names = [f.resolve().name for f in folders]
    if len(set(names)) < len(names):
        names = [shown(str(f)) for f in folders]
    read = []
    for folder in folders:
        history = read_history(folder)
        if not history.steps:
            raise UserError(f"{folder / 'metrics.jsonl'} holds no step", BAD_DATA)
        read.append((history, flat_settings(read_settings(folder))))
    unit = (
        "tokens"
        if all(isinstance(settings.get("seq_length"), int) for _, settings in read)
        else "samples"
    )
    return [
        ComparedRun(
            name, history, settings, unit, settings["seq_length"] if unit == "tokens" else 1
        )
        for name, (history, settings) in zip(names, read, strict=True)
    ]


def figures(r: ComparedRun) -> dict[str, Any]:
    steps, checks = r.history.steps, r.checks()
    last, best = steps[-1].iteration, r.history.best_validation()
    out = {
        "name": r.name,
        "steps": last,
        "amount": r.amount(last),
        "final_loss": r.final("training"),
    }
    out["final_loss_steps"] = r.final_training[1]
    out |= {
        "final_validation": r.final("validation") if checks else None,
        "best_validation": best and best[1],
    }
    speed = statistics.median(s.tokens_per_second for s in steps)
    goodput = read_goodput(r.history)
    out |= {"tokens_per_second": speed, "seconds": wall_time(r.history.attempts)[1]}
    out["scores"] = {
        name: scores[max(scores)] for name, scores in r.history.scores.items() if scores
    }
    return out | {"goodput": goodput.share if goodput else None}


# The settings that decide which tokens a validation reads.
_VALIDATED_ON = """
    data_path data_args_path valid_data_path per_split_data_args_path valid_weighted_split_paths
    valid_weighted_split_paths_path multiple_validation_sets full_validation split split_arithmetic seq_length seed
    mock_data eval_iters eval_interval global_batch_size vocab_file tokenizer_model tokenizer_type
    tokenizer
""".split()


def cautions(a: ComparedRun, b: ComparedRun) -> list[str]:
    """Return what a reader must know before trusting the numbers."""
    out = []
    if amounts_differ((a, b)):
        out.append(
            f"differences are taken at equal iterations, which are not equal {a.unit} here: see the picture"
        )
    if other := validated_differently(a, b):
        out.append(f"validated on other data ({', '.join(other)}): these losses are not comparable")
    return out


def validated_differently(a: ComparedRun, b: ComparedRun) -> list[str]:
    """Return the settings by which two runs were validated on other data."""
    both = a.validations() and b.validations()
    return [n for n in _VALIDATED_ON if both and a.settings.get(n) != b.settings.get(n)]


def amounts_differ(runs: Sequence[ComparedRun]) -> bool:
    """Return whether some iteration comes after different amounts of tokens (or samples)."""
    amounts: dict[int, set[int]] = {}
    for r in runs:
        for s in r.history.steps:
            amounts.setdefault(s.iteration, set()).add(s.consumed_samples * r.scale)
    return any(len(each) > 1 for each in amounts.values())


def difference(a: ComparedRun, b: ComparedRun) -> dict[str, Any]:
    """Return how b's losses differ from a's, b - a, at the iterations that both have."""
    before, after = ({s.iteration: s.loss for s in r.history.steps} for r in (a, b))
    gaps = {i: gap(before[i], after[i]) for i in before if i in after}
    relative = {i: abs(g / before[i]) if g and before[i] else abs(g) for i, g in gaps.items()}
    late = [g for g in list(gaps.values())[-max(1, len(gaps) // 10) :] if math.isfinite(g)]
    checks = b.validations()
    kind = "validation" if checks and a.validations() else "training"

    def reached(x: ComparedRun, y: ComparedRun) -> dict[str, Any]:
        loss = y.final(kind)
        return {
            "run": x.name,
            "loss_of": y.name,
            "kind": kind,
            "loss": loss,
            "after": x.reaches(loss, kind),
        }

    return {
        "runs": [a.name, b.name],
        "common_steps": len(gaps),
        "first": next((i for i in gaps if before[i].hex() != after[i].hex()), None),
        "largest": largest(gaps, "loss"),
        "largest_relative": largest(relative, "share"),
        "mean_of_last_tenth": statistics.fmean(late) if late else None,
        "validation": {i: gap(x, checks[i]) for i, x in a.validations().items() if i in checks},
        "reached": [] if validated_differently(a, b) else [reached(b, a), reached(a, b)],
    }


def gap(before: float, after: float) -> float:
    """Return after - before: 0 for equal bits, even of two NaNs; inf if only one is a number."""
    if before.hex() == after.hex():
        return 0.0
    return after - before if math.isfinite(after - before) else math.inf


def largest(values: dict[int, float], name: str) -> dict[str, Any] | None:
    at = max(values, key=lambda i: abs(values[i]), default=None)
    return None if at is None else {name: values[at], "iteration": at}


# Tables


def summary(comparison: dict[str, Any]) -> list[list[str]]:
    """Return the lines of a table with a column for each run."""
    counts = {r["final_loss_steps"] for r in comparison["runs"]}
    steps = f"{max(counts)} steps" if len(counts) == 1 else "the last steps"
    mean = f", mean of {steps}" if max(counts) > 1 else ""
    form = {
        "steps": ("steps", ","),
        "amount": (comparison["unit"], ","),
        "final_loss": (f"final training loss{mean}", ".4f"),
        "final_validation": ("final validation loss", ".4f"),
        "best_validation": ("best validation loss", ".4f"),
        "tokens_per_second": ("tokens per second, median", ",.0f"),
    }
    body = [
        [label, *("-" if r[key] is None else format(r[key], how) for r in comparison["runs"])]
        for key, (label, how) in form.items()
    ]
    for name in dict.fromkeys(name for r in comparison["runs"] for name in r["scores"]):
        scores = (r["scores"].get(name) for r in comparison["runs"])
        body.append(
            [f"final {name}", *("-" if score is None else f"{score:,.4f}" for score in scores)]
        )
    body.append(["wall time", *(duration(r["seconds"]) for r in comparison["runs"])])
    shares = [r["goodput"] for r in comparison["runs"]]
    return [*body, ["goodput", *("-" if share is None else f"{share:.1%}" for share in shares)]]


def distances(comparison: dict[str, Any]) -> list[list[str]]:
    """Return the lines of a table with a column for each run but the first."""
    out = []
    for d in comparison["differences"]:
        far, share, checks = d["largest"], d["largest_relative"], d["validation"]
        column = {"common steps": f"{d['common_steps']:,}"}
        if far:
            mean, first = d["mean_of_last_tenth"], d["first"]
            first_bit = "none: equal to the last bit" if first is None else f"iteration {first:,}"
            column |= {
                "first difference in any bit": first_bit,
                "largest difference": f"{far['loss']:+.4g} at {far['iteration']:,}",
                "largest relative difference": f"{percentage(share['share'])} at {share['iteration']:,}",
                "mean difference, last 10% of them": "-" if mean is None else f"{mean:+.4g}",
            }
        if checks:
            worst = largest(checks, "loss") or {}
            column["largest validation difference"] = (
                f"{worst['loss']:+.4g} at {worst['iteration']:,}"
            )
            column["last validation difference"] = (
                f"{list(checks.values())[-1]:+.4g} at {list(checks)[-1]:,}"
            )
        for r, who in zip(
            d["reached"], ("it reaches the first's", "the first reaches its"), strict=False
        ):
            reached = (
                "never" if r["after"] is None else f"after {r['after']:,} {comparison['unit']}"
            )
            column[f"{who} final {r['kind']} loss"] = f"{r['loss']:.4f} {reached}"
        out.append(column)
    return [[label, *(c.get(label, "-") for c in out)] for label in {k: 0 for c in out for k in c}]


def percentage(x: float) -> str:
    return f"{x:.0e}".replace("e-0", "e-") if 0 < x < 1e-4 else f"{x:.2%}"


def comparison_as_text(comparison: dict[str, Any]) -> list[str]:
    names = [r["name"] for r in comparison["runs"]]
    lines = align_columns(turned([["", *names], *summary(comparison)]))
    lines += [
        "",
        *align_columns(turned([[f"compared with {names[0]}", *names[1:]], *distances(comparison)])),
    ]
    settings = [
        f"  {n}: {' | '.join(map(show_setting, values))}"
        for n, values in comparison["settings"].items()
    ]
    notes = [f"note: {note}" for note in comparison["notes"]]
    return [
        *lines,
        *notes,
        "",
        "settings that differ:" if settings else "no setting differs",
        *settings,
    ]


def turned(rows: list[list[str]]) -> list[list[str]]:
    """Give each run a line instead of a column where there are many."""
    return [list(column) for column in zip(*rows, strict=True)] if len(rows[0]) > 5 else rows


def show_setting(value: Any) -> str:
    return "none" if value is None else json.dumps(value, default=str, ensure_ascii=False)


# The page


def page(runs: Sequence[ComparedRun], comparison: dict[str, Any]) -> str:
    names = [r.name for r in runs]
    settings = [[n, *map(show_setting, values)] for n, values in comparison["settings"].items()]
    parts = [
        f"<h1>{escape(', '.join(names))}</h1>",
        wide_table([["", *names], *summary(comparison)]),
        f'<div class="pictures">{"".join(plots(runs))}</div>',
        f"<h2>Compared with {escape(names[0])}</h2>",
        wide_table([["", *names[1:]], *distances(comparison)]),
        *(f'<p class="quiet">Note: {escape(note)}.</p>' for note in comparison["notes"]),
        *explained(runs),
        f"<h2>Settings that differ ({len(settings)})</h2>",
        html_table(settings, "numbers", ["", *names]) if settings else '<p class="quiet">None.</p>',
    ]
    return document(f"{', '.join(names)}: comparison", parts)


def wide_table(rows: list[list[str]]) -> str:
    head, *body = turned(rows)
    return html_table(body, "numbers runs", head)


def explained(runs: Sequence[ComparedRun]) -> list[str]:
    """Return what the best and the last validation of each run mean."""
    words = [(r.name, line) for r in runs for line in explain_validations(r.history, r.settings)]
    lines = (f"<p><b>{escape(name)}</b>: {escape(line)}</p>" for name, line in words)
    return ["<h2>Best and last validation</h2>", *lines] if words else []


def curve(r: ComparedRun, column: str, by_amount: bool) -> tuple[Any, Any]:
    """Return a column's finite values over iterations or over tokens."""
    x, y = columns(r.history.steps, column, "consumed_samples" if by_amount else "iteration")
    is_finite = np.isfinite(y)
    return x[is_finite] * (r.scale if by_amount else 1), y[is_finite]


def plots(runs: Sequence[ComparedRun]) -> list[str]:
    """Return losses, differences and learning rates; over tokens if the steps differ in size."""
    by_amount = amounts_differ(runs)
    x_label = runs[0].unit if by_amount else "iteration"
    marks = "points: validation" if any(r.validations() for r in runs) else ""
    notes = {"Loss": marks, "Difference": f"loss minus that of {runs[0].name}", "Learning rate": ""}
    drawn = {t: plot.new_axes((7.6, 3.4 if t == "Loss" else 2.4), x=x_label) for t in notes}
    losses, differences, rates = (axes for _, axes in drawn.values())
    differences.axhline(0, color=plot.INK, lw=0.8, alpha=0.6)
    legends = dict.fromkeys(drawn, "")  # of what is drawn, and no more
    x0, y0 = curve(runs[0], "loss", by_amount)
    for number, r in enumerate(runs):
        style = style_of(number)
        key = plot.key(style.sign, style.colour, r.name)
        x, y = curve(r, "loss", by_amount)
        signs = []
        if len(x):
            plot.draw_line(losses, x, y, style.colour, style.line)
            signs.append(style.sign)
        checks = [
            (r.amount(i) if by_amount else i, v)
            for i, v in r.validations().items()
            if math.isfinite(v)
        ]
        if checks:
            losses.plot(*zip(*checks, strict=True), style.marker, color=style.colour, ms=5)
            signs.append(style.marker_sign)
        legends["Loss"] += plot.key(" ".join(signs), style.colour, r.name) if signs else ""
        rates.plot(
            *plot.thin(*curve(r, "lr", by_amount)), color=style.colour, ls=style.line, lw=1.6
        )
        legends["Learning rate"] += key
        if number and len(x) and (both := (x0 >= x[0]) & (x0 <= x[-1])).any():
            plot.draw_line(
                differences,
                x0[both],
                np.interp(x0[both], x, y) - y0[both],
                style.colour,
                style.line,
            )
            legends["Difference"] += key
    return [
        plot.embed_figure(figure, t, notes[t], legends[t], wide=True)
        for t, (figure, _) in drawn.items()
        if legends[t]
    ]
