"""What the steps of a pipeline rank allocate and execute, from steps of few layers.

Without a pipeline whole steps are measured, of at most two micro-batches: what the others do is the
same as the second. In a pipeline a micro-batch's passes through each kind of stage are measured,
and put in the order of the schedule. Only where passes reach further than that, with ZeRO 2 and one
or two layers in a stage, the schedule itself is run.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from meshwright.apps.plan.measure.account import Phase
from meshwright.apps.plan.measure.allocator import MemoryEvent
from meshwright.apps.plan.measure.layers import Placed, Unit, choose_units, extend
from meshwright.apps.plan.measure.operations import (
    Operations,
    RankOperations,
    operations_of_rank,
    total,
)
from meshwright.apps.plan.measure.recorder import OperationRecorder
from meshwright.apps.plan.measure.steps import Extent, measure_layers, measure_update
from meshwright.config.schema import TrainConfig
from meshwright.parallel.pipeline_schedule import (
    Action,
    Op,
    most_sent,
    schedule,
)
from meshwright.training.network import Model
from meshwright.training.parameters import count as count_parameters
from meshwright.training.parameters import (
    data_parts,
    parameters_of_ranks,
    shapes_of_layer,
    stage_numbers,
)

# How many layers of one kind are measured; with fully_shard, which gathers one ahead, one more.
LEAST, LEAST_SHARDED = 5, 6
ROUNDS = 4  # of as many micro-batches as a pipeline has ranks, after which a schedule holds no more

Kinds = dict[str, int]  # bytes by kind


@dataclass(frozen=True)
class StepMemory:
    """What steps allocate beside what is held throughout."""

    peak: Kinds  # at the fullest moment
    events: list[MemoryEvent]  # of one step or several that follow each other, with their updates
    operations: RankOperations


MOST_STEPS = 256  # measured ones that are kept: what memory and time of a layout are asked for
MEASURED_STEPS: dict[object, StepMemory] = {}


def memory_of_steps(
    config: TrainConfig, padded: int, pipeline_rank: int, model: Model | None = None
) -> StepMemory:
    """Return what steps of a rank allocate and execute, measured once."""
    key = settings_of(config, padded), passed_micro_batches(config, ROUNDS), pipeline_rank, model
    if key not in MEASURED_STEPS:
        if len(MEASURED_STEPS) == MOST_STEPS:
            MEASURED_STEPS.clear()
        MEASURED_STEPS[key] = measure_steps(config, padded, pipeline_rank, model)
    return MEASURED_STEPS[key]


def measure_steps(
    config: TrainConfig, padded: int, pipeline_rank: int, model: Model | None
) -> StepMemory:
    if config.parallel.pipeline_model_parallel_size > 1 and not reaches_further(config):
        found = scheduled_passes(config, padded, pipeline_rank)
    else:
        found = whole_steps(config, padded, pipeline_rank, model)
    if updates_in_flat_buffers(config):
        return found

    # Append the update's own memory; its gradients are those of the passes.
    update = update_of_all(config, padded, pipeline_rank, model)
    offset = 1 + max((event.key for event in found.events), default=0)
    freed_keys = {event.key for event in update.events if event.size < 0}
    events = list(found.events)
    for event in update.events:
        if event.key in freed_keys:
            events.append(event._replace(key=offset + event.key))
    most = max(found.peak, update.peak, key=lambda kinds: sum(kinds.values()))
    return StepMemory(most, events, found.operations._replace(update=update.operations))


def reaches_further(config: TrainConfig) -> bool:
    """Return whether a pass frees what several passes before it have allocated.

    ZeRO 2 keeps the full gradients of the last two buckets until others are summed.
    """
    return config.parallel.zero_stage == 2 and data_parts(config) > 1 and min(config.stages) < 3


def updates_in_flat_buffers(config: TrainConfig) -> bool:
    """Return whether all updates run on the host, or as kernels over whatever there is."""
    if config.parallel.offloads:
        return True
    is_adamw = config.optimizer.optimizer in ("adam", "adamw")
    return is_adamw and config.precision.dtype != "float64" and not is_sharded(config)


def is_sharded(config: TrainConfig) -> bool:
    """Return whether ranks share each parameter."""
    return config.parallel.zero_stage == 3 and data_parts(config) > 1


# Whole steps


def whole_steps(
    config: TrainConfig, padded: int, pipeline_rank: int, model: Model | None
) -> StepMemory:
    """Return what whole steps of a rank allocate."""
    if config.parallel.pipeline_model_parallel_size > 1:
        count = passed_micro_batches(config, ROUNDS // 2)
    else:
        count = min(2, config.micro_batches(config.global_batch))
    extent = Extent(count, steps_to_measure(config))
    recorder = OperationRecorder()

    # Measure few layers, unless they are a custom model's, and extend them.
    if model is None:
        units = []
        for layers in stages_of_rank(config, pipeline_rank):
            units.append(choose_units(config, layers, least_layers(config)))
        chosen = [layer for chunk in units for unit in chunk for layer in unit.layers]
        record = measure_layers(config, padded, pipeline_rank, chosen, extent, recorder)
    else:
        record = measure_layers(config, padded, 0, (), extent, recorder, model)
        last = max(section.layer or 0 for _, section in record.marks)
        units = [[Unit((layer,)) for layer in range(last + 1)]]
    placed = extend(record, units)

    # Leave out what is held from the first step on, and an update that is measured apart.
    freed_keys = {each.event.key for each in placed if each.event.size < 0}
    is_measured_apart = not updates_in_flat_buffers(config)
    kept = set()
    for span, event in placed:
        if event.size < 0 or (is_measured_apart and span.section.phase == "update"):
            continue
        if event.key in freed_keys or span.step == extent.steps:
            kept.add(event.key)
    events = [event for _, event in placed if event.key in kept]
    growth = update_growth(config, padded, pipeline_rank, units)
    operations = operations_of_rank(recorder.sections, units, growth)
    return StepMemory(kinds_at_peak(events), events, operations)


def steps_to_measure(config: TrainConfig) -> int:
    """Return the number of the first step that is like all later ones; fp8's first makes casts."""
    return 2 if config.precision.fp8_format else 1


def least_layers(config: TrainConfig) -> int:
    return LEAST_SHARDED if is_sharded(config) else LEAST


# The update


class UpdateMemory(NamedTuple):
    """What an update of all parameters allocates and executes."""

    peak: Kinds
    events: list[MemoryEvent]
    operations: Operations


def update_of_all(
    config: TrainConfig, padded: int, pipeline_rank: int, model: Model | None
) -> UpdateMemory:
    """Return what an update of all parameters allocates and executes.

    It grows evenly with the layers, but for Muon, which takes so many matrices at a time.
    """
    few = set[int]()
    others = list[int]()
    for layers in stages_of_rank(config, pipeline_rank):
        few.update(layers[:2])
        others += layers[2:]
    if model is not None or config.optimizer.optimizer == "muon" or len(others) < 2:
        return update_of(config, padded, pipeline_rank, None, model)

    # Measure it with and without one of the other layers, and repeat the difference.
    less = update_of(config, padded, pipeline_rank, few)
    more = update_of(config, padded, pipeline_rank, {*few, min(others)})
    peak = {}
    for kind in {**less.peak, **more.peak}:
        without = less.peak.get(kind, 0)
        growth = more.peak.get(kind, 0) - without
        peak[kind] = without + len(others) * growth
    operations = total([(less.operations, 1 - len(others)), (more.operations, len(others))])
    return UpdateMemory(peak, more.events, operations)


def update_of(
    config: TrainConfig,
    padded: int,
    pipeline_rank: int,
    layers: Collection[int] | None,
    model: Model | None = None,
) -> UpdateMemory:
    """Return what an update of these layers, or of all, allocates and executes."""
    recorder = OperationRecorder()
    record = measure_update(config, padded, pipeline_rank, layers, recorder, model)
    placed = extend(record, [[]])
    events = complete(each.event for each in placed if each.span.section.phase == "update")
    if not is_sharded(config):  # what is left are casts of the weights, which are held throughout
        freed_keys = {event.key for event in events if event.size < 0}
        events = [event for event in events if event.key in freed_keys]
    operations = operations_of_rank(recorder.sections, [[]], 1.0).update
    return UpdateMemory(kinds_at_peak(events), events, operations)


def update_growth(
    config: TrainConfig, padded: int, pipeline_rank: int, units: Sequence[Sequence[Unit]]
) -> float:
    """Return a rank's parameters as a multiple of those that were measured."""
    repeated = sum(len(unit.layers) * (unit.copies - 1) for chunk in units for unit in chunk)
    held = parameters_of_ranks(config, padded)[pipeline_rank]
    shapes = shapes_of_layer(config.model, config.parallel.tensor_model_parallel_size)
    return held / (held - repeated * count_parameters(shapes))


def complete(events: Iterable[MemoryEvent]) -> list[MemoryEvent]:
    """Return the events without those that free what they did not allocate."""
    events = list(events)
    allocated = {event.key for event in events if event.size >= 0}
    return [event for event in events if event.key in allocated]


def passed_micro_batches(config: TrainConfig, rounds: int) -> int:
    """Return the micro-batches until the peak: GPipe holds all, others those of some rounds."""
    count = config.micro_batches(config.global_batch)
    p = config.parallel
    if p.pipeline_schedule == "gpipe":
        return count
    return min(count, rounds * p.pipeline_model_parallel_size)


def kinds_at_peak(events: Sequence[MemoryEvent]) -> Kinds:
    """Return the bytes by kind when they are the most."""
    sizes = levels(events)
    return kinds_of(events[: sizes.index(max(sizes))])


def levels(events: Sequence[MemoryEvent]) -> list[int]:
    """Return the bytes that are allocated before each event, and after the last."""
    return list(itertools.accumulate((event.size for event in events), initial=0))


def kinds_of(events: Sequence[MemoryEvent]) -> Kinds:
    """Return the bytes by kind that are left after these events."""
    out = Counter[str]()
    for event in events:
        out[event.kind] += event.size
    return dict(out)


# The passes of a pipeline


class Stage(NamedTuple):
    """The layers of a stage that are measured, and all by which it differs from other stages."""

    units: list[Unit]
    kind: tuple[object, ...]
    sends: bool  # its input's gradient to another rank


class PassMemory(NamedTuple):
    """What a pass allocates by kind: until its peak, and what it leaves, or frees if below 0."""

    at_peak: Kinds
    left: Kinds
    most: int  # sums of the two
    rest: int


# The number of a kind of stage, whether the micro-batch is the first, and the action.
Pass = tuple[int, bool, Op]


@dataclass(frozen=True)
class StagePasses:
    """A micro-batch's passes through kinds of stages."""

    begin: Kinds  # what a step allocates before them
    events: dict[Pass, list[MemoryEvent]]
    messages: dict[int, int]  # bytes of the gradient that a stage sends to another rank
    memory: dict[Pass, PassMemory]
    operations: RankOperations = RankOperations((), (), {})  # of the chunks that have been measured


def scheduled_passes(config: TrainConfig, padded: int, pipeline_rank: int) -> StepMemory:
    """Return what a step's passes allocate in the order of the schedule."""
    stages = kinds_of_stages(config, pipeline_rank)
    kinds_of_stage = list(dict.fromkeys(stage.kind for stage in stages))
    kind_of = [kinds_of_stage.index(stage.kind) for stage in stages]  # by chunk
    passes = measure_passes(config, padded, pipeline_rank, stages)
    kept = most_sent(config.chunks)
    order: list[Pass] = []
    for op, chunk, i in cached_schedule(config, pipeline_rank, ROUNDS):
        order.append((kind_of[chunk], i == 0, op))

    # Find the pass with the peak: the level before it, messages on their way, and its own.
    level = 0
    most = -1
    at = 0
    in_flight_at_peak = 0
    sent = list[int]()
    for number, each in enumerate(order):
        in_flight = sum(sent[-kept:])
        peak = level + in_flight + passes.memory[each].most
        if peak > most:
            most = peak
            at = number
            in_flight_at_peak = in_flight
        level += passes.memory[each].rest
        kind, _, op = each
        if op == "B" and kind in passes.messages:
            sent.append(passes.messages[kind])

    # What is there at the peak, by kind.
    kinds = Counter(passes.begin)
    kinds["communication"] += in_flight_at_peak
    kinds.update(passes.memory[order[at]].at_peak)
    for each, times in Counter(order[:at]).items():
        for kind_of_memory, size in passes.memory[each].left.items():
            kinds[kind_of_memory] += times * size

    measured = passes.operations
    operations = RankOperations(
        tuple(measured.first[number] for number in kind_of),
        tuple(measured.later[number] for number in kind_of),
        measured.update,
    )
    events = scheduled_events(config, pipeline_rank, passes, kind_of)
    return StepMemory(dict(kinds), events, operations)


def scheduled_events(
    config: TrainConfig, pipeline_rank: int, passes: StagePasses, kind_of: Sequence[int]
) -> list[MemoryEvent]:
    """Return what a step's passes allocate and free, in order."""
    kept = most_sent(config.chunks)
    # A new key for each allocation of each micro-batch in each stage.
    keys: defaultdict[tuple[int, int, int], int] = defaultdict(itertools.count().__next__)
    out = list[MemoryEvent]()
    sent = list[MemoryEvent]()
    for op, chunk, i in cached_schedule(config, pipeline_rank, ROUNDS // 2):
        kind = kind_of[chunk]
        for event in passes.events[kind, not i, op]:
            out.append(event._replace(key=keys[i, chunk, event.key]))
        if op == "B" and kind in passes.messages:
            key = keys[i, chunk, -1]
            message = MemoryEvent(key, passes.messages[kind], "communication", 0)
            out.append(message)
            # The message before so many others has arrived.
            if len(sent) >= kept:
                out.append(freed(sent[-kept]))
            sent.append(message)
    return [*out, *map(freed, sent[-kept:])]


def freed(event: MemoryEvent) -> MemoryEvent:
    return event._replace(size=-event.size)


def cached_schedule(config: TrainConfig, pipeline_rank: int, rounds: int) -> list[Action]:
    p = config.parallel
    count = passed_micro_batches(config, rounds)
    return schedule_of(
        p.pipeline_schedule, p.pipeline_model_parallel_size, pipeline_rank, count, config.chunks
    )


schedule_of = functools.lru_cache(1024)(schedule)


def kinds_of_stages(config: TrainConfig, pipeline_rank: int) -> list[Stage]:
    """Return the stages of a pipeline rank."""
    own = stage_numbers(config, pipeline_rank)
    last = len(config.stages) - 1
    out = []
    for number, layers in zip(own, stages_of_rank(config, pipeline_rank), strict=True):
        units = choose_units(config, layers, least_layers(config))
        ends = number == 0, number == last  # the embedding and the head
        kind = (*ends, *((unit.kind, unit.copies) for unit in units))
        out.append(Stage(units, kind, sends=number > 0))
    return out


def measure_passes(
    config: TrainConfig, padded: int, pipeline_rank: int, stages: Sequence[Stage]
) -> StagePasses:
    """Return a micro-batch's passes through the kinds of stages of a rank."""
    first_of_kind: dict[object, int] = {}
    for chunk, stage in enumerate(stages):
        first_of_kind.setdefault(stage.kind, chunk)
    chunks = list(first_of_kind.values())
    key = settings_of(config, padded), *first_of_kind
    if key in MEASURED_PASSES:
        return MEASURED_PASSES[key]

    # One stage of each kind is measured, of the others a layer: none is without layers.
    steps = steps_to_measure(config)
    units = list[list[Unit]]()
    chosen = set[int]()
    for chunk, stage in enumerate(stages):
        if chunk in chunks:
            units.append(stage.units)
            chosen.update(layer for unit in stage.units for layer in unit.layers)
        else:
            units.append(stage.units[:1])
        chosen.add(stage.units[0].layers[0])
    extent = Extent(2, steps, chunks)
    recorder = OperationRecorder()
    record = measure_layers(config, padded, pipeline_rank, chosen, extent, recorder)
    placed = [each for each in extend(record, units) if each.span.step == steps]
    growth = update_growth(config, padded, pipeline_rank, units)
    executed = operations_of_rank(recorder.sections, units, growth)
    operations = RankOperations(
        tuple(executed.first[chunk] for chunk in chunks),
        tuple(executed.later[chunk] for chunk in chunks),
        executed.update,
    )
    senders = {chunk for chunk in chunks if stages[chunk].sends}
    passes = split_passes(placed, chunks, senders)
    MEASURED_PASSES[key] = replace(passes, operations=operations)
    return MEASURED_PASSES[key]


MEASURED_PASSES: dict[object, StagePasses] = {}


def settings_of(config: TrainConfig, padded: int) -> tuple[object, ...]:
    """Return all settings on which the memory of a pass may depend."""
    d = config.data
    few_or_one = min(config.micro_batches(config.global_batch), 2)
    return (
        config.model,
        config.precision,
        config.optimizer,
        config.parallel,
        repr(config.training),
        (d.document_effects, d.seq_length, config.micro_batch, few_or_one),
        padded,
    )


def split_passes(
    placed: list[Placed], chunks: Sequence[int], senders: Collection[int]
) -> StagePasses:
    """Return the events of one step by pass.

    `chunks` have been measured, and `senders` of them send the gradients of their inputs.
    """
    numbers = {chunk: number for number, chunk in enumerate(chunks)}
    ends_in = {each.event.key: each.span.section for each in placed if each.event.size < 0}
    begin = list[MemoryEvent]()
    events = defaultdict[Pass, list[MemoryEvent]](list)
    # Memory that the same micro-batch frees, a later backward pass, or the end of the pass.
    own = set[int]()
    carried = set[int]()
    at_end = defaultdict[Pass, list[MemoryEvent]](list)
    messages = Counter[int]()

    for (_, section), event in placed:
        op = pass_of(section.phase)
        if op is None:
            if section.phase == "begin":
                begin.append(event)
            continue
        number = numbers[section.chunk]
        at: Pass = number, section.micro_batch == 0, op
        if event.size < 0:
            if event.key in own or event.key in carried:
                events[at].append(event)
            continue

        # An allocation counts where it is made; who frees it?
        events[at].append(event)
        end = ends_in.get(event.key)
        if end is None:
            continue
        freed_by = pass_of(end.phase)
        if freed_by is not None:
            if (end.micro_batch, end.chunk) == (section.micro_batch, section.chunk):
                own.add(event.key)
            elif op != "F" and freed_by != "F":  # ZeRO 2 sums it until the next backward pass
                carried.add(event.key)
            else:
                at_end[at].append(freed(event))
        elif end.phase == "end" and op != "F":
            at_end[at].append(freed(event))
            # The gradient of the stage's input is kept until it has arrived.
            if section.micro_batch > 0 and section.chunk in senders:
                messages[number] += event.size

    for at, rest in at_end.items():
        events[at] += rest
    memory = {at: pass_memory(each) for at, each in events.items()}
    within = {at: within_pass(each, carried) for at, each in events.items()}
    return StagePasses(kinds_of(begin), within, messages, memory)


def within_pass(events: list[MemoryEvent], carried: Collection[int]) -> list[MemoryEvent]:
    """Return a pass's events, of which those that the next backward pass would free end with it."""
    kept = [event for event in events if event.size >= 0 or event.key not in carried]
    return [*kept, *(freed(event) for event in kept if event.key in carried)]


def pass_of(phase: Phase) -> Op | None:
    """Return the pass that a part of a step is in."""
    if phase in ("embedding", "layer", "head"):
        return "F"
    if phase in ("embedding backward", "layer backward", "head backward"):
        return "B"
    return None


def pass_memory(events: Sequence[MemoryEvent]) -> PassMemory:
    sizes = levels(events)
    return PassMemory(kinds_at_peak(events), kinds_of(events), max(sizes), sizes[-1])


def stages_of_rank(config: TrainConfig, pipeline_rank: int) -> list[range]:
    """Return the layers of each stage of a pipeline rank."""
    begins = list(itertools.accumulate(config.stages, initial=0))
    return [range(begins[s], begins[s + 1]) for s in stage_numbers(config, pipeline_rank)]
