"""The memory of each pipeline rank of a run, in bytes by kind, from its settings alone. No torch.

A rank holds weights, gradients and optimizer state throughout. What a step allocates beside them
is found by running it with tensors of which only the size counts (blocks.py): a micro-batch
forward and backward, or the passes of a pipeline's schedule.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from meshwright.apps.plan import traffic
from meshwright.apps.plan.allocator import CachingAllocator
from meshwright.apps.plan.blocks import PassSizes, SizedGPT, Stage, make_buckets, make_shards, sizes_of
from meshwright.apps.plan.tensors import GRADIENTS, HANDED, MAIN, Event, Memory, Sized, kinds_of, rounded
from meshwright.apps.plan.updates import update_events
from meshwright.apps.plan.zero import begin_step, end_step, own_size
from meshwright.base.device import NVIDIA
from meshwright.config.schema import TrainConfig
from meshwright.optim.rule_table import STATE, treatment_of
from meshwright.optim.rule_table import state_bytes as bytes_of_moment
from meshwright.parallel.pipeline_schedule import Op, ScheduleName, most_sent, schedule
from meshwright.training.graph_rule import reason_against
from meshwright.training.parameters import WIDTHS, data_parts, flat_size, shapes_of_rank, stage_numbers
from meshwright.training.sizes import held_bytes

PROCESSORS = 132  # of an H100 and H200; they decide about small sums only
GRAPHS = 72 << 20  # of the driver for CUDA graphs, as measured on an H100
NCCL = 365 << 20  # of NCCL in a process of several, as measured on two H100
MAPPED_TRIAL = 16 << 20  # of the trial of sums by copy engines
SENT = -(1 << 40)  # key of the first gradient that is sent, from which the others count down
WORKSPACES = 32 << 20, 32 << 20, 1 << 20  # of cuBLAS, for the threads of both passes, and of cuBLASLt


class Device(Protocol):
    """The part of a device's profile that memory depends on."""

    @property
    def kind(self) -> str: ...

    @property
    def context_bytes(self) -> int: ...

    @property
    def mapped_ranks(self) -> int: ...


@dataclass(frozen=True)
class RankMemory:
    """The bytes of one rank: by kind at the peak of a step, and all that its process takes."""

    kinds: dict[str, int]  # weights, gradients, optimizer, activations, logits, buffers, communication
    context: int  # of the driver and its libraries
    reserve: Callable[[], int] = field(repr=False, compare=False)

    @property
    def allocated(self) -> int:
        """The most bytes that tensors hold at once."""
        return sum(self.kinds.values())

    @functools.cached_property
    def reserved(self) -> int:
        """The bytes that torch's allocator takes for them; this takes some milliseconds to find."""
        return self.reserve()

    @property
    def total(self) -> int:
        """The bytes that the process takes of the device."""
        return self.reserved + self.context


def memory_of_ranks(config: TrainConfig, padded: int, profile: Device) -> list[RankMemory]:
    """Return the memory of each pipeline rank; `padded` is the padded size of the vocabulary."""
    ranks = config.parallel.pipeline_model_parallel_size
    return [memory_of_rank(config, padded, rank, profile) for rank in range(ranks)]


def memory_of_rank(config: TrainConfig, padded: int, pipeline_rank: int, profile: Device) -> RankMemory:
    """Return the memory of a pipeline rank."""
    held = held_bytes(config, padded, pipeline_rank, profile.kind)
    held["buffers"] = buffer_bytes(config, padded, pipeline_rank, profile)
    held["batches"] = batch_bytes(config)
    passes, update = step_bytes(config, padded, pipeline_rank), update_events(config, padded, pipeline_rank)
    most = max(passes, kinds_of(update.events[: update.peak_at]), key=lambda kinds: sum(kinds.values()))
    reserve = functools.partial(reserved_bytes, config, padded, pipeline_rank, profile)
    return RankMemory(add_kinds(held, most), context_bytes(config, profile), reserve)


# What is held throughout


def context_bytes(config: TrainConfig, profile: Device) -> int:
    """Return the bytes of the driver and its libraries."""
    graphs = 0 if reason_against(config, profile.kind) else GRAPHS
    return profile.context_bytes + graphs + NCCL * (profile.kind == NVIDIA and (config.parallel.world_size or 1) > 1)


def buffer_bytes(config: TrainConfig, padded: int, pipeline_rank: int, profile: Device) -> int:
    """Return the bytes that libraries work in, and those that copy engines fetch or fetch from."""
    if profile.kind != NVIDIA:
        return 0
    p, (size, stride) = config.parallel, traffic.groups(config)["data"]
    buffers = sum(WORKSPACES) + traffic.mapped_rows(config, profile.mapped_ranks)
    is_mapped = 1 < size <= profile.mapped_ranks // stride and p.data_parallel_sums != "collectives"
    if p.zero_stage > 1 or not is_mapped:
        return buffers
    units, width = shapes_of_rank(config, padded, pipeline_rank), max(WIDTHS[config.precision.dtype], 4)
    largest = max(flat_size(unit, data_parts(config)) for unit, _ in units)
    return buffers + -(-largest // size) * width + MAPPED_TRIAL


def own_stages(config: TrainConfig, pipeline_rank: int) -> list[Stage]:
    """Return the stages of a pipeline rank."""
    own, ends = stage_numbers(config, pipeline_rank), len(config.stages) - 1
    begins = list(itertools.accumulate(config.stages, initial=0))
    return [Stage(config.stages[s], s == 0, s == ends, begins[s], s - 1 in own, s + 1 in own) for s in own]


# What a step allocates


def run_schedule(config: TrainConfig, sizes: PassSizes, stages: list[Stage], pipeline_rank: int) -> Memory:
    """Return the memory after a rank's passes in the order of its schedule.

    ZeRO 2 and 3 need all of them at once: a pass frees gradients of the one before.
    """
    p, memory = config.parallel, Memory()
    pp = p.pipeline_model_parallel_size
    buckets = make_buckets(memory, sizes, stages) if sizes.parts > 1 else None
    shards = [make_shards(memory, sizes, stage) for stage in stages] if sizes.shards > 1 else []
    if shards:
        begin_step(memory, shards)
    count, running = passed_micro_batches(config, 4), dict[tuple[int, int], Iterator[None]]()
    sent = list[Sized]()
    for op, chunk, i in schedule(p.pipeline_schedule, pp, pipeline_rank, count, config.chunks):
        if op == "F":
            own = shards[chunk] if shards else None
            running[chunk, i] = SizedGPT(sizes, stages[chunk], memory, buckets, own).passes(is_first=not i)
        memory.handed = HANDED * (i + 1)
        next(running[chunk, i])
        if op in ("B", "W"):
            del running[chunk, i]
        if sends(stages[chunk], op):
            sent.append(memory.new(traffic.message_elements(config), sizes.formats.stream, "communication"))
            del sent[: -most_sent(p.pipeline_schedule, pp, config.chunks)]
    sent.clear()
    if shards:
        end_step(memory, shards)
    return memory


def sends(stage: Stage, op: Op) -> bool:
    """Return whether a pass sends a gradient to another rank, where it is kept until it arrives."""
    return op in ("B", "I") and not stage.has_embedding and not stage.is_fed_here


def passed_micro_batches(config: TrainConfig, rounds: int) -> int:
    """Return the micro-batches until the peak: GPipe holds all, others those of some rounds."""
    count, p = config.micro_batches(config.global_batch), config.parallel
    return count if p.pipeline_schedule == "gpipe" else min(count, rounds * p.pipeline_model_parallel_size)


class PassMemory(NamedTuple):
    """What a pass allocates by kind: until its peak, and what it leaves, or frees if below 0."""

    at_peak: dict[str, int]
    left: dict[str, int]
    most: int  # sums of the two
    rest: int


Measure = Callable[[PassSizes, Stage, bool], dict[str, PassMemory]]


def step_bytes(config: TrainConfig, padded: int, pipeline_rank: int, measure: Measure | None = None) -> dict[str, int]:
    """Return the bytes by kind at the peak of a step, beside what is held throughout.

    `measure` may find what a pipeline's passes allocate in another way than `measure_passes`.
    """
    p, sizes = config.parallel, sizes_of(config, padded, PROCESSORS)
    pp, stages = p.pipeline_model_parallel_size, own_stages(config, pipeline_rank)
    if max(sizes.parts, sizes.shards) > 1 and pp > 1:
        memory = run_schedule(config, sizes, stages, pipeline_rank)
        return kinds_of(memory.events[: memory.peak_at])
    begins = config.precision.first_last_layers_bf16  # otherwise the places of layers do not matter
    stages = [replace(stage, begin=stage.begin * begins) for stage in stages]
    if pp == 1:
        return measure_step(sizes, stages[0])
    count = passed_micro_batches(config, 4)
    passes = passes_of_schedule(p.pipeline_schedule, pp, pipeline_rank, count, config.chunks)
    done = dict[tuple[int, bool, str], PassMemory]()
    for stage in set(stages):
        for is_first in (True, False):
            measured = (measure or measure_passes)(sizes, stage, is_first or not sizes.writes_first_products)
            chunks = [chunk for chunk, other in enumerate(stages) if other == stage]
            done |= {(chunk, is_first, op): memory for op, memory in measured.items() for chunk in chunks}
    before = itertools.accumulate((done[each].rest for each in passes[:-1]), initial=0)
    counts = itertools.accumulate((sends(stages[chunk], op) for chunk, _, op in passes[:-1]), initial=0)
    message = rounded(traffic.message_elements(config) * sizes.formats.stream)
    most = most_sent(p.pipeline_schedule, pp, config.chunks)
    sent = [min(count, most) * message for count in counts]
    peaks = [now + kept + done[each].most for now, kept, each in zip(before, sent, passes, strict=True)]
    peak_at = peaks.index(max(peaks))
    kinds = Counter(done[passes[peak_at]].at_peak)
    kinds["communication"] = sent[peak_at]
    for each, times in Counter(passes[:peak_at]).items():
        for kind, size in done[each].left.items():
            kinds[kind] += times * size
    return dict(kinds)


@functools.lru_cache(1024)
def passes_of_schedule(name: ScheduleName, pp: int, rank: int, count: int, chunks: int) -> list[tuple[int, bool, Op]]:
    """Return a rank's passes: the chunk, whether the micro-batch is the first, and the action."""
    return [(chunk, not i, op) for op, chunk, i in schedule(name, pp, rank, count, chunks)]


def add_kinds(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
    return {kind: a.get(kind, 0) + b.get(kind, 0) for kind in a | b}


def batch_bytes(config: TrainConfig) -> int:
    """Return the bytes of a step's samples, which are on the device from its begin."""
    d, cp = config.data, config.parallel.context_parallel_size
    tokens = config.micro_batch * (d.seq_length or 0) // cp
    masks_loss, resets_positions, resets_attention = d.document_effects
    wide, narrow = 2 + resets_positions, masks_loss + cp * resets_attention  # of 8 and 4 bytes a token
    each = wide * rounded(8 * tokens) + narrow * rounded(4 * tokens) + rounded(8 * config.micro_batch)
    return config.micro_batches(config.global_batch) * each


@functools.lru_cache(4096)
def measure_step(sizes: PassSizes, stage: Stage) -> dict[str, int]:
    """Return the bytes by kind at the peak of a micro-batch forward and backward."""
    memory = Memory()
    SizedGPT(sizes, stage, memory).run_step()
    return kinds_of(memory.events[: memory.peak_at])


@functools.lru_cache(4096)
def measure_passes(sizes: PassSizes, stage: Stage, is_first: bool) -> dict[str, PassMemory]:
    """Return what a micro-batch's passes through a stage allocate: F and B, or F, I and W."""
    return {op: pass_memory(events) for op, events in record_passes(sizes, stage, is_first).items()}


def pass_memory(events: Sequence[Event]) -> PassMemory:
    sizes = list(itertools.accumulate((size for _, size, _, _ in events), initial=0))
    at_peak, left = kinds_of(events[: sizes.index(max(sizes))]), kinds_of(events)
    return PassMemory(at_peak, left, max(sizes), sizes[-1])


def record_passes(sizes: PassSizes, stage: Stage, is_first: bool) -> dict[str, list[Event]]:
    """Return what a micro-batch's passes through a stage allocate and free, in order."""
    memory, out = Memory(), dict[str, list[Event]]()
    passes = SizedGPT(sizes, stage, memory).passes(is_first)
    for op in ("F", "I", "W") if sizes.splits_backward else ("F", "B"):
        begin = len(memory.events)
        next(passes)
        out[op] = memory.events[begin:]
    return out


# What torch's allocator takes


def reserved_bytes(config: TrainConfig, padded: int, pipeline_rank: int, profile: Device) -> int:
    """Return the most bytes that torch's allocator reserves in the first steps and for graphs."""
    allocator, keys = CachingAllocator(), itertools.count(2 * SENT, -1)  # keys that no event has
    beside = buffer_bytes(config, padded, pipeline_rank, profile) - sum(WORKSPACES)
    buffers = (*WORKSPACES, beside) if profile.kind == NVIDIA else ()
    held = *held_tensors(config, padded, pipeline_rank, profile.kind), *buffers
    for size in held:
        if size:
            allocator.allocate(next(keys), rounded(size))
    # Sums of ZeRO 3 are events of each unit too.
    step = [event for event in step_events(config, padded, pipeline_rank) if event[0] != GRADIENTS]
    update = update_events(config, padded, pipeline_rank).events
    for _ in range(2):
        allocator.run(step)
        allocator.run(update)
    if reason_against(config, profile.kind) is None:
        allocator.empty_cache()
        allocator.begin_pool()
        allocator.run(step)
        allocator.run(update)
    return allocator.most


def held_tensors(config: TrainConfig, padded: int, pipeline_rank: int, kind: str) -> list[int]:
    """Return the bytes of the buffers that a device holds; ZeRO 3 has a parameter's apart."""
    o, p, parts = config.optimizer, config.parallel, data_parts(config)
    if p.zero_stage < 3 or parts == 1:
        held = held_bytes(config, padded, pipeline_rank, kind)
        number = 3 + (o.ema > 0)  # masters and moments, and the average of --ema
        return [held["gradients"], held["weights"], *[held["optimizer"] // number] * number]
    if p.offloads:
        return []
    full, masters, moments = max(WIDTHS[config.precision.dtype], 4), list[int](), list[int]()
    for unit, number in shapes_of_rank(config, padded, pipeline_rank):
        for name, shape in unit.items():
            own, rule = own_size(shape, parts), treatment_of(o, config.model, name, len(shape)).rule
            masters += [own * full] * number * (1 + (o.ema > 0))
            moments += [own * bytes_of_moment(o, full)] * number * len(STATE[rule])
    return [*masters, *moments]


def freed(event: Event) -> Event:
    key, size, kind, stream = event
    return key, -size, kind, stream


def step_events(config: TrainConfig, padded: int, pipeline_rank: int) -> list[Event]:
    """Return what a rank's passes allocate and free, in order."""
    p, sizes = config.parallel, sizes_of(config, padded, PROCESSORS)
    name, pp, stages = p.pipeline_schedule, p.pipeline_model_parallel_size, own_stages(config, pipeline_rank)
    if pp == 1:
        memory = Memory()
        SizedGPT(sizes, stages[0], memory).run_step()
        return memory.events
    if max(sizes.parts, sizes.shards) > 1:
        return run_schedule(config, sizes, stages, pipeline_rank).events
    recorded = [[record_passes(sizes, stage, is_first) for is_first in (False, True)] for stage in stages]
    most = 1 + max(key for each in recorded for passes in each for events in passes.values() for key, *_ in events)
    count, out, sent = passed_micro_batches(config, 2), list[Event](), list[Event]()
    message, kept = rounded(traffic.message_elements(config) * sizes.formats.stream), most_sent(name, pp, config.chunks)
    for op, chunk, i in schedule(name, pp, pipeline_rank, count, config.chunks):
        first = most * (chunk * count + i)  # keys of a micro-batch's tensors count from here
        handed = HANDED * (i + 1)
        out += [
            (handed if key == HANDED else first + key, size, kind, stream)
            for key, size, kind, stream in recorded[chunk][not i][op]
        ]
        if sends(stages[chunk], op):
            sent.append((SENT - len(sent), message, "communication", MAIN))
            out.append(sent[-1])
            if len(sent) > kept:
                out.append(freed(sent[-1 - kept]))
    out += map(freed, sent[-kept:])
    return out
