"""All layouts that a number of devices allows, ranked by closed forms; the best of them measured.

A layout is legal if `config.checks` says so. Each of them has its memory and its time estimated,
without torch; of those that may fit, the fastest are predicted in full until enough of them fit.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from meshwright.apps.plan import estimate
from meshwright.apps.plan.estimate import NEAR, Layout, Run
from meshwright.apps.plan.prediction import Machine, Prediction
from meshwright.base.progress import progress_bar
from meshwright.config import checks
from meshwright.config.check_layout import parallel_problems
from meshwright.config.check_steps import batch_problems
from meshwright.config.fields import with_settings
from meshwright.config.schema import TrainConfig
from meshwright.parallel.pipeline_schedule import ScheduleName

Settings = dict[str, Any]
RECOMPUTE = (None, "selective", "full")  # slower and smaller with each
MOST_MICRO_BATCH = 64
MOST_MEASURED = 30  # layouts that are predicted in full, however many of them do not fit
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
        return [(count, self.examples[kind]) for kind, count in self.counts.most_common()]


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
    slower: int = 0  # layouts that may fit, and are estimated to be slower
    nearest: Prediction | None = None  # of those that do not fit, the one that lacks the least


class Candidate(NamedTuple):
    """A layout that may fit."""

    seconds: float  # of a step, estimated
    number: int  # in the order of the search
    layout: Layout


@functools.cache
def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


class LegalLayouts:
    """The layouts of a run that the checks accept, with the reasons against the others."""

    def __init__(self, run: Run, freedom: Freedom) -> None:
        self.run, self.freedom, self.refusals = run, freedom, Refusals()
        self.copies = run.config.parallel.num_distributed_optimizer_instances
        self.batch_reasons: dict[tuple[int, int], str] = {}
        self.other_reasons: dict[tuple[object, ...], str] = {}

    def free(self, layout: Layout, name: str, values: list[Any]) -> list[Any]:
        """Return these values of a setting, or the given one if it is fixed."""
        return [getattr(layout, name)] if name in self.freedom.fixed else values

    # Shapes: the numbers of ranks and the format, for any batch

    def shapes(self) -> Iterator[Layout]:
        start = estimate.layout_of(self.run.config)
        is_fixed = self.freedom.fixed.__contains__
        if not is_fixed("micro_batch_size"):
            start = start._replace(micro_batch_size=1)
        if not is_fixed("zero_stage"):
            start = start._replace(zero_stage=min(1, self.copies - 1))
        start = start._replace(recompute_granularity=self.recomputations()[0])
        return self.divided(start, [self.by_tensor, self.by_context, self.by_pipeline, self.by_format])

    def divided(self, layout: Layout, levels: list[Callable[[Layout], list[Layout]]]) -> Iterator[Layout]:
        """Yield the legal layouts of these levels: what a level refuses is not divided further."""
        if not levels:
            yield layout
            return
        for changed in levels[0](layout):
            problems = parallel_problems(self.run.config_of(changed))
            if problems:
                self.refusals.note(problems[0])
            else:
                yield from self.divided(changed, levels[1:])

    def by_tensor(self, layout: Layout) -> list[Layout]:
        most = self.run.config.model.num_attention_heads or 1
        sizes = [n for n in divisors(self.run.config.world) if n <= most]
        return [
            layout._replace(tensor_model_parallel_size=tp, sequence_parallel=sequence)
            for tp in self.free(layout, "tensor_model_parallel_size", sizes)
            for sequence in self.free(layout, "sequence_parallel", [True, False] if tp > 1 else [False])
        ]

    def by_context(self, layout: Layout) -> list[Layout]:
        tp = layout.tensor_model_parallel_size
        most = (self.run.config.model.num_attention_heads or 1) // tp
        sizes = [n for n in divisors(self.run.config.world // tp) if n <= most]
        return [
            layout._replace(context_parallel_size=cp) for cp in self.free(layout, "context_parallel_size", sizes or [1])
        ]

    def by_pipeline(self, layout: Layout) -> list[Layout]:
        ranks = self.run.config.world // (layout.tensor_model_parallel_size * layout.context_parallel_size)
        sizes = [n for n in divisors(ranks) if n <= (self.run.config.model.num_layers or 1)]
        return [
            layout._replace(pipeline_model_parallel_size=pp)
            for pp in self.free(layout, "pipeline_model_parallel_size", sizes or [1])
        ]

    def by_format(self, layout: Layout) -> list[Layout]:
        formats = [None, "hybrid"] if self.freedom.fp8 else [layout.fp8_format]
        return [layout._replace(fp8_format=kind) for kind in self.free(layout, "fp8_format", formats)]

    # What is left to choose

    def micro_batches(self, shape: Layout) -> list[Layout]:
        """Return a shape with each micro-batch of which its ranks can make a batch."""
        dp, out = self.run.data_ranks(shape), []
        sizes = [n for n in divisors(max(1, self.run.config.global_batch // dp)) if n <= MOST_MICRO_BATCH]
        for size in self.free(shape, "micro_batch_size", sizes):
            layout, key = shape._replace(micro_batch_size=size), (dp, size)
            if key not in self.batch_reasons:
                self.batch_reasons[key] = first(batch_problems(self.run.config_of(layout)))
            if self.batch_reasons[key]:
                self.refusals.note(self.batch_reasons[key])
            else:
                out.append(layout)
        return out

    def schedules(self, shape: Layout) -> list[tuple[ScheduleName, list[int | None]]]:
        """Return schedules, each with its sizes of virtual stages.

        GPipe is left out: it waits as long as 1F1B and holds more.
        """
        pp, layers = shape.pipeline_model_parallel_size, self.run.config.model.num_layers or 0
        names = self.free(shape, "pipeline_schedule", ["1f1b", "zero-bubble", "zbv"] if pp > 1 else ["1f1b"])
        even = layers // pp if pp > 1 and layers % pp == 0 else 1
        virtual = "num_layers_per_virtual_pipeline_stage"
        sizes = self.free(shape, virtual, [None, *divisors(even)[:-1]])
        is_free = virtual not in self.freedom.fixed
        return [(name, [None] if name == "zbv" and is_free else sizes) for name in names]

    def zero_stages(self, shape: Layout) -> list[int]:
        is_shared = self.run.data_ranks(shape) * shape.context_parallel_size > 1
        return self.free(shape, "zero_stage", [0, 1, 2, 3] if is_shared else [0])

    def recomputations(self) -> list[Any]:
        """Return what there is now, and what saves more memory."""
        now = self.run.config.training.recompute_granularity
        return [now] if "recompute_granularity" in self.freedom.fixed else [*RECOMPUTE[RECOMPUTE.index(now) :]]

    def is_legal(self, layout: Layout, is_round: bool) -> bool:
        """Return whether a legal shape is so with its schedule and ZeRO stage.

        `is_round`: pipeline ranks can share the micro-batches of a step.
        """
        dp, pp = self.run.data_ranks(layout), layout.pipeline_model_parallel_size
        is_shared, is_copied = dp * layout.context_parallel_size > 1, dp % self.copies == 0
        order = layout.pipeline_schedule, layout.num_layers_per_virtual_pipeline_stage, layout.zero_stage
        key = (pp, *order, layout.fp8_format, is_round, is_shared, is_copied)
        if key not in self.other_reasons:
            self.other_reasons[key] = first(parallel_problems(self.run.config_of(layout)))
        if self.other_reasons[key]:
            self.refusals.note(self.other_reasons[key])
        return not self.other_reasons[key]

    def is_round(self, layout: Layout) -> bool:
        unit = self.run.data_ranks(layout) * layout.micro_batch_size
        return all(size // unit % layout.pipeline_model_parallel_size == 0 for size in self.run.batches)


def first(problems: list[str]) -> str:
    return problems[0] if problems else ""


class Search:
    """One search: layouts are ranked, then the best of them predicted in full."""

    def __init__(self, machine: Machine, vocabulary: int, freedom: Freedom, keep: int = 10) -> None:
        self.machine, self.vocabulary, self.freedom, self.keep = machine, vocabulary, freedom, keep
        self.found = Found()

    def candidates(self, run: Run, legal: LegalLayouts) -> list[Candidate]:
        """Return all legal layouts, with the least recomputation, as a heap by their seconds."""
        out = list[Candidate]()
        for shape in legal.shapes():
            layouts = legal.micro_batches(shape)
            micro, rounds = [each.micro_batch_size for each in layouts], [*map(legal.is_round, layouts)]
            for (name, virtual), zero in itertools.product(legal.schedules(shape), legal.zero_stages(shape)):
                block = shape._replace(pipeline_schedule=name, zero_stage=zero)
                seconds = estimate.step_seconds(run, block, micro, virtual) if micro else []
                for size, row in zip(virtual, seconds):
                    example = {is_round: number for number, is_round in zip(micro, rounds)}
                    legal_of = {is_round: legal.is_legal(Layout(*shape[:5], number, name, size, zero), is_round) for is_round, number in example.items()}
                    for time, number, is_round in zip(row, micro, rounds):
                        if legal_of[is_round]:
                            out.append(Candidate(time, len(out), Layout(*shape[:5], number, name, size, zero, shape[9])))
        heapq.heapify(out)
        return out

    def rank(self, run):
        legal = LegalLayouts(run, self.freedom)
        self.found.refusals = legal.refusals
        have = self.machine.profile.memory_bytes
        import time
        t = time.process_time()
        heap = self.candidates(run, legal)
        print("candidates", len(heap), time.process_time() - t)
        kinds = legal.recomputations()
        out = []
        self.visited = 0
        number = len(heap)
        failed: dict[Any, int] = {}
        while heap and len(out) < 40:
            one = heapq.heappop(heap)
            layout = one.layout
            key = (*layout[:5], *layout[6:9])
            if layout.micro_batch_size >= failed.get(key, 1000):
                continue
            self.visited += 1
            need = estimate.fullest_bytes(run, layout)
            if need * (1 - NEAR) <= have:
                out.append(one)
            more = kinds[kinds.index(layout.recompute_granularity) + 1:]
            if need * (1 + NEAR) > have and more:
                if one.number < number and estimate.fullest_bytes(run, layout._replace(recompute_granularity=kinds[-1])) * (1 - NEAR) > have:
                    failed[key] = layout.micro_batch_size
                    continue
                layout = layout._replace(recompute_granularity=more[0])
                number += 1
                time = estimate.step_seconds(run, layout, [layout.micro_batch_size], [layout.num_layers_per_virtual_pipeline_stage])
                heapq.heappush(heap, Candidate(float(time[0][0]), number, layout))
        return out
