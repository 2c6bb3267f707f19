"""The page of one run: headline figures, plots, attempts and settings."""

from __future__ import annotations

import datetime
import itertools
import json
import math
import shlex
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.apps.pages import plot
from meshwright.apps.pages.html import document, escape, html_table, write_page
from meshwright.apps.pages.runs import CERTIFICATE, shell_line
from meshwright.base.files import read_small
from meshwright.base.progress import duration
from meshwright.base.runs.amounts import tokens_of_steps
from meshwright.base.runs.goodput import read_goodput
from meshwright.base.runs.history import (
    PATIENCE,
    Attempt,
    History,
    LoggedStep,
    Validation,
    flat_settings,
    read_history,
    read_settings,
    wall_time,
)
from meshwright.base.storage.addresses import shown
from meshwright.training.tasks import describe_column

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Settings = dict[str, dict[str, Any]]


def write_report(run_dir: Path, output: Path | None = None) -> Path:
    """Write the page of a run folder, by default to report.html in it; return its path."""
    text = page(run_dir, read_history(run_dir), read_settings(run_dir), time.time())
    return write_page(output or run_dir / "report.html", text, typed=output is not None)


CERTIFICATE_LIMIT = 16 << 20  # bytes
RELOAD = 30  # seconds
# Reload the page of a run that goes on, until it is no longer written.
SCRIPT = """<script>
const late = Date.now() - $written - $patience;
if (late < 0) setTimeout(() => location.reload(), $reload);
else addEventListener("DOMContentLoaded", () => {
  document.getElementById("state").textContent = "No longer updated. The run was killed, or is in a very long step. ";
});
</script>"""


def page(run_dir: Path, history: History, settings: Settings, now: float) -> str:
    name = run_dir.resolve().name
    last = history.attempts[-1] if history.attempts else None
    is_running = history.is_running(now)
    # A line for each attempt, in the order of the columns of their table.
    attempts = []
    for a in history.attempts:
        attempts.append(
            [
                str(a.number),
                date(a.start.get("time")),
                f"{a.began:,} to {a.last:,}",
                shell_line(a.start.get("command")),
                describe_end(a, a is last),
            ]
        )
    cards = [
        f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>"
        for label, value in headlines(history, settings, is_running)
    ]
    # What the numbers mean, for those who do not read curves.
    explained = explain_validations(history, flat_settings(settings), is_running)
    goodput = read_goodput(history)
    version = last.start.get("version", "") if last else ""
    parts = [
        f"<h1>{escape(name)}</h1>",
        *show_state(history, now),
        '<dl class="cards">',
        *cards,
        "</dl>",
        *(f"<p>{escape(words)}</p>" for words in explained),
        *explain_unsaved(history),
        *show_certificate(run_dir),
        *([f"<p>{escape(goodput.line().capitalize())}.</p>"] if goodput else []),
        f'<div class="pictures">{"".join(plots(history))}</div>',
        "<h2>Attempts</h2>",
        html_table(attempts, "attempts", ["", "started", "iterations", "command", "end"]),
        "<h2>Repeat this run</h2>",
        f"<pre>meshwright train --config {escape(shlex.quote(str(run_dir / 'config.toml')))}</pre>",
        '<p class="quiet">If the settings name --save and --load, this continues from the last checkpoint; '
        "give both a new folder to start afresh.</p>",
        f"<details><summary>Settings ({sum(map(len, settings.values()))})</summary>",
        *(f"<h3>{escape(group)}</h3>{settings_table(v)}" for group, v in settings.items()),
        "</details>",
        f'<footer class="quiet">Meshwright {escape(version)}. Exact numbers: '
        f"<code>meshwright report --losses {escape(shlex.quote(shown(str(run_dir))))}</code></footer>",
    ]
    return document(f"{name}: report", parts, reloading(now) if is_running else [])


def reloading(now: float) -> list[str]:
    """Return the head of a page that reloads itself; without scripts, for ever."""
    # A page from disk asks no server, so the times are written into its script, in milliseconds.
    script = Template(SCRIPT).substitute(
        written=round(1e3 * now),
        patience=round(1e3 * PATIENCE),
        reload=round(1e3 * RELOAD),
    )
    return [script, f'<noscript><meta http-equiv="refresh" content="{2 * RELOAD}"></noscript>']


def show_state(history: History, now: float) -> list[str]:
    """Return what the run does now, with its progress; or how it ended."""
    if not history.attempts:
        return ['<p class="quiet" id="state">no attempt recorded</p>']
    last = history.attempts[-1]
    if not history.is_running(now):
        words = escape(describe_end(last, True))
        if last.end is None and history.updated:
            words += f" since {date(history.updated)}"
        return [f'<p class="quiet" id="state">last attempt: {words}</p>']

    total = last.start.get("train_iters")
    words = f"step {last.last:,}"
    bar = []
    if isinstance(total, int) and total:
        words += f" of {total:,}"
        # The median of the last steps, of this attempt alone: another may have run elsewhere.
        recent = [s.ms for s in history.steps[-100:] if s.iteration > last.began]
        if recent:
            seconds = (total - last.last) * statistics.median(recent) / 1e3
            words += f"; about {duration(seconds)} left"
        bar = [f'<progress max="{total}" value="{last.last}"></progress>']
    words += f"; updated {date(now)}; this page reloads itself"
    state = f'<b class="running">running</b>: {escape(words)}'
    return [f'<p class="quiet" id="state">{state}</p>', *bar]


def show_certificate(run_dir: Path) -> list[str]:
    """Return a line about the comparison of the run's layout with one process, if there was one."""
    try:
        c = json.loads(read_small(run_dir / CERTIFICATE, CERTIFICATE_LIMIT, run_dir))
        verdict = "verified" if c["verdict"] == "equal" else "differs"
        words = f"{c['summary']} ({date(c['time'])}, {CERTIFICATE})"
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        # There is none, or another program's file has this name: the page does without it.
        return []
    return [f"<p><b>Layout {verdict}</b>: {escape(words)}.</p>"]


def explain_unsaved(history: History) -> list[str]:
    """Return a line about saves that failed, after which the last attempt went on."""
    lost = history.attempts[-1].unsaved if history.attempts else []
    if not lost:
        return []
    # The last ten by their steps, and a count of those before.
    listed = lost[-10:]
    steps = ", ".join(f"{step:,}" for step in listed)
    when = f"at steps {steps}"
    if len(lost) == 1:
        when = f"at step {steps}"
    if len(lost) > 10:
        when = f"{len(lost) - 10:,} times before step {listed[0]:,}, and {when}"
    return [f"<p><b>Saving failed</b> {when}; the run went on (--save-error warn).</p>"]


def explain_validations(
    history: History, settings: dict[str, Any], is_running: bool = False
) -> list[str]:
    """Return what the best and the last validation mean, in words, for each set."""
    out = []
    for all_checks in history.sets().values():
        checks = [v for v in all_checks if math.isfinite(v.loss)]
        count = len({v.iteration for v in checks})
        if count > 1:
            words = explain_set(checks, count, settings, is_running)
            out.append(" ".join([*words, *explain_twice(checks)]))
    return out


def explain_set(
    checks: list[Validation], count: int, settings: dict[str, Any], is_running: bool
) -> list[str]:
    """Return sentences on the validations of one set, which were at `count` steps."""
    best = min(checks, key=lambda v: v.loss)
    last = checks[-1]
    lead = f"Validation{suffix(last)}: the lowest loss, {best.loss:.4f}, was at step {best.iteration:,}"
    if best.iteration == last.iteration:
        then = "it is still falling" if is_running else "a longer training may lower it further"
        return [f"{lead}, the last of {count}: {then}."]

    gap = last.loss - best.loss
    at_last = f"the last, at step {last.iteration:,}, is {last.loss:.4f}"
    words = [f"{lead}; {at_last}, which is {gap:.4f} higher."]
    # A gap below one percent means nothing where each validation reads other samples.
    if gap < 0.01 * best.loss and not settings.get("full_validation"):
        words.append("The difference is within noise, since each validation reads other samples.")
    else:
        words += [
            "The model fits its training text ever better and new text worse (overfitting).",
            "More text, fewer steps, a lower --lr, or more dropout and weight decay help.",
        ]
    if settings.get("keep_best") and settings.get("save"):
        words.append(f"The best step is kept: {settings['save']}/iter_{best.iteration:07d}.")
    else:
        words.append("With --keep-best, a run keeps the checkpoint of its lowest validation loss.")
    return words


def explain_twice(checks: list[Validation]) -> list[str]:
    """Return a sentence on the last step's two validations, if they differ."""
    last = checks[-1].iteration
    losses = [v.loss for v in checks if v.iteration == last]
    if losses[0] == losses[-1]:
        return []
    # The check at an interval and the one at the end of training read on in the validation data.
    first, *_, again = losses
    both = f"{first:.4f}, at the end {again:.4f}"
    return [f"Step {last:,} was validated twice, on other batches: {both}."]


def settings_table(values: dict[str, Any]) -> str:
    return html_table([[k, json.dumps(v, default=str)] for k, v in values.items()], "settings")


def headlines(
    history: History, settings: Settings, is_running: bool = False
) -> list[tuple[str, str]]:
    """Return the figures at the top as (name, value); unknown ones are left out."""
    out: dict[str, str] = {}
    final = "latest" if is_running else "final"
    start = history.attempts[-1].start if history.attempts else {}
    steps = history.steps

    # How much was trained, and the training loss.
    parameters = start.get("parameters")
    if isinstance(parameters, int):
        out["parameters"] = f"{parameters:,}"
    if steps:
        samples = steps[-1].consumed_samples
        out["steps"] = f"{steps[-1].iteration:,}"
        out["samples"] = f"{samples:,}"
        tokens = tokens_of_steps(steps, flat_settings(settings))
        if tokens is not None:
            out["tokens"] = f"{tokens[-1]:,.0f}"
        if skipped := sum(s.skipped for s in steps):
            out["skipped steps"] = f"{skipped:,}"
        # The mean over an interval of the log, since the loss of a single step is noisy.
        mean, count = history.final_loss(settings.get("logging", {}).get("log_interval"))
        over = f", mean of {count} steps" if count > 1 else ""
        out[f"{final} training loss{over}"] = f"{mean:.4f}"

    # What it learned, on text that it was not trained on.
    for checks in history.sets().values():
        on = suffix(checks[0])
        last = checks[-1]
        # NaN compares with nothing, so it counts as the worst.
        best = min(
            checks,
            key=lambda v: math.inf if math.isnan(v.loss) else v.loss,
        )
        out[f"{final} validation loss{on}"] = f"{last.loss:.4f}"
        out[f"{final} validation perplexity{on}"] = f"{last.ppl:,.2f}"
        out[f"best validation loss{on}"] = f"{best.loss:.4f} at {best.iteration:,}"
        if last.ema_loss is not None:
            out[f"{final} validation loss of the average{on}"] = f"{last.ema_loss:.4f}"
    if history.means:
        mean_of = history.means[max(history.means)]
        label = f"validation loss of the mean of {len(mean_of.steps)} saved steps"
        out[label] = f"{mean_of.loss:.4f}"
    for tests in history.sets("test").values():
        out[f"test loss{suffix(tests[0])}"] = f"{tests[-1].loss:.4f}"
    for name, scores in history.scores.items():
        if scores:
            out[f"{final} {name}"] = f"{scores[max(scores)]:,.4f}"

    # What it cost.
    if steps:
        # Medians, since the first steps of each attempt are slower.
        speed = statistics.median(s.tokens_per_second for s in steps)
        out["tokens per second, median"] = f"{speed:,.0f}"
        if mfu := [s.mfu for s in steps if s.mfu is not None]:
            out["MFU, median"] = f"{100 * statistics.median(mfu):.1f}%"
        if memory := [s.memory for s in steps if s.memory is not None]:
            out["peak memory"] = f"{max(memory) / 2**30:.2f} GiB"
    label, seconds = wall_time(history.attempts)
    out[label] = duration(seconds)
    out["attempts"] = str(len(history.attempts))
    if goodput := read_goodput(history):
        out["goodput"] = f"{100 * goodput.share:.1f}%"
        if goodput.mean_recovery is not None:
            out["mean time to recover"] = duration(goodput.mean_recovery)
    for key in ("device", "dtype", "torch"):
        if value := start.get(key):
            out[key] = str(value)
    return list(out.items())


def suffix(v: Validation) -> str:
    return f" on {v.dataset}" if v.dataset else ""


def date(seconds: object) -> str:
    if not isinstance(seconds, int | float):
        return ""
    return (
        f"{datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    )


def describe_end(attempt: Attempt, is_last: bool) -> str:
    if attempt.end is None:
        return "no end recorded: still running, or killed" if is_last else "killed: no end recorded"
    return f"{attempt.end.get('reason', 'ended')} (exit status {attempt.end.get('status', '?')})"


# Plots

# A line for each data set, with its sign in the legend.
SET_LINES = (("-", "━"), ("--", "╌"), (":", "┈"), ("-.", "╌┈"))
SMALL = (4.8, 2.7)  # inches of all pictures but that of the loss


def plots(history: History) -> list[str]:
    """Return HTML figures: the loss, large, then what explains it."""
    if not history.steps:
        return ['<p class="quiet">No step was recorded, so there is nothing to draw.</p>']
    out = [loss_plot(history), *part_plots(history)]
    out += [score_plot(name, scores) for name, scores in history.scores.items()]
    for title, unit, column, scale, smooth in (
        ("Learning rate", "", "lr", 1.0, False),
        ("Gradient norm", "before clipping", "grad_norm", 1.0, True),
        ("Speed", "tokens per second", "tokens_per_second", 1.0, True),
        ("Step time", "milliseconds", "ms", 1.0, True),
        ("Peak memory", "GiB", "memory", 2.0**-30, False),
    ):
        if all(getattr(s, column) is None for s in history.steps):
            continue
        figure, axes = plot.new_axes(SMALL, resumed_at(history))
        draw_column(axes, history.steps, column, scale, smooth)
        if column == "grad_norm":
            use_log_scale_if_spiky(axes, history.steps)
        out.append(plot.embed_figure(figure, title, unit))
    return out


def loss_plot(history: History) -> str:
    figure, axes = plot.new_axes((7.6, 3.4), resumed_at(history))
    width = draw_column(axes, history.steps, "loss", smooth=True)
    losses = [s.loss for s in history.steps]
    legend = []
    if any(map(math.isfinite, losses)):
        training = f"training, median of {width} steps" if width > 1 else "training"
        legend.append(plot.key("━", plot.LINE, training))

    def draw(points: list[tuple[int, float]], colour: str, line: str, marker: str) -> None:
        x, y = np.array(points).T
        if len(points) >= 200:  # many markers would hide the line
            marker = ""
        axes.plot(
            *plot.thin(x, y),
            color=colour,
            lw=1,
            ls=line,
            marker=marker,
            ms=4,
        )

    # A line for each data set, in dashes of its own if there are several; one more for the average.
    for name, marker, sign in (("validation", "o", "●"), ("test", "D", "◆")):
        sets = history.sets(name).values()
        styles = itertools.cycle(SET_LINES)
        for all_checks in sets:
            checks = [v for v in all_checks if math.isfinite(v.loss)]
            if not checks:
                continue
            line, dashes = next(styles)
            which = f" {dashes}" if len(sets) > 1 else ""
            title = checks[0].title
            draw([(v.iteration, v.loss) for v in checks], plot.POINT, line, marker)
            legend.append(plot.key(sign + which, plot.POINT, title))
            averaged = [(v.iteration, v.ema_loss) for v in checks if v.ema_loss is not None]
            if averaged:
                draw(averaged, plot.INK, line, "^")
                legend.append(plot.key(f"▲{which}", plot.INK, f"{title}, average"))

    if not all(map(math.isfinite, losses)):
        legend.append(plot.key("×", plot.BAD, "not finite"))
    if resumed_at(history):
        legend.append(plot.key("┆", plot.INK, "resumed or rolled back"))
    return plot.embed_figure(figure, "Loss", legend="".join(legend), wide=True)


def part_plots(history: History) -> list[str]:
    """Return figures of each set's validation loss: by position, and by data set over the steps."""
    out = []
    for checks in history.sets().values():
        on = suffix(checks[0])
        last = checks[-1]
        if len(last.by_position) > 1:
            out.append(position_plot(checks, f"Validation loss by position{on}"))
        if last.by_data:
            out.append(data_plot(checks, f"Validation loss by data set{on}"))
    return out


def position_plot(checks: list[Validation], title: str) -> str:
    """Draw the loss over positions, at the first, the middle and the last step."""
    figure, axes = plot.new_axes(SMALL, x="position")
    names = list(checks[-1].by_position)
    # The last step is validated twice, and only the second time is drawn.
    by_step = list({v.iteration: v for v in checks}.values())
    last = len(by_step) - 1
    chosen = dict.fromkeys((last, len(by_step) // 2, 0))
    legend = ""
    for (line, dashes), number in zip(SET_LINES, chosen, strict=False):
        v = by_step[number]
        losses = [v.by_position.get(name, math.nan) for name in names]
        axes.plot(losses, color=plot.POINT, ls=line, marker=".")
        legend += plot.key(
            dashes,
            plot.POINT,
            f"step {v.iteration:,}",
        )
    axes.set_xticks(
        range(len(names)),
        labels=names,
        rotation=45,
    )
    return plot.embed_figure(figure, title, legend=legend)


def data_plot(checks: list[Validation], title: str) -> str:
    """Draw the loss on each data set over the steps."""
    figure, axes = plot.new_axes(SMALL)
    legend = ""
    lines = itertools.cycle(SET_LINES)
    for prefix, loss in checks[-1].by_data.items():
        line, dashes = next(lines)
        # A run may go on with other data sets than it began with.
        known = [v for v in checks if prefix in v.by_data]
        x = [v.iteration for v in known]
        y = [v.by_data[prefix] for v in known]
        marker = "." if len(x) <= 30 else ""
        axes.plot(x, y, color=plot.POINT, ls=line, marker=marker)
        legend += plot.key(
            dashes,
            plot.POINT,
            f"{Path(prefix).name}: {loss:.4f}",
        )
    return plot.embed_figure(figure, title, legend=legend)


def score_plot(name: str, scores: dict[int, float]) -> str:
    figure, axes = plot.new_axes(SMALL)
    points = np.array(sorted(scores.items()), dtype=np.float64)
    x, y = points.reshape(-1, 2).T
    plot.draw_line(axes, x, y, plot.POINT, smooth=False)
    note = describe_column(name)
    return plot.embed_figure(figure, name, note)


def resumed_at(history: History) -> list[int]:
    return [i for i in history.resumed_at() if i < history.steps[-1].iteration]


def draw_column(
    axes: Axes, steps: Sequence[LoggedStep], column: str, scale: float = 1.0, smooth: bool = False
) -> int:
    """Draw a column, with crosses where it is not finite; return the width of its median."""
    x, y = columns(steps, column, scale)
    is_finite = np.isfinite(y)
    bad = x[~is_finite]
    # No more crosses than a line has points: a run may have diverged for good.
    crosses = bad[:: max(1, len(bad) // plot.POINTS)]
    # Near the upper edge: x in data, y as a share of the picture's height.
    heights = np.full(len(crosses), 0.97)
    transform = axes.get_xaxis_transform()
    axes.plot(crosses, heights, "x", color=plot.BAD, transform=transform, ms=5)
    return plot.draw_line(axes, x[is_finite], y[is_finite], plot.LINE, smooth=smooth)


def columns(steps: Sequence[LoggedStep], column: str, scale: float = 1.0) -> tuple[Any, Any]:
    """Return the iterations at which a column is known, and its values there, as arrays."""
    x = []
    y = []
    for step in steps:
        value = getattr(step, column)
        if value is not None:
            x.append(step.iteration)
            y.append(value * scale)
    return np.array(x, dtype=np.float64), np.array(y, dtype=np.float64)


def use_log_scale_if_spiky(axes: Axes, steps: Sequence[LoggedStep]) -> None:
    """Choose a logarithmic scale if one norm is so large that it would flatten all others."""
    from matplotlib.ticker import LogLocator, NullLocator

    norms = [s.grad_norm for s in steps if math.isfinite(s.grad_norm)]
    if norms and min(norms) > 0 and max(norms) > 20 * statistics.median(norms):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())
