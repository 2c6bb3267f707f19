"""`meshwright report DIR`: one page with pictures for a run; `--losses`: its exact numbers.

Everything is read from metrics.jsonl, the source of truth. A killed run repeats steps in a later attempt, so the last row
of an iteration counts; a line that a kill cut short at the very end is no row.
"""

from __future__ import annotations

import argparse
import datetime
import html
import io
import json
import math
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import BAD_DATA, DONE, UserError

Row = dict[str, Any]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="meshwright report", description="One page with pictures for a run.")
    parser.add_argument("dir", help="the run's folder (--run-dir or --save)")
    parser.add_argument("--output", metavar="FILE", help="where to write the page (default: DIR/report.html)")
    parser.add_argument(
        "--losses",
        action="store_true",
        help="print iteration, loss, gradient norm and learning rate of each step as exact hexadecimal numbers",
    )
    args = parser.parse_args(argv)
    if args.losses:
        for r in read_rows(Path(args.dir)).steps:
            print(r["iteration"], *(float(r[name]).hex() for name in ("loss", "grad_norm", "lr")))
        return DONE
    print(write(Path(args.dir), Path(args.output) if args.output else None))
    return DONE


@dataclass(frozen=True)
class Rows:
    """A run's rows by event, each iteration once."""

    starts: list[Row]
    steps: list[Row]
    validations: list[Row]
    ends: list[Row]


def read_rows(folder: Path) -> Rows:
    path = folder / "metrics.jsonl"
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; a run writes it with --save or --run-dir", BAD_DATA) from None
    starts, ends = [], []
    steps: dict[int, Row] = {}
    validations: dict[tuple[str, int], Row] = {}
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            event, iteration = row["event"], row["iteration"]
        except (ValueError, KeyError, TypeError):
            if number == len(lines) and not line.endswith(b"\n"):
                break  # cut short by a kill
            raise UserError(f"{path}:{number}: not a row that a run writes", BAD_DATA) from None
        if event == "start":
            starts.append(row)
            # A resumed run goes on from its checkpoint: what an earlier attempt did beyond it happened to no weights.
            steps = {i: r for i, r in steps.items() if i <= iteration}
            validations = {k: r for k, r in validations.items() if k[1] <= iteration}
        elif event == "step":
            steps[iteration] = row
        elif event == "validation":
            validations[row["name"], iteration] = row
        elif event == "end":
            ends.append(row)
    return Rows(
        starts, [steps[i] for i in sorted(steps)], sorted(validations.values(), key=lambda r: r["iteration"]), ends
    )


def write(folder: Path, output: Path | None = None) -> Path:
    """Write the page, whole or not at all; return its path."""
    rows = read_rows(folder)
    output = output or folder / "report.html"
    new = output.with_name(output.name + ".new")
    new.write_text(page(folder, rows), encoding="utf-8")
    os.replace(new, output)
    return output


def page(folder: Path, rows: Rows) -> str:
    pictures = [
        ("Loss", loss_picture),
        ("Learning rate", lambda axes, rows: line(axes, rows, "lr")),
        ("Gradient norm", lambda axes, rows: line(axes, rows, "grad_norm", log=True)),
        ("Tokens per second", lambda axes, rows: line(axes, rows, "tokens_per_second", zero=True)),
    ]
    if any(r.get("memory") for r in rows.steps):
        pictures.append(("Peak memory (GiB)", lambda axes, rows: line(axes, rows, "memory", 2.0**-30, zero=True)))
    if any(r.get("loss_scale", 1) != 1 for r in rows.steps):
        pictures.append(("Loss scale", lambda axes, rows: line(axes, rows, "loss_scale", log=True)))
    figures = "".join(f"<div><b>{esc(v)}</b><span>{esc(k)}</span></div>" for k, v in headline(rows).items())
    drawn = "".join(
        f"<figure{' class=wide' if n == 0 else ''}><figcaption>{esc(title)}</figcaption>{picture(draw, rows, n == 0)}</figure>"
        for n, (title, draw) in enumerate(pictures)
        if rows.steps
    )
    ends = {r["attempt"]: r for r in rows.ends}
    attempts = "".join(
        f"<tr><td>{r['attempt']}<td>{when(r.get('time'))}<td>{r['iteration']}"
        f"<td>{esc(ends.get(r['attempt'], {}).get('reason', 'cut off'))}<td><code>{esc(' '.join(r.get('command', [])))}</code>"
        for r in rows.starts
    )
    config = folder / "config.toml"
    settings = config.read_text(encoding="utf-8") if config.exists() else ""
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{esc(folder.resolve().name)} - Meshwright</title>
<style>{STYLE}</style>
<main>
<h1>{esc(folder.resolve().name)}</h1>
<section class="figures">{figures}</section>
<section class="pictures">{drawn or "<p>No step was made yet.</p>"}</section>
<h2>Attempts</h2>
<div class="scroll"><table><tr><th>#<th>started<th>at step<th>ended<th>command{attempts}</table></div>
<h2>Run it again</h2>
<p><code>meshwright train --config {esc(config)}</code></p>
<p>Exact losses: <code>meshwright report --losses {esc(folder)}</code></p>
<details><summary>All settings</summary><pre>{esc(settings)}</pre></details>
</main></html>
"""


def headline(rows: Rows) -> dict[str, str]:
    """What somebody wants to know first."""
    out: dict[str, str] = {}
    if rows.starts:
        last = rows.starts[-1]
        out["parameters"] = f"{last.get('parameters', 0):,}"
    if rows.steps:
        end = rows.steps[-1]
        out["steps"] = f"{end['iteration']:,}" + (f" of {last['train_iters']:,}" if rows.starts else "")
        samples = end["consumed_samples"]
        per_sample = last.get("tokens_per_step", 0) / (samples / end["iteration"]) if rows.starts else 0
        out["tokens seen"] = f"{samples * per_sample:,.0f}"
        out["training loss"] = f"{float(end['loss']):.4f}"
    checks = [r for r in rows.validations if r["name"] == "validation"]
    if checks:
        best = min(checks, key=lambda r: (math.isnan(float(r["loss"])), float(r["loss"])))
        out["validation loss"] = f"{float(checks[-1]['loss']):.4f}"
        out["validation perplexity"] = f"{float(checks[-1]['ppl']):.2f}"
        out["best validation"] = f"{float(best['loss']):.4f} at step {best['iteration']}"
    if rows.steps:
        out["tokens per second"] = f"{statistics.median(r['tokens_per_second'] for r in rows.steps):,.0f}"
        out["time in steps"] = str(datetime.timedelta(seconds=round(sum(r["ms"] for r in rows.steps) / 1e3)))
        skipped = sum(bool(r.get("skipped")) for r in rows.steps)
        if skipped:
            out["skipped steps"] = f"{skipped}"
    if rows.starts:
        out["attempts"] = f"{len(rows.starts)}"
        out["device"] = f"{last.get('device', '')}, {last.get('dtype', '')}"
    return out


def picture(draw: Callable[[Any, Rows], None], rows: Rows, wide: bool) -> str:
    """One SVG; matplotlib is imported here because it takes a second and only pictures need it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6) if wide else (4.6, 2.6), layout="constrained")
    axes = figure.add_subplot()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(alpha=0.25)
    axes.tick_params(labelsize=8)
    draw(axes, rows)
    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "meshwright"}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def points(rows: Rows, name: str, factor: float = 1.0) -> tuple[list[int], list[float]]:
    pairs = [(r["iteration"], float(r[name]) * factor) for r in rows.steps if r.get(name) is not None]
    thin = max(1, len(pairs) // 4000)  # more points than pixels only make the page heavy
    return [i for i, _ in pairs[::thin]], [v for _, v in pairs[::thin]]


def line(axes: Any, rows: Rows, name: str, factor: float = 1.0, log: bool = False, zero: bool = False) -> None:
    x, y = points(rows, name, factor)
    axes.plot(x, y, lw=1, color="#3b6ea8")
    if log and any(v > 0 for v in y):
        axes.set_yscale("log")
    if zero:
        axes.set_ylim(bottom=0)


def loss_picture(axes: Any, rows: Rows) -> None:
    """Training loss thin, its running mean thick, validation as points, resumed steps as dashes."""
    x, y = points(rows, "loss")
    axes.plot(x, y, lw=0.6, alpha=0.4, color="#3b6ea8")
    window = max(1, len(y) // 50)
    mean = [statistics.fmean(y[max(0, i - window + 1) : i + 1]) for i in range(len(y))]
    axes.plot(x, mean, lw=1.6, color="#3b6ea8", label="training" + (f" (mean of {window})" if window > 1 else ""))
    checks = [r for r in rows.validations if r["name"] == "validation"]
    if checks:
        axes.plot(
            [r["iteration"] for r in checks], [float(r["loss"]) for r in checks], "o-", ms=4, lw=1, color="#c65d21",
            label="validation",
        )  # fmt: skip
    for n, r in enumerate(r for r in rows.starts[1:] if 0 < r["iteration"] < rows.steps[-1]["iteration"]):
        axes.axvline(r["iteration"], ls="--", lw=0.8, color="#888888", label="resumed" if n == 0 else None)
    axes.set_xlabel("iteration", fontsize=8)
    axes.legend(fontsize=8, frameon=False, labelcolor="#888888")


def when(unix: float | None) -> str:
    return f"{datetime.datetime.fromtimestamp(unix):%Y-%m-%d %H:%M:%S}" if unix else ""


def esc(value: object) -> str:
    return html.escape(str(value))


STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0; }
main { max-width: 960px; margin: 0 auto; padding: 24px 16px 64px; }
h1 { font-size: 24px; } h2 { font-size: 18px; margin-top: 32px; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 10px; }
.figures div { background: var(--soft); border-radius: 8px; padding: 10px 12px; }
.figures b { display: block; font-size: 17px; overflow-wrap: anywhere; } .figures span { font-size: 12px; opacity: .7; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 16px; margin-top: 24px; }
figure { margin: 0; background: #fff; color: #222; border: 1px solid var(--line); border-radius: 8px; padding: 8px; }
figure.wide { grid-column: 1 / -1; } figure svg { width: 100%; height: auto; }
figcaption { font-size: 13px; font-weight: 600; padding: 2px 6px; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; }
th, td { text-align: left; vertical-align: top; padding: 4px 10px 4px 0; border-bottom: 1px solid var(--line); }
pre { overflow-x: auto; background: var(--soft); padding: 12px; border-radius: 8px; font-size: 12px; }
code { overflow-wrap: anywhere; }
"""
