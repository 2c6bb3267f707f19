"""Scores of one or several checkpoints: as a table, as JSON and as a picture over the steps."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.base.files import writing
from meshwright.base.records import align_columns, json_ready


@dataclass(frozen=True)
class Result:
    """The measures of one checkpoint on one task.

    Fields:
        task: its name; empty for text and token files.
        headline: the measure that is drawn.
        facts: what identifies the measurement: file, variant, lengths.
        by_position: losses by the number of tokens before a prediction, of text and token files.
    """

    folder: str
    step: int
    task: str
    headline: str
    values: dict[str, float]
    facts: dict[str, Any] = field(default_factory=dict)
    by_position: dict[str, float] = field(default_factory=dict)

    @property
    def record(self) -> dict[str, Any]:
        """Return the result for JSON; what is not finite is a string there."""
        plain: dict[str, Any] = json_ready(self.values)
        if not self.task:
            positions = {"by_position": json_ready(self.by_position)} if self.by_position else {}
            return {"step": self.step} | plain | self.facts | positions
        return {
            "folder": self.folder,
            "step": self.step,
            "task": self.task,
            "values": plain,
        } | self.facts


def format_value(value: Any) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.4f}" if isinstance(value, float) else f"{value:,}"


def list_result(result: Result) -> str:
    """Return the figures of one checkpoint, a line each."""
    named = {"step": result.step} | result.values | result.facts
    named |= {f"loss at {positions}": loss for positions, loss in result.by_position.items()}
    width = max(16, *(len(name) for name in named))
    return "\n".join(
        f"  {name.replace('_', ' '):{width}} {format_value(value)}" for name, value in named.items()
    )


def tabulate(results: Sequence[Result]) -> str:
    """Return one task's figures of several checkpoints, a row each."""
    several = len({r.folder for r in results}) > 1
    head = ["folder"] * several + ["step", *(name.replace("_", " ") for name in results[0].values)]
    rows = [
        [*[r.folder] * several, format_value(r.step), *map(format_value, r.values.values())]
        for r in results
    ]
    lines = align_columns([head, *rows], to_the_right=True)
    facts = "; ".join(
        f"{n.replace('_', ' ')} {format_value(v)}"
        for n, v in results[0].facts.items()
        if n != "seconds"
    )
    return "\n".join([f"{results[0].task or 'text'}: {facts}", *(f"  {line}" for line in lines)])


def by_task(results: Sequence[Result]) -> list[list[Result]]:
    names = dict.fromkeys(r.task for r in results)
    return [[r for r in results if r.task == name] for name in names]


def write_results(results: Sequence[Result], path: str) -> None:
    with writing(Path(path), "--results-path"):
        Path(path).write_text(
            json.dumps([r.record for r in results], indent=1) + "\n", encoding="utf-8"
        )


def draw_results(results: Sequence[Result], path: str) -> None:
    """Draw each task's headline over the steps, a line for each folder."""
    from matplotlib.figure import Figure

    from meshwright.apps.pages import plot
    from meshwright.apps.pages.styles import style_of

    tasks = by_task(results)
    figure = Figure(figsize=(5.2 * len(tasks), 3.6), layout="constrained")
    panels = figure.subplots(1, len(tasks), squeeze=False)[0]
    folders = list(dict.fromkeys(r.folder for r in results))
    for axes, of_task in zip(panels, tasks, strict=True):
        plot.style(axes, "step")
        title = f"{of_task[0].task} {of_task[0].headline.replace('_', ' ')}".strip()
        axes.set_title(title, color=plot.INK, fontsize=10)
        for number, folder in enumerate(folders):
            style = style_of(number)
            of_folder = sorted((r for r in of_task if r.folder == folder), key=lambda r: r.step)
            x, y = (
                [r.step for r in of_folder],
                [r.values.get(r.headline, math.nan) for r in of_folder],
            )
            axes.plot(
                x,
                y,
                color=style.colour,
                ls=style.line,
                marker=style.marker,
                ms=4,
                lw=1.2,
                label=folder,
            )
    if len(folders) > 1:
        panels[0].legend(fontsize=8, labelcolor=plot.INK, frameon=False)
    with writing(Path(path), "--picture"):
        if path.endswith(".svg"):
            Path(path).write_text(plot.svg_of(figure, "scores"), encoding="utf-8")
        else:
            figure.savefig(path, dpi=150)
