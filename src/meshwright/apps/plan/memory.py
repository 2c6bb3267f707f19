"""The memory of each pipeline rank of a run, in bytes by kind. No torch until it is measured.

A rank holds weights, gradients and optimizer state throughout. What a step allocates beside them is
measured: the program's own steps run on tensors without memory (measure/), with few layers.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from meshwright.apps.plan import traffic
from meshwright.apps.plan.measure.allocator import CachingAllocator, MemoryEvent, rounded
from meshwright.base.device import HIDES, NVIDIA
from meshwright.config import flags
from meshwright.config.schema import TrainConfig
from meshwright.optim.rule_table import STATE, param_group_of
from meshwright.optim.rule_table import state_bytes as bytes_of_moment
from meshwright.parallel import shard
from meshwright.training.graph_rule import reason_against
from meshwright.training.parameters import WIDTHS, data_parts, flat_size, shapes_of_rank
from meshwright.training.sizes import held_bytes

if TYPE_CHECKING:
    from meshwright.training.network import Model

GRAPHS = 72 << 20  # bytes of the driver for CUDA graphs, measured on an H100
NCCL = 365 << 20  # bytes of NCCL in each of several processes, measured on two H100
CHILD_SECONDS = 300  # in which a process of its own must have measured
SYMMETRIC_TRIAL = 16 << 20  # bytes of the trial of sums by copy engines
# Memory that cuBLAS works in, once for the thread of each pass, and that of cuBLASLt.
WORKSPACES = 32 << 20, 32 << 20, 1 << 20

# What steps allocate: the bytes by kind at their peak, and each allocation in order.
Measured = tuple[dict[str, int], list[MemoryEvent]]


class Device(Protocol):
    """The part of a device's profile that memory depends on."""

    @property
    def kind(self) -> str: ...

    @property
    def context_bytes(self) -> int: ...

    @property
    def symmetric_ranks(self) -> int: ...


@dataclass(frozen=True)
class RankMemory:
    """The bytes of one rank: by kind at the peak of a step, and in all that its process takes."""

    # weights, gradients, optimizer, activations, logits, buffers, batches, communication
    kinds: dict[str, int]
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


def can_measure() -> bool:
    """Return whether torch is there, without which nothing can be measured."""
    return importlib.util.find_spec("torch") is not None


def memory_of_ranks(
    config: TrainConfig, padded: int, profile: Device, model: Model | None = None
) -> list[RankMemory]:
    """Return the memory of each pipeline rank; `padded` is the padded size of the vocabulary."""
    ranks = config.parallel.pipeline_model_parallel_size
    return [memory_of_rank(config, padded, rank, profile, model) for rank in range(ranks)]


def memory_of_rank(
    config: TrainConfig,
    padded: int,
    pipeline_rank: int,
    profile: Device,
    model: Model | None = None,
) -> RankMemory:
    """Return the memory of a pipeline rank, also of a model of the user's own."""
    from meshwright.apps.plan.measure.stages import memory_of_steps

    steps = memory_of_steps(config, padded, pipeline_rank, model)
    return with_what_is_held(config, padded, pipeline_rank, profile, (steps.peak, steps.events))


def measure_in_child(
    config: TrainConfig,
    padded: int,
    profile: Device,
    ranks: Sequence[int],
    niceness: int = 10,
) -> list[RankMemory] | None:
    """Return the memory of pipeline ranks, measured in a process of its own; None if that fails.

    A process that trains calls this, since a measurement replaces parts of torch for a while.
    """
    given = {
        "settings": flags.to_dict(config),
        "padded": padded,
        "ranks": list(ranks),
        "niceness": niceness,
    }
    try:
        # The child has no device, lets the training go first, and is given up if it hangs.
        done = subprocess.run(
            [sys.executable, "-m", "meshwright.apps.plan.measure"],
            input=json.dumps(given),
            env=os.environ | dict.fromkeys(HIDES.values(), ""),
            capture_output=True,
            text=True,
            timeout=CHILD_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    found = []
    for rank, (peak, events) in zip(ranks, json.loads(done.stdout), strict=True):
        measured = peak, [MemoryEvent(*each) for each in events]
        found.append(with_what_is_held(config, padded, rank, profile, measured))
    return found


def with_what_is_held(
    config: TrainConfig, padded: int, pipeline_rank: int, profile: Device, measured: Measured
) -> RankMemory:
    """Return the memory of a rank from what its steps allocate."""
    peak, events = measured
    kinds = Counter(held_between_steps(config, padded, pipeline_rank, profile.kind))
    kinds["buffers"] += buffer_bytes(config, padded, pipeline_rank, profile)
    kinds["batches"] += batch_bytes(config)
    kinds.update(peak)
    reserve = functools.partial(reserved_bytes, config, padded, pipeline_rank, profile, events)
    return RankMemory(dict(kinds), context_bytes(config, profile), reserve)


# What is held throughout


def held_between_steps(
    config: TrainConfig, padded: int, pipeline_rank: int, kind: str
) -> dict[str, int]:
    """Return the bytes that a step finds: the sums of ZeRO 3 are gone when it begins."""
    held = held_bytes(config, padded, pipeline_rank, kind)
    if config.parallel.zero_stage == 3 and data_parts(config) > 1:
        held["gradients"] = 0
    return held


def context_bytes(config: TrainConfig, profile: Device) -> int:
    """Return the bytes of the driver and its libraries."""
    size = profile.context_bytes
    if reason_against(config, profile.kind) is None:
        size += GRAPHS
    if profile.kind == NVIDIA and (config.parallel.world_size or 1) > 1:
        size += NCCL
    return size


def buffer_bytes(config: TrainConfig, padded: int, pipeline_rank: int, profile: Device) -> int:
    """Return the bytes that libraries work in, and those that copy engines fetch or fetch from."""
    if profile.kind != NVIDIA:
        return 0
    p = config.parallel
    size, stride = traffic.groups(config)["data"]
    buffers = sum(WORKSPACES) + traffic.symmetric_rows(config, profile.symmetric_ranks)
    is_symmetric = (
        1 < size <= profile.symmetric_ranks // stride and p.data_parallel_sums != "collectives"
    )
    if p.zero_stage > 1 or not is_symmetric:
        return buffers
    # A rank's part of the largest bucket, in full precision.
    units = shapes_of_rank(config, padded, pipeline_rank)
    largest = max(flat_size(unit, data_parts(config)) for unit, _ in units)
    width = max(WIDTHS[config.precision.dtype], 4)
    return buffers + -(-largest // size) * width + SYMMETRIC_TRIAL


def batch_bytes(config: TrainConfig) -> int:
    """Return the bytes of a step's samples, which are on the device from its begin."""
    cp = config.parallel.context_parallel_size
    tokens = config.micro_batch * (config.data.seq_length or 0) // cp
    masks_loss, resets_positions, resets_attention = config.data.document_effects
    wide = 2 + resets_positions  # of 8 bytes a token: tokens, targets, positions
    narrow = masks_loss + cp * resets_attention  # of 4 bytes a token
    each = wide * rounded(8 * tokens) + narrow * rounded(4 * tokens)
    each += rounded(8 * config.micro_batch)  # sample numbers
    return config.micro_batches(config.global_batch) * each


# What torch's allocator takes


def reserved_bytes(
    config: TrainConfig, padded: int, pipeline_rank: int, profile: Device, events: list[MemoryEvent]
) -> int:
    """Return the most bytes that torch's allocator reserves in the first steps and for graphs."""
    # What is held throughout.
    sizes = held_tensors(config, padded, pipeline_rank, profile.kind)
    sizes.append(batch_bytes(config))
    if profile.kind == NVIDIA:
        buffers = buffer_bytes(config, padded, pipeline_rank, profile)
        sizes += [*WORKSPACES, buffers - sum(WORKSPACES)]
    allocator, keys = CachingAllocator(), itertools.count(-1, -1)  # keys that no event has
    for size in sizes:
        if size:
            allocator.allocate(next(keys), rounded(size))

    # Two steps, and that which is captured into a graph, with a pool of its own.
    for _ in range(2):
        allocator.run(events)
    if reason_against(config, profile.kind) is None:
        allocator.empty_cache()
        allocator.begin_pool()
        allocator.run(events)
    return allocator.most


def held_tensors(config: TrainConfig, padded: int, pipeline_rank: int, kind: str) -> list[int]:
    """Return the bytes of the buffers that a device holds; ZeRO 3 has a parameter's apart."""
    o = config.optimizer
    p = config.parallel
    parts = data_parts(config)
    averages = int(o.ema > 0)
    if p.zero_stage < 3 or parts == 1:
        held = held_bytes(config, padded, pipeline_rank, kind)
        number = 3 + averages  # with the master and two moments
        return [held["gradients"], held["weights"], *[held["optimizer"] // number] * number]
    if p.offloads:
        return []
    full = max(WIDTHS[config.precision.dtype], 4)
    masters = list[int]()
    moments = list[int]()
    # ZeRO 3 updates each parameter apart, so its master and moments are tensors of their own.
    for unit, number in shapes_of_rank(config, padded, pipeline_rank):
        for name, shape in unit.items():
            own = own_size(shape, parts)
            rule = param_group_of(o, config.model, name, len(shape)).rule
            masters += [own * full] * number * (1 + averages)
            moments += [own * bytes_of_moment(o, full)] * number * len(STATE[rule])
    return [*masters, *moments]


def own_size(shape: tuple[int, ...], ranks: int) -> int:
    """Return the elements of the first rank's rows."""
    dimension, _, count = shard.rows(shape, ranks)
    return count * math.prod(shape) // shape[dimension]
