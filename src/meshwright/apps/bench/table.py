"""The table of a bench: lines of text, one a row, and a picture of bars."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Result = dict[str, Any]
NAME_WIDTH = 31  # columns of a row's name

COLUMNS: list[tuple[str, int, Callable[[Result], str]]] = [
    ("tokens/s", 11, lambda r: f"{r['tokens_per_second']:,.0f}"),
    ("ms", 9, lambda r: f"{r['ms']:,.1f}"),
    ("MFU %", 7, lambda r: "-" if r["mfu"] is None else f"{100 * r['mfu']:.1f}"),
    ("GiB", 7, lambda r: "-" if r["peak_bytes"] is None else f"{r['peak_bytes'] / 2**30:.1f}"),
    (
        "first s",
        8,
        lambda r: "-" if r["first_step_seconds"] is None else f"{r['first_step_seconds']:.1f}",
    ),
    ("loss", 9, lambda r: f"{r['first_loss']:.4f}"),
    ("at last", 9, lambda r: f"{r['last_loss']:.4f}"),
]


def head() -> str:
    return " " * NAME_WIDTH + "".join(title.rjust(width) for title, width, _ in COLUMNS)


def lines_of(result: Result) -> list[str]:
    """Return a row's line, and below it those of what it is compared with and of its profile."""
    name = f"{result['name'][: NAME_WIDTH - 1]:{NAME_WIDTH}}"
    if result["failed"]:
        return textwrap.wrap(
            f"FAILED: {result['failed']}",
            100,
            initial_indent=name,
            subsequent_indent=" " * NAME_WIDTH,
        )
    out = [name + "".join(text(result).rjust(width) for _, width, text in COLUMNS)]
    if (ratio := result.get("ratio")) is not None:
        times = ratio * result["gpus"]
        out.append(
            f"{'':{NAME_WIDTH}}{times:.2f} x {result['beside']} with {result['gpus']} ranks, {ratio:.1%} each"
        )
    for peer in result.get("peers", ()):
        out.append(f"{'':{NAME_WIDTH}}{describe_peer(peer)}")
    if result.get("profile"):
        shares = result["profile"]["shares"].items()
        listed = ", ".join(f"{name} {share:.1%}" for name, share in shares if share >= 0.0005)
        out.append(f"{'':{NAME_WIDTH}}{listed}")
    return out


def describe_peer(peer: Result) -> str:
    if peer["failed"]:
        return f"{peer['name']}: {peer['failed']}"
    at = f"{peer['tokens_per_second']:,.0f} tokens/s, micro-batch {peer['micro']}"
    others = sorted(
        ((speed, n) for n, speed in peer["tried"].items() if n != peer["micro"]), reverse=True
    )
    at += "".join(
        f"; {n}: {format(speed, ',.0f') if speed else 'too large'}" for speed, n in others
    )
    return f"{peer['ratio']:.2f} x {peer['name']} {peer['version']} ({at})"


def startup_lines(results: Iterable[Result]) -> list[str]:
    """Return a table of the seconds of each phase before and with the first step."""
    timed = [r for r in results if not r["failed"] and r["startup"]]
    names = list(dict.fromkeys(name for r in timed for name in r["startup"]))
    if not names:
        return []
    widths = [max(len(name), 5) + 2 for name in names]
    title = f"{'seconds to the first step':{NAME_WIDTH}}"
    out = [
        "",
        title + "".join(name.rjust(width) for name, width in zip(names, widths, strict=True)),
    ]
    for r in timed:
        cells = (
            f"{r['startup'].get(name, 0):.2f}".rjust(width)
            for name, width in zip(names, widths, strict=True)
        )
        out.append(f"{r['name'][: NAME_WIDTH - 1]:{NAME_WIDTH}}" + "".join(cells))
    return out


def add_ratio(result: Result, earlier: Iterable[Result]) -> None:
    """Add the share of the speed a GPU that is left of the one-GPU row's."""
    base = next((r for r in earlier if r["name"] == result["beside"] and not r["failed"]), None)
    if base is not None and not result["failed"]:
        result["ratio"] = result["tokens_per_second"] / result["gpus"] / base["tokens_per_second"]


def draw_bars(results: Iterable[Result], title: str, path: Path) -> None:
    """Draw the tokens/s of each row as bars, with its peers' beside it."""
    from matplotlib.figure import Figure

    from meshwright.apps.pages.plot import INK, LINE, POINT

    bars: list[tuple[str, float, str]] = []
    for r in results:
        if r["failed"]:
            continue
        bars.append((r["name"], r["tokens_per_second"], LINE))
        for peer in r.get("peers", ()):
            if not peer["failed"]:
                bars.append(
                    (f"{peer['name']}, {1 / peer['ratio']:.0%}", peer["tokens_per_second"], POINT)
                )
    if not bars:
        return
    figure = Figure(figsize=(9, 0.8 + 0.28 * len(bars)), layout="constrained")
    axes = figure.add_subplot()
    names, speeds, colours = zip(*reversed(bars), strict=True)
    heights = range(len(bars))
    axes.barh(heights, speeds, color=colours, height=0.75)
    axes.set_yticks(heights, names, fontsize=8)
    for height, speed in zip(heights, speeds, strict=True):
        axes.text(speed, height, f" {speed:,.0f}", va="center", fontsize=8, color=INK)
    axes.set_xlim(0, 1.12 * max(speeds))
    axes.set_xlabel("tokens/s", fontsize=9)
    axes.set_title(title, fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
