"""The colours, lines and markers of several runs in one picture."""

from __future__ import annotations

from typing import Any, NamedTuple

from meshwright.apps.pages import plot

# Colours with a contrast of at least 3 to a white and to a dark page.
COLOURS = (plot.LINE, plot.POINT, "#2f9e62", "#c9405f", "#8f63d2", "#8a7a2e", "#1597a5", "#d060b0")
# Lines, and markers of validations, each with its sign in the legend.
RUN_LINES: tuple[tuple[Any, str], ...] = (
    ("-", "━━━"),
    ((0, (4, 1.5)), "━ ━"),
    ((0, (5, 1.5, 1, 1.5)), "━ ·"),
    ((0, (1, 1.5)), "· · ·"),
)
MARKERS = (
    ("o", "●"),
    ("D", "◆"),
    ("s", "■"),
    ("^", "▲"),
    ("v", "▼"),
    ("P", "✚"),
    ("X", "✖"),
    ("*", "★"),
)


class Style(NamedTuple):
    """Colour, line and marker of a run. Colour is never the only difference."""

    colour: str
    line: Any
    sign: str
    marker: str
    marker_sign: str


def style_of(number: int) -> Style:
    """Return the style of a run; the first 32 are all different."""
    # When the colours begin again, each comes with the line after the one that it had.
    again = number // len(COLOURS)
    line = RUN_LINES[(number + again) % len(RUN_LINES)]
    marker = MARKERS[number % len(MARKERS)]
    colour = COLOURS[number % len(COLOURS)]
    return Style(colour, *line, *marker)
