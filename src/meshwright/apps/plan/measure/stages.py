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

# layers that are measured of those alike; fully_shard gathers one further ahead
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
    update = update_of_all(config, padded, pipeline_rank, model)
    first = 1 + max((event.key for event in found.events), default=0)
    # its gradients are those of the passes
    gone = {event.key for event in update.events if event.size < 0}
    events = [event._replace(key=first + event.key) for event in update.events if event.key in gone]
    most = max(found.peak, update.peak, key=lambda kinds: sum(kinds.values()))
    return StepMemory(
        most, [*found.events, *events], found.operations._replace(update=update.operations)
    )


def reaches_further(config: TrainConfig) -> bool:
    """Return whether a pass frees what several passes before it have allocated.

    ZeRO 2 keeps the full gradients of the last two buckets until others are summed.
    """
    return config.parallel.zero_stage == 2 and data_parts(config) > 1 and min(config.stages) < 3


def updates_in_flat_buffers(config: TrainConfig) -> bool:
    """Return whether all updates run on the host, or as kernels over whatever there is."""
    is_adamw, is_full = (
        config.optimizer.optimizer in ("adam", "adamw"),
        config.precision.dtype == "float64",
    )
    return config.parallel.offloads or (is_adamw and not is_full and not is_sharded(config))


def is_sharded(config: TrainConfig) -> bool:
    """Return whether ranks share each parameter."""
    return config.parallel.zero_stage == 3 and data_parts(config) > 1


# Whole steps


def whole_steps(
    config: TrainConfig, padded: int, pipeline_rank: int, model: Model | None
) -> StepMemory:
    """Return what whole steps of a rank allocate."""
    pp = config.parallel.pipeline_model_parallel_size
    count = (
        passed_micro_batches(config, ROUNDS // 2)
        if pp > 1
        else min(2, config.micro_batches(config.global_batch))
    )
    extent, recorder = Extent(count, steps_to_measure(config)), OperationRecorder()

    # Measure few layers, unless they are a custom model's, and extend them.
    units = [
        choose_units(config, layers, least_layers(config))
        for layers in stages_of_rank(config, pipeline_rank)
    ]
    if model is None:
        chosen = [layer for chunk in units for unit in chunk for layer in unit.layers]
        record = measure_layers(config, padded, pipeline_rank, chosen, extent, recorder)
    else:
        record = measure_layers(config, padded, 0, (), extent, recorder, model)
        units = [
            [
                Unit((layer,))
                for layer in range(1 + max(section.layer or 0 for _, section in record.marks))
            ]
        ]
    placed = extend(record, units)

    # Leave out what is held from the first step on, and an update that is measured apart.
    gone = {each.event.key for each in placed if each.event.size < 0}
    is_measured_apart = not updates_in_flat_buffers(config)
    kept = {
        each.event.key
        for each in placed
        if each.event.size >= 0
        and (each.event.key in gone or each.span.step == extent.steps)
        and not (is_measured_apart and each.span.section.phase == "update")
    }
    events = [each.event for each in placed if each.event.key in kept]
    operations = operations_of_rank(
        recorder.sections, units, update_growth(config, padded, pipeline_rank, units)
    )
    return StepMemory(kinds_at_peak(events), events, operations)


def steps_to_measure(config: TrainConfig) -> int:
    """Return the number of the first step that is as all later ones; with fp8 one makes casts."""
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
    stages = [list(layers) for layers in stages_of_rank(config, pipeline_rank)]
    few = {layer for layers in stages for layer in layers[:2]}
    others = sorted({layer for layers in stages for layer in layers} - few)
    if model is not None or config.optimizer.optimizer == "muon" or len(others) < 2:
        return update_of(config, padded, pipeline_rank, None, model)
    less = update_of(config, padded, pipeline_rank, few)
    more = update_of(config, padded, pipeline_rank, {*few, others[0]})
    growth = {
        kind: more.peak.get(kind, 0) - less.peak.get(kind, 0) for kind in {**less.peak, **more.peak}
    }
    peak = {kind: less.peak.get(kind, 0) + len(others) * size for kind, size in growth.items()}
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
    events = complete(
        each.event for each in extend(record, [[]]) if each.span.section.phase == "update"
    )
    if not is_sharded(config):  # what is left are casts of the weights, which are held throughout
        gone = {event.key for event in events if event.size < 0}
        events = [event for event in events if event.key in gone]
    return UpdateMemory(
        kinds_at_peak(events), events, operations_of_rank(recorder.sections, [[]], 1.0).update
    )


def update_growth(
    config: TrainConfig, padded: int, pipeline_rank: int, units: Sequence[Sequence[Unit]]
) -> float:
    """Return how many times as many parameters a rank has as were measured."""
    layers = sum(len(unit.layers) * (unit.copies - 1) for chunk in units for unit in chunk)
    held = parameters_of_ranks(config, padded)[pipeline_rank]
    of_layer = count_parameters(
        shapes_of_layer(config.model, config.parallel.tensor_model_parallel_size)
    )
    return held / (held - layers * of_layer)


def complete(events: Iterable[MemoryEvent]) -> list[MemoryEvent]:
    """Return the events without those that free what they did not allocate."""
    events = list(events)
    allocated = {event.key for event in events if event.size >= 0}
    return [event for event in events if event.key in allocated]


def passed_micro_batches(config: TrainConfig, rounds: int) -> int:
    """Return the micro-batches until the peak: GPipe holds all, others those of some rounds."""
    count, p = config.micro_batches(config.global_batch), config.parallel
    return (
        count
        if p.pipeline_schedule == "gpipe"
        else min(count, rounds * p.pipeline_model_parallel_size)
    )


def kinds_at_peak(events: Sequence[MemoryEvent]) -> Kinds:
    """Return the bytes by kind when they are the most."""
    sizes = list(itertools.accumulate((event.size for event in events), initial=0))
    return kinds_of(events[: sizes.index(max(sizes))])


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


# number of a kind of stage, whether the micro-batch is the first, and the action
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
    numbers = {
        kind: number for number, kind in enumerate(dict.fromkeys(stage.kind for stage in stages))
    }
    kind_of = [numbers[stage.kind] for stage in stages]  # by chunk
    passes = measure_passes(config, padded, pipeline_rank, stages)
    kept = most_sent(config.chunks)
    order = cached_schedule(config, pipeline_rank, ROUNDS)

    # The level before each pass, and the messages that are on their way.
    level, sent, levels, on_their_way = 0, list[int](), list[int](), list[int]()
    for op, chunk, i in order:
        levels.append(level)
        on_their_way.append(sum(sent[-kept:]))
        level += passes.memory[kind_of[chunk], not i, op].rest
        if op == "B" and kind_of[chunk] in passes.messages:
            sent.append(passes.messages[kind_of[chunk]])
    peaks = [
        level + messages + passes.memory[kind_of[chunk], not i, op].most
        for level, messages, (op, chunk, i) in zip(levels, on_their_way, order, strict=True)
    ]

    # What is there at the peak, by kind.
    at = peaks.index(max(peaks))
    op, chunk, i = order[at]
    kinds = Counter(passes.begin)
    kinds["communication"] += on_their_way[at]
    kinds.update(passes.memory[kind_of[chunk], not i, op].at_peak)
    done = Counter((kind_of[chunk], not i, op) for op, chunk, i in order[:at])
    for each, times in done.items():
        for kind, size in passes.memory[each].left.items():
            kinds[kind] += times * size
    measured = passes.operations
    operations = RankOperations(
        tuple(measured.first[number] for number in kind_of),
        tuple(measured.later[number] for number in kind_of),
        measured.update,
    )
    return StepMemory(
        dict(kinds), scheduled_events(config, pipeline_rank, passes, kind_of), operations
    )


def scheduled_events(
    config: TrainConfig, pipeline_rank: int, passes: StagePasses, kind_of: Sequence[int]
) -> list[MemoryEvent]:
    """Return what a step's passes allocate and free, in order."""
    kept = most_sent(config.chunks)
    keys: defaultdict[tuple[int, int, int], int] = defaultdict(itertools.count().__next__)
    out, sent = list[MemoryEvent](), list[MemoryEvent]()
    for op, chunk, i in cached_schedule(config, pipeline_rank, ROUNDS // 2):
        events = passes.events[kind_of[chunk], not i, op]
        out += [event._replace(key=keys[i, chunk, event.key]) for event in events]
        if op == "B" and kind_of[chunk] in passes.messages:
            sent.append(
                MemoryEvent(keys[i, chunk, -1], passes.messages[kind_of[chunk]], "communication", 0)
            )
            out += [sent[-1], *map(freed, sent[:-kept][-1:])]
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
    own, last, out = stage_numbers(config, pipeline_rank), len(config.stages) - 1, list[Stage]()
    for number, layers in zip(own, stages_of_rank(config, pipeline_rank), strict=True):
        units = choose_units(config, layers, least_layers(config))
        ends = number == 0, number == last
        kind = (*ends, *((unit.kind, unit.copies) for unit in units))
        out.append(Stage(units, kind, sends=number > 0))
    return out


def measure_passes(
    config: TrainConfig, padded: int, pipeline_rank: int, stages: Sequence[Stage]
) -> StagePasses:
    """Return a micro-batch's passes through the kinds of stages of a rank."""
    chunks = list(
        {stage.kind: chunk for chunk, stage in reversed(list(enumerate(stages)))}.values()
    )[::-1]
    key = settings_of(config, padded), *(stages[chunk].kind for chunk in chunks)
    if key not in MEASURED_PASSES:
        steps = steps_to_measure(config)
        chosen = {
            layer for chunk in chunks for unit in stages[chunk].units for layer in unit.layers
        }
        chosen |= {stage.units[0].layers[0] for stage in stages}  # none is without layers
        recorder = OperationRecorder()
        record = measure_layers(
            config, padded, pipeline_rank, chosen, Extent(2, steps, chunks), recorder
        )
        units = [
            stage.units if chunk in chunks else stage.units[:1]
            for chunk, stage in enumerate(stages)
        ]
        placed = [each for each in extend(record, units) if each.span.step == steps]
        senders = {chunk for chunk in chunks if stages[chunk].sends}
        executed = operations_of_rank(
            recorder.sections, units, update_growth(config, padded, pipeline_rank, units)
        )
        first, later = (tuple(each[chunk] for chunk in chunks) for each in executed[:2])
        passes = split_passes(placed, chunks, senders)
        MEASURED_PASSES[key] = replace(
            passes, operations=RankOperations(first, later, executed.update)
        )
    return MEASURED_PASSES[key]


MEASURED_PASSES: dict[object, StagePasses] = {}


def settings_of(config: TrainConfig, padded: int) -> tuple[object, ...]:
    """Return all settings that what a pass allocates may depend on."""
    d, count = config.data, config.micro_batches(config.global_batch)
    data = d.document_effects, d.seq_length, config.micro_batch, min(count, 2)
    return (
        config.model,
        config.precision,
        config.optimizer,
        config.parallel,
        repr(config.training),
        data,
        padded,
    )


def split_passes(
    placed: list[Placed], chunks: Sequence[int], senders: Collection[int]
) -> StagePasses:
    """Return the events of one step by pass.

    `chunks` have been measured, and `senders` of them send the gradients of their inputs.
    """
    numbers = {chunk: number for number, chunk in enumerate(chunks)}
    gone = {each.event.key: each.span.section for each in placed if each.event.size < 0}
    begin, own, carried, messages = list[MemoryEvent](), set[int](), set[int](), Counter[int]()
    events, ends = (
        defaultdict[Pass, list[MemoryEvent]](list),
        defaultdict[Pass, list[MemoryEvent]](list),
    )
    for (_, section), event in placed:
        op = pass_of(section.phase)
        if op is None:
            begin += [event] if section.phase == "begin" else []
            continue
        number = numbers[section.chunk]
        at: Pass = number, section.micro_batch == 0, op
        if event.size < 0 and (event.key in own or event.key in carried):
            events[at].append(event)
        if event.size < 0:
            continue
        events[at].append(event)
        end = gone.get(event.key)
        if end is not None and pass_of(end.phase) is not None:
            if (end.micro_batch, end.chunk) == (section.micro_batch, section.chunk):
                own.add(event.key)
            # ZeRO 2 sums it until the next backward pass
            elif op != "F" and pass_of(end.phase) != "F":
                carried.add(event.key)
            else:
                ends[at].append(freed(event))
        elif end is not None and end.phase == "end" and op != "F":
            ends[at].append(freed(event))
            # a gradient that is kept until it has arrived
            if section.micro_batch > 0 and section.chunk in senders:
                messages[number] += event.size
    for at, rest in ends.items():
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
    sizes = list(itertools.accumulate((event.size for event in events), initial=0))
    at_peak, left = kinds_of(events[: sizes.index(max(sizes))]), kinds_of(events)
    return PassMemory(at_peak, left, max(sizes), sizes[-1])


def stages_of_rank(config: TrainConfig, pipeline_rank: int) -> list[range]:
    """Return the layers of each stage of a pipeline rank."""
    begins = list(itertools.accumulate(config.stages, initial=0))
    return [range(begins[s], begins[s + 1]) for s in stage_numbers(config, pipeline_rank)]
