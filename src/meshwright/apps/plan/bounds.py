"""The least time that a step may take, in closed form: a search looks at layouts in its order.

The time of a pipeline takes milliseconds to find. This takes some ten microseconds, and is within
a few percent for the layouts that are worth running.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from meshwright.apps.plan import traffic
from meshwright.apps.plan.prediction import Machine
from meshwright.apps.plan.timing import Step, StepTerms, Work
from meshwright.config.fields import with_settings
from meshwright.config.grammar import split_layers
from meshwright.config.schema import TrainConfig
from meshwright.parallel.pipeline_schedule import SPLIT_BACKWARD, V_SHAPED, ScheduleName
from meshwright.training.parameters import parameters_of_ranks

Key = tuple[Any, ...]
# A model as one rank would have it: some schedules have a tied table twice.
WITHOUT_PIPELINE: dict[str, Any] = {"pipeline_model_parallel_size": 1, "pipeline_schedule": "1f1b"}
WITHOUT_PIPELINE |= {"pipeline_layout": None, "num_layers_per_virtual_pipeline_stage": None}


class PassOrder(NamedTuple):
    """A schedule, and the number of stages on each rank."""

    name: ScheduleName
    chunks: int


class Passes(NamedTuple):
    """Seconds of a micro-batch in some layers or in an end of the model."""

    forward: float
    backward: float  # of all gradients, or of those of activations if the others come later
    weights: float = 0.0

    def times(self, number: float) -> Passes:
        return Passes(*(number * x for x in self))


class Parts(NamedTuple):
    """Seconds of a micro-batch in the parts of a model: at least, but for the last two."""

    layer: Passes
    first: Passes  # the embedding
    last: Passes  # the head and the loss
    message: float  # between two stages
    heaviest: Passes  # a layer, at most
    ends: Passes  # both, at most


class PartsWork(NamedTuple):
    """The work of the parts of a model for a micro-batch."""

    layer: Step  # the lightest
    heaviest: Step
    first: Step
    last: Step


class Bounds:
    """Least seconds of steps on a machine; layouts of the same sizes share what is alike."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.work: dict[Key, PartsWork] = {}
        self.parts: dict[Key, Parts] = {}
        self.after: dict[Key, float] = {}

    def least(
        self,
        config: TrainConfig,
        padded: int,
        schedules: Collection[PassOrder],
        zero_stages: Collection[int],
        is_busy: bool = False,
    ) -> float:
        """Return the least seconds of a step with any of these schedules and ZeRO stages.

        With `is_busy` they are those of ranks that wait for no others.
        """
        p, profile = config.parallel, self.machine.profile
        pp, layers = p.pipeline_model_parallel_size, config.model.num_layers or 0
        count, is_even = config.micro_batches(config.global_batch), not p.pipeline_layout
        key = sizes_of(config)
        parts = {name: self.parts_of(config, padded, key, name) for name in {schedule.name for schedule in schedules}}
        if is_busy:
            passes = min(busy_seconds(pp, count, layers, 2, each) for each in parts.values())
        else:
            passes = min(least_passes(each, pp, count, layers, parts[each.name], is_even) for each in schedules)
        stages = [stage for stage in zero_stages if stage or 1 not in zero_stages]  # 1 never takes longer than 0
        after = min(self.after_passes(config, padded, (*key, stage, is_busy)) for stage in stages)
        seconds = passes + after + profile.seconds["step"]
        return seconds / (profile.reached["slowest"] if config.world > 1 else 1)

    def parts_of(self, config: TrainConfig, padded: int, sizes: Key, name: ScheduleName) -> Parts:
        """Return the parts of passes in the order of a schedule, without the launches of ZeRO 3."""
        is_split = name in SPLIT_BACKWARD and config.parallel.pipeline_model_parallel_size > 1
        key = (*sizes, is_split)
        if key not in self.parts:
            terms = self.terms(with_settings(config, pipeline_schedule=name, zero_stage=0), padded)
            of_block = (*sizes, terms.block)
            if of_block not in self.work:
                self.work[of_block] = work_of(terms)
            self.parts[key] = parts_of(terms, self.work[of_block], is_split)
        return self.parts[key]

    def after_passes(self, config: TrainConfig, padded: int, key: Key) -> float:
        """Return the least seconds of sums and update with any schedule."""
        if key not in self.after:
            *sizes, zero_stage, is_hidden = key
            p, layers = config.parallel, config.model.num_layers or 0
            pp, forward, backward = p.pipeline_model_parallel_size, math.inf, math.inf
            if not is_hidden:
                most = max(config.stages) * config.chunks if p.pipeline_layout else 2 * -(-layers // (2 * pp))
                kinds = [self.parts_of(config, padded, tuple(sizes), name) for name in ("1f1b", "zero-bubble")]
                forward = max(most * each.heaviest.forward + each.ends.forward for each in kinds)
                backward = max(most * sum(each.heaviest[1:]) + sum(each.ends[1:]) for each in kinds)
            (parameters,) = parameters_of_ranks(with_settings(config, **WITHOUT_PIPELINE), padded)
            terms = self.terms(with_settings(config, zero_stage=zero_stage), padded)
            self.after[key] = terms.update(parameters / pp) + terms.data_parallel(parameters / pp, 1, forward, backward)
        return self.after[key]

    def terms(self, config: TrainConfig, padded: int) -> StepTerms:
        return StepTerms(config, padded, self.machine.profile, self.machine.links)


def sizes_of(config: TrainConfig) -> Key:
    """Return what a search changes of the work of a micro-batch."""
    p, t = config.parallel, config.training
    sizes = p.tensor_model_parallel_size, p.context_parallel_size, p.pipeline_model_parallel_size
    return (*sizes, p.sequence_parallel, config.micro_batch, config.precision.fp8_format, t.recompute_granularity)


def work_of(terms: StepTerms) -> PartsWork:
    """Return the work of the parts of a model."""
    config, t = terms.config, terms.config.training
    kinds = terms.kinds(0, config.model.num_layers or 0)
    light = heavy = [terms.layer(*kind) for kind in kinds]
    if t.recompute_granularity == "full":
        heavy = [layer._replace(backward=layer.backward + layer.forward) for layer in heavy]
        if t.recompute_method != "block":
            light = [terms.stage_of({kind: 1}, 1, False, False) for kind in kinds]
    first = Step(terms.embedding(False), terms.embedding(True), Work())
    return PartsWork(extreme(min, light), extreme(max, heavy), first, terms.head())


def extreme(choose: Callable[[Iterable[float]], float], layers: list[Step]) -> Step:
    """Return the least or the most work of kinds of layers, on the device and on the host."""
    each = zip(*layers, strict=True)
    return Step(
        *(Work(choose(x.device_seconds for x in works), kernels=choose(x.kernels for x in works)) for works in each)
    )


def parts_of(terms: StepTerms, work: PartsWork, is_split: bool) -> Parts:
    """Return the seconds of the parts; `is_split`: gradients of weights are computed later."""
    ends = Step(*(a + b for a, b in zip(work.first, work.last, strict=True)))
    launch = 0.0 if terms.pp == 1 or terms.has_graphs else terms.profile.seconds["launch"]

    def joined(step: Step) -> tuple[Work, ...]:
        """Return the work of passes: both of a backward pass if no schedule takes them apart."""
        return step if is_split else (step.forward, step.backward + step.weights)

    def seconds(step: Step) -> Passes:
        """Return seconds on the device, or on the host where that is slower in a layer."""
        on_host = [x.kernels * launch > x.device_seconds for x in joined(work.layer)]
        pairs = zip(joined(step), on_host, strict=True)
        return Passes(*(x.kernels * launch if is_slower else x.device_seconds for x, is_slower in pairs))

    message = terms.sending("pipeline", traffic.message_bytes(terms.config)) if terms.pp > 1 else 0.0
    always = terms.profile.seconds["launch"]  # for layouts of other ZeRO stages, which may have no graphs

    def at_most(step: Step) -> Passes:
        return Passes(*(max(x.device_seconds, x.kernels * always) for x in joined(step)))

    heaviest, ends_at_most = at_most(work.heaviest), at_most(ends)
    return Parts(seconds(work.layer), seconds(work.first), seconds(work.last), message, heaviest, ends_at_most)


def least_passes(schedule: PassOrder, pp: int, count: int, layers: int, parts: Parts, is_even: bool = True) -> float:
    """Return the least seconds from the first to the last pass of `count` micro-batches.

    A rank does one thing at a time, and waits for each message that it needs. `is_even`: layers are
    shared as settings.grammar.split_layers does by itself.
    """
    (name, chunks), (layer, first, last, message, *_) = schedule, parts
    through = layers * (layer.forward + layer.backward) + sum(first[:2]) + sum(last[:2])  # one micro-batch
    # Ranks in the middle get two messages for each stage; the busiest of an uneven V is the last.
    messages = 2 if name in V_SHAPED and layers % (2 * pp) else 2 * chunks
    busy = max(busy_seconds(pp, count, layers, messages, parts), through)
    if pp == 1 or not is_even:
        return busy
    stage = layer.times(layers // (pp * chunks))  # the smallest ones, among them the first and the last
    if name in V_SHAPED:
        return max(busy, *(through_rank_of_v(rank, pp, count, layers, parts) for rank in {0, pp // 2, pp - 2, pp - 1}))
    # The last rank waits for the first micro-batch, the first rank for the last one to come back.
    way = first.forward + (pp - 1) * stage.forward + (pp - 2) * message
    way += count * (chunks * sum(stage) + sum(last) + (2 * chunks - 1) * message)
    back = (pp - 1) * (stage.backward + message) + first.backward
    if name in SPLIT_BACKWARD:  # meanwhile it computes gradients of weights, as the first one does in the end
        back -= pp * (stage.weights + (last.weights if chunks == 1 else 0.0)) - stage.weights
    return max(busy, way + max(0.0, back))


def through_rank_of_v(rank: int, pp: int, count: int, layers: int, parts: Parts) -> float:
    """Return the seconds of a way through ZBV's passes.

    The first micro-batch goes through all stages and back to this rank's second stage. The rank
    computes until the last micro-batch has come back there, which goes on to the first stage. The
    counts of passes are those of `pipeline_schedule.v_schedule`.
    """
    layer, first, last, message, *_ = parts
    stages = even_stages(layers, 2 * pp)
    one, other = layer.times(stages[rank]), layer.times(stages[-1 - rank])
    filling = max(2 * pp - 1, count)
    way = layers * (layer.forward + layer.backward) - other.backward + first.forward + first.backward + last.forward
    way += stages[0] * layer.weights + 4 * (pp - 1) * message
    before = min(count, 2 * pp - rank - 1), min(count, rank + 1)  # forward passes of both stages, already done
    after = min(count, pp - rank)  # backward passes of the first stage, still to be done
    within = (count - before[0]) * one.forward + (count - before[1]) * other.forward
    within += (count - after) * one.backward + count * other.backward
    within += min(count - after, filling - pp) * one.weights + min(count - 1, filling - rank) * other.weights
    if rank == 0:
        within += (count - before[0]) * first.forward + (count - before[1]) * last.forward
        within += (count - after) * first.backward + count * last.backward + (count - 1) * last.weights
        messages = count - before[1] + count - after
    elif rank == pp - 1:
        messages = count - before[0] + count - 1
    else:
        messages = 4 * count - sum(before) - after - 1
    return way + within + messages * message


@functools.lru_cache
def even_stages(layers: int, stages: int) -> list[int]:
    """Return the layers of each stage if no flag shares them otherwise."""
    return split_layers(None, layers, stages)


def busy_seconds(pp: int, count: int, layers: int, messages: int, parts: Parts) -> float:
    """Return the least seconds of the busiest rank, which gets so many messages a micro-batch."""
    mean = count * (layers * sum(parts.layer) + sum(parts.first) + sum(parts.last)) / pp
    middle = count * (-(-layers // pp) * sum(parts.layer) + messages * parts.message) if pp > 2 else 0.0
    return max(mean, middle)
