"""The table of a bench: lines of text, one a row, and a picture of bars."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Result = dict[str, Any]
NAME_WIDTH = 31  # columns of a row's name


def number(name: str, form: str, factor: float = 1) -> Callable[[Result], str]:
    """Return what shows a figure of a result times a factor, and - where it is not known."""

    def shown(result: Result) -> str:
        value = result[name]
        return "-" if value is None else format(value * factor, form)

    return shown


COLUMNS: list[tuple[str, int, Callable[[Result], str]]] = [
    ("tokens/s", 11, number("tokens_per_second", ",.0f")),
    ("ms", 9, number("ms", ",.1f")),
    ("MFU %", 7, number("mfu", ".1f", 100)),
    ("GiB", 7, number("peak_bytes", ".1f", 2**-30)),
    ("first s", 8, number("first_step_seconds", ".1f")),
    ("loss", 9, number("first_loss", ".4f")),
    ("at last", 9, number("last_loss", ".4f")),
]


def head() -> str:
    return " " * NAME_WIDTH + "".join(title.rjust(width) for title, width, _ in COLUMNS)


def padded(name: str) -> str:
    return name[: NAME_WIDTH - 1].ljust(NAME_WIDTH)


def lines_of(result: Result) -> list[str]:
    """Return a row's line, and below it those of what it is compared with and of its profile."""
    name = padded(result["name"])
    below = " " * NAME_WIDTH
    if result["failed"]:
        reason = f"FAILED: {result['failed']}"
        return textwrap.wrap(reason, 100, initial_indent=name, subsequent_indent=below)
    out = [name + "".join(text(result).rjust(width) for _, width, text in COLUMNS)]
    ratio = result.get("ratio")
    if ratio is not None:
        times = ratio * result["gpus"]
        out.append(
            f"{below}{times:.2f} x {result['beside']} with {result['gpus']} ranks, {ratio:.1%} each"
        )
    for peer in result.get("peers", ()):
        out.append(below + describe_peer(peer))
    if profile := result.get("profile"):
        # Kinds of operations by their share of the time; what rounds to 0.0 % is left out.
        shares = profile["shares"].items()
        listed = [f"{name} {share:.1%}" for name, share in shares if share >= 0.0005]
        out.append(below + ", ".join(listed))
    return out


def describe_peer(peer: Result) -> str:
    if peer["failed"]:
        return f"{peer['name']}: {peer['failed']}"
    at = f"{peer['tokens_per_second']:,.0f} tokens/s, micro-batch {peer['micro']}"
    # The other micro-batches that it tried, the fastest first.
    tried = [(speed, micro) for micro, speed in peer["tried"].items()]
    tried.sort(reverse=True)
    for speed, micro in tried:
        if micro == peer["micro"]:
            continue
        reached = f"{speed:,.0f}" if speed else "too large"
        at += f"; {micro}: {reached}"
    program = f"{peer['name']} {peer['version']}"
    return f"{peer['ratio']:.2f} x {program} ({at})"


def startup_lines(results: Iterable[Result]) -> list[str]:
    """Return a table of the seconds of each phase before and with the first step."""
    timed = [r for r in results if not r["failed"] and r["startup"]]
    # A column for each phase that any row has, in the order of the phases.
    widths = {name: max(len(name), 5) + 2 for r in timed for name in r["startup"]}
    if not widths:
        return []
    title = padded("seconds to the first step")
    out = ["", title + "".join(name.rjust(width) for name, width in widths.items())]
    for r in timed:
        line = padded(r["name"])
        for name, width in widths.items():
            line += f"{r['startup'].get(name, 0):.2f}".rjust(width)
        out.append(line)
    return out


def add_ratio(result: Result, earlier: Iterable[Result]) -> None:
    """Add the speed of each GPU as a share of that of the row on one GPU."""
    if result["failed"]:
        return
    for base in earlier:
        if base["name"] == result["beside"] and not base["failed"]:
            of_one = result["tokens_per_second"] / result["gpus"]
            result["ratio"] = of_one / base["tokens_per_second"]
            return


def draw_bars(results: Iterable[Result], title: str, path: Path) -> None:
    """Draw the tokens/s of each row as bars, with its peers' beside it."""
    from matplotlib.figure import Figure

    from meshwright.apps.pages.plot import INK, LINE, POINT

    names = list[str]()
    speeds = list[float]()
    colours = list[str]()
    for r in results:
        if r["failed"]:
            continue
        names.append(r["name"])
        speeds.append(r["tokens_per_second"])
        colours.append(LINE)
        for peer in r.get("peers", ()):
            if not peer["failed"]:
                names.append(f"{peer['name']}, {1 / peer['ratio']:.0%}")
                speeds.append(peer["tokens_per_second"])
                colours.append(POINT)
    if not names:
        return

    figure = Figure(figsize=(9, 0.8 + 0.28 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    heights = range(len(names) - 1, -1, -1)  # the first on top
    axes.barh(heights, speeds, color=colours, height=0.75)
    axes.set_yticks(heights, names, fontsize=8)
    for height, speed in zip(heights, speeds, strict=True):
        axes.text(speed, height, f" {speed:,.0f}", va="center", fontsize=8, color=INK)
    axes.set_xlim(0, 1.12 * max(speeds))
    axes.set_xlabel("tokens/s", fontsize=9)
    axes.set_title(title, fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
