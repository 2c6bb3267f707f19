"""Line plots for pages: matplotlib figures as SVG images, readable on light and dark pages."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.apps.pages.html import escape

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT, LINE, POINT, BAD = "#7b8490", "#8d96a355", "#3d85c8", "#d9772b", "#e0454f"
NARROW = (4.2, 3.0)  # inches of a wide plot on a narrow screen
POINTS = 1000  # per line at most: no picture shows more


def new_axes(
    size: tuple[float, float], resumed: Iterable[int] = (), x: str = "iteration"
) -> tuple[Figure, Axes]:
    """Return an empty figure with resumes marked; without pyplot and its global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    figure.patch.set_visible(False)
    axes = figure.add_subplot()
    style(axes, x)
    for i in resumed:
        axes.axvline(i, color=INK, lw=0.9, ls=(0, (4, 3)), alpha=0.6)
    return figure, axes


def style(axes: Axes, x: str) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axes.patch.set_visible(False)
    axes.grid(color=FAINT, lw=0.6)
    axes.spines[:].set_visible(False)
    axes.tick_params(which="both", colors=INK, length=0, labelsize=9)
    axes.yaxis.offsetText.set_color(INK)
    axes.set_xlabel(x, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def draw_line(axes: Axes, x: Any, y: Any, colour: str, line: Any = "-", smooth: bool = True) -> int:
    """Draw a line, with a running median over more than 20 points; return the median's width."""
    if not smooth or len(y) <= 20:
        marker = "." if len(y) <= 30 else ""
        axes.plot(*thin(x, y), color=colour, ls=line, lw=1.2, marker=marker)
        return 1

    # The values themselves, faintly, and over them the median of a fiftieth on each side.
    half = max(1, len(y) // 50)
    axes.plot(*thin(x, y), color=colour, lw=0.6, alpha=0.4)
    axes.plot(
        *running_median(x, y, half),
        color=colour,
        ls=line,
        lw=1.6,
    )
    return 2 * half + 1


def thin(x: Any, y: Any, points: int = POINTS) -> tuple[Any, Any]:
    """Keep at most `points` points, the lowest and highest of each stretch: a spike still shows."""
    if len(x) <= points:
        return x, y
    keep = []
    for stretch in np.array_split(np.arange(len(x)), points // 2):
        keep.append(stretch[y[stretch].argmin()])
        keep.append(stretch[y[stretch].argmax()])
    at = np.unique(keep)  # in order, and a point that is both once
    return x[at], y[at]


def running_median(x: Any, y: Any, half: int) -> tuple[Any, Any]:
    """Return the median of up to `half` neighbours on each side, which a spike does not move.

    Near the start it takes as many after a point as before it: a steep fall is not flattened.
    """
    at = np.unique(np.linspace(0, len(y) - 1, POINTS // 2).astype(int))
    medians = []
    for i in at:
        reach = min(i, half)
        medians.append(np.median(y[i - reach : i + reach + 1]))
    return x[at], medians


def svg_of(figure: Figure, title: str) -> str:
    """Return the figure as SVG text, the same for the same figure."""
    import matplotlib

    file = io.StringIO()
    # Text stays text, which a reader can search, and ids are hashes of the title, not random.
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": title, "font.family": "sans-serif"}
    ):
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=no_metadata)
    return file.getvalue()


def embed_figure(
    figure: Figure, title: str, note: str = "", legend: str = "", wide: bool = False
) -> str:
    """Return an HTML figure; as a data URI, its ids and styles stay apart from the page's."""
    name = escape(title)
    caption = f"<figcaption>{name}</figcaption>"
    if note:
        caption = f'<figcaption>{name} <span class="quiet">{escape(note)}</span></figcaption>'
    if legend:
        caption += f'<div class="legend quiet">{legend}</div>'
    image = f'<img alt="{name}" src="{data_uri(figure, title)}">'
    if not wide:
        return f"<figure>{caption}{image}</figure>"
    # Scaled down to a phone, its labels could not be read.
    figure.set_size_inches(*NARROW)
    narrow = f'<source media="(max-width: 40rem)" srcset="{data_uri(figure, title)}">'
    return f'<figure class="wide">{caption}<picture>{narrow}{image}</picture></figure>'


def data_uri(figure: Figure, title: str) -> str:
    encoded = base64.b64encode(svg_of(figure, title).encode())
    return f"data:image/svg+xml;base64,{encoded.decode()}"


def key(sign: str, colour: str, text: str) -> str:
    """Return one entry of a legend."""
    return f'<span><b style="color: {colour}">{sign}</b> {escape(text)}</span>'
