"""What the steps of a pipeline rank allocate, from steps of few layers.

Without a pipeline whole steps are measured, of at most two micro-batches: what the others do is the
same as the second. In a pipeline a micro-batch's passes through each kind of stage are measured, and
put in the order of the schedule. Only with ZeRO 2 and 3, where a pass frees what the one before has
allocated, the schedule itself is run.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.apps.plan.measure.account import Event, Phase
from meshwright.apps.plan.measure.layers import Placed, Unit, choose_units, extend
from meshwright.apps.plan.measure.steps import measure_layers, measure_update
from meshwright.config.schema import TrainConfig
from meshwright.parallel.pipeline_schedule import SPLIT_BACKWARD, V_SHAPED, Action, Op, most_sent, schedule
from meshwright.training.network import Model
from meshwright.training.parameters import data_parts, stage_numbers

LEAST, LEAST_SHARDED = 5, 6  # layers that are measured of those alike; fully_shard gathers one further ahead
ROUNDS = 4  # of as many micro-batches as a pipeline has ranks, after which a schedule holds no more

Kinds = dict[str, int]  # bytes by kind


@dataclass(frozen=True)
class StepMemory:
    """What steps allocate beside what is held throughout."""

    peak: Kinds  # at the fullest moment
    events: list[Event]  # of one step or several that follow each other, with their updates


def memory_of_steps(config: TrainConfig, padded: int, pipeline_rank: int, model: Model | None = None) -> StepMemory:
    """Return what steps of a rank allocate."""
    p = config.parallel
    is_coupled = p.zero_stage > 1 and data_parts(config) > 1
    if p.pipeline_model_parallel_size == 1 or is_coupled:
        found = whole_steps(config, padded, pipeline_rank, model)
    else:
        found = scheduled_passes(config, padded, pipeline_rank)
    if updates_in_flat_buffers(config):
        return found
    update = whole_update(config, padded, pipeline_rank, model)
    first = 1 + max((event.key for event in found.events), default=0)
    update = [event._replace(key=first + event.key) for event in update]
    most = max(found.peak, kinds_at_peak(update), key=lambda kinds: sum(kinds.values()))
    return StepMemory(most, [*found.events, *update])


def updates_in_flat_buffers(config: TrainConfig) -> bool:
    """Return whether all updates run on the host, or as kernels over whatever there is."""
    p, is_full = config.parallel, config.precision.dtype == "float64"
    is_sharded = p.zero_stage == 3 and data_parts(config) > 1
    return p.offloads or (config.optimizer.optimizer in ("adam", "adamw") and not is_sharded and not is_full)


# Whole steps


def whole_steps(config: TrainConfig, padded: int, pipeline_rank: int, model: Model | None) -> StepMemory:
    """Return what whole steps of a rank allocate."""
    p = config.parallel
    is_sharded = p.zero_stage == 3 and data_parts(config) > 1
    steps = 2 if is_sharded or config.precision.fp8_format else 1  # the first one begins without gradients, or casts
    count = passed_micro_batches(config, ROUNDS if p.pipeline_model_parallel_size > 1 else 2)

    # Measure few layers, unless they are a custom model's, and extend them.
    least = LEAST_SHARDED if is_sharded else LEAST
    units = [choose_units(config, layers, least) for layers in stages_of_rank(config, pipeline_rank)]
    if model is None:
        chosen = [layer for chunk in units for unit in chunk for layer in unit.layers]
        record = measure_layers(config, padded, pipeline_rank, chosen, micro_batches=count, steps=steps)
    else:
        record = measure_layers(config, padded, 0, (), micro_batches=count, steps=steps, model=model)
        units = [[Unit((layer,)) for layer in range(1 + max(section.layer or 0 for _, section in record.marks))]]
    placed = extend(record, units)

    # Leave out what is held from the first step on, as casts of the weights, and an update that is measured apart.
    gone = {each.event.key for each in placed if each.event.size < 0}
    is_measured_apart = not updates_in_flat_buffers(config)
    events = [
        each.event
        for each in placed
        if (each.event.key in gone or each.span.step == steps > 1)
        and not (is_measured_apart and each.span.section.phase == "update")
    ]
    events = complete(events)
    return StepMemory(kinds_at_peak(events), events)


def whole_update(config: TrainConfig, padded: int, pipeline_rank: int, model: Model | None) -> list[Event]:
    """Return what an update of all parameters allocates."""
    record = measure_update(config, padded, pipeline_rank, model)
    return complete(each.event for each in extend(record, [[]]) if each.span.section.phase == "update")


def complete(events: Iterable[Event]) -> list[Event]:
    """Return the events without those that free what they did not allocate."""
    events = list(events)
    allocated = {event.key for event in events if event.size >= 0}
    return [event for event in events if event.key in allocated]


def passed_micro_batches(config: TrainConfig, rounds: int) -> int:
    """Return the micro-batches until the peak: GPipe holds all, others those of some rounds."""
    count, p = config.micro_batches(config.global_batch), config.parallel
    return count if p.pipeline_schedule == "gpipe" else min(count, rounds * p.pipeline_model_parallel_size)


def kinds_at_peak(events: Sequence[Event]) -> Kinds:
    """Return the bytes by kind when they are the most."""
    sizes = list(itertools.accumulate((event.size for event in events), initial=0))
    return kinds_of(events[: sizes.index(max(sizes))])


def kinds_of(events: Sequence[Event]) -> Kinds:
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


Pass = tuple[int, bool, Op]  # number of a kind of stage, whether the micro-batch is the first, and the action


@dataclass(frozen=True)
class StagePasses:
    """A micro-batch's passes through kinds of stages."""

    begin: Kinds  # what a step allocates before them
    events: dict[Pass, list[Event]]
    messages: dict[int, int]  # bytes of the gradient that a stage sends to another rank
    memory: dict[Pass, PassMemory]


def scheduled_passes(config: TrainConfig, padded: int, pipeline_rank: int) -> StepMemory:
    """Return what a step's passes allocate in the order of the schedule."""
    p, stages = config.parallel, kinds_of_stages(config, pipeline_rank)
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(stage.kind for stage in stages))}
    kind_of = [numbers[stage.kind] for stage in stages]  # by chunk
    passes = measure_passes(config, padded, pipeline_rank, stages)
    kept = most_sent(p.pipeline_schedule, p.pipeline_model_parallel_size, config.chunks)
    order = cached_schedule(config, pipeline_rank, ROUNDS)

    # The level before each pass, and the messages that are on their way.
    level, sent, levels, on_their_way = 0, list[int](), list[int](), list[int]()
    for op, chunk, i in order:
        levels.append(level)
        on_their_way.append(sum(sent[-kept:]))
        level += passes.memory[kind_of[chunk], not i, op].rest
        if op in ("B", "I") and kind_of[chunk] in passes.messages:
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
    return StepMemory(dict(kinds), scheduled_events(config, pipeline_rank, passes, kind_of))


def scheduled_events(
    config: TrainConfig, pipeline_rank: int, passes: StagePasses, kind_of: Sequence[int]
) -> list[Event]:
    """Return what a step's passes allocate and free, in order."""
    p = config.parallel
    kept = most_sent(p.pipeline_schedule, p.pipeline_model_parallel_size, config.chunks)
    keys: defaultdict[tuple[int, int, int], int] = defaultdict(itertools.count().__next__)
    out, sent = list[Event](), list[Event]()
    hands_over = p.pipeline_schedule in V_SHAPED and len(set(kind_of)) > 1  # one stage leaves tensors to the next
    for op, chunk, i in cached_schedule(config, pipeline_rank, ROUNDS // 2):
        events, owner = passes.events[kind_of[chunk], not i, op], 0 if hands_over else chunk
        out += [event._replace(key=keys[i, owner, event.key]) for event in events]
        if op in ("B", "I") and kind_of[chunk] in passes.messages:
            sent.append(Event(keys[i, chunk, -1], passes.messages[kind_of[chunk]], "communication", 0))
            out += [sent[-1], *map(freed, sent[:-kept][-1:])]
    return [*out, *map(freed, sent[-kept:])]


def freed(event: Event) -> Event:
    return event._replace(size=-event.size)


def cached_schedule(config: TrainConfig, pipeline_rank: int, rounds: int) -> list[Action]:
    p = config.parallel
    count = passed_micro_batches(config, rounds)
    return schedule_of(p.pipeline_schedule, p.pipeline_model_parallel_size, pipeline_rank, count, config.chunks)


schedule_of = functools.lru_cache(1024)(schedule)


def kinds_of_stages(config: TrainConfig, pipeline_rank: int) -> list[Stage]:
    """Return the stages of a pipeline rank."""
    own, last, out = stage_numbers(config, pipeline_rank), len(config.stages) - 1, list[Stage]()
    for number, layers in zip(own, stages_of_rank(config, pipeline_rank), strict=True):
        units = choose_units(config, layers, LEAST)
        ends = number == 0, number == last, number - 1 in own, number + 1 in own
        sends = number > 0 and number - 1 not in own
        out.append(Stage(units, (*ends, *((unit.kind, unit.copies) for unit in units)), sends))
    return out


def measure_passes(config: TrainConfig, padded: int, pipeline_rank: int, stages: Sequence[Stage]) -> StagePasses:
    """Return a micro-batch's passes through the kinds of stages of a rank."""
    chunks = list({stage.kind: chunk for chunk, stage in reversed(list(enumerate(stages)))}.values())[::-1]
    key = settings_of(config, padded), *(stages[chunk].kind for chunk in chunks)
    if key not in MEASURED_PASSES:
        steps = 2 if config.precision.fp8_format else 1  # casts of the weights are made in the first
        chosen = {layer for chunk in chunks for unit in stages[chunk].units for layer in unit.layers}
        chosen |= {stage.units[0].layers[0] for stage in stages}  # none is without layers
        record = measure_layers(config, padded, pipeline_rank, chosen, micro_batches=2, steps=steps, chunks=chunks)
        units = [stage.units if chunk in chunks else stage.units[:1] for chunk, stage in enumerate(stages)]
        placed = [each for each in extend(record, units) if each.span.step == steps]
        senders = {chunk for chunk in chunks if stages[chunk].sends}
        MEASURED_PASSES[key] = split_passes(config, placed, chunks, senders)
    return MEASURED_PASSES[key]


MEASURED_PASSES: dict[object, StagePasses] = {}


def settings_of(config: TrainConfig, padded: int) -> tuple[object, ...]:
    """Return all settings that what a pass allocates may depend on."""
    d, count = config.data, config.micro_batches(config.global_batch)
    data = d.document_effects, d.seq_length, config.micro_batch, min(count, 2)
    return config.model, config.precision, config.optimizer, config.parallel, repr(config.training), data, padded


def split_passes(
    config: TrainConfig, placed: list[Placed], chunks: Sequence[int], senders: Collection[int]
) -> StagePasses:
    """Return the events of one step by pass.

    `chunks` have been measured, and `senders` of them send the gradients of their inputs.
    """
    p = config.parallel
    is_split, is_v_shaped = p.pipeline_schedule in SPLIT_BACKWARD, p.pipeline_schedule in V_SHAPED
    numbers = {chunk: number for number, chunk in enumerate(chunks)}
    gone = {each.event.key: each.span.section for each in placed if each.event.size < 0}
    begin, own, messages = list[Event](), set[int](), Counter[int]()
    events, ends = defaultdict[Pass, list[Event]](list), defaultdict[Pass, list[Event]](list)
    for (_, section), event in placed:
        op = pass_of(section.phase, is_split)
        if op is None:
            begin += [event] if section.phase == "begin" else []
            continue
        number = numbers[section.chunk]
        at: Pass = number, section.micro_batch == 0, op
        if event.key in own:  # freed by a later pass of this micro-batch
            events[at].append(event)
        if event.size < 0:
            continue
        events[at].append(event)
        end = gone.get(event.key)
        if end is not None and pass_of(end.phase, is_split) is not None:
            is_own = end.micro_batch == section.micro_batch and (is_v_shaped or end.chunk == section.chunk)
            if is_own:
                own.add(event.key)
            else:
                ends[at].append(freed(event))
        elif op != "F":  # what a forward pass leaves is kept until the step ends
            ends[at].append(freed(event))
            if section.micro_batch > 0 and op != "W" and section.chunk in senders:  # kept until it has arrived
                messages[number] += event.size
    for at, rest in ends.items():
        events[at] += rest
    return StagePasses(kinds_of(begin), dict(events), messages, {at: pass_memory(each) for at, each in events.items()})


def pass_of(phase: Phase, is_split: bool) -> Op | None:
    """Return the pass that a part of a step is in."""
    if phase in ("embedding", "layer", "head"):
        return "F"
    if phase in ("embedding backward", "layer backward", "head backward"):
        return "I" if is_split else "B"
    return "W" if phase == "weights" else None


def pass_memory(events: Sequence[Event]) -> PassMemory:
    sizes = list(itertools.accumulate((event.size for event in events), initial=0))
    at_peak, left = kinds_of(events[: sizes.index(max(sizes))]), kinds_of(events)
    return PassMemory(at_peak, left, max(sizes), sizes[-1])


def stages_of_rank(config: TrainConfig, pipeline_rank: int) -> list[range]:
    """Return the layers of each stage of a pipeline rank."""
    begins = list(itertools.accumulate(config.stages, initial=0))
    return [range(begins[s], begins[s + 1]) for s in stage_numbers(config, pipeline_rank)]
