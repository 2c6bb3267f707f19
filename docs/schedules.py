"""Draw schedules.svg with the package's own functions; run `python docs/schedules.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from meshwright.apps.pages import plot
from meshwright.apps.pages.html import write_page
from meshwright.config.schema import Optimizer, Precision, TrainConfig, Training
from meshwright.optim.loss_scale import LossScale
from meshwright.optim.schedule import build_schedule

PICTURE = Path(__file__).with_name("schedules.svg")
SAMPLES, BATCH = 100_000, 100
OVERFLOWS = {50, 80, 110, 500, 530, 760}  # steps
SOLID, DASHED, DOTTED, MIXED = "-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 1.5, 1, 1.5))


def config(**optimizer: Any) -> TrainConfig:
    """Return the settings of the pictured run, with these flags of the optimizer."""
    training = Training(
        micro_batch_size=1,
        global_batch_size=BATCH,
        train_samples=SAMPLES,
        rampup_batch_size=[20, 20, 30_000],
    )
    lengths = {
        "lr_warmup_samples": 10_000,
        "lr_decay_samples": 90_000,
        "lr_wsd_decay_samples": 30_000,
    }
    return TrainConfig(
        training=training, optimizer=Optimizer(lr=1e-3, min_lr=1e-4, **lengths, **optimizer)
    )


def plot_curve(axes: Axes, label: str, f: Callable[[int], float], colour: str, line: Any) -> None:
    x = range(0, SAMPLES + 1, 250)
    axes.plot(x, [f(n) for n in x], label=label, color=colour, ls=line, lw=1.6)


def draw_rates(axes: Axes) -> None:
    for style, colour, line in (
        ("constant", plot.INK, SOLID),
        ("inverse-square-root", plot.INK, DASHED),
        ("linear", plot.LINE, SOLID),
        ("cosine", plot.LINE, DASHED),
    ):
        plot_curve(axes, style, build_schedule(config(lr_decay_style=style)).lr, colour, line)
    for style, line in (
        ("exponential", SOLID),
        ("linear", DASHED),
        ("cosine", MIXED),
        ("minus_sqrt", DOTTED),
    ):
        wsd = build_schedule(config(lr_decay_style="WSD", lr_wsd_decay_style=style))
        plot_curve(axes, f"WSD, {style}", wsd.lr, plot.POINT, line)


def draw_decays(axes: Axes) -> None:
    for style, line in (("constant", SOLID), ("linear", DASHED), ("cosine", MIXED)):
        ramp = {} if style == "constant" else {"start_weight_decay": 0.01, "end_weight_decay": 0.1}
        c = config(weight_decay=0.05, weight_decay_incr_style=style, **ramp)
        plot_curve(axes, style, build_schedule(c).wd, plot.LINE, line)


def draw_batches(axes: Axes) -> None:
    plot_curve(axes, "--rampup-batch-size\n20 20 30000", config().batch, plot.LINE, SOLID)


def draw_scales(axes: Axes) -> None:
    scale = LossScale(Precision(fp16=True, initial_loss_scale=2.0**16, loss_scale_window=200))
    samples, scales = [0], [scale.scale]
    for step in range(1, SAMPLES // BATCH + 1):
        scale.update(step in OVERFLOWS)
        samples.append(step * BATCH)
        scales.append(scale.scale)
    axes.plot(
        samples,
        scales,
        label="window 200,\nhysteresis 2",
        color=plot.LINE,
        lw=1.6,
        drawstyle="steps-post",
    )
    axes.set_yscale("log", base=2)
    x, y = [n * BATCH for n in sorted(OVERFLOWS)], [min(scales) / 2] * len(OVERFLOWS)
    axes.plot(x, y, "x", color=plot.BAD, label="overflow", ms=6)


PANELS = {
    "Learning rate": draw_rates,
    "Weight decay": draw_decays,
    "Global batch": draw_batches,
    "fp16 loss scale": draw_scales,
}


def draw() -> str:
    """Return the picture as SVG."""
    figure = Figure(figsize=(8, 10.4))
    figure.patch.set_visible(False)
    figure.subplots_adjust(left=0.09, right=0.72, top=0.97, bottom=0.06, hspace=0.28)
    panels = figure.subplots(4, sharex=True, gridspec_kw={"height_ratios": [2.2, 1, 1, 1]})
    for axes in panels:
        plot.style(axes, "samples" if axes is panels[-1] else "")
    for axes, (title, draw_panel) in zip(panels, PANELS.items(), strict=True):
        draw_panel(axes)
        axes.set_title(title, loc="left", color=plot.INK, fontsize=11)
        beside = {"loc": "upper left", "bbox_to_anchor": (1.01, 1)}
        axes.legend(**beside, frameon=False, labelcolor=plot.INK, fontsize=9, handlelength=2.6)
    return plot.svg_of(figure, "Schedules")


if __name__ == "__main__":
    print(write_page(PICTURE, draw()))
