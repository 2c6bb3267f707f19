"""The memory of each pipeline rank of a run, in bytes by kind, from its settings alone. No torch.

A rank holds weights, gradients and optimizer state throughout. What a step allocates beside them
is found by running it with tensors of which only the size counts (blocks.py): a micro-batch
forward and backward, or the passes of a pipeline's schedule.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from meshwright.parallel.pipeline_schedule import schedule, stages_of
from meshwright.parallel.shard import aligned
from meshwright.plan.blocks import PassSizes, SizedGPT, Stage, sizes_of
from meshwright.plan.parameters import WIDTHS, Shapes, shapes_of_rank
from meshwright.plan.tensors import Memory
from meshwright.settings.schema import TrainConfig

PROCESSORS = 132  # of an H100 and H200; they decide about small sums only
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
    p, rule = config.parallel, config.optimizer.optimizer
    low = WIDTHS[config.precision.dtype]
    full = max(low, 4)
    parts = data_parts(config)
    sizes = [flat_size(unit, parts) for unit in shapes_of_rank(config, padded, pipeline_rank)]
    n = sum(sizes)
    share = n // parts
    is_separate = low != full or p.offloads or parts > 1
    keeps_all = p.zero_stage < 2 or parts == 1
    moments = share * (2 if rule in ("adam", "adamw") else 1)
    if rule == "muon":
        moments += sum(share_of_adamw(unit) for unit in shapes_of_rank(config, padded, pipeline_rank)) // parts
    has_tables = kind == "cuda" and full == 4 and not p.offloads and rule in ("adam", "adamw", "muon")
    optimizer = 0 if p.offloads else full * (moments + share * is_separate)
    gradients = full * (n * keeps_all + share * (parts > 1))
    weights = n * low
    return {"weights": weights, "gradients": gradients, "optimizer": optimizer + has_tables * share // 8}


def data_parts(config: TrainConfig) -> int:
    """Return the number of ranks that ZeRO shards over."""
    p = config.parallel
    return config.dp * p.context_parallel_size // p.num_distributed_optimizer_instances if p.zero_stage else 1


def flat_size(unit: Shapes, parts: int) -> int:
    """Return the elements of a unit in the flat buffers."""
    return aligned(sum(aligned(math.prod(shape)) for shape in unit.values()), parts)


def share_of_adamw(unit: Shapes) -> int:
    """Return the elements of a unit that Muon leaves to AdamW."""
    return sum(math.prod(s) for name, s in unit.items() if len(s) == 1 or name.endswith("bias") or "wte" in name)


# What a step allocates


class PassMemory(NamedTuple):
    """What a pass allocates by kind: until its peak, and what it leaves, or frees if below 0."""

    at_peak: dict[str, int]
    left: dict[str, int]


def step_bytes(config: TrainConfig, padded: int, pipeline_rank: int) -> dict[str, int]:
    """Return the bytes by kind at the peak of a step, beside what is held throughout."""
    p, sizes = config.parallel, sizes_of(config, padded, PROCESSORS)
    pp, ends = p.pipeline_model_parallel_size, len(config.stages) - 1
    if pp == 1:
        return measure_step(sizes, Stage(config.model.num_layers or 0))
    own = stages_of(p.pipeline_schedule, pipeline_rank, pp, config.chunks)
    stages = [Stage(config.stages[s], s == 0, s == ends) for s in own]
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
