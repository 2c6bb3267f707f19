"""Train a layout and one process side by side, and compare every tensor of both.

Rank 0 first trains alone and keeps what each step made. All ranks then train in the layout; after
each step rank 0 sends them the whole tensors of its own run, and every rank compares the parts that
it holds, copies too, so that a difference names its rank. Then the state is saved, loaded by the
layout and by one process, and both go on. All this is in float64.

In the run's own precision both train once more. There one process takes its steps with the
gradients that the layout has summed, so that only these are as far apart as sums in 16 bits are;
masters and moments, made of the same numbers, differ by a few roundings of float32.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.apps.verify.baseline import alone, make_baseline
from meshwright.base import console
from meshwright.base.errors import UNEQUAL, UserError
from meshwright.base.python310 import StrEnum
from meshwright.checkpoint.boxes import Box, split_boxes
from meshwright.checkpoint.sources import TensorBoxes
from meshwright.config.command import out_of_memory
from meshwright.config.schema import Checkpoint, Optimizer, TrainConfig
from meshwright.data.loader import Batch
from meshwright.kernels import dropout
from meshwright.optim import rule_table
from meshwright.parallel.layout import layout_of
from meshwright.runtime.ranks.lost import bare_message, is_lost_rank
from meshwright.runtime.ranks.team import ALONE, Team
from meshwright.training import small_run
from meshwright.training.log.columns import STEP_COLUMNS
from meshwright.training.loop import Trainer
from meshwright.training.small_run import COLUMNS, RankSetup, RecordingFeed, StepRows

# The largest relative difference of equal runs: in a lower precision, sums are rounded differently.
TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}
# The largest difference of float32 masters and moments that are made of equal gradients; Muon's are
# larger, since it multiplies in 16 bits.
UPDATED, ORTHOGONALISED = 1e-5, 1e-3
# Differences are relative to the largest element of a tensor, or to this part of the largest of all
# tensors: some gradients are 0 but for rounding, such as that of a bias of keys, and rounding is
# much larger in the run's own precision.
FLOOR, FLOOR_OF_GRADIENTS = 1e-4, 0.1


class Quantity(StrEnum):
    """What is compared, in the order in which a step makes it, which is the order of the table."""

    DRAWN = "initial weights"
    SAMPLES = "sample numbers"
    DROPOUT = "draws of dropout"
    LOSS = "loss"
    GRADIENTS = "gradients"
    NORM = "gradient norm"
    WEIGHTS = "weights"
    MOMENTS = "optimizer state"
    WEIGHT_NORM = "norm of the weights"
    SCALE = "loss scale"
    VALIDATION = "validation loss"
    LOADED = "loaded by the layout"
    NEXT_STEP = "step after the load"
    LOADED_ALONE = "loaded by one process"
    NEXT_STEP_ALONE = "its step after the load"

    @property
    def is_exact(self) -> bool:
        """Whether no rounding excuses a difference."""
        return self in (Q.DRAWN, Q.SAMPLES, Q.DROPOUT, Q.SCALE, Q.LOADED, Q.LOADED_ALONE)

    def tolerance(self, config: TrainConfig, device: torch.device) -> float:
        """Return the largest difference that rounding makes."""
        dtype = config.precision.dtype
        rule = config.optimizer
        if self.is_exact:
            return 0.0
        if dtype == "float64" or self is Q.GRADIENTS:
            return TOLERANCE[dtype]
        if self is Q.LOSS:
            return TOLERANCE[dtype] / 10  # a mean of many
        if rule.optimizer == "muon":
            return ORTHOGONALISED
        # On a GPU, ZeRO 3 updates by torch's fused AdamW and one process by our own kernel.
        if self is Q.MOMENTS and device.type != "cpu" and config.parallel.zero_stage == 3:
            return UPDATED + fused_adamw_error(rule)
        return UPDATED


def fused_adamw_error(o: Optimizer) -> float:
    """Return the relative error of a GPU's exp_avg_sq in torch's fused AdamW, which ZeRO 3 uses.

    It rounds beta2 to float32 before it takes it from 1: of 1 - 0.999, that is 1.3e-5. Its bias
    correction is rounded alike, so the weights hardly move. Our own kernel rounds 1 - beta2.
    """
    if rule_table.is_beyond_torch(o):
        return 0.0
    rounded = 1.0 - float(torch.tensor(o.adam_beta2, dtype=torch.float32))
    return abs(rounded / (1.0 - o.adam_beta2) - 1.0)


Q = Quantity
QUANTITIES = {
    column.name: Quantity(column.compared_as) for column in STEP_COLUMNS if column.compared_as
}
AFTER = "after the last step"


@dataclass(frozen=True)
class Difference:
    """A tensor or a number that differs by more than the tolerance."""

    what: Quantity
    name: str
    largest: float  # relative
    tolerance: float
    precision: str  # of both runs
    where: str  # the step and the rank where it first differed


@dataclass(frozen=True)
class Compared:
    """A quantity, over all ranks and steps."""

    what: Quantity
    count: int  # names
    largest: float
    worst: str  # the name with the largest difference
    tolerance: float
    precision: str  # of both runs

    @property
    def is_equal(self) -> bool:
        return self.largest <= self.tolerance


@dataclass(frozen=True)
class Comparison:
    steps: int
    compared: list[Compared]
    differences: list[Difference]  # the first to occur comes first
    gradients: dict[str, float]  # the largest difference of each parameter's, in float64
    not_compared: list[str]
    config: TrainConfig  # of the baseline

    @property
    def is_equal(self) -> bool:
        return not self.differences


def compare_with_one_process(
    config: TrainConfig,
    team: Team,
    steps: int,
    folder: Path | None = None,
    setup: RankSetup | None = None,
) -> Comparison:
    """Compare a layout with one process at reduced size; return the same on all ranks.

    Both are in float64, then in the run's own precision. Every rank of an initialised world calls
    this. Checkpoints go into a folder within `folder` (none: a temporary one), which is removed; if
    not all ranks see it, resuming is not compared. `setup` gives another device, and a model and a
    loss of the user's own.
    """
    setup = dataclasses.replace(setup or RankSetup(), team=team)
    baseline = make_baseline(config, setup.device.type != "cpu")
    not_compared = list(baseline.left_out)
    # All trainers of the comparison share their process groups, which are closed at its end.
    connected = small_run.Connected(team.timeout)
    if setup.connect is RankSetup.connect:
        setup = dataclasses.replace(setup, connect=connected)

    with contextlib.ExitStack() as block:
        block.callback(connected.close)
        block.enter_context(console.silence())
        shared = block.enter_context(shared_folder(folder, team))
        if shared is None:
            not_compared.append("resuming: the ranks share no folder; give --save or --run-dir")
        exact = _Comparing(baseline.config, steps, setup, shared).compare(not_compared)
        # In the run's own precision a known difference would only show again.
        if not baseline.in_own_precision or not exact.is_equal:
            return exact
        rounded = _ComparingUpdates(baseline.in_own_precision, steps, setup, None).compare([])

    return dataclasses.replace(
        exact,
        compared=exact.compared + rounded.compared,
        differences=exact.differences + rounded.differences,
    )


@contextlib.contextmanager
def shared_folder(folder: Path | None, team: Team) -> Iterator[Path | None]:
    """Make a folder for checkpoints, and remove it; None if some rank does not see it."""

    def make() -> str:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        return tempfile.mkdtemp(prefix=".verify-layout-", dir=folder)

    made = Path(team.run_on_rank_0(make))
    try:
        yield made if all(team.gather(made.is_dir())) else None
        team.wait()
    finally:
        if team.is_rank_0:
            shutil.rmtree(made, ignore_errors=True)


# What a run makes


class RecordedStep(NamedTuple):
    """What one step made on one rank; tensors are copies on the host."""

    gradients: TensorBoxes = {}
    state: TensorBoxes = {}  # after the step
    numbers: dict[str, float] = {}  # COLUMNS
    samples: list[int] = []
    draws: Tensor = torch.empty(0)  # hashes of seed, sample and position that dropout draws from


NOTHING = RecordedStep()  # what ranks other than 0 know of the run in one process


class Watched:
    """A trainer whose steps are recorded."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.gradients: dict[str, Any] = {}  # as TensorBoxes
        self.given: FullTensors = {}  # gradients that the next step takes in place of its own
        trainer.net.store.observer = self.copy_gradients

    def copy_gradients(self) -> None:
        """Copy what the sums over the ranks gave: the update changes it in place."""
        store = self.trainer.net.store
        scale = self.trainer.state.scaler.scale
        summed = dict(store.each_gradient())
        for name, (shape, boxes, _) in store.named_state(False).items():
            unscaled = _on_host(summed[name]) / scale
            self.gradients[name] = shape, boxes, unscaled
        # What is given is for one process, which has all of each.
        for name, full in self.given.items():
            own = summed[name]
            own.copy_(full.view_as(own) * scale)

    def draws(self, batches: list[Batch]) -> Any:
        """Return hashes of the seeds, samples and positions that these micro-batches draw from."""
        net = self.trainer.net
        out = [torch.empty(0, dtype=torch.int32)]
        for batch in batches:
            where = net.where(batch.to(net.device), self.trainer.config.training.seed)
            assert where.samples is not None
            columns = where.columns
            if columns is None:
                columns = torch.arange(batch.tokens.shape[1], device=net.device)
            hashes = dropout.rows(where.seed, where.samples[:, None], columns)
            out.append(hashes.flatten().cpu())

            # Hidden states of a rank that has a part of the tokens have positions of their own.
            rows = where.stream
            if rows is not None and rows.samples is not None:
                hashes = dropout.rows(where.seed, rows.samples, rows.columns)
                out.append(hashes.flatten().cpu())
        return torch.unique(torch.cat(out))

    def state(self) -> TensorBoxes:
        """Return copies of this rank's weights and optimizer state."""
        named = self.trainer.net.store.named_state()
        return {name: (shape, boxes, _on_host(x)) for name, (shape, boxes, x) in named.items()}

    def counters(self) -> dict[str, Any]:
        """Return the rest of the state."""
        state = self.trainer.state
        counters = dataclasses.asdict(state.progress)
        counters["steps"] = self.trainer.net.store.steps
        counters["loss_scale"] = state.scaler.state()
        return counters

    def step(self) -> RecordedStep:
        self.gradients = {}
        feed = self.trainer.feed
        assert isinstance(feed, RecordingFeed)
        self.trainer.step()
        # A step's numbers may still be on their way when it returns.
        self.trainer.finish()
        return RecordedStep(
            gradients=self.gradients,
            state=self.state(),
            numbers=dict(zip(COLUMNS, rows_of(self.trainer)[-1], strict=True)),
            samples=[int(number) for batch in feed.batches for number in batch.sample_ids],
            draws=self.draws(feed.batches),
        )

    def close(self) -> None:
        self.trainer.net.store.observer = None
        self.trainer.feed.close()
        self.trainer.state.saver.close()


def rows_of(trainer: Trainer) -> list[list[float]]:
    assert isinstance(trainer.metrics, StepRows)
    return trainer.metrics.rows


def _on_host(x: Tensor) -> Tensor:
    return x.detach().to("cpu", torch.float64, copy=True)


FullTensors = dict[str, Tensor]  # by name


def full_tensors(named: TensorBoxes) -> FullTensors:
    """Return the tensors of one process, which holds them completely."""
    return {name: x.view(shape) for name, (shape, _, x) in named.items()}


def broadcast(tensors: FullTensors, team: Team) -> FullTensors:
    """Send rank 0's tensors to all ranks, as one flat tensor; other ranks' are not read."""
    shapes = team.run_on_rank_0(lambda: [[name, list(x.shape)] for name, x in tensors.items()])
    if team.size == 1:
        return tensors
    count = sum(math.prod(shape) for _, shape in shapes)
    flat = torch.empty(count, dtype=torch.float64)
    if tensors and team.is_rank_0:
        torch.cat([x.double().flatten() for x in tensors.values()], out=flat)
    team.broadcast(flat)
    return views(flat, shapes)


def views(flat: Tensor, shapes: list[tuple[str, list[int]]]) -> FullTensors:
    """Return the named tensors that lie in a flat one, one after the other."""
    parts = flat.split_with_sizes([math.prod(shape) for _, shape in shapes])
    return {name: part.view(shape) for (name, shape), part in zip(shapes, parts, strict=True)}


# The comparison


@dataclass
class Seen:
    """The largest difference of one name so far, and the first beyond the tolerance."""

    largest: float = 0.0
    first: tuple[int, float] | None = None  # step, difference


class FirstSeen(NamedTuple):
    """Where a difference beyond the tolerance was first seen, by all ranks."""

    step: int
    rank: int
    difference: float


@dataclass
class Recorder:
    """The differences that one rank has seen."""

    config: TrainConfig  # of both runs
    device: torch.device
    seen: dict[tuple[Quantity, str], Seen] = field(default_factory=dict)

    def allowed(self, what: Quantity) -> float:
        return what.tolerance(self.config, self.device)

    def note(self, what: Quantity, name: str, step: int, far: float) -> None:
        if math.isnan(far):  # two infinities, which cannot be told apart
            far = math.inf
        # The first difference tells where it comes from, the largest how bad it is.
        seen = self.seen.setdefault((what, name), Seen())
        seen.largest = max(seen.largest, far)
        if far > self.allowed(what) and seen.first is None:
            seen.first = step, far

    def note_equal(self, what: Quantity, name: str, step: int, is_equal: bool) -> None:
        """Note something that is equal or is not, without a distance."""
        self.note(what, name, step, 0.0 if is_equal else math.inf)

    def tensors(
        self,
        what: Quantity,
        step: int,
        got: TensorBoxes,
        want: FullTensors,
        floor: float | None = None,
    ) -> None:
        """Compare this rank's parts with whole tensors."""
        if floor is None:
            is_rough = what is Q.GRADIENTS and self.config.precision.dtype != "float64"
            floor = FLOOR_OF_GRADIENTS if is_rough else FLOOR

        # The largest element of each tensor, and of its kind: weights, or one of the moments.
        sizes: dict[str, float] = {}
        largest: dict[str, float] = {}
        for name, x in want.items():
            sizes[name] = float(x.abs().max()) if x.numel() else 0.0
            largest[kind_of(name)] = max(largest.get(kind_of(name), 0.0), sizes[name])

        for name, (shape, boxes, tensor) in got.items():
            if name not in want or tuple(shape) != tuple(want[name].shape):
                self.note(what, name, step, math.inf)
                continue
            far = 0.0
            for box, flat in split_boxes(boxes, tensor.reshape(-1)):
                far = max(far, largest_gap(flat, cut(want[name], box).reshape(-1)))
            scale = max(sizes[name], floor * largest[kind_of(name)])
            if scale:
                self.note(what, name, step, far / scale)
            else:  # every wanted element is 0
                self.note_equal(what, name, step, far == 0)


def kind_of(name: str) -> str:
    """Return the part of a name of the state that names a moment; "" for weights."""
    return name.partition("/")[2]


def split_state(named: TensorBoxes) -> tuple[TensorBoxes, TensorBoxes]:
    """Return the weights of a state, and its moments."""
    moments = {name: x for name, x in named.items() if kind_of(name)}
    weights = {name: x for name, x in named.items() if name not in moments}
    return weights, moments


def largest_gap(got: Tensor, want: Tensor) -> float:
    """Return the largest difference of two flat tensors; infinity if it is not a number."""
    if not got.numel():
        return 0.0
    gap = float((got - want).abs().max())
    return math.inf if math.isnan(gap) else gap


def cut(full: Tensor, box: Box) -> Tensor:
    return full[tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))]


def relative(got: float, want: float) -> float:
    if got == want or (math.isnan(got) and math.isnan(want)):
        return 0.0
    far = abs(got - want) / abs(want) if want else math.inf
    return math.inf if math.isnan(far) else far


class _Comparing:
    """One comparison on one rank."""

    def __init__(
        self, config: TrainConfig, steps: int, setup: RankSetup, folder: Path | None
    ) -> None:
        self.config = config
        self.steps = steps
        self.setup = setup
        self.folder = folder
        self.team = setup.team
        self.seen = Recorder(config, setup.device)
        self.is_repeatable = setup.device.type == "cpu"
        # Rank 0 alone fills these: one process's steps, its first weights, its validation loss.
        self.one: list[RecordedStep] = []
        self.drawn: TensorBoxes = {}
        self.validation = 0.0
        self.has_trained_alone = False

    def compare(self, not_compared: list[str]) -> Comparison:
        """Return the result; a failure of the layout alone is a difference from one process."""
        try:
            self.run()
        except (UserError, OSError):
            raise
        except Exception as error:
            # A model that one process cannot train either says nothing about the layout, and
            # another rank's failure is reported there.
            if not self.has_trained_alone or is_lost_rank(error) or out_of_memory(error):
                raise
            raise UserError(self.describe_failure(error), UNEQUAL) from error
        return self.result(not_compared)

    def describe_failure(self, error: Exception) -> str:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        differing = [name for (_, name), seen in self.seen.seen.items() if seen.first]
        before = f", after a difference in {differing[0]}" if differing else ""
        reason = f"{type(error).__name__} at {where}: {bare_message(error)}{before}"
        return (
            f"this layout fails where one process does not, {reason}; "
            "do not train with it, and report it with these flags"
        )

    def run(self) -> None:
        # One step more than the layout saves: it is what the resumed runs are compared with.
        self.team.run_on_rank_0(lambda: self.train_alone(self.steps + 1))
        self.has_trained_alone = True
        saves = Checkpoint()
        if self.folder:
            saves = dataclasses.replace(self.config.checkpoint, save=str(self.folder))
        with self.running(self.config, saves) as run:
            saved, counters, last = self.train(run)
        if self.folder:
            self.resume(saved, counters, last)
            self.take_over(saved, counters)

    @contextlib.contextmanager
    def running(
        self, config: TrainConfig, checkpoint: Checkpoint, team: Team | None = None
    ) -> Iterator[Watched]:
        setup = dataclasses.replace(self.setup, team=team or self.team)
        config = dataclasses.replace(config, checkpoint=checkpoint)
        run = Watched(small_run.start_trainer(config, setup))
        try:
            yield run
        finally:
            run.close()

    def train_alone(self, steps: int) -> None:
        with self.running(alone(self.config), Checkpoint(), ALONE) as run:
            self.drawn = run.state()
            for step in range(steps):
                self.one.append(run.step())
                if step + 1 == self.steps:
                    self.validation = run.trainer.validation.validate("valid", is_at_end=True)

    def train(self, run: Watched) -> tuple[TensorBoxes, dict[str, Any], RecordedStep]:
        """Train in the layout; return what it saved, its counters then, and its step after that."""
        self.compare_drawn(run)
        for number in range(1, self.steps + 1):
            made = run.step()
            self.compare_step(number, made)

        # Validate, which resuming must not notice, and save.
        want = self.team.run_on_rank_0(lambda: self.validation)
        loss = run.trainer.validation.validate("valid", is_at_end=True)
        self.seen.note(Q.VALIDATION, AFTER, self.steps, relative(loss, want))
        # The resumed runs are compared with the saved state, and with the step after it.
        saved = made.state
        counters = run.counters()
        if self.folder:
            run.trainer.state.save()
            run.trainer.state.saver.wait()

        last = run.step()
        self.compare_step(self.steps + 1, last)
        return saved, counters, last

    def compare_drawn(self, run: Watched) -> None:
        drawn, _ = split_state(run.state())
        want = self.of_one(self.drawn)
        self.seen.tensors(Q.DRAWN, 0, drawn, want, floor=0.0)
        self.check_cover(run)

    def check_cover(self, run: Watched) -> None:
        """Check that each element of each tensor is held by one rank as its own."""

        def sizes_of(named: TensorBoxes) -> dict[str, int]:
            return {name: x.numel() for name, (_, _, x) in named.items()}

        # What all ranks would save together has as many elements as one process has.
        totals = Counter[str]()
        own = run.trainer.net.store.named_state(to_save=True)
        for held in self.team.gather(sizes_of(own)):
            totals.update(held)
        sizes = self.team.run_on_rank_0(lambda: sizes_of(self.drawn))
        for name in sizes.keys() | totals.keys():
            if totals.get(name) != sizes.get(name):
                about = f"{name} (elements held)"
                self.seen.note(Q.DRAWN, about, 0, math.inf)

    def compare_step(self, step: int, made: RecordedStep, stage: Quantity | None = None) -> None:
        """Compare a step of the layout with that of one process.

        All differences count as those of `stage` if one is given.
        """
        # Rank 0 knows the run in one process. It sends the others one kind of value at a time.
        one = self.one[step - 1] if self.team.is_rank_0 else NOTHING

        # The numbers of the log, the samples and dropout's draws.
        row, samples = self.team.run_on_rank_0(lambda: [one.numbers, one.samples])
        for column, got in made.numbers.items():
            far = relative(got, row[column])
            self.seen.note(stage or QUANTITIES[column], column, step, far)
        self.compare_samples(step, made.samples, samples, stage or Q.SAMPLES)
        draws = broadcast({"": one.draws}, self.team)[""]
        self.compare_draws(step, made.draws, draws, stage or Q.DROPOUT)

        # The tensors.
        gradients = self.of_one(one.gradients)
        self.seen.tensors(stage or Q.GRADIENTS, step, made.gradients, gradients)
        want = self.of_one(one.state)
        weights, moments = split_state(made.state)
        self.seen.tensors(stage or Q.WEIGHTS, step, weights, want)
        self.seen.tensors(stage or Q.MOMENTS, step, moments, want)

    def of_one(self, named: TensorBoxes) -> FullTensors:
        """Send the full tensors of rank 0's own run to all ranks."""
        return broadcast(full_tensors(named), self.team)

    def compare_samples(self, step: int, mine: list[int], want: list[int], what: Quantity) -> None:
        """Check that the data-parallel ranks together read what one process reads."""
        layout = layout_of(self.config, self.team.rank)
        at = layout.at("replicas", "shard")
        read: dict[int, list[int]] = {}
        for data, numbers in self.team.gather([at, mine]):
            # Model-parallel ranks with the same place in the data must read the same.
            if read.setdefault(data, numbers) != numbers:
                self.seen.note(what, f"of data-parallel rank {data}", step, math.inf)

        # Their order among the data-parallel ranks is the layout's own.
        everything = itertools.chain(*read.values())
        is_equal = sorted(everything) == sorted(want)
        self.seen.note_equal(what, "of the step", step, is_equal)

    def compare_draws(self, step: int, mine: Tensor, want: Tensor, what: Quantity) -> None:
        """Check that the ranks together draw from the positions that one process draws from."""
        want = want.to(torch.int32)
        drawn_by = torch.isin(want, mine).to(torch.int32)
        self.team.sum(drawn_by)
        # Equal if no rank draws from another position, and each position is some rank's.
        is_equal = bool(torch.isin(mine, want).all() and drawn_by.all())
        self.seen.note_equal(what, "seed, sample and position", step, is_equal)

    # Resuming

    def resume(self, saved: TensorBoxes, counters: dict[str, Any], last: RecordedStep) -> None:
        """Load the saved state into the same layout and take its next step again."""
        with self.running(self.config, Checkpoint(load=str(self.folder))) as run:
            self.compare_bits(Q.LOADED, run.state(), saved)
            self.compare_counters(Q.LOADED, run.counters(), counters)
            again = run.step()
        if self.is_repeatable:
            self.compare_bits(Q.NEXT_STEP, again.state, last.state)
            self.compare_counters(Q.NEXT_STEP, again.numbers, last.numbers)
        else:  # the order of atomic additions differs
            self.compare_step(self.steps + 1, again, Q.NEXT_STEP)

    def take_over(self, saved: TensorBoxes, counters: dict[str, Any]) -> None:
        """Load the saved state into one process, on rank 0, which takes the next step alone."""
        state: TensorBoxes = {}
        loaded: dict[str, Any] = {}
        made = NOTHING

        def load() -> None:
            nonlocal state, loaded, made
            with self.running(alone(self.config), Checkpoint(load=str(self.folder)), ALONE) as run:
                state = run.state()
                loaded = run.counters()
                made = run.step()

        self.team.run_on_rank_0(load)
        self.seen.tensors(Q.LOADED_ALONE, self.steps, saved, self.of_one(state), floor=0.0)
        if self.team.is_rank_0:
            self.compare_counters(Q.LOADED_ALONE, loaded, counters)
            want = self.one[self.steps]
            number = self.steps + 1
            self.seen.tensors(Q.NEXT_STEP_ALONE, number, made.state, full_tensors(want.state))
            for name, got in made.numbers.items():
                self.seen.note(Q.NEXT_STEP_ALONE, name, number, relative(got, want.numbers[name]))

    def compare_bits(self, what: Quantity, got: TensorBoxes, want: TensorBoxes) -> None:
        for name in got.keys() | want.keys():
            is_equal = False
            if name in got and name in want:
                _, _, ours = got[name]
                _, _, theirs = want[name]
                is_equal = torch.equal(ours, theirs)
            self.seen.note_equal(what, name, self.steps, is_equal)

    def compare_counters(self, what: Quantity, got: dict[str, Any], want: dict[str, Any]) -> None:
        for name, value in got.items():
            wanted = want[name]
            are_nan = value != value and wanted != wanted
            self.seen.note_equal(what, name, self.steps, value == wanted or are_nan)

    # The result

    def result(self, not_compared: list[str]) -> Comparison:
        """Merge what all ranks have seen, on all ranks alike."""
        mine = [[*key, seen.largest, seen.first] for key, seen in self.seen.seen.items()]
        largest: dict[tuple[Quantity, str], float] = {}
        first: dict[tuple[Quantity, str], FirstSeen] = {}
        for rank, rows in enumerate(self.team.gather(mine)):
            for what, name, far, begin in rows:
                key = Quantity(what), name
                largest[key] = max(largest.get(key, 0.0), far)
                if begin is None:
                    continue
                step, difference = begin
                if key not in first or step < first[key].step:
                    first[key] = FirstSeen(step, rank, difference)

        # A line of the table for each quantity.
        dtype = self.config.precision.dtype
        compared = []
        for what in Quantity:
            names = [name for kind, name in largest if kind == what]
            if names:
                worst = max(names, key=lambda name: largest[what, name])
                far = largest[what, worst]
                allowed = self.seen.allowed(what)
                compared.append(Compared(what, len(names), far, worst, allowed, dtype))

        # Within a step, in the order in which it makes the quantities, the largest first.
        order = list(Quantity)
        differences = []
        for (what, name), seen in sorted(
            first.items(),
            key=lambda item: (item[1].step, order.index(item[0][0]), -item[1].difference),
        ):
            where = f"step {seen.step}, rank {seen.rank}"
            allowed = self.seen.allowed(what)
            far = largest[what, name]
            differences.append(Difference(what, name, far, allowed, dtype, where))

        gradients = {name: far for (kind, name), far in largest.items() if kind == Q.GRADIENTS}
        return Comparison(self.steps, compared, differences, gradients, not_compared, self.config)


class _ComparingUpdates(_Comparing):
    """One comparison in the run's own precision: one process takes the layout's gradients."""

    def run(self) -> None:
        # Find out whether one process can train it at all: a failure below is then the layout's.
        self.team.run_on_rank_0(lambda: self.train_alone(1))
        self.has_trained_alone = True
        self.one.clear()

        with contextlib.ExitStack() as block:
            run = block.enter_context(self.running(self.config, Checkpoint()))
            one: Watched | None = None
            if self.team.is_rank_0:
                context = self.running(alone(self.config), Checkpoint(), ALONE)
                one = block.enter_context(context)
            self.compare_drawn(run)
            for number in range(1, self.steps + 1):
                made = run.step()
                gradients = self.full_gradients(run, made.gradients)
                if one is not None:
                    one.given = gradients
                    self.one.append(one.step())
                self.compare_step(number, made)

    def full_gradients(self, run: Watched, gradients: TensorBoxes) -> FullTensors:
        """Put the gradients together, of which each rank has parts as its own."""
        # The shapes of all weights, which rank 0 has seen when one process trained.
        drawn, _ = split_state(self.drawn)
        shapes = self.team.run_on_rank_0(
            lambda: [[name, list(shape)] for name, (shape, _, _) in drawn.items()]
        )
        count = sum(math.prod(shape) for _, shape in shapes)
        flat = torch.zeros(count, dtype=torch.float64)
        full = views(flat, shapes)
        # Every element is some rank's own, and 0 on the others: their sum is the whole.
        for name in run.trainer.net.store.named_state(False, to_save=True):
            _, boxes, tensor = gradients[name]
            for box, part in split_boxes(boxes, tensor.reshape(-1)):
                cut(full[name], box).copy_(part.view(box.size))
        self.team.sum(flat)
        return full
