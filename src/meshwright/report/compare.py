"""`meshwright report`: a page for one run; for several, how far their loss curves lie from the first, and what differs.

`meshwright report A B` prints it and writes a page; `--json` is for programs, `--tolerance` for tests.
"""

from __future__ import annotations

import bisect
import html
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import BAD_DATA, DONE, UNEXPECTED, USAGE, UserError
from meshwright.report import page as report
from meshwright.report.page import BAD, INK, LINE, POINT

# Of each run in turn: colour, line, the line as text, marker, the marker as text. The colour alone never tells.
LOOKS: list[tuple[str, Any, str, str, str]] = [
    (LINE, "-", "━━━", "o", "●"),
    (POINT, (0, (4, 1.5)), "━ ━", "D", "◆"),
    (BAD, (0, (5, 1.5, 1, 1.5)), "━ ·", "s", "■"),
    (INK, (0, (1, 1.5)), "· · ·", "^", "▲"),
]


@dataclass(frozen=True)
class Run:
    name: str
    rows: report.Rows
    settings: dict[str, Any]
    unit: str  # tokens; samples where the sequence length of one of the runs is not known
    scale: int  # of these in a sample

    def amount(self, iteration: int) -> int:
        """Tokens (or samples) consumed by then."""
        at = bisect.bisect_right(self.rows.steps, iteration, key=lambda s: s.iteration)
        return self.rows.steps[at - 1].consumed_samples * self.scale if at else 0

    def validations(self) -> dict[int, float]:
        """By iteration, the mean of several sets; at the last one there may be another at the end of the run, with other
        samples."""
        all_of_them: dict[int, dict[str, float]] = {}
        for v in reversed(self.rows.validations):
            if v.name != "test":
                all_of_them.setdefault(v.iteration, {})[v.of] = v.loss
        return {i: math.fsum(losses.values()) / len(losses) for i, losses in sorted(all_of_them.items())}

    def final(self, kind: str) -> float:
        """The last validation's loss, or the median training loss of the last fiftieth: one step alone says little."""
        if kind == "validation":
            return [*self.validations().values()][-1]
        losses = [s.loss for s in self.rows.steps]
        known = [x for x in losses[-max(1, len(losses) // 50) :] if math.isfinite(x)]
        return statistics.median(known) if known else math.nan

    def reaches(self, loss: float, kind: str) -> int | None:
        """Tokens (or samples) after which the loss is that low for the first time, but for rounding."""
        loss += 1e-6 * abs(loss)
        if kind == "validation":
            return next((self.amount(i) for i, x in self.validations().items() if x <= loss), None)
        x, y = curve(self, "loss", by_amount=True)
        if len(y) > 20:
            x, y = report.smoothed(x, y, len(y) // 100)
        return next((int(n) for n, value in zip(x, y, strict=True) if value <= loss), None)


def run(folders: Sequence[Path], output: Path | None, as_json: bool, tolerance: float | None) -> int:
    if len(folders) > len(LOOKS):
        raise UserError(f"{len(folders)} folders: at most {len(LOOKS)} are compared at once", USAGE)
    if tolerance is not None and not tolerance >= 0:
        raise UserError(f"--tolerance {tolerance} is not a number from 0 on", USAGE)
    runs = load(folders)
    found: dict[str, Any] = {
        "unit": runs[0].unit,
        "runs": [figures(r) for r in runs],
        "settings": differing([r.settings for r in runs]),
        "differences": [difference(runs[0], r) for r in runs[1:]],
        "notes": [*dict.fromkeys(note for r in runs[1:] for note in cautions(runs[0], r))],
    }
    if as_json:
        print(json.dumps(plain(found), allow_nan=False))
    else:
        print("\n".join(told(found)))
    if output or not as_json:
        target = report.write_whole(output or folders[0] / "compare.html", page(runs, found))
        print(target, file=sys.stderr if as_json else sys.stdout)
    if tolerance is None:
        return DONE
    if not all(d["common_steps"] for d in found["differences"]):
        raise UserError("--tolerance: these runs have no iteration in common", BAD_DATA)
    worst = max(abs(d["largest"]["loss"]) for d in found["differences"])
    if worst > tolerance:
        print(f"the losses differ by {worst:g}, more than --tolerance {tolerance:g}", file=sys.stderr)
    return UNEXPECTED if worst > tolerance else DONE


def load(folders: Sequence[Path]) -> list[Run]:
    names = [f.resolve().name for f in folders]
    if len(set(names)) < len(names):
        names = [str(f) for f in folders]
    read = []
    for folder in folders:
        rows = report.read_rows(folder)
        if not rows.steps:
            raise UserError(f"{folder / 'metrics.jsonl'}: no step in it", BAD_DATA)
        groups = report.read_settings(folder).values()
        read.append((rows, {name: value for group in groups for name, value in group.items()}))
    known = all(isinstance(settings.get("seq_length"), int) for _, settings in read)
    return [
        Run(name, rows, settings, "tokens" if known else "samples", settings["seq_length"] if known else 1)
        for name, (rows, settings) in zip(names, read, strict=True)
    ]


def figures(r: Run) -> dict[str, Any]:
    """What is told of each run."""
    steps, checks = r.rows.steps, r.validations()
    return {
        "name": r.name,
        "steps": steps[-1].iteration,
        "amount": r.amount(steps[-1].iteration),
        "final_loss": r.final("training"),
        "final_validation": r.final("validation") if checks else None,
        "best_validation": min((x for x in checks.values() if not math.isnan(x)), default=None),
        "tokens_per_second": statistics.median(s.tokens_per_second for s in steps),
        "seconds": report.wall_time(r.rows.attempts)[1],
    }


def differing(settings: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Settings that are not the same in all runs, paths last: those differ almost always, and hardly ever matter."""
    names = [n for n in {n: 0 for s in settings for n in s} if any(s.get(n) != settings[0].get(n) for s in settings)]
    names.sort(key=lambda n: n in ("save", "load") or n.endswith(("_path", "_dir", "_file")))
    return {n: [s.get(n) for s in settings] for n in names}


# What decides which tokens a validation reads.
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
)


def cautions(a: Run, b: Run) -> list[str]:
    """What a reader must know before he believes the numbers."""
    out = []
    if not_in_step((a, b)):
        out.append(f"differences are taken at equal iterations, which are not equal {a.unit} here: see the picture")
    other = [n for n in _VALIDATED_ON if a.settings.get(n) != b.settings.get(n)]
    if other and a.validations() and b.validations():
        out.append(f"validated on other data ({', '.join(other)}): these losses are not comparable")
    return out


def not_in_step(runs: Sequence[Run]) -> bool:
    """Whether an iteration that some of them have lies at other tokens (or samples)."""
    amounts: dict[int, set[int]] = {}
    for r in runs:
        for s in r.rows.steps:
            amounts.setdefault(s.iteration, set()).add(s.consumed_samples * r.scale)
    return any(len(found) > 1 for found in amounts.values())


def difference(a: Run, b: Run) -> dict[str, Any]:
    """How b's losses lie from a's, b - a, at the iterations that both have."""
    before, after = ({s.iteration: s.loss for s in r.rows.steps} for r in (a, b))
    gaps = {i: gap(before[i], after[i]) for i in before if i in after}
    relative = {i: abs(g / before[i]) if g and before[i] else abs(g) for i, g in gaps.items()}
    late = [g for g in list(gaps.values())[-max(1, len(gaps) // 10) :] if math.isfinite(g)]
    checks = b.validations()
    kind = "validation" if checks and a.validations() else "training"
    return {
        "runs": [a.name, b.name],
        "common_steps": len(gaps),
        "first": next((i for i in gaps if before[i].hex() != after[i].hex()), None),
        "largest": largest(gaps, "loss"),
        "largest_relative": largest(relative, "share"),
        "mean_of_last_tenth": statistics.fmean(late) if late else None,
        "validation": {i: gap(x, checks[i]) for i, x in a.validations().items() if i in checks},
        "reached": [
            {
                "run": x.name,
                "loss_of": y.name,
                "kind": kind,
                "loss": y.final(kind),
                "after": x.reaches(y.final(kind), kind),
            }
            for x, y in ((b, a), (a, b))
        ],
    }


def gap(before: float, after: float) -> float:
    """Equal bits, two NaNs too, lie 0 apart; a number and what is none lie infinitely far apart."""
    if before.hex() == after.hex():
        return 0.0
    return after - before if math.isfinite(after - before) else math.inf


def largest(values: dict[int, float], called: str) -> dict[str, Any] | None:
    at = max(values, key=lambda i: abs(values[i]), default=None)
    return None if at is None else {called: values[at], "iteration": at}


def plain(value: Any) -> Any:
    """As JSON can say it: what is not finite becomes its name, as in metrics.jsonl."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# Telling


def summary(found: dict[str, Any]) -> list[list[str]]:
    """Lines of a table: a column for each run."""
    form = {
        "steps": ("steps", ","),
        "amount": (found["unit"], ","),
        "final_loss": ("final training loss", ".4f"),
        "final_validation": ("final validation loss", ".4f"),
        "best_validation": ("best validation loss", ".4f"),
        "tokens_per_second": ("tokens per second, median", ",.0f"),
    }
    body = [
        [label, *("-" if r[key] is None else format(r[key], how) for r in found["runs"])]
        for key, (label, how) in form.items()
    ]
    return [*body, ["wall time", *(report.duration(r["seconds"]) for r in found["runs"])]]


def distances(found: dict[str, Any]) -> list[list[str]]:
    """Lines of a table: a column for each run but the first."""
    out = []
    for d in found["differences"]:
        far, share, checks = d["largest"], d["largest_relative"], d["validation"]
        column = {"common steps": f"{d['common_steps']:,}"}
        if far:
            equal = "none: equal to the last bit" if d["first"] is None else f"iteration {d['first']:,}"
            mean = d["mean_of_last_tenth"]
            column |= {
                "first difference in any bit": equal,
                "largest difference": f"{far['loss']:+.4g} at {far['iteration']:,}",
                "largest relative difference": f"{relatively(share['share'])} at {share['iteration']:,}",
                "mean difference, last 10% of them": "-" if mean is None else f"{mean:+.4g}",
            }
        if checks:
            worst = largest(checks, "loss") or {}
            column["largest validation difference"] = f"{worst['loss']:+.4g} at {worst['iteration']:,}"
            column["last validation difference"] = f"{list(checks.values())[-1]:+.4g} at {list(checks)[-1]:,}"
        for r, who in zip(d["reached"], ("it reaches the first's", "the first reaches its"), strict=True):
            when = "never" if r["after"] is None else f"after {r['after']:,} {found['unit']}"
            column[f"{who} final {r['kind']} loss"] = f"{r['loss']:.4f} {when}"
        out.append(column)
    return [[label, *(c.get(label, "-") for c in out)] for label in {k: 0 for c in out for k in c}]


def relatively(x: float) -> str:
    return f"{x:.0e}".replace("e-0", "e-") if 0 < x < 1e-4 else f"{x:.2%}"


def told(found: dict[str, Any]) -> list[str]:
    names = [r["name"] for r in found["runs"]]
    lines = padded([["", *names], *summary(found)])
    lines += ["", *padded([[f"compared with {names[0]}", *names[1:]], *distances(found)])]
    settings = [f"  {n}: {' | '.join(map(shown, values))}" for n, values in found["settings"].items()]
    notes = [f"note: {note}" for note in found["notes"]]
    return [*lines, *notes, "", "settings that differ:" if settings else "no setting differs", *settings]


def padded(table: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in table]


def shown(value: Any) -> str:
    return "none" if value is None else json.dumps(value, default=str, ensure_ascii=False)


def page(runs: Sequence[Run], found: dict[str, Any]) -> str:
    names = [r.name for r in runs]
    settings = [[n, *map(shown, values)] for n, values in found["settings"].items()]
    parts = [
        f"<h1>{html.escape(', '.join(names))}</h1>",
        report.table(summary(found), "numbers", ["", *names]),
        f'<div class="pictures">{"".join(pictures(runs))}</div>',
        f"<h2>Compared with {html.escape(names[0])}</h2>",
        report.table(distances(found), "numbers", ["", *names[1:]]),
        *(f'<p class="quiet">Note: {html.escape(note)}.</p>' for note in found["notes"]),
        f"<h2>Settings that differ ({len(settings)})</h2>",
        report.table(settings, "numbers", ["", *names]) if settings else '<p class="quiet">None.</p>',
    ]
    return report.document(f"{', '.join(names)}: comparison", parts)


def curve(r: Run, column: str, by_amount: bool) -> tuple[Any, Any]:
    """A column's finite values over iterations or over tokens."""
    import numpy as np

    x, y = report.points(r.rows.steps, column, "consumed_samples" if by_amount else "iteration")
    known = np.isfinite(y)
    return x[known] * (r.scale if by_amount else 1), y[known]


def pictures(runs: Sequence[Run]) -> list[str]:
    """Losses, their differences and learning rates; over tokens where the runs' steps are not of the same size."""
    import numpy as np

    over_amount = not_in_step(runs)
    x_label = runs[0].unit if over_amount else "iteration"
    titles = {"Loss": "", "Difference": f"loss less that of {runs[0].name}", "Learning rate": ""}
    drawn = {t: report.blank_axes((7.6, 3.4 if t == "Loss" else 2.4), x=x_label) for t in titles}
    losses, differences, rates = (axes for _, axes in drawn.values())
    differences.axhline(0, color=INK, lw=0.8, alpha=0.6)
    legend = ""
    x0, y0 = curve(runs[0], "loss", over_amount)
    for r, (colour, line, as_text, marker, sign) in zip(runs, LOOKS, strict=False):
        x, y = curve(r, "loss", over_amount)
        report.draw(losses, x, y, colour, line)
        checks = [(r.amount(i) if over_amount else i, v) for i, v in r.validations().items() if math.isfinite(v)]
        losses.plot([i for i, _ in checks], [v for _, v in checks], marker, color=colour, ms=5)
        rates.plot(*report.thinned(*curve(r, "lr", over_amount)), color=colour, ls=line, lw=1.6)
        if r is not runs[0] and len(x):
            both = (x0 >= x[0]) & (x0 <= x[-1])
            report.draw(differences, x0[both], np.interp(x0[both], x, y) - y0[both], colour, line)
        points = f", validation {sign}" if checks else ""
        legend += (
            f'<span><b style="color: {report.VARIABLES[colour]}">{as_text}</b> {html.escape(r.name)}{points}</span>'
        )
    return [
        report.framed(t, titles[t], f'<div class="legend quiet">{legend}</div>{report.svg_of(figure, t)}', "wide")
        for t, (figure, _) in drawn.items()
    ]
