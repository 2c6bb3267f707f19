"""Draw schedules.svg with the package's own functions; run `python docs/schedules.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from meshwright.optim.loss_scale import LossScale
from meshwright.optim.schedule import build_schedule
from meshwright.report import plot
from meshwright.report.html import write_page
from meshwright.settings.schema import Optimizer, Precision, TrainConfig, Training

PICTURE = Path(__file__).with_name("schedules.svg")
SAMPLES, BATCH = 100_000, 100
OVERFLOWS = {50, 80, 110, 500, 530, 760}  # steps


def config(**optimizer: Any) -> TrainConfig:
    training = Training(
        micro_batch_size=1, global_batch_size=BATCH, train_samples=SAMPLES, rampup_batch_size=[20, 20, 30_000]
    )
    return TrainConfig(
        training=training,
        optimizer=Optimizer(
            lr=1e-3,
            min_lr=1e-4,
            lr_warmup_samples=10_000,
            lr_decay_samples=90_000,
            lr_wsd_decay_samples=30_000,
            **optimizer,
        ),
    )


def draw() -> str:
    figure = Figure(figsize=(8, 10.4))
    figure.patch.set_visible(False)
    figure.subplots_adjust(left=0.09, right=0.72, top=0.97, bottom=0.06, hspace=0.28)
    rates, decays, batches, scales = figure.subplots(4, sharex=True, gridspec_kw={"height_ratios": [2.2, 1, 1, 1]})
    for axes in (rates, decays, batches, scales):
        plot.style(axes, "samples" if axes is scales else "")

    def add(axes: Any, label: str, f: Callable[[int], float], colour: str, line: Any, width: float = 1.6) -> None:
        x = range(0, SAMPLES + 1, 250)
        axes.plot(x, [f(n) for n in x], label=label, color=colour, ls=line, lw=width)

    solid, dashed, dotted, mixed = "-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 1.5, 1, 1.5))
    for style, colour, line in (
        ("constant", plot.INK, solid),
        ("inverse-square-root", plot.INK, dashed),
        ("linear", plot.LINE, solid),
        ("cosine", plot.LINE, dashed),
    ):
        add(rates, style, build_schedule(config(lr_decay_style=style)).lr, colour, line)
    for style, line in (("exponential", solid), ("linear", dashed), ("cosine", mixed), ("minus_sqrt", dotted)):
        wsd = build_schedule(config(lr_decay_style="WSD", lr_wsd_decay_style=style))
        add(rates, f"WSD, {style}", wsd.lr, plot.POINT, line)
    for style, line in (("constant", solid), ("linear", dashed), ("cosine", mixed)):
        ramp = {} if style == "constant" else {"start_weight_decay": 0.01, "end_weight_decay": 0.1}
        c = config(weight_decay=0.05, weight_decay_incr_style=style, **ramp)
        add(decays, style, build_schedule(c).wd, plot.LINE, line)
    add(batches, "--rampup-batch-size\n20 20 30000", config().batch, plot.LINE, solid)
    consumed, scale = [0], LossScale(Precision(fp16=True, initial_loss_scale=2.0**16, loss_scale_window=200))
    seen = [scale.scale]
    for step in range(1, SAMPLES // BATCH + 1):
        scale.update(step in OVERFLOWS)
        consumed.append(step * BATCH)
        seen.append(scale.scale)
    scales.plot(consumed, seen, label="window 200,\nhysteresis 2", color=plot.LINE, lw=1.6, drawstyle="steps-post")
    scales.set_yscale("log", base=2)
    scales.plot(
        [n * BATCH for n in sorted(OVERFLOWS)],
        [min(seen) / 2] * len(OVERFLOWS),
        "x",
        color=plot.BAD,
        label="overflow",
        ms=6,
    )
    for axes, title in (
        (rates, "Learning rate"),
        (decays, "Weight decay"),
        (batches, "Global batch"),
        (scales, "fp16 loss scale"),
    ):
        axes.set_title(title, loc="left", color=plot.INK, fontsize=11)
        axes.legend(
            loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, labelcolor=plot.INK, fontsize=9, handlelength=2.6
        )
    return plot.svg_of(figure, "Schedules")


if __name__ == "__main__":
    print(write_page(PICTURE, draw()))
