"""The memory of each pipeline rank of a run, in bytes by kind, from its settings alone. No torch.

A rank holds weights, gradients and optimizer state throughout. What a step allocates beside them
is found by running it with tensors of which only the size counts (blocks.py): a micro-batch
forward and backward, or the passes of a pipeline's schedule.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from meshwright.model.counts import layer_matrices
from meshwright.optim.rule_table import STATE, rule_of
from meshwright.parallel.pipeline_schedule import schedule, stages_of
from meshwright.parallel.shard import aligned
from meshwright.plan.blocks import PassSizes, SizedGPT, Stage, sizes_of
from meshwright.plan.parameters import WIDTHS, Shapes, shapes_of_layer, shapes_of_rank
from meshwright.plan.tensors import Memory
from meshwright.settings.schema import TrainConfig

PROCESSORS = 132  # of an H100 and H200; they decide about small sums only
BLOCK = 128  # elements of an entry in the tables of AdamW
WORKSPACES = 65 << 20  # of cuBLAS: 32 MiB for each of two threads, and 1 MiB


class Device(Protocol):
    """The part of a device's profile that memory depends on."""

    @property
    def kind(self) -> str: ...

    @property
    def context_bytes(self) -> int: ...


@dataclass(frozen=True)
class RankMemory:
    """The bytes of one rank: by kind at the peak of a step, and all that its process takes."""

    kinds: dict[str, int]  # weights, gradients, optimizer, activations, logits, buffers, communication, graphs
    allocated: int  # by tensors at the peak
    reserved: int  # by torch's allocator
    context: int  # by the driver and its libraries

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
    kinds = Counter(held_bytes(config, padded, pipeline_rank, profile.kind))
    kinds.update(step_bytes(config, padded, pipeline_rank))
    kinds["buffers"] += WORKSPACES if profile.kind == "cuda" else 0
    allocated = sum(kinds.values())
    return RankMemory(dict(kinds), allocated, allocated + allocated // 20, profile.context_bytes)


# What is held throughout


def held_bytes(config: TrainConfig, padded: int, pipeline_rank: int, kind: str) -> dict[str, int]:
    """Return the bytes of weights, gradients and optimizer state that a device holds."""
    p, o, low, parts = config.parallel, config.optimizer, WIDTHS[config.precision.dtype], data_parts(config)
    units = shapes_of_rank(config, padded, pipeline_rank)
    full, n = max(low, 4), sum(flat_size(unit, parts) for unit in units)
    by_rule = Counter[str]()
    for unit in units:
        for name, shape in unit.items():
            by_rule[rule_of(o, name, len(shape))] += aligned(math.prod(shape))
    share = n // parts
    is_separate = low != full or p.offloads or parts > 1
    keeps_all = p.zero_stage < 2 or parts == 1
    moments = sum(len(STATE[rule]) * count for rule, count in by_rule.items()) // parts
    optimizer = 0 if p.offloads else full * (moments + share * is_separate)
    if kind == "cuda" and full == 4 and not p.offloads and by_rule["adamw"]:  # tables of blocks: updated, counted
        optimizer += 8 * (by_rule["adamw"] // parts + share) // BLOCK
    weights = n * low + 2 * fp8_parameters(config, pipeline_rank)
    return {"weights": weights, "gradients": full * (n * keeps_all + share * (parts > 1)), "optimizer": optimizer}


def fp8_parameters(config: TrainConfig, pipeline_rank: int) -> int:
    """Return the parameters of which a rank keeps casts in fp8, as they are and transposed."""
    m, p = config.model, config.parallel
    shapes = shapes_of_layer(m, p.tensor_model_parallel_size)
    layers = [i for stage in own_stages(config, pipeline_rank) for i in range(stage.begin, stage.begin + stage.layers)]
    each = sum(math.prod(shapes[f"{name}.weight"]) for name in layer_matrices(m))
    return each * sum(config.precision.multiplies_fp8(i, m.num_layers or 0) for i in layers)


def own_stages(config: TrainConfig, pipeline_rank: int) -> list[Stage]:
    """Return the stages of a pipeline rank."""
    p, ends = config.parallel, len(config.stages) - 1
    own = stages_of(p.pipeline_schedule, pipeline_rank, p.pipeline_model_parallel_size, config.chunks)
    return [Stage(config.stages[s], s == 0, s == ends, sum(config.stages[:s])) for s in own]


def data_parts(config: TrainConfig) -> int:
    """Return the number of ranks that ZeRO shards over."""
    p = config.parallel
    return config.dp * p.context_parallel_size // p.num_distributed_optimizer_instances if p.zero_stage else 1


def flat_size(unit: Shapes, parts: int) -> int:
    """Return the elements of a unit in the flat buffers."""
    return aligned(sum(aligned(math.prod(shape)) for shape in unit.values()), parts)


# What a step allocates


class PassMemory(NamedTuple):
    """What a pass allocates by kind: until its peak, and what it leaves, or frees if below 0."""

    at_peak: dict[str, int]
    left: dict[str, int]


def step_bytes(config: TrainConfig, padded: int, pipeline_rank: int) -> dict[str, int]:
    """Return the bytes by kind at the peak of a step, beside what is held throughout."""
    p, sizes = config.parallel, sizes_of(config, padded, PROCESSORS)
    pp, stages = p.pipeline_model_parallel_size, own_stages(config, pipeline_rank)
    if not config.precision.first_last_layers_bf16:  # then their places do not matter
        stages = [replace(stage, begin=0) for stage in stages]
    if pp == 1:
        return measure_step(sizes, stages[0])
    count = min(config.micro_batches(config.global_batch), 4 * pp)
    now, peak = dict[str, int](), dict[str, int]()
    for op, chunk, _ in schedule(p.pipeline_schedule, pp, pipeline_rank, count, config.chunks):
        done = measure_passes(sizes, stages[chunk])[op]
        peak = max(peak, add_kinds(now, done.at_peak), key=lambda kinds: sum(kinds.values()))
        now = add_kinds(now, done.left)
    return peak


def add_kinds(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
    return {kind: a.get(kind, 0) + b.get(kind, 0) for kind in a | b}


@functools.lru_cache(4096)
def measure_step(sizes: PassSizes, stage: Stage) -> dict[str, int]:
    """Return the bytes by kind at the peak of a micro-batch forward and backward."""
    memory = Memory()
    SizedGPT(sizes, stage, memory).run_step()
    return memory.kinds_at(memory.peak_at)


@functools.lru_cache(4096)
def measure_passes(sizes: PassSizes, stage: Stage) -> dict[str, PassMemory]:
    """Return what the passes of a pipeline's stage allocate: F and B, or F, I and W."""
    memory, out = Memory(), dict[str, PassMemory]()
    gpt = SizedGPT(sizes, stage, memory)
    passes = gpt.passes()
    for op in ("F", "I", "W") if sizes.splits_backward else ("F", "B"):
        begin = memory.begin()
        next(passes)
        out[op] = PassMemory(*memory.since(begin))
    return out
