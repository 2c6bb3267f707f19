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
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.apps.pages import plot
from meshwright.apps.pages.html import document, escape, html_table, write_page
from meshwright.apps.pages.runs import CERTIFICATE, shell_line
from meshwright.base.files import read_small
from meshwright.base.progress import duration
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
const late = Date.now() - WRITTEN - PATIENCE;
if (late < 0) setTimeout(() => location.reload(), RELOAD);
else addEventListener("DOMContentLoaded", () => {
  document.getElementById("state").textContent = "No longer updated. The run was killed, or is in a very long step. ";
});
</script>"""


def page(run_dir: Path, history: History, settings: Settings, now: float) -> str:
    name, last = run_dir.resolve().name, history.attempts[-1] if history.attempts else None
    is_running, head = history.is_running(now), []
    if is_running:
        script = SCRIPT.replace("WRITTEN", str(round(1e3 * now))).replace(
            "PATIENCE", str(round(1e3 * PATIENCE))
        )
        head = [script.replace("RELOAD", str(1000 * RELOAD))]
        head.append(f'<noscript><meta http-equiv="refresh" content="{2 * RELOAD}"></noscript>')
    attempts = []
    for a in history.attempts:
        row = [str(a.number), date(a.start.get("time")), f"{a.began:,} to {a.last:,}"]
        attempts.append([*row, shell_line(a.start.get("command")), describe_end(a, a is last)])
    parts = [
        f"<h1>{escape(name)}</h1>",
        *show_state(history, now),
        '<dl class="cards">',
        *(
            f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>"
            for k, v in headlines(history, settings, is_running)
        ),
        "</dl>",
        *(
            f"<p>{escape(words)}</p>"
            for words in explain_validations(history, flat_settings(settings), is_running)
        ),
        *explain_unsaved(history),
        *show_certificate(run_dir),
        *(
            [f"<p>{escape(goodput.line().capitalize())}.</p>"]
            if (goodput := read_goodput(history))
            else []
        ),
        f'<div class="pictures">{"".join(plots(history))}</div>',
        "<h2>Attempts</h2>",
        html_table(attempts, "attempts", ["", "started", "iterations", "command", "end"]),
        "<h2>Repeat this run</h2>",
        f"<pre>meshwright train --config {escape(shlex.quote(str(run_dir / 'config.toml')))}</pre>",
        '<p class="quiet">If the settings name --save and --load, this continues from the last checkpoint; '
        "give both a new folder to start afresh.</p>",
        f"<details><summary>Settings ({sum(map(len, settings.values()))})</summary>",
        *(
            f"<h3>{escape(group)}</h3>{settings_table(values)}"
            for group, values in settings.items()
        ),
        "</details>",
        f'<footer class="quiet">Meshwright {escape(last.start.get("version", "") if last else "")}. Exact numbers: '
        f"<code>meshwright report --losses {escape(shlex.quote(shown(str(run_dir))))}</code></footer>",
    ]
    return document(f"{name}: report", parts, head)


def show_state(history: History, now: float) -> list[str]:
    """Return what the run does now, with its progress; or how it ended."""
    if not history.attempts:
        return ['<p class="quiet" id="state">no attempt recorded</p>']
    last = history.attempts[-1]
    if not history.is_running(now):
        since = f" since {date(history.updated)}" if last.end is None and history.updated else ""
        return [
            f'<p class="quiet" id="state">last attempt: {escape(describe_end(last, True))}{since}</p>'
        ]
    total = last.start.get("train_iters")
    words, bar = [f"step {last.last:,}"], []
    if isinstance(total, int) and total:
        words[0] += f" of {total:,}"
        recent = [s.ms for s in history.steps[-100:] if s.iteration > last.began]
        if recent:
            words.append(
                f"about {duration((total - last.last) * statistics.median(recent) / 1e3)} left"
            )
        bar = [f'<progress max="{total}" value="{last.last}"></progress>']
    words.append(f"updated {date(now)}; this page reloads itself")
    return [
        f'<p class="quiet" id="state"><b class="running">running</b>: {escape("; ".join(words))}</p>',
        *bar,
    ]


def show_certificate(run_dir: Path) -> list[str]:
    """Return a line about the comparison of the run's layout with one process, if there was one."""
    try:
        c = json.loads(read_small(run_dir / CERTIFICATE, CERTIFICATE_LIMIT, run_dir))
        words = f"{c['summary']} ({date(c['time'])}, {CERTIFICATE})"
        return [
            f"<p><b>Layout {'verified' if c['verdict'] == 'equal' else 'differs'}</b>: {escape(words)}.</p>"
        ]
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return []


def explain_unsaved(history: History) -> list[str]:
    """Return a line about saves that failed, after which the last attempt went on."""
    if not history.attempts or not (lost := history.attempts[-1].unsaved):
        return []
    earlier = f"{len(lost) - 10:,} times before step {lost[-10]:,}, and " if len(lost) > 10 else ""
    steps = f"step{'s' * (len(lost) > 1)} {', '.join(f'{step:,}' for step in lost[-10:])}"
    return [
        f"<p><b>Saving failed</b> {earlier}at {steps}; the run went on (--save-error warn).</p>"
    ]


def explain_validations(
    history: History, settings: dict[str, Any], is_running: bool = False
) -> list[str]:
    """Return what the best and the last validation mean, in words, for each set."""
    out = []
    for all_checks in history.sets().values():
        checks = [v for v in all_checks if math.isfinite(v.loss)]
        steps = sorted({v.iteration for v in checks})
        if len(steps) < 2:
            continue
        best, last = min(checks, key=lambda v: v.loss), checks[-1]
        gap, pair = last.loss - best.loss, [v.loss for v in checks if v.iteration == last.iteration]
        both = f"{pair[0]:.4f}, at the end {pair[-1]:.4f}"
        twice = f" Step {last.iteration:,} was validated twice, on other batches: {both}." * (
            pair[0] != pair[-1]
        )
        lead = f"Validation{suffix(last)}: the lowest loss, {best.loss:.4f}, was at step {best.iteration:,}"
        if best.iteration == last.iteration:
            then = (
                "it is still falling." if is_running else "a longer training may lower it further."
            )
            out.append(f"{lead}, the last of {len(steps)}: {then}{twice}")
            continue
        words = [
            f"{lead}; the last, at step {last.iteration:,}, is {last.loss:.4f}, which is {gap:.4f} higher."
        ]
        if gap < 0.01 * best.loss and not settings.get("full_validation"):
            words.append(
                "The difference is within noise, since each validation reads other samples."
            )
        else:
            words.append(
                "The model fits its training text ever better and new text worse (overfitting)."
            )
            words.append(
                "More text, fewer steps, a lower --lr, or more dropout and weight decay help."
            )
        if settings.get("keep_best") and settings.get("save"):
            words.append(f"The best step is kept: {settings['save']}/iter_{best.iteration:07d}.")
        else:
            words.append(
                "With --keep-best, a run keeps the checkpoint of its lowest validation loss."
            )
        out.append(" ".join(words) + twice)
    return out


def settings_table(values: dict[str, Any]) -> str:
    return html_table([[k, json.dumps(v, default=str)] for k, v in values.items()], "settings")


def headlines(
    history: History, settings: Settings, is_running: bool = False
) -> list[tuple[str, str]]:
    """Return the figures at the top as (name, value); unknown ones are left out."""
    out: list[tuple[str, str]] = []
    final = "latest" if is_running else "final"
    start = history.attempts[-1].start if history.attempts else {}
    if isinstance(start.get("parameters"), int):
        out.append(("parameters", f"{start['parameters']:,}"))
    steps = history.steps
    if steps:
        end = steps[-1]
        out += [("steps", f"{end.iteration:,}"), ("samples", f"{end.consumed_samples:,}")]
        seq = settings.get("data", {}).get("seq_length")
        if isinstance(seq, int):
            out.append(("tokens", f"{end.consumed_samples * seq:,}"))
        if skipped := sum(s.skipped for s in steps):
            out.append(("skipped steps", f"{skipped:,}"))
        mean, count = history.final_loss(settings.get("logging", {}).get("log_interval"))
        out.append(
            (f"{final} training loss{f', mean of {count} steps' * (count > 1)}", f"{mean:.4f}")
        )
    for checks in history.sets().values():
        best, on = (
            min(checks, key=lambda v: math.inf if math.isnan(v.loss) else v.loss),
            suffix(checks[0]),
        )
        out.append((f"{final} validation loss{on}", f"{checks[-1].loss:.4f}"))
        out.append((f"{final} validation perplexity{on}", f"{checks[-1].ppl:,.2f}"))
        out.append((f"best validation loss{on}", f"{best.loss:.4f} at {best.iteration:,}"))
        if checks[-1].ema_loss is not None:
            out.append(
                (f"{final} validation loss of the average{on}", f"{checks[-1].ema_loss:.4f}")
            )
    if history.means:
        last = history.means[max(history.means)]
        out.append(
            (f"validation loss of the mean of {len(last.steps)} saved steps", f"{last.loss:.4f}")
        )
    for tests in history.sets("test").values():
        out.append((f"test loss{suffix(tests[0])}", f"{tests[-1].loss:.4f}"))
    out += [
        (f"{final} {name}", f"{scores[max(scores)]:,.4f}")
        for name, scores in history.scores.items()
        if scores
    ]
    if steps:
        out.append(
            (
                "tokens per second, median",
                f"{statistics.median(s.tokens_per_second for s in steps):,.0f}",
            )
        )
        if mfu := [s.mfu for s in steps if s.mfu is not None]:
            out.append(("MFU, median", f"{100 * statistics.median(mfu):.1f}%"))
        if memory := [s.memory for s in steps if s.memory is not None]:
            out.append(("peak memory", f"{max(memory) / 2**30:.2f} GiB"))
    label, seconds = wall_time(history.attempts)
    out += [(label, duration(seconds)), ("attempts", str(len(history.attempts)))]
    if goodput := read_goodput(history):
        out.append(("goodput", f"{100 * goodput.share:.1f}%"))
        if goodput.mean_recovery is not None:
            out.append(("mean time to recover", duration(goodput.mean_recovery)))
    return out + [(k, str(start[k])) for k in ("device", "dtype", "torch") if start.get(k)]


def suffix(v: Validation) -> str:
    return f" on {v.dataset}" if v.dataset else ""


def date(seconds: object) -> str:
    if not isinstance(seconds, int | float):
        return ""
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"


def describe_end(attempt: Attempt, is_last: bool) -> str:
    if attempt.end is None:
        return "no end recorded: still running, or killed" if is_last else "killed: no end recorded"
    return f"{attempt.end.get('reason', 'ended')} (exit status {attempt.end.get('status', '?')})"


# Plots

# one per data set, and its sign in the legend
SET_LINES = (("-", "━"), ("--", "╌"), (":", "┈"), ("-.", "╌┈"))


def plots(history: History) -> list[str]:
    """Return HTML figures: the loss, large, then what explains it."""
    if not history.steps:
        return ['<p class="quiet">No step was recorded, so there is nothing to draw.</p>']
    out = [
        loss_plot(history),
        *part_plots(history),
        *(score_plot(*item) for item in history.scores.items()),
    ]
    for title, unit, column, scale, smooth in (
        ("Learning rate", "", "lr", 1.0, False),
        ("Gradient norm", "before clipping", "grad_norm", 1.0, True),
        ("Speed", "tokens per second", "tokens_per_second", 1.0, True),
        ("Step time", "milliseconds", "ms", 1.0, True),
        ("Peak memory", "GiB", "memory", 2.0**-30, False),
    ):
        if any(getattr(s, column) is not None for s in history.steps):
            figure, axes = plot.new_axes((4.8, 2.7), resumed_at(history))
            draw_column(axes, history.steps, column, scale, smooth)
            if column == "grad_norm":
                use_log_scale_if_spiky(axes, history.steps)
            out.append(plot.embed_figure(figure, title, unit))
    return out


def loss_plot(history: History) -> str:
    figure, axes = plot.new_axes((7.6, 3.4), resumed_at(history))
    width = draw_column(axes, history.steps, "loss", smooth=True)
    training = f"training, median of {width} steps" if width > 1 else "training"
    legend = (
        [plot.key("━", plot.LINE, training)]
        if any(math.isfinite(s.loss) for s in history.steps)
        else []
    )
    for name, marker, sign in (("validation", "o", "●"), ("test", "D", "◆")):
        sets = [
            [v for v in checks if math.isfinite(v.loss)] for checks in history.sets(name).values()
        ]
        for checks, (line, dashes) in zip(filter(None, sets), itertools.cycle(SET_LINES)):
            x, y = np.array([(v.iteration, v.loss) for v in checks]).T
            axes.plot(
                *plot.thin(x, y),
                color=plot.POINT,
                lw=1,
                ls=line,
                marker=marker if len(checks) < 200 else "",
                ms=4,
            )
            legend.append(
                plot.key(f"{sign} {dashes}" if len(sets) > 1 else sign, plot.POINT, checks[0].title)
            )
            if averaged := [(v.iteration, v.ema_loss) for v in checks if v.ema_loss is not None]:
                x, y = np.array(averaged).T
                axes.plot(
                    *plot.thin(x, y),
                    color=plot.INK,
                    lw=1,
                    ls=line,
                    marker="^" if len(x) < 200 else "",
                    ms=4,
                )
                legend.append(
                    plot.key(
                        f"▲ {dashes}" if len(sets) > 1 else "▲",
                        plot.INK,
                        f"{checks[0].title}, average",
                    )
                )
    if not all(math.isfinite(s.loss) for s in history.steps):
        legend.append(plot.key("×", plot.BAD, "not finite"))
    if resumed_at(history):
        legend.append(plot.key("┆", plot.INK, "resumed or rolled back"))
    return plot.embed_figure(figure, "Loss", legend="".join(legend), wide=True)


def part_plots(history: History) -> list[str]:
    """Return figures of each set's validation loss: by position, and by data set over the steps."""
    out = []
    for checks in history.sets().values():
        on, last = suffix(checks[0]), checks[-1]
        if len(last.by_position) > 1:
            figure, axes = plot.new_axes((4.8, 2.7), x="position")
            # the last step is validated twice
            by_step = list({v.iteration: v for v in checks}.values())
            chosen = [by_step[i] for i in sorted({0, len(by_step) // 2, len(by_step) - 1})]
            legend, names = [], list(last.by_position)
            for (line, dashes), v in zip(SET_LINES, reversed(chosen), strict=False):
                axes.plot(
                    [v.by_position.get(name, math.nan) for name in names],
                    color=plot.POINT,
                    ls=line,
                    marker=".",
                )
                legend.append(plot.key(dashes, plot.POINT, f"step {v.iteration:,}"))
            axes.set_xticks(range(len(names)), labels=names, rotation=45)
            out.append(
                plot.embed_figure(
                    figure, f"Validation loss by position{on}", legend="".join(legend)
                )
            )
        if last.by_data:
            figure, axes = plot.new_axes((4.8, 2.7))
            legend = []
            for (line, dashes), prefix in zip(
                itertools.cycle(SET_LINES), last.by_data, strict=False
            ):
                known = [(v.iteration, v.by_data[prefix]) for v in checks if prefix in v.by_data]
                axes.plot(
                    *zip(*known, strict=True),
                    color=plot.POINT,
                    ls=line,
                    marker="." if len(known) <= 30 else "",
                )
                legend.append(
                    plot.key(dashes, plot.POINT, f"{Path(prefix).name}: {last.by_data[prefix]:.4f}")
                )
            out.append(
                plot.embed_figure(
                    figure, f"Validation loss by data set{on}", legend="".join(legend)
                )
            )
    return out


def score_plot(name: str, scores: dict[int, float]) -> str:
    figure, axes = plot.new_axes((4.8, 2.7))
    x, y = np.array(sorted(scores.items()), dtype=np.float64).reshape(-1, 2).T
    plot.draw_line(axes, x, y, plot.POINT, smooth=False)
    return plot.embed_figure(figure, name, describe_column(name))


def resumed_at(history: History) -> list[int]:
    return [i for i in history.resumed_at() if i < history.steps[-1].iteration]


def draw_column(
    axes: Axes, steps: Sequence[LoggedStep], column: str, scale: float = 1.0, smooth: bool = False
) -> int:
    """Draw a column, with crosses where it is not finite; return the width of its median."""
    x, y = columns(steps, column, scale=scale)
    is_finite = np.isfinite(y)
    crosses = x[~is_finite][:: max(1, int((~is_finite).sum()) // plot.POINTS)]
    axes.plot(
        crosses,
        np.full(len(crosses), 0.97),
        "x",
        color=plot.BAD,
        transform=axes.get_xaxis_transform(),
        ms=5,
    )
    return plot.draw_line(axes, x[is_finite], y[is_finite], plot.LINE, smooth=smooth)


def columns(
    steps: Sequence[LoggedStep], column: str, at: str = "iteration", scale: float = 1.0
) -> tuple[Any, Any]:
    """Return column `at` and `column` as arrays, where the latter is known."""
    pairs = [(getattr(s, at), v * scale) for s in steps if (v := getattr(s, column)) is not None]
    x, y = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
    return x, y


def use_log_scale_if_spiky(axes: Axes, steps: Sequence[LoggedStep]) -> None:
    """On a linear scale, one gradient of fifty times the usual norm would flatten all others."""
    from matplotlib.ticker import LogLocator, NullLocator

    norms = [s.grad_norm for s in steps if math.isfinite(s.grad_norm)]
    if norms and min(norms) > 0 and max(norms) > 20 * statistics.median(norms):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())
