"""All layouts that a number of devices allows, ranked by closed forms; the best of them measured.

A layout is legal if `config.checks` says so. Each of them has its memory and its time estimated,
without torch; of those that may fit, the fastest are predicted in full until enough of them fit.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from meshwright.apps.plan import estimate
from meshwright.apps.plan.estimate import NEAR, LayoutSizes, Run
from meshwright.apps.plan.prediction import Machine, Prediction
from meshwright.base.progress import progress_bar
from meshwright.config import checks
from meshwright.config.check_layout import parallel_problems
from meshwright.config.check_steps import batch_problems
from meshwright.config.fields import with_settings
from meshwright.config.problem import FLAGS, Problem
from meshwright.config.schema import TrainConfig
from meshwright.parallel.pipeline_schedule import ScheduleName

Settings = dict[str, Any]
RECOMPUTE = (None, "selective", "full")  # slower and smaller with each
MOST_MICRO_BATCH = 64
MOST_TIMED = 40  # layouts of the ranking whose time is found exactly
MOST_TOO_LARGE = 20  # layouts that are predicted in full and do not fit, before a search gives up
MOST_TRIALS = 3  # of layouts that are to fit, however fast they are


@dataclass(frozen=True)
class Freedom:
    """What a search may change."""

    fixed: frozenset[str] = frozenset()  # settings that keep their values
    fp8: bool = False  # whether it may multiply in 8 bits


@dataclass
class Refusals:
    """Reasons against layouts, each with an example and how often it was the first."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def note(self, reason: str) -> None:
        kind = kind_of(reason)
        self.counts[kind] += 1
        self.examples.setdefault(kind, reason)

    def listed(self) -> list[tuple[int, str]]:
        """Return counts and examples, the most frequent first."""
        return [
            (count, FLAGS.render(self.examples[kind])) for kind, count in self.counts.most_common()
        ]


@functools.lru_cache(4096)
def kind_of(reason: str) -> str:
    """Return a reason without its numbers."""
    return re.sub(r"\d[\d.,]*", "N", reason)


@dataclass
class Found:
    """The outcome of a search."""

    refusals: Refusals = field(default_factory=Refusals)
    fitting: list[Prediction] = field(default_factory=list)  # the fastest, in order
    too_large: int = 0  # layouts that do not fit
    slower: int = 0  # layouts that may fit, and are slower
    ranked: list[Prediction] = field(default_factory=list)  # the best by estimate, in order
    nearest: Prediction | None = None  # of those that do not fit, the one that lacks the least


class RankedLayout(NamedTuple):
    """A layout that may fit."""

    seconds: float  # of a step, estimated
    number: int  # in the order of the search
    layout: LayoutSizes


@functools.cache
def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


class LegalLayouts:
    """The layouts of a run that the checks accept, with the reasons against the others."""

    def __init__(self, run: Run, freedom: Freedom) -> None:
        self.run = run
        self.freedom = freedom
        self.refusals = Refusals()
        self.copies = run.config.parallel.num_distributed_optimizer_instances
        self.batch_reasons: dict[tuple[int, int], str] = {}
        self.other_reasons: dict[tuple[object, ...], str] = {}

    def free(self, layout: LayoutSizes, name: str, values: list[Any]) -> list[Any]:
        """Return these values of a setting, or the given one if it is fixed."""
        return [getattr(layout, name)] if name in self.freedom.fixed else values

    # Shapes: the numbers of ranks and the format, for any batch

    def shapes(self) -> Iterator[LayoutSizes]:
        # What is chosen later has its least value here, so that the checks do not refuse it.
        start = estimate.layout_of(self.run.config)
        if "micro_batch_size" not in self.freedom.fixed:
            start = start._replace(micro_batch_size=1)
        if "zero_stage" not in self.freedom.fixed:  # replicas of shards need some ZeRO
            start = start._replace(zero_stage=min(1, self.copies - 1))
        start = start._replace(recompute_granularity=self.recomputations()[0])
        levels = [self.by_tensor, self.by_context, self.by_pipeline, self.by_format]
        return self.divided(start, levels)

    def divided(
        self, layout: LayoutSizes, levels: Sequence[Callable[[LayoutSizes], list[LayoutSizes]]]
    ) -> Iterator[LayoutSizes]:
        """Yield the legal layouts of these levels: what a level refuses is not divided further."""
        if not levels:
            yield layout
            return
        for changed in levels[0](layout):
            problems = parallel_problems(self.run.config_of(changed))
            if problems:
                self.refusals.note(problems[0].text)
            else:
                yield from self.divided(changed, levels[1:])

    def by_tensor(self, layout: LayoutSizes) -> list[LayoutSizes]:
        # A rank has at least a head.
        most = self.run.config.model.num_attention_heads or 1
        sizes = [n for n in divisors(self.run.config.world) if n <= most]
        return [
            layout._replace(tensor_model_parallel_size=tp, sequence_parallel=sequence)
            for tp in self.free(layout, "tensor_model_parallel_size", sizes)
            for sequence in self.free(
                layout, "sequence_parallel", [True, False] if tp > 1 else [False]
            )
        ]

    def by_context(self, layout: LayoutSizes) -> list[LayoutSizes]:
        tp = layout.tensor_model_parallel_size
        # Context ranks exchange tokens for heads, of which tensor ranks have a part.
        most = (self.run.config.model.num_attention_heads or 1) // tp
        sizes = [n for n in divisors(self.run.config.world // tp) if n <= most]
        return [
            layout._replace(context_parallel_size=cp)
            for cp in self.free(layout, "context_parallel_size", sizes or [1])
        ]

    def by_pipeline(self, layout: LayoutSizes) -> list[LayoutSizes]:
        ranks = self.run.config.world // (
            layout.tensor_model_parallel_size * layout.context_parallel_size
        )
        # A stage has at least a layer.
        sizes = [n for n in divisors(ranks) if n <= (self.run.config.model.num_layers or 1)]
        return [
            layout._replace(pipeline_model_parallel_size=pp)
            for pp in self.free(layout, "pipeline_model_parallel_size", sizes or [1])
        ]

    def by_format(self, layout: LayoutSizes) -> list[LayoutSizes]:
        formats = [None, "hybrid"] if self.freedom.fp8 else [layout.fp8_format]
        return [
            layout._replace(fp8_format=kind) for kind in self.free(layout, "fp8_format", formats)
        ]

    # What is left to choose

    def micro_batches(self, shape: LayoutSizes) -> list[LayoutSizes]:
        """Return a shape with each micro-batch of which its ranks can make a batch."""
        dp = self.run.data_ranks(shape)
        out = []
        sizes = [
            n for n in divisors(max(1, self.run.config.global_batch // dp)) if n <= MOST_MICRO_BATCH
        ]
        for size in self.free(shape, "micro_batch_size", sizes):
            layout = shape._replace(micro_batch_size=size)
            key = (dp, size)
            # The checks of a batch are slow, and depend on these two numbers alone.
            if key not in self.batch_reasons:
                self.batch_reasons[key] = first(batch_problems(self.run.config_of(layout)))
            if reason := self.batch_reasons[key]:
                self.refusals.note(reason)
            else:
                out.append(layout)
        return out

    def schedules(self, shape: LayoutSizes) -> list[tuple[ScheduleName, list[int | None]]]:
        """Return schedules, each with its sizes of virtual stages.

        GPipe is left out: it waits as long as 1F1B and holds more.
        """
        pp = shape.pipeline_model_parallel_size
        layers = self.run.config.model.num_layers or 0
        names = self.free(shape, "pipeline_schedule", ["1f1b"])
        # Virtual stages of as many layers as divide those of a rank, which all ranks have alike.
        even = 1
        if pp > 1 and layers % pp == 0:
            even = layers // pp
        virtual: list[int | None] = [None, *divisors(even)[:-1]]
        sizes = self.free(shape, "num_layers_per_virtual_pipeline_stage", virtual)
        return [(name, sizes) for name in names]

    def zero_stages(self, shape: LayoutSizes) -> list[int]:
        is_shared = self.run.data_ranks(shape) * shape.context_parallel_size > 1
        return self.free(shape, "zero_stage", [0, 1, 2, 3] if is_shared else [0])

    def recomputations(self) -> list[Any]:
        """Return what there is now, and what saves more memory."""
        now = self.run.config.training.recompute_granularity
        if "recompute_granularity" in self.freedom.fixed:
            return [now]
        return [*RECOMPUTE[RECOMPUTE.index(now) :]]

    def is_legal(self, layout: LayoutSizes, is_round: bool) -> bool:
        """Return whether a legal shape stays legal with its schedule and ZeRO stage.

        `is_round`: pipeline ranks can share the micro-batches of a step.
        """
        # All by which the answer may differ, so that each kind of layout is checked once.
        dp = self.run.data_ranks(layout)
        pp = layout.pipeline_model_parallel_size
        is_shared = dp * layout.context_parallel_size > 1
        is_copied = dp % self.copies == 0
        order = (
            layout.pipeline_schedule,
            layout.num_layers_per_virtual_pipeline_stage,
            layout.zero_stage,
        )
        key = (pp, *order, layout.fp8_format, is_round, is_shared, is_copied)
        if key not in self.other_reasons:
            self.other_reasons[key] = first(parallel_problems(self.run.config_of(layout)))
        reason = self.other_reasons[key]
        if reason:
            self.refusals.note(reason)
        return not reason

    def is_round(self, layout: LayoutSizes) -> bool:
        unit = self.run.data_ranks(layout) * layout.micro_batch_size
        return all(
            size // unit % layout.pipeline_model_parallel_size == 0 for size in self.run.batches
        )


def first(problems: list[Problem]) -> str:
    """Return the first problem's text, or nothing."""
    return problems[0].text if problems else ""


class Search:
    """One search: layouts are ranked by estimates, then the best of them predicted in full."""

    def __init__(self, machine: Machine, vocabulary: int, freedom: Freedom, keep: int = 10) -> None:
        self.machine = machine
        self.vocabulary = vocabulary
        self.freedom = freedom
        self.keep = keep
        self.found = Found()
        self.have = machine.profile.memory_bytes
        # Bytes and layout of the one that lacks the least memory, by its estimate.
        self.least_lack: tuple[float, LayoutSizes] | None = None

    def run(self, config: TrainConfig) -> Found:
        """Find the `keep` fastest layouts of a configuration that fit."""
        # Estimates, which are quick, rank all layouts; a full prediction takes seconds.
        run = self.run_of(config)
        found = self.found
        ranked = self.ranked(run)
        few = [
            self.predict(run, layout)
            for layout in itertools.islice(ranked, max(MOST_TIMED, 4 * self.keep))
        ]
        # The time of these is found exactly: the ranking has it to some percent.
        found.ranked = sorted(few, key=lambda one: one.time.seconds)
        with progress_bar("predicting the best layouts in full", self.keep, of="count") as show:
            before = found.too_large
            most = before + MOST_TOO_LARGE
            for one in found.ranked:
                if len(found.fitting) == self.keep or found.too_large == most:
                    break
                # One that is estimated to be too large is tried only until a faster one fits.
                if not found.fitting or one.tensors <= self.have:
                    show(self.try_layout(one.measured()))
        found.fitting.sort(key=lambda one: one.time.seconds)
        # The rest of those that were timed are slower, or too large, which is counted already.
        found.slower += len(few) - len(found.fitting) - (found.too_large - before)
        # Not even an estimate fits: say by how little the nearest does not.
        if not found.fitting and found.nearest is None and self.least_lack is not None:
            found.nearest = self.predict(run, self.least_lack[1]).measured()
        return found

    def find_small(self, config: TrainConfig) -> Prediction | None:
        """Return a layout that fits, of the few that need the least memory; None if none does."""
        run = self.run_of(config)
        sizes = list[tuple[float, LayoutSizes]]()
        # One that fits for sure ends the search; of the others the smallest are tried in full.
        legal = LegalLayouts(run, self.freedom)
        for shape in legal.shapes():
            if layout := smallest(legal, shape):
                need = estimate.need_of(run, layout)
                if estimate.reserved_bytes(layout, need) * (1 + NEAR) <= self.have:
                    sizes = [(need, layout)]
                    break
                if need * (1 - NEAR) <= self.have:
                    sizes.append((need, layout))
        few = (
            self.predict(run, layout).measured()
            for _, layout in heapq.nsmallest(MOST_TRIALS, sizes)
        )
        return next((prediction for prediction in few if prediction.fits), None)

    def run_of(self, config: TrainConfig) -> Run:
        return Run(config, self.vocabulary, self.machine.profile, self.machine.links)

    def predict(self, run: Run, layout: LayoutSizes) -> Prediction:
        return Prediction(run.config_of(layout), self.machine, self.vocabulary)

    def try_layout(self, prediction: Prediction) -> bool:
        """Add a layout to those that fit, unless it does so with less recomputation too."""
        found = self.found
        alike = recomputed_alike(prediction.config)
        # The ranking has one with less recomputation first, which is faster.
        if any(recomputed_alike(other.config) == alike for other in found.fitting):
            return False
        # The ranking asked the checks of layout and batch alone.
        if problems := checks.problems(prediction.config, needs_data=False):
            found.refusals.note(problems[0].text)
            return False
        if prediction.left_first >= 0 and prediction.fits:
            found.fitting.append(prediction)
            return True
        found.too_large += 1
        if found.nearest is None or prediction.left_first > found.nearest.left_first:
            found.nearest = prediction
        return False

    def ranked(self, run: Run) -> Iterator[LayoutSizes]:
        """Yield the layouts that may fit, the fastest first, with little recomputation."""
        legal = LegalLayouts(run, self.freedom)
        self.found.refusals, kinds = legal.refusals, legal.recomputations()
        heap = self.candidates(run, legal)
        fails = dict[LayoutSizes, int]()  # layout -> the micro-batch from which on it is too large
        number = len(heap)
        while heap:
            layout = heapq.heappop(heap).layout
            # What is left when the caller has enough is slower than all that it got.
            self.found.slower = len(heap)
            alike = layout._replace(micro_batch_size=0, recompute_granularity=None)
            # A smaller micro-batch of the same layout did not fit, even with all recomputation.
            if layout.micro_batch_size >= fails.get(alike, math.inf):
                self.found.too_large += 1
                continue
            # Three outcomes: it fits; it may fit, or would with more recomputation, which then goes
            # back into the heap by its own time; or no recomputation helps.
            more = kinds[kinds.index(layout.recompute_granularity) + 1 :]
            need = estimate.need_of(run, layout)
            if need * (1 - NEAR) <= self.have:
                yield layout
                if estimate.reserved_bytes(layout, need) * (1 + NEAR) <= self.have:
                    continue
            elif not self.may_fit(run, layout._replace(recompute_granularity=kinds[-1])):
                # If what it holds throughout is too much, no micro-batch is small enough.
                is_too_large = estimate.held_of(run, layout) > self.have
                fails[alike] = 0 if is_too_large else layout.micro_batch_size
                self.found.too_large += 1
                continue
            if more:
                number += 1
                layout = layout._replace(recompute_granularity=more[0])
                seconds = estimate.step_seconds(
                    run,
                    layout,
                    [layout.micro_batch_size],
                    [layout.num_layers_per_virtual_pipeline_stage],
                )
                heapq.heappush(heap, RankedLayout(seconds[0][0], number, layout))

    def may_fit(self, run: Run, layout: LayoutSizes) -> bool:
        """Return whether a layout may fit, and keep the nearest of those that do not."""
        need = estimate.need_of(run, layout)
        if need * (1 - NEAR) <= self.have:
            return True
        if self.least_lack is None or need < self.least_lack[0]:
            self.least_lack = need, layout
        return False

    def candidates(self, run: Run, legal: LegalLayouts) -> list[RankedLayout]:
        """Return all legal layouts with the least recomputation, as a heap."""
        out = list[RankedLayout]()
        shapes = [*legal.shapes()]
        with progress_bar("ranking layouts", len(shapes), of="count") as show:
            for shape in shapes:
                for layout, seconds in timed_layouts(run, legal, shape):
                    out.append(RankedLayout(seconds, len(out), layout))
                show(1)
        heapq.heapify(out)
        return out


def timed_layouts(
    run: Run, legal: LegalLayouts, shape: LayoutSizes
) -> Iterator[tuple[LayoutSizes, float]]:
    """Yield the legal layouts of a shape, with the seconds of a step."""
    layouts = legal.micro_batches(shape)
    if not layouts:
        return
    micro = [layout.micro_batch_size for layout in layouts]
    rounds = [legal.is_round(layout) for layout in layouts]
    # One layout for those that are round and one for the others.
    examples = dict(zip(rounds, layouts, strict=True))
    for (name, sizes), zero in itertools.product(legal.schedules(shape), legal.zero_stages(shape)):
        seconds = estimate.step_seconds(run, shape.ordered(name, None, zero), micro, sizes)
        for size, row in zip(sizes, seconds, strict=True):
            # Micro-batches that pipeline ranks can share alike are refused or accepted together.
            accepted = {
                key: legal.is_legal(each.ordered(name, size, zero), key)
                for key, each in examples.items()
            }
            for layout, key, time in zip(layouts, rounds, row, strict=True):
                if accepted[key]:
                    yield layout.ordered(name, size, zero), time


def smallest(legal: LegalLayouts, shape: LayoutSizes) -> LayoutSizes | None:
    """Return the layout of a shape that needs the least memory, as a rule."""
    layout = next(iter(legal.micro_batches(shape)), None)
    if layout is None:
        return None
    # The smallest micro-batch, all recomputation, the first schedule and the most ZeRO.
    (name, sizes), *_ = legal.schedules(shape)
    layout = layout._replace(recompute_granularity=legal.recomputations()[-1])
    for zero in reversed(legal.zero_stages(shape)):
        each = layout.ordered(name, sizes[0], zero)
        if legal.is_legal(each, legal.is_round(each)):
            return each
    return None


def recomputed_alike(config: TrainConfig) -> TrainConfig:
    """Return a configuration with one kind of recomputation, to compare the rest."""
    return with_settings(config, recompute_granularity=None)


# The least change of a layout that does not fit

MOST_CHANGES = 3


def smaller_steps(c: TrainConfig) -> list[list[Settings]]:
    """Return for each setting the values with which a rank may need less memory."""
    p = c.parallel
    t = c.training
    now = RECOMPUTE.index(t.recompute_granularity)
    tp = p.tensor_model_parallel_size
    pp = p.pipeline_model_parallel_size
    cp = p.context_parallel_size
    # Data-parallel ranks become ranks of another dimension.
    factors = [n for n in divisors(c.dp) if n > 1]
    return [
        [{"recompute_granularity": kind} for kind in RECOMPUTE[now + 1 :]],
        [{"micro_batch_size": n} for n in divisors(c.micro_batch)[-2::-1]],
        [{"zero_stage": stage} for stage in range(p.zero_stage + 1, 4)],
        [{"bf16": True}] if c.precision.dtype == "float32" else [],
        [{"sequence_parallel": True}] if tp > 1 and not p.sequence_parallel else [],
        [{"tensor_model_parallel_size": tp * n, "sequence_parallel": True} for n in factors],
        [{"pipeline_model_parallel_size": pp * n} for n in factors],
        [{"context_parallel_size": cp * n} for n in factors],
        [{"cpu_optimizer": True}] if not p.offloads else [],
    ]


def least_change(prediction: Prediction) -> tuple[Settings, Prediction] | None:
    """Return the fewest settings that make a layout fit, the fastest of these, and the result."""
    steps = [each for each in smaller_steps(prediction.config) if each]
    have = prediction.machine.profile.memory_bytes
    for number in range(1, MOST_CHANGES + 1):
        hopeful = list[tuple[Settings, Prediction]]()
        for chosen in itertools.combinations(steps, number):
            for values in itertools.product(*chosen):
                settings = {name: value for each in values for name, value in each.items()}
                config = with_settings(prediction.config, **settings)
                # The checks and the estimate are quick, and leave few to be predicted in full.
                if parallel_problems(config) or batch_problems(config):
                    continue
                changed = Prediction(config, prediction.machine, prediction.vocabulary)
                if changed.tensors * (1 - NEAR) <= have:
                    hopeful.append((settings, changed))
        # Of as many changes, the fastest is proposed.
        hopeful.sort(key=lambda pair: pair[1].time.seconds)
        for settings, changed in hopeful[:MOST_TRIALS]:
            in_full = dataclasses.replace(changed, is_measured=prediction.is_measured)
            if in_full.left_first >= 0 and in_full.fits:
                return settings, in_full
    return None
