"""How activations grow with width or depth in the first steps: the coordinate check of µP.

Models of several sizes train on one batch, over and over, by the steps of a run with plain layers
and a constant learning rate. Before the first step and after each, the batch goes through the model
without dropout, and the root mean square (RMS) of its activations is taken, and of what has changed
in them since the beginning. If settings carry over to other sizes, each step changes activations by
as much at any size: the slope of log(change) over log(size) is about 0, and no initial activation
grows. Logits may begin smaller in wider models, as µP has it, and branches become smaller in deeper
ones, of which there are more.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from meshwright.apps.pages import plot
from meshwright.apps.pages.styles import COLOURS
from meshwright.base import console
from meshwright.base.records import align_columns
from meshwright.config.fields import baseline_settings, with_settings
from meshwright.config.problem import SettingsError
from meshwright.config.schema import (
    Checkpoint,
    Logging,
    Model,
    Optimizer,
    Parallel,
    TrainConfig,
    Training,
)
from meshwright.data.feed import Feed
from meshwright.data.loader import Batch
from meshwright.parallel.layout import Layout
from meshwright.runtime.ranks.team import ALONE
from meshwright.training.before.resolve import find_vocabulary
from meshwright.training.health.stop import StopConditions
from meshwright.training.log.timers import Startup, Timers
from meshwright.training.loop import Trainer
from meshwright.training.network import Spec
from meshwright.training.setup import build_state, open_feed
from meshwright.training.small_run import StepRows

Axis = Literal["width", "depth"]
ACTIVATIONS = ("embedding", "qkv", "attention", "mlp", "stream", "logits")
OF_BRANCHES = ("attention", "mlp")  # expected to become smaller in deeper models
NO_STEPS = 10**6  # length of the schedule, which is constant


@dataclass(frozen=True)
class Growth:
    """RMS of each activation at each size: before the first step, and of its change after each."""

    axis: Axis
    sizes: list[int]
    initial: dict[str, list[float]] = field(
        default_factory=lambda: {name: [] for name in ACTIVATIONS}
    )
    # Activation -> step -> size.
    changes: dict[str, list[list[float]]] = field(
        default_factory=lambda: {name: [] for name in ACTIVATIONS}
    )

    def add(self, initial: dict[str, float], changes: list[dict[str, float]]) -> None:
        """Add what was measured at the next size."""
        for name in ACTIVATIONS:
            self.initial[name].append(initial[name])
            # The first size makes the lists, the others append to them.
            steps = self.changes[name] or [[] for _ in changes]
            self.changes[name] = [
                [*before, step[name]] for before, step in zip(steps, changes, strict=True)
            ]

    def initial_slope(self, name: str) -> float:
        return slope(self.sizes, self.initial[name])

    def slopes(self, name: str) -> list[float]:
        """Return the slope of the change after each step."""
        return [slope(self.sizes, values) for values in self.changes[name]]

    def faults(self, tolerance: float) -> list[str]:
        """Describe changes that depend on the size, and what grows with it from the beginning."""
        out = []
        for name in ACTIVATIONS:
            if self.axis == "depth" and name in OF_BRANCHES:
                continue
            # The steepest slope of any step, up or down; no number at all is the worst.
            worst = max(self.slopes(name), key=lambda x: abs(x) if math.isfinite(x) else math.inf)
            if not abs(worst) <= tolerance:
                out.append(f"the change of {name} goes with {self.axis}^{worst:.2f}")
            elif not (first := self.initial_slope(name)) <= tolerance:
                out.append(f"the initial {name} goes with {self.axis}^{first:.2f}")
        return out

    def table(self) -> list[str]:
        head = [
            f"slope over {self.axis}",
            "initial",
            *(f"step {n}" for n in range(1, 1 + len(self.changes["logits"]))),
        ]
        rows = [
            [name, *(f"{x:+.2f}" for x in [self.initial_slope(name), *self.slopes(name)])]
            for name in ACTIVATIONS
        ]
        return align_columns([head, *rows], to_the_right=True)

    def as_record(self) -> dict[str, Any]:
        slopes = {
            name: {"initial": self.initial_slope(name), "changes": self.slopes(name)}
            for name in ACTIVATIONS
        }
        return dataclasses.asdict(self) | {"slopes": slopes}


def slope(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Return the slope of log(values) over log(sizes): 0 if all are 0, NaN if some are."""
    if not any(values):
        return 0.0  # such as branches that --zero-init-projections begins with
    if not all(0 < v < math.inf for v in values):
        return math.nan
    return statistics.linear_regression(
        list(map(math.log, sizes)), list(map(math.log, values))
    ).slope


# Sizes


def at_width(m: Model, width: int) -> Model:
    """Return the model with another width, of which heads, groups and MLP keep their shares."""
    hidden = m.hidden_size or 1
    heads = m.num_attention_heads or 1
    groups = m.num_query_groups or 0
    # The smallest width with whole heads and whole groups of them.
    unit = hidden // math.gcd(hidden, heads, groups)
    if width % unit:
        raise SettingsError(
            f"{{widths={width}}}: heads of {m.head_dim} and their groups need multiples of {unit}"
        )
    return dataclasses.replace(
        m,
        hidden_size=width,
        num_attention_heads=heads * width // hidden,
        num_query_groups=m.num_query_groups and groups * width // hidden,
        ffn_hidden_size=m.ffn_hidden_size and max(1, round(m.ffn_hidden_size * width / hidden)),
    )


def at_size(config: TrainConfig, axis: Axis, size: int) -> TrainConfig:
    if axis == "depth":
        return with_settings(config, num_layers=size)
    return dataclasses.replace(config, model=at_width(config.model, size))


def make_small(config: TrainConfig) -> TrainConfig:
    """Return the run as it is measured: on this device alone, with plain layers and one rate."""
    t = config.training
    o = config.optimizer
    training = dataclasses.replace(
        Training(**baseline_settings(t)),
        micro_batch_size=1 if t.micro_batch_size == "auto" else t.micro_batch_size,
        global_batch_size=t.global_batch_size,
        num_accumulation_steps=t.num_accumulation_steps,
        rampup_batch_size=[],
        step_batch_size_schedule=None,
        seq_length_schedule=None,
        train_iters=NO_STEPS,
        train_samples=None,
        train_tokens=None,
        train_epochs=None,
        eval_iters=0,
        seed=t.seed,
        fused_kernels="off",
        compile="off",
        cuda_graphs="off",
    )
    return dataclasses.replace(
        config,
        training=training,
        optimizer=dataclasses.replace(
            Optimizer(**baseline_settings(o)),
            lr=o.lr,
            lr_decay_style="constant",
            weight_decay=o.weight_decay,
        ),
        parallel=Parallel(world_size=1, device=config.parallel.device),
        checkpoint=Checkpoint(),
        logging=Logging(progress=False, tensorboard=False),
    )


# Measurement


class RepeatedFeed(Feed):
    """A feed that reads the first step's batch again and again."""

    def next(self, consumed: int, iteration: int) -> list[Batch]:
        return self.read_again(0, 0)


def start_trainer(config: TrainConfig, device: torch.device) -> Trainer:
    """Return a trainer of this process that has drawn its weights."""
    vocabulary = find_vocabulary(config, None)
    spec = Spec(config, Layout(), device, vocabulary.size, vocabulary.padded)
    state = build_state(spec, ALONE, Startup())
    timers = Timers(0, "minmax", device, ALONE)
    # The real feed, for its data; what is repeated is the first batch of it.
    feed = open_feed(state, vocabulary.tokenizer, None)
    repeated = RepeatedFeed(feed.datasets, feed.spec)
    return Trainer(
        state,
        repeated,
        StepRows(state, timers),
        timers,
        StopConditions(config.training, time.perf_counter()),
    )


def measure(
    config: TrainConfig,
    axis: Axis,
    sizes: list[int],
    steps: int,
    device: torch.device,
    report: Callable[[str], None],
) -> Growth:
    """Train a model of each size for so many steps and return what was measured."""
    growth = Growth(axis, sizes)
    for size in sizes:
        # The same batch before and after each step, so that only the weights change activations.
        with console.only_warnings():
            trainer = start_trainer(at_size(config, axis, size), device)
            batch, *_ = trainer.feed.read_again(0, 0)
            first = activations_of(trainer, batch)
            changes = []
            for _ in range(steps):
                trainer.step()
                trainer.finish()
                now = activations_of(trainer, batch)
                changes.append(
                    {name: rms_of_change(first[name], now[name]) for name in ACTIVATIONS}
                )
            trainer.close()
        growth.add({name: rms(tensors) for name, tensors in first.items()}, changes)
        report(f"{axis} {size:,} measured")
    return growth


def rms_of_change(before: list[Tensor], after: list[Tensor]) -> float:
    return rms([b - a for a, b in zip(before, after, strict=True)])


def rms(tensors: list[Tensor]) -> float:
    """Return the root mean square of all elements."""
    # In float64, since a sum of millions of small squares is taken.
    squares = sum(float(x.double().square().sum()) for x in tensors)
    return math.sqrt(squares / sum(x.numel() for x in tensors))


@torch.no_grad()
def activations_of(trainer: Trainer, batch: Batch) -> dict[str, list[Tensor]]:
    """Return the activations of a micro-batch, of each layer where they are of layers."""
    net = trainer.net
    vocab = trainer.state.vocab
    (model,) = net.parts
    # The store may still gather what the step before has updated.
    net.store.wait_for_weights()
    with recorded(model) as found:
        found["logits"] += net.infer([batch], lambda logits, _: logits[..., :vocab].clone())
    return found


@contextmanager
def recorded(model: Any) -> Iterator[dict[str, list[Tensor]]]:
    """Collect copies of activations in the order of the layers."""
    found: dict[str, list[Tensor]] = {name: [] for name in ACTIVATIONS}

    def keep_output(name: str) -> Callable[..., None]:
        return lambda module, inputs, out: found[name].append(out.detach().clone())

    def keep_input(name: str, place: int = 0) -> Callable[..., None]:
        return lambda module, inputs: found[name].append(inputs[place].detach().clone())

    layers = list(model.h.children())
    # The first layer's input, its second argument, is the embedding's output.
    hooks = [layers[0].register_forward_pre_hook(keep_input("embedding", 1))]
    hooks.append(model.ln_f.register_forward_pre_hook(keep_input("stream")))
    for layer in layers:
        for name, module in (
            ("qkv", layer.attn.qkv),
            ("attention", layer.attn),
            ("mlp", layer.mlp),
        ):
            hooks.append(module.register_forward_hook(keep_output(name)))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


# The picture


def picture(measured: Sequence[Growth], title: str) -> str:
    """Return an SVG: a row for each axis, a panel for each activation, a line for each step.

    The dashed line is the RMS before the first step, the others are the RMS of the change.
    """
    from matplotlib.figure import Figure

    columns = len(ACTIVATIONS)
    figure = Figure(figsize=(2.2 * columns, 2.6 * len(measured)), layout="constrained")
    figure.patch.set_visible(False)
    for row, growth in enumerate(measured):
        for column, name in enumerate(ACTIVATIONS):
            axes = figure.add_subplot(len(measured), columns, row * columns + column + 1)
            draw_panel(axes, growth, name)
            if column == 0:
                axes.set_ylabel("RMS", color=plot.INK)
                axes.legend(fontsize=6, frameon=False, labelcolor=plot.INK)
    return plot.svg_of(figure, title)


def draw_panel(axes: Any, growth: Growth, name: str) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

    plot.style(axes, growth.axis)
    axes.set_title(name, color=plot.INK, fontsize=9)
    # Initial activations dashed, and a line for the change after each step.
    axes.loglog(
        growth.sizes,
        growth.initial[name],
        color=plot.INK,
        lw=1.0,
        ls="--",
        marker=".",
        label="initial",
    )
    for number, values in enumerate(growth.changes[name]):
        colour = COLOURS[number % len(COLOURS)]
        axes.loglog(
            growth.sizes,
            values,
            color=colour,
            lw=1.2,
            marker=".",
            label=f"change, step {number + 1}",
        )
    # Ticks at the sizes alone: between them there is nothing.
    axes.set_xticks(growth.sizes, [str(size) for size in growth.sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(10))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelsize=7)
