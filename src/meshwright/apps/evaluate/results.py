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
        values: dict[str, Any] = json_ready(self.values)
        if self.task:
            return {
                "folder": self.folder,
                "step": self.step,
                "task": self.task,
                "values": values,
            } | self.facts
        # Text and token files have no task, so their measures lie beside the step.
        out = {"step": self.step} | values | self.facts
        if self.by_position:
            out["by_position"] = json_ready(self.by_position)
        return out


def format_value(value: Any) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.4f}" if isinstance(value, float) else f"{value:,}"


def list_result(result: Result) -> str:
    """Return the figures of one checkpoint, a line each."""
    figures = {"step": result.step} | result.values | result.facts
    for positions, loss in result.by_position.items():
        figures[f"loss at {positions}"] = loss
    # At least 16 columns, so that results of several tasks are aligned, mostly.
    width = max(16, *map(len, figures))
    lines = []
    for name, value in figures.items():
        lines.append(f"  {with_spaces(name):{width}} {format_value(value)}")
    return "\n".join(lines)


def with_spaces(name: str) -> str:
    return name.replace("_", " ")


def tabulate(results: Sequence[Result]) -> str:
    """Return one task's figures of several checkpoints, a row each."""
    first = results[0]
    rows = [["folder", "step", *map(with_spaces, first.values)]]
    for r in results:
        numbers = map(format_value, (r.step, *r.values.values()))
        rows.append([r.folder, *numbers])
    # Steps of one run need no folder.
    if len({r.folder for r in results}) == 1:
        rows = [row[1:] for row in rows]
    lines = align_columns(rows, to_the_right=True)

    # The facts that all have in common are said once, in a line above.
    facts = []
    for name, value in first.facts.items():
        if name != "seconds":  # each checkpoint has its own
            facts.append(f"{with_spaces(name)} {format_value(value)}")
    head = f"{first.task or 'text'}: {'; '.join(facts)}"
    return "\n  ".join([head, *lines])


def by_task(results: Sequence[Result]) -> list[list[Result]]:
    names = dict.fromkeys(r.task for r in results)
    return [[r for r in results if r.task == name] for name in names]


def write_results(results: Sequence[Result], path: str) -> None:
    text = json.dumps([r.record for r in results], indent=1)
    with writing(Path(path), "--results-path"):
        Path(path).write_text(f"{text}\n", encoding="utf-8")


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
        first = of_task[0]
        plot.style(axes, "step")
        title = f"{first.task} {with_spaces(first.headline)}".strip()
        axes.set_title(title, color=plot.INK, fontsize=10)
        for number, folder in enumerate(folders):
            style = style_of(number)
            # A line for each run, from left to right whatever the order of the steps.
            of_folder = [r for r in of_task if r.folder == folder]
            of_folder.sort(key=lambda r: r.step)
            axes.plot(
                [r.step for r in of_folder],
                [r.values.get(r.headline, math.nan) for r in of_folder],
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
