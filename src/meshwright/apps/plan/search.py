"""All layouts that a number of devices allows, and the fastest of those that fit.

A layout is legal if `settings.checks` says so. The dimensions form a tree: each level sets one of
them, and a branch that is refused, too large or slower than what is found is never made.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from meshwright.apps.plan.bounds import Bounds, PassOrder
from meshwright.apps.plan.estimates import MemoryEstimates
from meshwright.apps.plan.prediction import Machine, Prediction
from meshwright.config.check_layout import parallel_problems
from meshwright.config.check_steps import batch_problems
from meshwright.config.fields import with_settings
from meshwright.config.problem import FLAGS, Problem
from meshwright.config.schema import TrainConfig

Settings = dict[str, Any]
RECOMPUTE = (None, "selective", "full")  # slower and smaller with each
MOST_MICRO_BATCH = 64
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
        kind = re.sub(r"\d[\d.,]*", "N", reason)
        self.counts[kind] += 1
        self.examples.setdefault(kind, reason)

    def listed(self) -> list[tuple[int, str]]:
        """Return counts and examples, the most frequent first."""
        return [(count, FLAGS.render(self.examples[kind])) for kind, count in self.counts.most_common()]


@dataclass
class Found:
    """The outcome of a search."""

    refusals: Refusals = field(default_factory=Refusals)
    fitting: list[Prediction] = field(default_factory=list)  # the fastest, in order
    too_large: int = 0  # layouts, or groups of them, that may be as fast and do not fit
    slower: int = 0  # the same that cannot be as fast
    nearest: Prediction | None = None  # of those that do not fit, the one that lacks the least


@functools.cache
def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


# The dimensions: each function returns what one level of the tree may set.


def tensor_sizes(c: TrainConfig) -> list[Settings]:
    most = c.model.num_attention_heads or 1
    sizes = [n for n in divisors(c.world) if n <= most]
    return [
        {"tensor_model_parallel_size": n, "sequence_parallel": sequence}
        for n in sizes
        for sequence in ((True, False) if n > 1 else (False,))
    ]


def context_sizes(c: TrainConfig) -> list[Settings]:
    ranks = c.world // c.parallel.tensor_model_parallel_size
    most = (c.model.num_attention_heads or 1) // c.parallel.tensor_model_parallel_size
    return [{"context_parallel_size": n} for n in divisors(ranks) if n <= most]


def pipeline_sizes(c: TrainConfig) -> list[Settings]:
    ranks = c.world // c.parallel.model_ranks
    return [{"pipeline_model_parallel_size": n} for n in divisors(ranks) if n <= (c.model.num_layers or 1)]


def schedules(c: TrainConfig) -> list[Settings]:
    """Return schedules, without GPipe, which waits as long as 1F1B and holds more."""
    stages, layers = c.parallel.pipeline_model_parallel_size, c.model.num_layers or 1
    if stages == 1:
        return [{"pipeline_schedule": "1f1b", "num_layers_per_virtual_pipeline_stage": None}]
    virtual = [n for n in divisors(layers // stages) if n * stages < layers] if layers % stages == 0 else []
    kinds = [("1f1b", n) for n in (None, *virtual)] + [("zero-bubble", n) for n in (None, *virtual)] + [("zbv", None)]
    return [{"pipeline_schedule": kind, "num_layers_per_virtual_pipeline_stage": n} for kind, n in kinds]


def zero_stages(c: TrainConfig) -> list[Settings]:
    sharing = c.dp * c.parallel.context_parallel_size
    return [{"zero_stage": stage} for stage in ((0, 1, 2, 3) if sharing > 1 else (0,))]


def micro_batches(c: TrainConfig) -> list[Settings]:
    each = c.global_batch // c.dp
    return [{"micro_batch_size": n} for n in divisors(each) if n <= MOST_MICRO_BATCH]


def recomputations(c: TrainConfig) -> list[Settings]:
    """Return what there is now, and what saves more memory."""
    now = RECOMPUTE.index(c.training.recompute_granularity)
    return [{"recompute_granularity": kind} for kind in RECOMPUTE[now:]]


def formats(c: TrainConfig) -> list[Settings]:
    return [{"fp8_format": kind} for kind in (None, "hybrid")]


Dimension = Callable[[TrainConfig], list[Settings]]
SHAPE = tensor_sizes, context_sizes, pipeline_sizes, formats
OPEN = micro_batches, schedules, zero_stages  # the dimensions that are left of a shape


class Branch(NamedTuple):
    """A part of the tree: all layouts with these settings."""

    seconds: float  # that a step of any takes at least
    number: int
    prediction: Prediction
    left: tuple[Dimension, ...] | None  # dimensions that are open; None if `seconds` are those of the layout


class Search:
    """One search in the tree of legal layouts.

    A heap holds the nodes that are left. The one that may be the fastest is looked at: it grows
    branches, or it is a layout, which is timed if its tensors may have room, and predicted in full
    if it still comes first. So layouts end in the order of their times, until enough of them fit.
    """

    def __init__(self, machine: Machine, vocabulary: int, freedom: Freedom, keep: int = 10) -> None:
        self.machine, self.vocabulary, self.freedom, self.keep = machine, vocabulary, freedom, keep
        self.found, self.estimates, self.bounds = Found(), MemoryEstimates(), Bounds(machine)
        self.nodes: list[Branch] = []
        self.schedules: dict[int, list[PassOrder]] = {}  # by the number of pipeline ranks
        self.highest: dict[tuple[object, ...], int] = {}  # legal ZeRO stage
        self.pushed = 0
        self.most_left = 0  # bytes of the nearest layout

    def run(self, config: TrainConfig) -> Found:
        """Find the `keep` fastest layouts of a configuration that fit."""
        for shape in self.shapes(config):
            self.push(shape, OPEN)
        while self.nodes and len(self.found.fitting) < self.keep:
            self.look(heapq.heappop(self.nodes))
        self.found.slower = len(self.nodes)
        return self.found

    def find_small(self, config: TrainConfig) -> Prediction | None:
        """Return a layout that fits, of the few that need the least memory; None if none does."""
        most = self.choices(config, recomputations)[-1]
        smallest = [self.smallest(with_settings(shape, **most), OPEN) for shape in self.shapes(config)]
        predictions = [self.predict(least) for each in smallest for least in each]
        hopeful = [prediction for prediction in predictions if self.estimates.may_fit(prediction)]
        few = heapq.nsmallest(MOST_TRIALS, hopeful, key=self.estimates.at_least)
        return next((prediction for prediction in few if prediction.fits), None)

    def shapes(self, config: TrainConfig) -> Iterator[TrainConfig]:
        """Yield legal numbers of ranks where weights and their like may fit."""
        for shape in self.divided(config):
            if not self.is_legal(batch_problems(shape)):
                continue
            smallest = [self.predict(config) for config in self.smallest(shape, OPEN)]
            if self.can_hold(smallest):
                yield shape
            else:
                self.found.too_large += 1
                self.note_lack(smallest[0])

    def divided(self, config: TrainConfig) -> Iterator[TrainConfig]:
        """Yield legal numbers of ranks, for any batch."""
        if not self.is_fixed("micro_batch_size"):
            config = with_settings(config, micro_batch_size=1)
        return self.expand(config, SHAPE if self.freedom.fp8 else SHAPE[:-1])

    def look(self, node: Branch) -> None:
        """Take a node closer to the times of its layouts."""
        config, left = node.prediction.config, node.left
        if left is None:
            if node.prediction.fits:
                self.found.fitting.append(node.prediction)
            else:
                self.recompute_more(config, ())
        elif left != OPEN and not self.may_fit(config, left):
            self.recompute_more(config, left)
        elif left:
            for branch in self.expand(config, left[:1]):
                self.push(branch, left[1:])
        else:
            self.push_after(node.prediction.time.seconds, node.prediction, None)

    def recompute_more(self, config: TrainConfig, left: tuple[Dimension, ...]) -> None:
        """Count a node that does not fit, and add it with more recomputation if there is more."""
        self.found.too_large += 1
        smallest = [self.predict(least) for least in self.smallest(config, left)]
        more = self.choices(config, recomputations)[1:2] if self.can_hold(smallest) else []
        for settings in more:
            self.push(with_settings(config, **settings), left)
        if not more:
            self.note_lack(smallest[0])

    def can_hold(self, predictions: Sequence[Prediction]) -> bool:
        """Return whether any of these layouts has room for weights and their like."""
        return min(map(self.estimates.held, predictions)) <= self.machine.profile.memory_bytes

    def push(self, config: TrainConfig, left: tuple[Dimension, ...]) -> None:
        """Add a node with the least seconds of its layouts."""
        prediction, p = self.predict(config), config.parallel
        names = self.open_schedules(config) if schedules in left else [PassOrder(p.pipeline_schedule, config.chunks)]
        zero = self.open_stages(config) if zero_stages in left else [p.zero_stage]
        is_busy = micro_batches in left
        if is_busy:  # a step of the largest ones takes the least, but for waiting
            config = with_settings(config, **self.choices(config, micro_batches)[-1])
        seconds = self.bounds.least(config, prediction.padded, names, zero, is_busy)
        self.push_after(seconds, prediction, left)

    def push_after(self, seconds: float, prediction: Prediction, left: tuple[Dimension, ...] | None) -> None:
        self.pushed += 1
        heapq.heappush(self.nodes, Branch(seconds, self.pushed, prediction, left))

    def open_schedules(self, config: TrainConfig) -> list[PassOrder]:
        pp = config.parallel.pipeline_model_parallel_size
        if pp not in self.schedules:
            changed = self.changed(config, schedules)
            self.schedules[pp] = [PassOrder(c.parallel.pipeline_schedule, c.chunks) for c in changed]
        return self.schedules[pp]

    def open_stages(self, config: TrainConfig) -> list[int]:
        return [s.get("zero_stage", config.parallel.zero_stage) for s in self.choices(config, zero_stages)]

    def may_fit(self, config: TrainConfig, left: tuple[Dimension, ...]) -> bool:
        """Return whether any layout of a node may fit."""
        may_fit = self.estimates.may_begin if left else self.estimates.may_fit
        return any(may_fit(self.predict(least)) for least in self.smallest(config, left))

    def smallest(self, config: TrainConfig, left: tuple[Dimension, ...]) -> list[TrainConfig]:
        """Return the layouts of a node one of which needs the least memory."""
        kinds, width = [config], 2 * config.parallel.pipeline_model_parallel_size
        # ZBV may hold less than 1F1B of few micro-batches, or of layers that are not shared evenly.
        may_hold_less = config.micro_batches(config.global_batch) < width - 1 or (config.model.num_layers or 0) % width
        if schedules in left and may_hold_less and PassOrder("zbv", 2) in self.open_schedules(config):
            kinds.append(with_settings(config, pipeline_schedule="zbv", num_layers_per_virtual_pipeline_stage=None))
        if zero_stages in left:
            kinds = [self.with_most_sharing(kind) for kind in kinds]
        return kinds[:1] + [kind for kind in kinds[1:] if not parallel_problems(kind)]

    def with_most_sharing(self, config: TrainConfig) -> TrainConfig:
        """Return a configuration with the highest legal ZeRO stage."""
        p, stages = config.parallel, self.open_stages(config)
        key = len(stages), p.pipeline_model_parallel_size, p.pipeline_schedule, config.precision.fp8_format
        if key not in self.highest:
            changed = [with_settings(config, zero_stage=stage) for stage in stages]
            legal = [c.parallel.zero_stage for c in changed if not parallel_problems(c)]
            self.highest[key] = legal[-1] if legal else stages[0]
        return with_settings(config, zero_stage=self.highest[key])

    def is_fixed(self, name: str) -> bool:
        return name in self.freedom.fixed

    def note_lack(self, prediction: Prediction) -> None:
        """Keep a layout that does not fit if it is the nearest so far."""
        have = self.machine.profile.memory_bytes
        if self.found.nearest is not None and have - self.estimates.held(prediction) <= self.most_left:
            return
        most = self.choices(prediction.config, recomputations)[-1]
        smaller = self.predict(with_settings(prediction.config, **most))
        left = have - self.estimates.at_least(smaller)
        if self.found.nearest is None or left > self.most_left:
            self.most_left, self.found.nearest = left, smaller

    def predict(self, config: TrainConfig) -> Prediction:
        return Prediction(config, self.machine, self.vocabulary)

    def changed(self, config: TrainConfig, dimension: Dimension) -> list[TrainConfig]:
        """Return the configurations of a dimension, legal or not."""
        return [with_settings(config, **settings) for settings in self.choices(config, dimension)]

    def choices(self, config: TrainConfig, dimension: Dimension) -> list[Settings]:
        """Return what a dimension may be, without what is fixed."""
        free = [{n: v for n, v in s.items() if not self.is_fixed(n)} for s in dimension(config)]
        return [s for n, s in enumerate(free) if s not in free[:n]]

    def expand(self, config: TrainConfig, dimensions: Sequence[Dimension]) -> Iterator[TrainConfig]:
        """Yield the legal configurations of these dimensions."""
        if not dimensions:
            yield config
            return
        for changed in self.changed(config, dimensions[0]):
            if self.is_legal(parallel_problems(changed)):
                yield from self.expand(changed, dimensions[1:])

    def is_legal(self, problems: list[Problem]) -> bool:
        """Return whether there are no problems, and count the first."""
        if problems:
            self.found.refusals.note(problems[0].text)
        return not problems


# The least change of a layout that does not fit.

MOST_CHANGES = 3


def smaller_steps(c: TrainConfig) -> list[list[Settings]]:
    """Return for each setting the values with which a rank may need less memory."""
    p, t = c.parallel, c.training
    now = RECOMPUTE.index(t.recompute_granularity)
    tp, pp, cp = p.tensor_model_parallel_size, p.pipeline_model_parallel_size, p.context_parallel_size
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
    steps, estimates = [each for each in smaller_steps(prediction.config) if each], MemoryEstimates()
    for number in range(1, MOST_CHANGES + 1):
        fitting = []
        for chosen in itertools.combinations(steps, number):
            for values in itertools.product(*chosen):
                settings = {name: value for each in values for name, value in each.items()}
                config = with_settings(prediction.config, **settings)
                if parallel_problems(config) or batch_problems(config):
                    continue
                changed = dataclasses.replace(prediction, config=config)
                if estimates.may_fit(changed):
                    fitting.append((settings, changed))
        for settings, changed in sorted(fitting, key=lambda pair: pair[1].time.seconds):
            if changed.fits:
                return settings, changed
    return None
