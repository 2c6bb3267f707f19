"""What a run did: `meshwright report DIR` writes one page with pictures, `--losses` prints exact numbers to compare.

With several folders it compares their runs: compare.py.

The page is one file without outside resources, so that it can be mailed or archived. Pictures are SVG with their text
left as text, and their colours are the page's variables: they stay sharp, and follow the reader's light or dark theme.
"""

from __future__ import annotations

import dataclasses
import datetime
import html
import io
import itertools
import json
import math
import re
import shlex
import statistics
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.errors import BAD_DATA, USAGE, UserError
from meshwright.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def write(run_dir: Path, output: Path | None = None) -> Path:
    """Write the page of a run folder; return where."""
    return write_whole(output or run_dir / "report.html", page(run_dir, read_rows(run_dir), read_settings(run_dir)))


def write_whole(target: Path, text: str) -> Path:
    """Write a file whole or not at all."""
    if target.exists() and not target.is_file():
        raise UserError(f"{target} is no plain file: the page needs a name of its own", USAGE)
    with replacing(target) as file:
        # A command line of bytes that are no text comes back as lone surrogates, which UTF-8 does not know.
        file.write(text.encode(errors="replace"))
    return target


# Reading


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    attempt: int
    iteration: int
    consumed_samples: int
    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    ms: float
    tokens_per_second: float
    mfu: float | None
    memory: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class Validation:
    iteration: int
    name: str  # "validation" or "test"
    loss: float
    ppl: float
    of: str = ""  # which of several sets

    @property
    def title(self) -> str:
        return f"{self.name} on {self.of}" if self.of else self.name


@dataclasses.dataclass
class Attempt:
    number: int
    start: dict[str, Any]
    began: int  # the iteration it started from
    last: int  # the iteration it reached
    seconds: float = 0.0  # in steps and saves, also those that a later attempt repeated
    end: dict[str, Any] | None = None  # None: still running, or killed


@dataclasses.dataclass(frozen=True)
class Rows:
    """The history of a run: of each iteration the row that counts, in order, and all its attempts."""

    steps: list[Step]
    validations: list[Validation]
    attempts: list[Attempt]


def read_rows(folder: Path) -> Rows:
    """Read metrics.jsonl. An attempt that starts at iteration N undoes what earlier ones did after N.

    So the last row of an iteration counts, and a run begun anew in the same folder is not mixed with the one before.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}", USAGE)
    path = folder / "metrics.jsonl"
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; a run writes it with --save or --run-dir", BAD_DATA) from None
    steps: dict[int, Step] = {}
    validations: dict[tuple[str, int, bool], Validation] = {}  # by title, iteration, and whether at the end of a run
    attempts: list[Attempt] = []
    with file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                event, iteration = row["event"], int(row["iteration"])
                if event == "start":
                    steps = {i: s for i, s in steps.items() if i <= iteration}
                    validations = {k: v for k, v in validations.items() if k[1] <= iteration}
                    attempts.append(Attempt(int(row["attempt"]), row, iteration, iteration))
                    row["time"] = float(row.get("time", 0))
                elif event == "step":
                    steps[iteration] = step = _step(row)
                    if attempts:
                        attempts[-1].last = iteration
                        attempts[-1].seconds += step.ms / 1e3
                elif event == "validation":
                    v = Validation(
                        iteration, str(row["name"]), float(row["loss"]), float(row["ppl"]), str(row.get("set", ""))
                    )
                    validations[v.title, iteration, bool(row.get("end"))] = v
                elif event == "save" and attempts:
                    attempts[-1].seconds += float(row["seconds"])
                elif event == "end" and attempts and attempts[-1].number == int(row["attempt"]):  # not an evaluation's
                    attempts[-1].end = row
                    row["time"] = float(row.get("time", 0))
            except (ValueError, TypeError, KeyError, OverflowError) as e:
                if not line.endswith(b"\n"):
                    break  # the last line, cut by a kill
                why = f"{e} is missing" if isinstance(e, KeyError) else str(e)
                raise UserError(f"{path}:{number}: not a row that a run writes: {why}", BAD_DATA) from None
    in_order = sorted(validations.values(), key=lambda v: v.iteration)
    return Rows([steps[i] for i in sorted(steps)], in_order, attempts)


def _step(row: dict[str, Any]) -> Step:
    # float() also reads the texts "nan", "inf" and "-inf", which stand for what JSON has no numbers for.
    kinds = {"int": int, "float": float, "bool": bool}
    values: dict[str, Any] = {
        f.name: None
        if row.get(f.name) is None and "None" in str(f.type)
        else kinds[str(f.type).split(" ")[0]](row[f.name])
        for f in dataclasses.fields(Step)
    }
    return Step(**values)


def read_settings(folder: Path) -> dict[str, dict[str, Any]]:
    """Groups of settings from config.toml; none if the file is not there."""
    path = folder / "config.toml"
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8", errors="surrogateescape"))
    except FileNotFoundError:
        return {}
    except ValueError as e:
        raise UserError(f"{path} is damaged: {e}", BAD_DATA) from None
    return {group: values for group, values in found.items() if isinstance(values, dict)}


# The page


def page(run_dir: Path, rows: Rows, settings: dict[str, dict[str, Any]]) -> str:
    name, last = run_dir.resolve().name, rows.attempts[-1] if rows.attempts else None
    state = "no attempt recorded" if last is None else f"last attempt: {_ended(last, True)}"
    attempts = [
        [
            str(a.number),
            _date(a.start.get("time")),
            f"{a.began:,} to {a.last:,}",
            _command(a.start.get("command")),
            _ended(a, a is last),
        ]
        for a in rows.attempts
    ]
    parts = [
        f'<h1>{escaped(name)}</h1><p class="quiet">{escaped(state)}</p>',
        '<dl class="cards">',
        *(f"<div><dt>{escaped(k)}</dt><dd>{escaped(v)}</dd></div>" for k, v in headlines(rows, settings)),
        "</dl>",
        f'<div class="pictures">{"".join(pictures(rows))}</div>',
        "<h2>Attempts</h2>",
        table(attempts, "attempts", ["", "started", "iterations", "command", "end"]),
        "<h2>Repeat this run</h2>",
        f"<pre>meshwright train --config {escaped(shlex.quote(str(run_dir / 'config.toml')))}</pre>",
        '<p class="quiet">Where the settings name --save and --load, this continues from the last checkpoint; '
        "give both a new folder to start afresh.</p>",
        f"<details><summary>Settings ({sum(map(len, settings.values()))})</summary>",
        *(
            f"<h3>{escaped(group)}</h3>"
            + table([[k, json.dumps(v, default=str)] for k, v in values.items()], "settings")
            for group, values in settings.items()
        ),
        "</details>",
        f'<footer class="quiet">Meshwright {escaped(last.start.get("version", "") if last else "")}. Exact numbers: '
        f"<code>meshwright report --losses {escaped(shlex.quote(str(run_dir)))}</code></footer>",
    ]
    return document(f"{name}: report", parts)


def document(title: str, parts: Iterable[str]) -> str:
    head = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escaped(title)}</title><style>{THEME}{STYLE}</style></head><body>",
    ]
    return "\n".join([*head, *parts, "</body></html>\n"])


def headlines(rows: Rows, settings: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """The figures at the top, as (name, value); what is not known is left out."""
    out: list[tuple[str, str]] = []
    start = rows.attempts[-1].start if rows.attempts else {}
    if isinstance(start.get("parameters"), int):
        out.append(("parameters", f"{start['parameters']:,}"))
    if rows.steps:
        end = rows.steps[-1]
        out += [("steps", f"{end.iteration:,}"), ("samples", f"{end.consumed_samples:,}")]
        seq = settings.get("data", {}).get("seq_length")
        if isinstance(seq, int):
            out.append(("tokens", f"{end.consumed_samples * seq:,}"))
        skipped = sum(s.skipped for s in rows.steps)
        if skipped:
            out.append(("skipped steps", f"{skipped:,}"))
        out.append(("final loss", f"{end.loss:.4f}"))
    for checks in by_set(v for v in rows.validations if v.name != "test"):
        best, on = min(checks, key=lambda v: math.inf if math.isnan(v.loss) else v.loss), _on(checks[0])
        out.append((f"final validation loss{on}", f"{checks[-1].loss:.4f}"))
        out.append((f"final validation perplexity{on}", f"{checks[-1].ppl:,.2f}"))
        out.append((f"best validation loss{on}", f"{best.loss:.4f} at {best.iteration:,}"))
    for tests in by_set(v for v in rows.validations if v.name == "test"):
        out.append((f"test loss{_on(tests[0])}", f"{tests[-1].loss:.4f}"))
    if rows.steps:
        out.append(("tokens per second, median", f"{statistics.median(s.tokens_per_second for s in rows.steps):,.0f}"))
        mfu = [s.mfu for s in rows.steps if s.mfu is not None]
        if mfu:
            out.append(("MFU, median", f"{100 * statistics.median(mfu):.1f}%"))
        memory = [s.memory for s in rows.steps if s.memory is not None]
        if memory:
            out.append(("peak memory", f"{max(memory) / 2**30:.2f} GiB"))
    called, seconds = wall_time(rows.attempts)
    out += [(called, duration(seconds)), ("attempts", str(len(rows.attempts)))]
    return out + [(k, str(start[k])) for k in ("device", "dtype", "torch") if start.get(k)]


def by_set(validations: Iterable[Validation]) -> list[list[Validation]]:
    """Of one name, each of several sets apart."""
    out: dict[str, list[Validation]] = {}
    for v in validations:
        out.setdefault(v.of, []).append(v)
    return list(out.values())


def _on(v: Validation) -> str:
    return f" on {v.of}" if v.of else ""


def wall_time(attempts: Sequence[Attempt]) -> tuple[str, float]:
    """From start to end where every attempt's end is dated; else, as after a kill, the steps and saves known of."""
    dated = [a.end["time"] - a.start["time"] for a in attempts if a.end and "time" in a.end and "time" in a.start]
    if dated and len(dated) == len(attempts):
        return "wall time", sum(dated)
    return "time in steps and saves", sum(a.seconds for a in attempts)


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours} h {m:02d} min" if hours else f"{m} min {s:02d} s"


def _date(seconds: object) -> str:
    if not isinstance(seconds, int | float):
        return ""
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"


def _command(words: object) -> str:
    return shlex.join(map(str, words)) if isinstance(words, list) else str(words or "")


def _ended(attempt: Attempt, last: bool) -> str:
    if attempt.end is None:
        return "no end recorded: still running, or killed" if last else "killed: no end recorded"
    return f"{attempt.end.get('reason', 'ended')} (exit status {attempt.end.get('status', '?')})"


def escaped(value: object) -> str:
    return html.escape(str(value))


def table(body: Iterable[list[str]], kind: str, head: Sequence[str] = ()) -> str:
    top = "<tr>" + "".join(f"<th>{escaped(h)}</th>" for h in head) + "</tr>" if head else ""
    lines = ("<tr>" + "".join(f"<td>{escaped(cell)}</td>" for cell in line) + "</tr>" for line in body)
    return f'<div class="scroll"><table class="{kind}">{top}{"".join(lines)}</table></div>'


# The pictures

# Colours as matplotlib writes them, and the page's variables that take their place.
INK, FAINT, LINE, POINT, BAD = "#010000", "#010001", "#010002", "#010003", "#010004"
VARIABLES = {INK: "var(--ink)", FAINT: "var(--faint)", LINE: "var(--line)", POINT: "var(--point)", BAD: "var(--bad)"}
LINES = (("-", "━"), ("--", "╌"), (":", "┈"), ("-.", "╌┈"))  # of several sets, and their signs in the legend
POINTS = 1000  # of a line at most: no picture shows more


def pictures(rows: Rows) -> list[str]:
    """Figures as HTML: the loss, large, then what explains it."""
    if not rows.steps:
        return ['<p class="quiet">No step was recorded, so there is nothing to draw.</p>']
    out = [_loss(rows)]
    for title, unit, column, scale, smooth in (
        ("Learning rate", "", "lr", 1.0, False),
        ("Gradient norm", "before clipping", "grad_norm", 1.0, True),
        ("Speed", "tokens per second", "tokens_per_second", 1.0, True),
        ("Step time", "milliseconds", "ms", 1.0, True),
        ("Peak memory", "GiB", "memory", 2.0**-30, False),
    ):
        if any(getattr(s, column) is not None for s in rows.steps):
            figure, axes = blank_axes((4.8, 2.7), _resumed(rows))
            _line(axes, rows.steps, column, scale, smooth)
            if column == "grad_norm":
                _log_if_spiky(axes, rows.steps)
            out.append(framed(title, unit, svg_of(figure, title)))
    return out


def _loss(rows: Rows) -> str:
    import numpy as np

    figure, axes = blank_axes((7.6, 3.4), _resumed(rows))
    width = _line(axes, rows.steps, "loss", smooth=True)
    legend = [("line", "━", f"training, median of {width} steps" if width > 1 else "training")]
    for name, marker, sign in (("validation", "o", "●"), ("test", "D", "◆")):
        sets = by_set(v for v in rows.validations if v.name == name and math.isfinite(v.loss))
        for points, (line, dashes) in zip(sets, itertools.cycle(LINES)):
            x, y = np.array([(v.iteration, v.loss) for v in points]).T
            axes.plot(*thinned(x, y), color=POINT, lw=1, ls=line, marker=marker if len(points) < 200 else "", ms=4)
            legend.append(("point", f"{sign} {dashes}" if len(sets) > 1 else sign, points[0].title))
    if not all(math.isfinite(s.loss) for s in rows.steps):
        legend.append(("bad", "×", "not finite"))
    if _resumed(rows):
        legend.append(("ink", "┆", "resumed"))
    key = "".join(
        f'<span><b style="color: var(--{colour})">{sign}</b> {escaped(text)}</span>' for colour, sign, text in legend
    )
    return framed("Loss", "", f'<div class="legend quiet">{key}</div>' + svg_of(figure, "Loss"), "wide")


def _resumed(rows: Rows) -> list[int]:
    return sorted({a.began for a in rows.attempts[1:] if 0 < a.began < rows.steps[-1].iteration})


def blank_axes(size: tuple[float, float], resumed: Iterable[int] = (), x: str = "iteration") -> tuple[Figure, Axes]:
    """A picture in the page's colours with the resumes marked; without pyplot, so that nothing global is touched."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    figure.patch.set_visible(False)
    axes = figure.add_subplot()
    furnish(axes, x)
    for i in resumed:
        axes.axvline(i, color=INK, lw=0.9, ls=(0, (4, 3)), alpha=0.6)
    return figure, axes


def furnish(axes: Axes, x: str) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axes.patch.set_visible(False)
    axes.grid(color=FAINT, lw=0.6)
    axes.spines[:].set_visible(False)
    axes.tick_params(which="both", colors=INK, length=0, labelsize=9)
    axes.yaxis.offsetText.set_color(INK)
    axes.set_xlabel(x, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _line(axes: Axes, steps: Sequence[Step], column: str, scale: float = 1.0, smooth: bool = False) -> int:
    """Draw a column over the iterations, crosses where it is not finite; return how many steps were smoothed into one."""
    import numpy as np

    x, y = points(steps, column, scale=scale)
    known = np.isfinite(y)
    crosses = x[~known][:: max(1, int((~known).sum()) // POINTS)]
    axes.plot(crosses, np.full(len(crosses), 0.97), "x", color=BAD, transform=axes.get_xaxis_transform(), ms=5)
    return draw(axes, x[known], y[known], LINE, smooth=smooth)


def points(steps: Sequence[Step], column: str, at: str = "iteration", scale: float = 1.0) -> tuple[Any, Any]:
    """A column over another one, where it is known."""
    import numpy as np

    pairs = [(getattr(s, at), v * scale) for s in steps if (v := getattr(s, column)) is not None]
    x, y = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
    return x, y


def draw(axes: Axes, x: Any, y: Any, colour: str, line: Any = "-", smooth: bool = True) -> int:
    """A line, and on it, if there are enough points, the median of neighbours; return of how many."""
    if not smooth or len(y) <= 20:
        axes.plot(*thinned(x, y), color=colour, ls=line, lw=1.2, marker="." if len(y) <= 30 else "")
        return 1
    half = max(1, len(y) // 50)
    axes.plot(*thinned(x, y), color=colour, lw=0.6, alpha=0.4)
    axes.plot(*smoothed(x, y, half), color=colour, ls=line, lw=1.6)
    return 2 * half + 1


def thinned(x: Any, y: Any) -> tuple[Any, Any]:
    """At most POINTS points: the lowest and the highest of each stretch, so that a spike still shows."""
    import numpy as np

    if len(x) <= POINTS:
        return x, y
    stretches = np.array_split(np.arange(len(x)), POINTS // 2)
    keep = np.unique([i for s in stretches for i in (s[y[s].argmin()], s[y[s].argmax()])])
    return x[keep], y[keep]


def smoothed(x: Any, y: Any, half: int) -> tuple[Any, Any]:
    """Median of up to `half` neighbours on each side: unlike a mean it shows no plateau around a spike.

    At the start it takes as many after as before, so that a steep fall is not flattened.
    """
    import numpy as np

    at = np.unique(np.linspace(0, len(y) - 1, POINTS // 2).astype(int))
    return x[at], [np.median(y[i - min(i, half) : i + min(i, half) + 1]) for i in at]


def _log_if_spiky(axes: Axes, steps: Sequence[Step]) -> None:
    """One gradient of fifty times the usual norm would flatten all others into the floor."""
    from matplotlib.ticker import LogLocator, NullLocator

    norms = [s.grad_norm for s in steps if math.isfinite(s.grad_norm)]
    if norms and min(norms) > 0 and max(norms) > 20 * statistics.median(norms):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())


def svg_of(figure: Figure, title: str) -> str:
    import matplotlib

    file = io.StringIO()
    # Text stays text: small, sharp, selectable. The salt makes the same run give the same page.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "font.family": "sans-serif"}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    prefix = title.lower().replace(" ", "-")
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{prefix}-", svg)  # many pictures, one page: names must differ
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)  # the page gives the size
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg.replace("<svg", f'<svg role="img" aria-label="{escaped(title)}"', 1)


def framed(title: str, unit: str, drawing: str, kind: str = "") -> str:
    caption = escaped(title) + (f' <span class="quiet">{escaped(unit)}</span>' if unit else "")
    return f'<figure class="{kind}"><figcaption>{caption}</figcaption>{drawing}</figure>'


THEME = """
:root { color-scheme: light dark; --paper: #fff; --card: #f5f6f8; --ink: #1d2129; --quiet: #5c6470; --faint: #dfe2e7;
  --line: #2563b0; --point: #c2570c; --bad: #c01f2e }
@media (prefers-color-scheme: dark) { :root { --paper: #15181d; --card: #1f242b; --ink: #e4e7ec; --quiet: #9aa3b0;
  --faint: #343b45; --line: #6aa9f4; --point: #f3a056; --bad: #ff7b84 } }
"""
STYLE = """
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 62rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif }
h1 { margin: 0; font-size: 1.6rem; overflow-wrap: anywhere } h2 { margin: 2rem 0 .5rem; font-size: 1.2rem }
h3 { margin: 1rem 0 .25rem; font-size: 1rem } p { margin: .25rem 0 1rem }
.quiet { color: var(--quiet); font-size: .9rem; font-weight: normal }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .6rem; margin: 1rem 0 1.5rem }
.cards div { background: var(--card); border-radius: .5rem; padding: .5rem .75rem }
dt { color: var(--quiet); font-size: .8rem; line-height: 1.3 }
dd { margin: .1rem 0 0; font-weight: 600; overflow-wrap: anywhere }
.pictures { display: grid; grid-template-columns: 1fr 1fr; gap: 1.25rem 1rem }
.wide { grid-column: 1 / -1 } figure { margin: 0; min-width: 0 } figcaption { font-weight: 600 }
.legend { display: flex; flex-wrap: wrap; gap: 0 1rem; margin: .1rem 0 .3rem }
svg { display: block; width: 100%; height: auto; overflow: visible } svg text { font-family: system-ui, sans-serif !important }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: .9rem; width: 100% }
th { text-align: left; font-weight: 600 }
td, th { padding: .35rem .75rem .35rem 0; border-bottom: 1px solid var(--faint); vertical-align: top }
.settings td { width: 50%; overflow-wrap: anywhere; font-family: ui-monospace, monospace }
.attempts td { white-space: nowrap }
.attempts td:nth-child(4) { white-space: normal; min-width: 18rem; overflow-wrap: anywhere; font-size: .8rem;
  font-family: ui-monospace, monospace }
.attempts td:last-child { white-space: normal; min-width: 9rem }
pre { background: var(--card); border-radius: .5rem; padding: .75rem; overflow-x: auto }
details { margin: 2rem 0 } summary { font-size: 1.2rem; font-weight: 600; cursor: pointer }
footer { margin-top: 2rem; border-top: 1px solid var(--faint); padding-top: .75rem; overflow-wrap: anywhere }
@media (max-width: 40rem) { .pictures { grid-template-columns: minmax(0, 1fr) }
  .wide text { font-size: 15px !important } }
"""
