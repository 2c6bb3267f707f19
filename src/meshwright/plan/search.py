"""All layouts that a number of devices allows, and the fastest of those that fit.

A layout is legal if `settings.checks` says so. The dimensions form a tree: each level sets one of
them, and a refused node ends its branch, so that few configurations of the many are made.
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
from typing import Any

from meshwright.plan.estimates import MemoryEstimates
from meshwright.plan.prediction import Machine, Prediction, with_settings
from meshwright.plan.timing import least_seconds
from meshwright.settings.check_layout import parallel_problems
from meshwright.settings.check_steps import batch_problems
from meshwright.settings.schema import TrainConfig

Settings = dict[str, Any]
RECOMPUTE = (None, "selective", "full")  # slower and smaller with each
MOST_MICRO_BATCH = 64
# After so many layouts that fit, the rest must promise to be faster than the best by a factor.
MANY, GAIN = 40, 1.03


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
        return [(count, self.examples[kind]) for kind, count in self.counts.most_common()]


@dataclass
class Found:
    """The outcome of a search."""

    refusals: Refusals = field(default_factory=Refusals)
    fitting: list[Prediction] = field(default_factory=list)  # the fastest first
    too_large: int = 0  # predicted layouts that do not fit
    slower: int = 0  # layouts, or groups of them, that cannot be as fast as the best ones
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


def unchanged(c: TrainConfig) -> list[Settings]:
    return [{}]


def recomputations(c: TrainConfig) -> list[Settings]:
    """Return what there is now, and what saves more memory."""
    now = RECOMPUTE.index(c.training.recompute_granularity)
    return [{"recompute_granularity": kind} for kind in RECOMPUTE[now:]]


def formats(c: TrainConfig) -> list[Settings]:
    return [{"fp8_format": kind} for kind in (None, "hybrid")]


Dimension = Callable[[TrainConfig], list[Settings]]


class Search:
    """One search in the tree of legal layouts."""

    def __init__(self, machine: Machine, vocabulary: int, freedom: Freedom, keep: int = 10) -> None:
        self.machine, self.vocabulary, self.freedom, self.keep = machine, vocabulary, freedom, keep
        self.found, self.estimates = Found(), MemoryEstimates()
        self.nodes: list[tuple[float, int, TrainConfig, bool]] = []  # a heap: speeds, negative, and configurations
        self.pushed = 0
        self.most_left = 0  # bytes of the nearest layout
        self.speed_to_beat = 0.0  # of the slowest layout that is kept

    def run(self, config: TrainConfig) -> Found:
        """Find the `keep` fastest layouts of a configuration that fit.

        The node that may be the fastest is looked at first, so that the search ends when no other
        may be faster than what it has.
        """
        for branch in self.branches(config):
            self.push(branch, with_schedule=False)
        self.look()
        while self.drops_some():
            self.look()
        self.found.slower = len(self.nodes)
        best = [p.in_full for p in self.found.fitting[: self.keep]]
        self.found.fitting = sorted(best, key=speed_of, reverse=True) + self.found.fitting[self.keep :]
        return self.found

    def drops_some(self) -> bool:
        """Sort what is found, and return whether some of the best do not fit in full predictions.

        These are left to be looked at with more recomputation.
        """
        self.found.fitting.sort(key=speed_of, reverse=True)
        lacking = [p for p in self.found.fitting[: self.keep] if p.in_full.left_at_ends < 0]
        for prediction in lacking:
            self.found.fitting.remove(prediction)
            self.note_lack(prediction.config)
            for changed in self.with_each_recomputation(prediction.config)[1:2]:
                self.push(changed)
        self.set_speed_to_beat()
        return bool(lacking)

    def look(self) -> None:
        """Predict layouts until no other may be as fast as those that are kept."""
        while self.nodes and -self.nodes[0][0] > self.speed_to_beat:
            _, _, node, has_schedule = heapq.heappop(self.nodes)
            fitting = self.with_recomputation(node, with_schedule=has_schedule)
            if fitting is not None and fitting.training.recompute_granularity != node.training.recompute_granularity:
                self.push(fitting, has_schedule)
            elif fitting is not None and has_schedule:
                self.predict_layout(node)
            elif fitting is not None:
                for layout in self.expand(node, (schedules, zero_stages)):
                    if self.left_at_most(layout) < 0:
                        self.note_lack(layout)
                    else:
                        self.push(layout)

    def push(self, config: TrainConfig, with_schedule: bool = True) -> None:
        """Add a layout, or sizes with open schedule and ZeRO stage, to what is left."""
        least = config
        if not with_schedule and self.shards(config):
            least = with_settings(config, zero_stage=1)  # which sends the least
        padded = Prediction(config, self.machine, self.vocabulary).padded
        profile, links = self.machine.profile, self.machine.links
        seconds = least_seconds(least, padded, profile, links, any_schedule=not with_schedule)
        most = config.global_batch * (config.data.seq_length or 0) / seconds
        self.pushed += 1
        heapq.heappush(self.nodes, (-most, self.pushed, config, with_schedule))

    def predict_layout(self, layout: TrainConfig) -> None:
        """Add a layout to what is found."""
        self.found.fitting.append(self.predict(layout))
        self.set_speed_to_beat()

    def set_speed_to_beat(self) -> None:
        fastest = heapq.nlargest(self.keep, self.found.fitting, key=speed_of)
        self.speed_to_beat = speed_of(fastest[-1]) if len(fastest) == self.keep else 0.0
        if len(self.found.fitting) >= max(MANY, self.keep):
            self.speed_to_beat = max(self.speed_to_beat, GAIN * speed_of(fastest[0]))

    def branches(self, config: TrainConfig) -> Iterator[TrainConfig]:
        """Yield legal sizes with each micro-batch, where weights and their like may fit."""
        if not self.is_fixed("micro_batch_size"):
            config = with_settings(config, micro_batch_size=1)
        for shape in self.expand(config, (tensor_sizes, context_sizes, pipeline_sizes)):
            if not self.is_legal(batch_problems(shape)):
                continue
            if self.left_at_most(self.smallest(shape)) < 0:
                self.note_lack(self.smallest(shape))
                continue
            yield from self.expand(shape, (micro_batches, formats if self.freedom.fp8 else unchanged))

    def smallest(self, config: TrainConfig) -> TrainConfig:
        """Return a configuration with the ZeRO stage that needs the least memory."""
        return with_settings(config, zero_stage=3) if self.shards(config) else config

    def shards(self, config: TrainConfig) -> bool:
        """Return whether ZeRO stages are searched."""
        return not self.is_fixed("zero_stage") and len(zero_stages(config)) > 1

    def with_recomputation(self, config: TrainConfig, with_schedule: bool) -> TrainConfig | None:
        """Return a configuration with the least recomputation that lets it fit; None without one.

        Without a schedule, the ZeRO stage is still open too.
        """
        for changed in self.with_each_recomputation(config):
            if self.predict(changed if with_schedule else self.smallest(changed)).left_at_ends >= 0:
                return changed
        self.note_lack(config if with_schedule else self.smallest(config))
        return None

    def with_each_recomputation(self, config: TrainConfig) -> list[TrainConfig]:
        return [with_settings(config, **settings) for settings in self.choices(config, recomputations)]

    def is_fixed(self, name: str) -> bool:
        return name in self.freedom.fixed

    def note_lack(self, config: TrainConfig) -> None:
        """Count a layout that does not fit, and keep it if it is the nearest so far."""
        self.found.too_large += 1
        if self.found.nearest is not None and self.left_at_most(config) <= self.most_left:
            return
        prediction = self.predict(self.with_each_recomputation(config)[-1])
        if self.found.nearest is None or prediction.left_at_ends > self.most_left:
            self.most_left, self.found.nearest = prediction.left_at_ends, prediction.in_full

    def left_at_most(self, config: TrainConfig) -> int:
        """Return the bytes that a layout may leave free, without running its passes."""
        prediction = Prediction(config, self.machine, self.vocabulary)
        return self.machine.profile.memory_bytes - self.estimates.at_least(prediction)

    def predict(self, config: TrainConfig) -> Prediction:
        """Return a quick prediction with an estimate of the memory."""
        prediction = Prediction(config, self.machine, self.vocabulary, is_quick=True)
        return dataclasses.replace(prediction, estimate=self.estimates.total(prediction))

    def choices(self, config: TrainConfig, dimension: Dimension) -> list[Settings]:
        """Return what a dimension may be, without what is fixed."""
        free = [{n: v for n, v in s.items() if not self.is_fixed(n)} for s in dimension(config)]
        return [s for n, s in enumerate(free) if s not in free[:n]]

    def expand(self, config: TrainConfig, dimensions: Sequence[Dimension]) -> Iterator[TrainConfig]:
        """Yield the legal configurations of these dimensions."""
        if not dimensions:
            yield config
            return
        for settings in self.choices(config, dimensions[0]):
            changed = with_settings(config, **settings)
            if self.is_legal(parallel_problems(changed)):
                yield from self.expand(changed, dimensions[1:])

    def is_legal(self, problems: list[str]) -> bool:
        """Return whether there are no problems, and count the first."""
        if problems:
            self.found.refusals.note(problems[0])
        return not problems


def speed_of(prediction: Prediction) -> float:
    return prediction.time.tokens_per_second


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
                changed = dataclasses.replace(prediction, config=config, is_quick=True)
                changed = dataclasses.replace(changed, estimate=estimates.total(changed))
                if changed.left_at_ends >= 0:
                    fitting.append((settings, changed))
        for settings, changed in sorted(fitting, key=lambda pair: speed_of(pair[1]), reverse=True):
            if changed.in_full.left_at_ends >= 0:
                return settings, changed.in_full
    return None
