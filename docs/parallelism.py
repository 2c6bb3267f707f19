"""Draw the pictures and compute the tables of parallelism.md; run `python docs/parallelism.py`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.apps.pages import plot
from meshwright.apps.pages.html import write_page
from meshwright.apps.plan.timeline import simulate
from meshwright.apps.plan.traffic import bytes_sent
from meshwright.config import schema as config
from meshwright.config.presets import PRESETS
from meshwright.parallel.layout import Layout
from meshwright.parallel.pipeline_schedule import ScheduleName

PAGE = Path(__file__).with_suffix(".md")
MODELS = {"345M": "ascend-345m", "1.3B": "ascend-1.3b", "2.7B": "ascend-2.7b"}
VOCABULARY = 50_304
# In the tables: ranks, tokens of a step, tokens of a micro-batch
RANKS, TOKENS, MICRO_TOKENS = 4, 2**18, 2**12

# Bytes


def sent(preset: str, dimension: str, pieces: int = 1, **parallel: Any) -> int:
    """Return the bytes that a rank sends in a step of TOKENS tokens in a dimension."""
    given = PRESETS[preset]
    m = config.Model(**{k: v for k, v in given.items() if k in config.Model.__dataclass_fields__})
    seq = given["seq_length"]
    if pieces > 1:
        parallel["num_layers_per_virtual_pipeline_stage"] = (m.num_layers or 0) // RANKS // pieces
    c = config.TrainConfig(
        model=m,
        data=config.Data(seq_length=seq),
        training=config.Training(
            micro_batch_size=MICRO_TOKENS // seq, global_batch_size=TOKENS // seq
        ),
        precision=config.Precision(bf16=True),
        parallel=config.Parallel(world_size=RANKS, **parallel),
    )
    return bytes_sent(c, VOCABULARY)[dimension]


def table(rows: dict[str, tuple[str, dict[str, Any]]]) -> str:
    """Return a table; each row has a dimension and the layout that uses it."""
    lines = [f"| gigabytes a step | {' | '.join(MODELS)} |", "|---|" + "---:|" * len(MODELS)]
    for name, (dimension, layout) in rows.items():
        cells = [f"{sent(preset, dimension, **layout) / 1e9:.2f}" for preset in MODELS.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def tables() -> dict[str, str]:
    layout = Layout(pp=2, shard=2, tp=2)
    order = ["| group | ranks |", "|---|---|"]
    for name, dimensions in (
        ("tensor", ("tp",)),
        ("data", ("replicas", "shard")),
        ("pipeline", ("pp",)),
    ):
        order.append(
            f"| {name} | {', '.join('-'.join(map(str, g)) for g in layout.members(*dimensions))} |"
        )
    stages = {"pipeline_model_parallel_size": RANKS}
    return {
        "order": "\n".join(order),
        "data": table({f"ZeRO {stage}": ("data", {"zero_stage": stage}) for stage in range(4)}),
        "tensor": table(
            {"`--tensor-model-parallel-size 4`": ("tensor", {"tensor_model_parallel_size": RANKS})}
        ),
        "pipeline": table(
            {
                "`--pipeline-model-parallel-size 4`": ("pipeline", stages),
                "and two pieces on each rank": ("pipeline", stages | {"pieces": 2}),
            }
        ),
        "context": table(
            {"`--context-parallel-size 4`": ("context", {"context_parallel_size": RANKS})}
        ),
    }


def page() -> str:
    """Return the page with new tables, each from the comment with its name up to an empty line."""
    text = PAGE.read_text(encoding="utf-8")
    for name, lines in tables().items():
        text, found = re.subn(
            rf"(<!-- table: {name} -->\n).*?(?=\n\n)", lambda m, s=lines: m[1] + s, text, flags=re.S
        )  # type: ignore[misc]
        assert found == 1, name
    return text


# Pictures

# Colours and strengths of ranks 0 to 3
SHADES = ((plot.LINE, 0.75), (plot.LINE, 0.3), (plot.POINT, 0.75), (plot.POINT, 0.3))


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def canvas(
    width: float, height: float, rows: int = 1, columns: int = 1, **where: float
) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    figure.patch.set_visible(False)
    figure.subplots_adjust(**{"left": 0.02, "right": 0.98, "top": 0.9, "bottom": 0.05, **where})
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for one in axes:
        one.set_axis_off()
    return figure, axes


def box(
    axes: Axes,
    x: float,
    y: float,
    w: float,
    h: float,
    colour: str = plot.INK,
    alpha: float = 0.0,
    **more: Any,
) -> None:
    from matplotlib import patches

    axes.add_patch(
        patches.Rectangle((x, y), w, h, facecolor=colour, alpha=alpha, lw=0, **more)
        if alpha
        else patches.Rectangle((x, y), w, h, fill=False, edgecolor=colour, lw=0.8, **more)
    )


def write(axes: Axes, x: float, y: float, text: str, size: float = 8, **more: Any) -> None:
    axes.text(
        x, y, text, **{"fontsize": size, "ha": "center", "va": "center", "color": plot.INK, **more}
    )


def data() -> Figure:
    """Draw bars of bytes per weight at each stage of ZeRO, filled where a rank holds them."""
    kinds = (("weights", 2), ("gradients", 4), ("optimizer state", 12))
    figure, axes = canvas(8, 3.5, columns=4, left=0.13, bottom=0.08, top=0.92)
    # From ZeRO 1 on, a rank's own part of the sums is kept as well.
    bytes_of = ("18", "2 + 4 + 16/4 = 10", "2 + 16/4 = 6", "16/4 = 4")
    for stage, one in enumerate(axes):
        one.set(xlim=(-0.2, 4.2), ylim=(-4.2, 19.6))
        one.set_title(f"ZeRO {stage}", color=plot.INK, fontsize=10)
        top = 18.9
        for kind, (name, size) in enumerate(kinds):
            cut = stage >= 3 - kind
            for rank in range(RANKS):
                box(one, rank + 0.1, top - size, 0.8, size, plot.INK, alpha=0.07)
                part = size / RANKS if cut else size
                begin = top - (rank + 1) * part if cut else top - size
                box(
                    one,
                    rank + 0.1,
                    begin,
                    0.8,
                    part,
                    plot.LINE if kind < 2 else plot.POINT,
                    (0.75, 0.4, 0.6)[kind],
                )
            if stage == 0:
                write(
                    one,
                    -0.3,
                    top - size / 2,
                    f"{name},\n{size} bytes each" if size > 2 else f"{name}, 2",
                    ha="right",
                )
            top -= size + 0.45
        for rank in range(RANKS):
            write(one, rank + 0.5, -1.0, f"rank {rank}", 6.5)
        write(one, 2, -3.2, bytes_of[stage], 8)
    return figure


def tensor() -> Figure:
    """Draw the model on two ranks from left to right, without and with sequence parallelism.

    Grey is what a rank lacks.
    """
    figure, axes = canvas(8.6, 4.6, rows=2, hspace=0.12, top=0.95, bottom=0.01)
    parts = (
        ("tokens", "rows"),
        "leave",
        ("norm", "stream"),
        "enter",
        ("qkv", "rows"),
        ("attention", "rows"),
        ("proj", "columns"),
        "leave",
        ("norm", "stream"),
        "enter",
        ("fc", "rows"),
        ("GELU", "rows"),
        ("proj", "columns"),
        "leave",
        ("norm", "stream"),
        "enter",
        ("head", "rows"),
        ("loss", "rows"),
    )
    signs = {"leave": ("sum", "rows of\nthe sum"), "enter": ("sum, in\nbackward", "all\nrows")}
    for sequence, one in enumerate(axes):
        one.set(xlim=(-1.6, 21.8), ylim=(-1.0, 5.2))
        title = "Tensor and sequence parallelism" if sequence else "Tensor parallelism"
        one.set_title(title, loc="left", color=plot.INK, fontsize=10)
        for rank in range(2):
            write(one, -0.2, 3.4 - 2.1 * rank, f"rank {rank}", ha="right")
        x = 0.1
        for part in parts:
            if isinstance(part, str):
                box(
                    one,
                    x + 0.2,
                    0.3,
                    0.3,
                    4.2,
                    plot.POINT,
                    0.75 if sequence or part == "leave" else 0.35,
                )
                write(one, x + 0.35, -0.3, signs[part][sequence], 6.5)
                x += 0.8
                continue
            name, cut = part
            write(one, x + 0.625, 4.7, name, 7)
            for rank in range(2):
                y = 2.5 - 2.1 * rank
                low, height = (
                    (y + 0.9 * (1 - rank), 0.9)
                    if cut == "rows" or (cut == "stream" and sequence)
                    else (y, 1.8)
                )
                left, width = (x + 0.625 * rank, 0.625) if cut == "columns" else (x, 1.25)
                box(one, x, y, 1.25, 1.8, plot.INK, 0.07)
                weights = name in ("tokens", "qkv", "proj", "fc", "head")
                box(one, left, low, width, height, plot.LINE, 0.75 if weights else 0.3)
            x += 1.4
    return figure


def pipeline() -> Figure:
    """Draw the timelines of three schedules on four ranks with eight micro-batches."""
    cases: tuple[tuple[str, ScheduleName, int], ...] = (
        ("GPipe", "gpipe", 1),
        ("1F1B", "1f1b", 1),
        ("interleaved 1F1B, two pieces on each rank", "1f1b", 2),
    )
    figure, axes = canvas(8, 6.2, rows=3, left=0.07, hspace=0.35, top=0.95, bottom=0.02)
    for one, (title, kind, chunks) in zip(axes, cases, strict=True):
        run = simulate(kind, 4, 8, chunks)
        one.set(xlim=(0, 33.2), ylim=(-4, 0.1))
        held = ", ".join(f"{live / chunks:g}" for live in run.live)
        said = f"{title}: waiting {run.bubble:.0%}, micro-batches held at most {held}"
        one.set_title(said, loc="left", color=plot.INK, fontsize=9)
        for rank, ran in enumerate(run.spans):
            write(one, -0.3, -rank - 0.5, f"rank {rank}", ha="right")
            box(one, 0, -rank - 0.95, run.total, 0.9, plot.INK, 0.07)
            for (op, chunk, microbatch), (start, end) in ran.items():
                colour = plot.LINE if op == "F" else plot.POINT
                box(one, start, -rank - 0.95, end - start, 0.9, colour, 0.35 if chunk else 0.75)
                box(one, start, -rank - 0.95, end - start, 0.9, plot.FAINT)
                write(
                    one, (start + end) / 2, -rank - 0.5, str(microbatch), 7 if chunks == 1 else 5.5
                )
    return figure


def context() -> Figure:
    """Draw who holds which tokens of which heads before, in and after the attention kernel."""
    figure, axes = canvas(8, 2.6, columns=3, top=0.86, bottom=0.12, left=0.05, wspace=0.35)
    for step, one in enumerate(axes):
        title = (
            "q, k, v: some tokens, all heads",
            "attention: all tokens, some heads",
            "output: some tokens, all heads",
        )[step]
        one.set_title(title, color=plot.INK, fontsize=9)
        one.set(xlim=(0, 4), ylim=(0, 4))
        for tokens in range(RANKS):
            for heads in range(RANKS):
                rank = heads if step == 1 else tokens
                box(one, tokens + 0.03, 3.03 - heads, 0.94, 0.94, *SHADES[rank])
                write(one, tokens + 0.5, 3.5 - heads, f"rank {rank}", 7)
        write(one, 2, -0.25, "tokens", 8)
        write(one, -0.2, 2, "heads", 8, rotation=90)
        if step < 2:
            one.annotate(
                "",
                (4.95, 2),
                (4.1, 2),
                annotation_clip=False,
                arrowprops={"arrowstyle": "->", "color": plot.INK},
            )
            write(one, 4.5, 2.4, "all to\nall", 7)
    return figure


PICTURES = {"data": data, "tensor": tensor, "pipeline": pipeline, "context": context}


def path(name: str) -> Path:
    return PAGE.with_name(f"parallelism-{name}.svg")


def draw(name: str) -> str:
    return plot.svg_of(PICTURES[name](), f"Parallelism {name}")


if __name__ == "__main__":
    for name in PICTURES:
        print(write_page(path(name), draw(name)))
    print(write_page(PAGE, page()))
