"""A small training run with the real Trainer, whose data and log are stand-ins.

Nothing is read from disk but a checkpoint, and nothing is printed or logged.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from meshwright.config.schema import TrainConfig
from meshwright.data.feed import Feed
from meshwright.data.loader import Batch, DocumentEnds, Mock
from meshwright.parallel.layout import Layout, connect, layout_of
from meshwright.runtime.ranks.team import ALONE, Team
from meshwright.training.before.resolve import find_vocabulary
from meshwright.training.health.stop import StopConditions
from meshwright.training.log.columns import STEP_COLUMNS
from meshwright.training.log.lines import Check
from meshwright.training.log.metrics import Metrics
from meshwright.training.log.timers import Startup, Timers
from meshwright.training.loop import Trainer
from meshwright.training.network import Spec
from meshwright.training.setup import build_state, loader_spec, sizes_of_run
from meshwright.training.state.state import State

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshwright.training.micro_step import Loss
    from meshwright.training.network import Model

SAMPLES = 10**6  # of random tokens
EOD = 5  # the end of documents; occurs in every other sample of 16 random tokens
COMPARED = [column.name for column in STEP_COLUMNS if column.compared_as]
# First what the step has computed, then what the loss scale made of it.
COLUMNS = tuple(sorted(COMPARED, key=lambda name: name in ("loss_scale", "skipped")))


class StepRows(Metrics):
    """A stand-in for the log, which keeps a row of numbers for each step and each validation."""

    def __init__(self, state: State, timers: Timers) -> None:
        super().__init__(None, state.config, sizes_of_run(state), timers, state.team)
        self.rows: list[list[float]] = []  # COLUMNS

    def step(
        self, iteration: int, consumed: int, seconds: float, next_lr: float, values: dict[str, Any]
    ) -> None:
        self.rows.append([float(values.get(name, 0.0)) for name in COLUMNS])

    def validation(self, consumed: int, check: Check) -> None:
        # A validation has no norm of the weights: the loss of averaged weights takes its column.
        values = {"loss": check.loss, "params_norm": check.ema_loss or 0.0}
        self.rows.append([values.get(name, 0.0) for name in COLUMNS])


class RecordingFeed(Feed):
    """A feed that keeps the micro-batches of the last step."""

    batches: list[Batch]

    def next(self, consumed: int, iteration: int) -> list[Batch]:
        self.batches = super().next(consumed, iteration)
        return self.batches


@dataclass(frozen=True)
class RankSetup:
    """The ranks and device that compute a run, and the user's own model and loss, if any."""

    team: Team = ALONE
    device: torch.device = torch.device("cpu")
    connect: Callable[[Layout], Layout] = connect
    model: Model | None = None
    loss: Loss | None = None


def start_trainer(config: TrainConfig, setup: RankSetup) -> Trainer:
    """Return this rank's trainer, whose weights are loaded or drawn."""
    team = setup.team if config.world > 1 else ALONE
    layout = layout_of(config, team.rank)
    layout = setup.connect(layout) if layout.world > 1 else layout
    vocabulary = find_vocabulary(config, None)
    spec = Spec(
        config, layout, setup.device, vocabulary.size, vocabulary.padded, setup.model, setup.loss
    )
    state, timers = build_state(spec, team, Startup()), Timers(0, "minmax", setup.device, team)
    d = config.data
    effects = d.document_effects
    assert d.seq_length
    sizes = vocabulary.size, SAMPLES, d.seq_length
    datasets = {"train": Mock(*sizes, seed=0), "valid": Mock(*sizes, seed=1)}
    feed = RecordingFeed(
        datasets, loader_spec(state, DocumentEnds(EOD, *effects) if any(effects) else None)
    )
    return Trainer(
        state,
        feed,
        StepRows(state, timers),
        timers,
        StopConditions(config.training, time.perf_counter()),
    )


class Connected:
    """A `connect` that reuses process groups until the layout's sizes change."""

    def __init__(self, timeout: timedelta | None = None) -> None:
        self.timeout = timeout
        self.shape: tuple[int, ...] = ()
        self.groups: dict[str, Any] = {}

    def __call__(self, layout: Layout) -> Layout:
        if layout.shape != self.shape:
            self.close()
            self.shape, self.groups = layout.shape, connect(layout, self.timeout).groups
        return dataclasses.replace(layout, groups=dict(self.groups))

    def close(self) -> None:
        for group in self.groups.values():
            dist.destroy_process_group(group)
        self.shape, self.groups = (), {}
