"""The comparison of several runs with the first: distances of losses, settings that differ."""

from __future__ import annotations

import bisect
import itertools
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
from meshwright.base.records import align_columns, json_ready, or_dash
from meshwright.base.runs.amounts import Numbers, tokens_of_steps
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
    unit: str  # "tokens", or "samples" if those of one run have an unknown length
    amounts: Numbers  # what it has consumed by the end of each step

    def amount(self, iteration: int) -> int:
        """Return the tokens (or samples) consumed by an iteration."""
        steps = self.history.steps
        at = bisect.bisect_right(steps, iteration, key=lambda s: s.iteration)
        return int(self.amounts[at - 1]) if at else 0

    def checks(self) -> list[tuple[int, float]]:
        return self.history.mean_validations()

    def validations(self) -> dict[int, float]:
        """Return iteration -> mean validation loss.

        A run validates its last step twice; the first time is taken, since the one at the end
        reads other batches.
        """
        earliest = dict(reversed(self.checks()))
        return dict(sorted(earliest.items()))

    def final(self, kind: str) -> float:
        """Return the last validation loss, or the mean training loss at the end."""
        return self.checks()[-1][1] if kind == "validation" else self.final_training[0]

    @property
    def final_training(self) -> tuple[float, int]:
        return self.history.final_loss(self.settings.get("log_interval"))

    def reaches(self, loss: float, kind: str) -> int | None:
        """Return the tokens (or samples) after which the loss is first that low, up to rounding."""
        # Two runs that are equal but for rounding reach each other's loss.
        loss += 1e-6 * abs(loss)
        if kind == "validation":
            for iteration, validated in self.checks():
                if validated <= loss:
                    return self.amount(iteration)
            return None
        x, y = curve(self, "loss", by_amount=True)
        # Single losses are noisy, so a short run of low ones does not count.
        if len(y) > 20:
            x, y = plot.running_median(x, y, len(y) // 100)
        for amount, smoothed in zip(x, y, strict=True):
            if smoothed <= loss:
                return int(amount)
        return None


def compare_runs(
    folders: Sequence[Path], output: Path | None, as_json: bool, tolerance: float | None
) -> int:
    """Print the comparison, write its page, return 1 if losses differ by more than `tolerance`."""
    if tolerance is not None and not tolerance >= 0:
        raise SettingsError(f"{{tolerance={tolerance}}} must be a number of at least 0", USAGE)
    runs = read_runs(folders)
    comparison = describe_comparison(runs)
    if as_json:
        print(json.dumps(json_ready(comparison), allow_nan=False))
    else:
        print("\n".join(comparison_as_text(comparison)))

    # With --json, standard output has the JSON alone.
    if output or not as_json:
        text = page(runs, comparison)
        target = write_page(output or folders[0] / "compare.html", text, typed=output is not None)
        print(target, file=sys.stderr if as_json else sys.stdout)

    if tolerance is None:
        return DONE
    differences = comparison["differences"]
    if not all(d["common_steps"] for d in differences):
        raise SettingsError("{tolerance}: these runs have no iteration in common", BAD_DATA)
    worst = max(abs(d["largest"]["loss"]) for d in differences)
    if worst <= tolerance:
        return DONE
    print(f"the losses differ by {worst:g}, more than --tolerance {tolerance:g}", file=sys.stderr)
    return UNEXPECTED


def describe_comparison(runs: Sequence[ComparedRun]) -> dict[str, Any]:
    """Return all that is shown, as JSON has it."""
    first, *others = runs
    notes = [note for run in others for note in cautions(first, run)]
    return {
        "unit": first.unit,
        "runs": [figures(run) for run in runs],
        "settings": differing([run.settings for run in runs]),
        "differences": [difference(first, run) for run in others],
        "notes": list(dict.fromkeys(notes)),
    }


def read_runs(folders: Sequence[Path]) -> list[ComparedRun]:
    # Folders of the same name are told apart by their paths.
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [shown(str(folder)) for folder in folders]

    read = []
    for folder in folders:
        history = read_history(folder)
        if not history.steps:
            raise UserError(f"{folder / 'metrics.jsonl'} holds no step", BAD_DATA)
        read.append((history, flat_settings(read_settings(folder))))

    # All runs are counted in one unit.
    tokens = [tokens_of_steps(history.steps, settings) for history, settings in read]
    unit = "samples" if any(amounts is None for amounts in tokens) else "tokens"
    runs = []
    for name, (history, settings), amounts in zip(names, read, tokens, strict=True):
        if amounts is None or unit == "samples":
            amounts = np.array([s.consumed_samples for s in history.steps], dtype=np.float64)
        runs.append(ComparedRun(name, history, settings, unit, amounts))
    return runs


def figures(r: ComparedRun) -> dict[str, Any]:
    steps = r.history.steps
    last = steps[-1].iteration
    loss, loss_steps = r.final_training
    best = r.history.best_validation()
    goodput = read_goodput(r.history)
    scores = r.history.scores
    return {
        "name": r.name,
        "steps": last,
        "amount": r.amount(last),
        "final_loss": loss,
        "final_loss_steps": loss_steps,
        "final_validation": r.final("validation") if r.checks() else None,
        "best_validation": best and best[1],
        "tokens_per_second": statistics.median(s.tokens_per_second for s in steps),
        "seconds": wall_time(r.history.attempts)[1],
        "scores": {name: by_step[max(by_step)] for name, by_step in scores.items() if by_step},
        "goodput": goodput.share if goodput else None,
    }


# The settings that decide which tokens a validation reads.
_VALIDATED_ON = (
    "data_path",
    "data_args_path",
    "valid_data_path",
    "per_split_data_args_path",
    "valid_weighted_split_paths",
    "valid_weighted_split_paths_path",
    "multiple_validation_sets",
    "full_validation",
    "split",
    "split_arithmetic",
    "seq_length",
    "seed",
    "mock_data",
    "eval_iters",
    "eval_interval",
    "global_batch_size",
    "vocab_file",
    "tokenizer_model",
    "tokenizer_type",
    "tokenizer",
)


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
    if not a.validations() or not b.validations():
        return []
    return [n for n in _VALIDATED_ON if a.settings.get(n) != b.settings.get(n)]


def amounts_differ(runs: Sequence[ComparedRun]) -> bool:
    """Return whether some iteration comes after different amounts of tokens (or samples)."""
    amounts: dict[int, float] = {}
    for run in runs:
        for step, amount in zip(run.history.steps, run.amounts.tolist(), strict=True):
            if amounts.setdefault(step.iteration, amount) != amount:
                return True
    return False


def difference(a: ComparedRun, b: ComparedRun) -> dict[str, Any]:
    """Return how b's losses differ from a's, b - a, at the iterations that both have."""
    before = {s.iteration: s.loss for s in a.history.steps}
    after = {s.iteration: s.loss for s in b.history.steps}
    first = None
    gaps: dict[int, float] = {}
    relative: dict[int, float] = {}
    for i, loss in before.items():
        if i not in after:
            continue
        gaps[i] = gap(loss, after[i])
        # Of a loss of 0, or one that is not a number, no share can be taken.
        is_share = gaps[i] and loss and math.isfinite(gaps[i])
        relative[i] = abs(gaps[i] / loss) if is_share else abs(gaps[i])
        if first is None and loss.hex() != after[i].hex():
            first = i
    # The mean at the end of the runs, without steps whose loss is not a number.
    last_tenth = list(gaps.values())[-max(1, len(gaps) // 10) :]
    late = [g for g in last_tenth if math.isfinite(g)]

    # When each reaches the final loss of the other.
    checks = a.validations()
    other_checks = b.validations()
    kind = "validation" if checks and other_checks else "training"
    reached = list[dict[str, Any]]()
    if not validated_differently(a, b):
        for run, other in ((b, a), (a, b)):
            loss = other.final(kind)
            amount = run.reaches(loss, kind)
            names = {"run": run.name, "loss_of": other.name, "kind": kind}
            reached.append({**names, "loss": loss, "after": amount})

    return {
        "runs": [a.name, b.name],
        "common_steps": len(gaps),
        "first": first,
        "largest": largest(gaps, "loss"),
        "largest_relative": largest(relative, "share"),
        "mean_of_last_tenth": statistics.fmean(late) if late else None,
        "validation": {i: gap(x, other_checks[i]) for i, x in checks.items() if i in other_checks},
        "reached": reached,
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
    runs = comparison["runs"]
    # How many steps the final training loss is the mean of, which the log's interval decides.
    counts = {r["final_loss_steps"] for r in runs}
    mean = ""
    if max(counts) > 1:
        steps = f"{max(counts)} steps" if len(counts) == 1 else "the last steps"
        mean = f", mean of {steps}"
    forms = (
        ("steps", "steps", ","),
        (comparison["unit"], "amount", ","),
        (f"final training loss{mean}", "final_loss", ".4f"),
        ("final validation loss", "final_validation", ".4f"),
        ("best validation loss", "best_validation", ".4f"),
        ("tokens per second, median", "tokens_per_second", ",.0f"),
    )
    body = []
    for label, key, form in forms:
        body.append([label, *(or_dash(r[key], form) for r in runs)])
    for name in dict.fromkeys(name for r in runs for name in r["scores"]):
        body.append([f"final {name}", *(or_dash(r["scores"].get(name), ",.4f") for r in runs)])
    body.append(["wall time", *(duration(r["seconds"]) for r in runs)])
    body.append(["goodput", *(or_dash(r["goodput"], ".1%") for r in runs)])
    return body


def distances(comparison: dict[str, Any]) -> list[list[str]]:
    """Return the lines of a table with a column for each run but the first."""
    columns = [distance_column(d, comparison["unit"]) for d in comparison["differences"]]
    # A run may lack lines that others have.
    rows = []
    for label in dict.fromkeys(itertools.chain(*columns)):
        rows.append([label, *(column.get(label, "-") for column in columns)])
    return rows


def loss_at(difference: float, iteration: int) -> str:
    return f"{difference:+.4g} at {iteration:,}"


def distance_column(d: dict[str, Any], unit: str) -> dict[str, str]:
    """Return the cells of one run, by the labels of their lines."""
    column = {"common steps": f"{d['common_steps']:,}"}

    # The training losses of steps that both runs have.
    far = d["largest"]
    if far:
        first = d["first"]
        begin = "none: equal to the last bit" if first is None else f"iteration {first:,}"
        column["first difference in any bit"] = begin
        column["largest difference"] = loss_at(far["loss"], far["iteration"])
        share = d["largest_relative"]
        most = f"{percentage(share['share'])} at {share['iteration']:,}"
        column["largest relative difference"] = most
        mean = or_dash(d["mean_of_last_tenth"], "+.4g")
        column["mean difference, last 10% of them"] = mean

    # Their validations.
    checks = d["validation"]
    if checks:
        worst = largest(checks, "loss") or {}
        column["largest validation difference"] = loss_at(worst["loss"], worst["iteration"])
        last, loss = list(checks.items())[-1]
        column["last validation difference"] = loss_at(loss, last)

    # When each run reached the other's last loss.
    # Neither is known if the runs were validated on other data.
    whose = ("it reaches the first's", "the first reaches its")
    for who, r in zip(whose, d["reached"], strict=False):
        when = "never" if r["after"] is None else f"after {r['after']:,} {unit}"
        column[f"{who} final {r['kind']} loss"] = f"{r['loss']:.4f} {when}"
    return column


def percentage(x: float) -> str:
    return f"{x:.0e}".replace("e-0", "e-") if 0 < x < 1e-4 else f"{x:.2%}"


def comparison_as_text(comparison: dict[str, Any]) -> list[str]:
    # Figures of all runs, and distances of the others from the first.
    first, *others = [r["name"] for r in comparison["runs"]]
    figures_table = [["", first, *others], *summary(comparison)]
    distances_table = [[f"compared with {first}", *others], *distances(comparison)]
    lines = [
        *align_columns(turned(figures_table)),
        "",
        *align_columns(turned(distances_table)),
        *(f"note: {note}" for note in comparison["notes"]),
    ]

    # What may explain them.
    settings = comparison["settings"]
    lines += ["", "settings that differ:" if settings else "no setting differs"]
    for name, values in settings.items():
        in_words = " | ".join(map(show_setting, values))
        lines.append(f"  {name}: {in_words}")
    return lines


def turned(rows: list[list[str]]) -> list[list[str]]:
    """Return the table with a line instead of a column for each run, if there are many."""
    return [list(column) for column in zip(*rows, strict=True)] if len(rows[0]) > 5 else rows


def show_setting(value: Any) -> str:
    return "none" if value is None else json.dumps(value, default=str, ensure_ascii=False)


# The page


def page(runs: Sequence[ComparedRun], comparison: dict[str, Any]) -> str:
    first, *others = names = [r.name for r in runs]
    title = ", ".join(names)
    settings = [[n, *map(show_setting, values)] for n, values in comparison["settings"].items()]
    settings_table = '<p class="quiet">None.</p>'
    if settings:
        settings_table = html_table(settings, "numbers", ["", *names])
    parts = [
        f"<h1>{escape(title)}</h1>",
        wide_table([["", *names], *summary(comparison)]),
        f'<div class="pictures">{"".join(plots(runs))}</div>',
        f"<h2>Compared with {escape(first)}</h2>",
        wide_table([["", *others], *distances(comparison)]),
        *(f'<p class="quiet">Note: {escape(note)}.</p>' for note in comparison["notes"]),
        *explained(runs),
        f"<h2>Settings that differ ({len(settings)})</h2>",
        settings_table,
    ]
    return document(f"{title}: comparison", parts)


def wide_table(rows: list[list[str]]) -> str:
    head, *body = turned(rows)
    return html_table(body, "numbers runs", head)


def explained(runs: Sequence[ComparedRun]) -> list[str]:
    """Return what the best and the last validation of each run mean."""
    lines = []
    for run in runs:
        for line in explain_validations(run.history, run.settings):
            lines.append(f"<p><b>{escape(run.name)}</b>: {escape(line)}</p>")
    return ["<h2>Best and last validation</h2>", *lines] if lines else []


def curve(r: ComparedRun, column: str, by_amount: bool) -> tuple[Any, Any]:
    """Return a column's finite values over iterations or over tokens; each step has a value."""
    x, y = columns(r.history.steps, column)
    if by_amount:
        x = r.amounts
    is_finite = np.isfinite(y)
    return x[is_finite], y[is_finite]


def plots(runs: Sequence[ComparedRun]) -> list[str]:
    """Return losses, differences and learning rates; over tokens if the steps differ in size."""
    by_amount = amounts_differ(runs)
    x_label = runs[0].unit if by_amount else "iteration"
    marks = "points: validation" if any(r.validations() for r in runs) else ""
    notes = {"Loss": marks, "Difference": f"loss minus that of {runs[0].name}", "Learning rate": ""}
    drawn = {}
    for title in notes:
        height = 3.4 if title == "Loss" else 2.4
        drawn[title] = plot.new_axes((7.6, height), x=x_label)
    losses, differences, rates = (axes for _, axes in drawn.values())
    differences.axhline(0, color=plot.INK, lw=0.8, alpha=0.6)
    legends = dict.fromkeys(drawn, "")  # of what is drawn, and no more
    x0, y0 = curve(runs[0], "loss", by_amount)

    for number, r in enumerate(runs):
        style = style_of(number)
        key = plot.key(style.sign, style.colour, r.name)

        # Losses: a line of the training, a marker for each validation.
        x, y = curve(r, "loss", by_amount)
        signs = []
        if len(x):
            plot.draw_line(losses, x, y, style.colour, style.line)
            signs.append(style.sign)
        checks = [(i, loss) for i, loss in r.validations().items() if math.isfinite(loss)]
        if checks:
            at = [r.amount(i) if by_amount else i for i, _ in checks]
            validated = [loss for _, loss in checks]
            losses.plot(
                at,
                validated,
                style.marker,
                color=style.colour,
                ms=5,
            )
            signs.append(style.marker_sign)
        if signs:
            legends["Loss"] += plot.key(" ".join(signs), style.colour, r.name)

        # Learning rates.
        rate = plot.thin(*curve(r, "lr", by_amount))
        rates.plot(*rate, color=style.colour, ls=style.line, lw=1.6)
        legends["Learning rate"] += key

        # The difference from the first run, where both have steps.
        if number and len(x):
            # The first run's steps lie within the other's, whose losses are interpolated at them.
            both = (x0 >= x[0]) & (x0 <= x[-1])
            if both.any():
                apart = np.interp(x0[both], x, y) - y0[both]
                plot.draw_line(differences, x0[both], apart, style.colour, style.line)
                legends["Difference"] += key

    pictures = []
    for title, (figure, _) in drawn.items():
        if legends[title]:
            picture = plot.embed_figure(figure, title, notes[title], legends[title], wide=True)
            pictures.append(picture)
    return pictures
