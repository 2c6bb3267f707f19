"""Pictures of a plan: the pipeline's schedule, memory over the stages, layouts, save intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.apps.pages import plot
from meshwright.apps.pages.html import document, escape, write_page
from meshwright.apps.plan.goodput import ExpectedGoodput, Interruptions
from meshwright.apps.plan.prediction import Prediction
from meshwright.apps.plan.timeline import Timeline, simulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GIB = 2**30
DRAWN_ROUNDS = 3  # of as many micro-batches as stages; a pipeline repeats itself after that
# A colour for each kind of memory, of which a pipeline rank may have all ten.
KINDS = (
    "#3d85c8",
    "#d9772b",
    "#2f9e62",
    "#8f63d2",
    "#c9405f",
    "#8a7a2e",
    "#1597a5",
    "#d060b0",
    "#7b8490",
    "#a5684c",
)
PASSES = {
    "F": ("forward", plot.LINE),
    "B": ("backward", plot.POINT),
}


@dataclass(frozen=True)
class Drawing:
    """A figure with its title and what its colours mean."""

    name: str  # of its file
    title: str
    figure: Figure
    note: str = ""
    legend: tuple[tuple[str, str], ...] = ()  # colour and meaning

    def keys(self) -> str:
        return "".join(plot.key("■", colour, meaning) for colour, meaning in self.legend)


# The data of the pictures


def drawn_timeline(prediction: Prediction) -> Timeline | None:
    """Return the passes of a step's first micro-batches on each rank; None without a pipeline."""
    c = prediction.config
    p = c.parallel
    ranks = p.pipeline_model_parallel_size
    if ranks == 1:
        return None
    count = min(c.micro_batches(c.global_batch), DRAWN_ROUNDS * ranks)
    return simulate(p.pipeline_schedule, ranks, count, c.chunks, prediction.stage_times)


def stacked_memory(prediction: Prediction) -> dict[str, list[float]]:
    """Return kind -> GiB on each pipeline rank; together they are what a rank takes."""
    ranks = prediction.ranks
    out: dict[str, list[float]] = {}
    for number, rank in enumerate(ranks):
        for kind, size in rank.kinds.items():
            if size:
                out.setdefault(kind, [0.0] * len(ranks))[number] = size / GIB
    out["allocator"] = [(rank.reserved - rank.allocated) / GIB for rank in ranks]
    out["context"] = [rank.context / GIB for rank in ranks]
    return out


def layout_points(predictions: Sequence[Prediction]) -> list[tuple[float, float]]:
    """Return GiB of the fullest rank and seconds of a step of each layout."""
    return [(one.need / GIB, one.time.seconds) for one in predictions]


def goodput_points(losses: Interruptions, step: float) -> list[tuple[float, float]]:
    """Return minutes between saves and goodput, around the best interval."""
    best = max(losses.interval, step)
    points = []
    # From a sixteenth to sixteen times the best interval, which shows how flat the top is.
    for quarter in range(-16, 17):  # of a doubling
        interval = best * 2 ** (quarter / 4)
        if step <= interval < 50 * losses.between:
            points.append((interval / 60, losses.goodput(interval)))
    return points


# The pictures


def schedule_drawing(prediction: Prediction) -> Drawing | None:
    """Draw what each pipeline rank does at what time; paler for later stretches of layers."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    timeline = drawn_timeline(prediction)
    if timeline is None:
        return None
    ranks = len(timeline.spans)
    figure, axes = plot.new_axes((7.6, min(8.0, 1.2 + 0.28 * ranks)), x="seconds")

    # One patch for all passes of a kind: thousands of them would be slow to draw and to show.
    boxes: dict[tuple[str, int], list[Outline]] = {}
    for rank, spans in enumerate(timeline.spans):
        low = rank - 0.42
        high = rank + 0.42
        for action, (begin, end) in spans.items():
            corners = [(begin, low), (end, low), (end, high), (begin, high), (begin, low)]
            box = Outline(corners, closed=True)
            boxes.setdefault((action.op, action.chunk), []).append(box)
    for (op, chunk), outlines in boxes.items():
        patch = PathPatch(
            Outline.make_compound_path(*outlines),
            lw=0.2,
            ec=plot.INK,
            fc=PASSES[op][1],
            alpha=0.9 / (1 + 0.6 * chunk),
        )
        axes.add_patch(patch)

    axes.set(xlim=(0, timeline.total), ylim=(ranks - 0.5, -0.5))
    axes.set_ylabel("pipeline rank", color=plot.INK)
    decimals(axes)
    legend = []
    for op in dict.fromkeys(op for op, _ in boxes):
        meaning, colour = PASSES[op]
        legend.append((colour, meaning))
    count = sum(action.op == "F" and action.chunk == 0 for action in timeline.spans[0])
    note = f"{prediction.config.parallel.pipeline_schedule}, first {count} micro-batches"
    return Drawing("schedule", "Pipeline", figure, note, tuple(legend))


def memory_drawing(prediction: Prediction) -> Drawing:
    """Draw the memory of each pipeline rank by kind, and the device's."""
    stacked = stacked_memory(prediction)
    count = len(prediction.ranks)
    figure, axes = plot.new_axes((7.6, 3.4), x="pipeline rank")
    # Bars of a kind stand on those of the kinds before it.
    base = [0.0] * count
    for colour, sizes in zip(KINDS, stacked.values(), strict=False):
        axes.bar(range(count), sizes, bottom=base, color=colour, width=0.8)
        base = [low + size for low, size in zip(base, sizes, strict=True)]
    have = prediction.machine.profile.memory_bytes / GIB
    # The device's memory as a line: what is above does not fit.
    axes.axhline(have, color=plot.BAD, lw=1.2)
    axes.set_ylabel("GiB", color=plot.INK)
    axes.set_ylim(0, 1.05 * max(have, *base))
    legend = tuple(zip(KINDS, stacked, strict=False))
    return Drawing(
        "memory", "Memory of the pipeline ranks", figure, f"{have:,.1f} GiB there are", legend
    )


def layouts_drawing(chosen: Prediction, predictions: Sequence[Prediction]) -> Drawing:
    """Draw memory and time of the best layouts of a search, estimated, and of the chosen one."""
    figure, axes = plot.new_axes((7.6, 3.6), x="GiB of the fullest rank")
    for one, colour, size in ((predictions, plot.LINE, 14), ([chosen], plot.POINT, 60)):
        x, y = zip(*layout_points(one), strict=True)
        axes.scatter(x, y, s=size, color=colour, alpha=0.8, lw=0)
    axes.axvline(chosen.machine.profile.memory_bytes / GIB, color=plot.BAD, lw=1.2)
    axes.set_ylabel("seconds of a step", color=plot.INK)
    decimals(axes)
    legend = (
        (plot.LINE, "a layout, estimated"),
        (plot.POINT, "the chosen one"),
        (plot.BAD, "memory of the device"),
    )
    return Drawing(
        "layouts", "Time and memory of the layouts", figure, f"{len(predictions):,}", legend
    )


def goodput_drawing(losses: Interruptions, expected: ExpectedGoodput, step: float) -> Drawing:
    """Draw the goodput over the time between two saves."""
    figure, axes = plot.new_axes((7.6, 3.0), x="minutes between saves")
    # Where failures come faster than steps, there is no interval to draw.
    points = goodput_points(losses, step)
    x = [minutes for minutes, _ in points]
    y = [100 * share for _, share in points]
    axes.plot(x, y, color=plot.LINE, lw=1.6)
    axes.plot([expected.save_interval * step / 60], [100 * expected.share], "o", color=plot.POINT)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("goodput, %", color=plot.INK)
    note = f"{expected.hours_between_failures:,.1f} hours between failures"
    return Drawing(
        "goodput", "Goodput over the save interval", figure, note, ((plot.POINT, "this plan"),)
    )


def decimals(axes: Axes) -> None:
    """Allow decimals on an axis of something that is measured, not counted."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter("{x:g}")


def write_pictures(folder: Path, drawings: Sequence[Drawing]) -> list[Path]:
    """Write each picture as an SVG file; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for one in drawings:
        text = plot.svg_of(one.figure, one.title)
        written.append(write_page(folder / f"{one.name}.svg", text))
    return written


def page_of(title: str, text: Sequence[str], drawings: Sequence[Drawing]) -> str:
    """Return a page with the plan's text and pictures."""
    figures = ""
    for one in drawings:
        figures += plot.embed_figure(one.figure, one.title, one.note, one.keys(), wide=True)
    lines = "\n".join(text)
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<pre>{escape(lines)}</pre>",
        f'<div class="pictures">{figures}</div>',
    ]
    return document(f"{title}: plan", parts)
