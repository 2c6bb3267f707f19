"""Estimates of memory for a search: few predictions of small stages serve many layouts."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

from meshwright.apps.plan.blocks import PassSizes, Stage, sizes_of
from meshwright.apps.plan.memory import (
    PROCESSORS,
    PassMemory,
    batch_bytes,
    buffer_bytes,
    context_bytes,
    measure_passes,
    measure_step,
    own_stages,
    passed_micro_batches,
    passes_of_schedule,
    step_bytes,
)
from meshwright.apps.plan.prediction import Prediction
from meshwright.apps.plan.tensors import ROUNDING
from meshwright.config.fields import with_settings
from meshwright.config.schema import TrainConfig
from meshwright.parallel.pipeline_schedule import SPLIT_BACKWARD
from meshwright.training.sizes import held_bytes

Key = tuple[object, ...]
MOST_SAVED = 20  # tensors of a layer
SURE = 1.03  # a layout does not fit if its estimate is more than this times the memory


class MemoryEstimates:
    """Bytes that tensors of the first or last pipeline rank need, which need the most as a rule.

    What passes allocate is predicted for stages of two and of three layers, and grows evenly with
    them. What ZeRO 2 and 3 keep in full for a while does not, and is left out: with these, and in
    what torch's allocator takes, a layout may need more.
    """

    def __init__(self) -> None:
        self.states: dict[Key, int] = {}
        self.saved: dict[Key, float] = {}
        self.passes: dict[Key, int] = {}

    def may_fit(self, prediction: Prediction) -> bool:
        """Return whether both ends of the pipeline may have room."""
        most = prediction.machine.profile.memory_bytes * SURE
        return self.may_begin(prediction) and all(self.at_rank(prediction, rank) <= most for rank in ends(prediction))

    def may_begin(self, prediction: Prediction) -> bool:
        """Return whether there may be room until the first backward pass: a quicker answer."""
        have = prediction.machine.profile.memory_bytes
        return self.held(prediction) <= have and self.waiting(prediction) <= have

    def held(self, prediction: Prediction) -> int:
        """Return the bytes of the process of the fuller end, without what passes allocate."""
        return max(self.held_at(prediction, rank) for rank in ends(prediction))

    def at_least(self, prediction: Prediction) -> int:
        """Return the bytes of the process of the fuller end."""
        return max(self.at_rank(prediction, rank) for rank in ends(prediction))

    def at_rank(self, prediction: Prediction, rank: int) -> int:
        c, profile = prediction.config, prediction.machine.profile
        beside = batch_bytes(c) + buffer_bytes(c, prediction.padded, rank, profile)
        beside += context_bytes(c, profile) - profile.context_bytes
        return self.held_at(prediction, rank) + beside + self.passes_at(prediction, rank)

    def held_at(self, prediction: Prediction, rank: int) -> int:
        c, p, profile = prediction.config, prediction.config.parallel, prediction.machine.profile
        ranks = p.tensor_model_parallel_size, p.context_parallel_size, c.dp
        key = (rank, *order_of(c), *ranks, p.zero_stage, p.cpu_optimizer, c.precision.fp8_format, c.precision.dtype)
        if key not in self.states:
            held = held_bytes(c, prediction.padded, rank, profile.kind)
            self.states[key] = sum(held.values()) + profile.context_bytes
        return self.states[key]

    def waiting(self, prediction: Prediction) -> int:
        """Return the bytes of the first rank, with what waits for its first backward pass."""
        c, p = prediction.config, prediction.config.parallel
        held = self.held_at(prediction, 0)
        if differs_by_layer(c):
            return held
        key = (p.pipeline_model_parallel_size > 1 and p.pipeline_schedule in SPLIT_BACKWARD, *work_of(c))
        if key not in self.saved:
            self.saved[key] = saved_bytes(c, prediction.padded)
        return held + round(waiting_layers(c) * c.micro_batch * self.saved[key])

    def passes_at(self, prediction: Prediction, rank: int) -> int:
        c = prediction.config
        number = min(c.micro_batches(c.global_batch), 2 * c.parallel.pipeline_model_parallel_size)
        key = (rank, number, c.micro_batch, *order_of(c), *work_of(c))
        if key not in self.passes:
            unsharded = with_settings(c, zero_stage=min(c.parallel.zero_stage, 1))
            self.passes[key] = passes_bytes(unsharded, prediction.padded, rank)
        return self.passes[key]


def ends(prediction: Prediction) -> list[int]:
    """Return the first and the last pipeline rank."""
    return sorted({0, prediction.config.parallel.pipeline_model_parallel_size - 1})


def order_of(c: TrainConfig) -> Key:
    """Return what the order of a pipeline's passes depends on, beside micro-batches."""
    return c.parallel.pipeline_model_parallel_size, c.parallel.pipeline_schedule, c.chunks


def work_of(c: TrainConfig) -> Key:
    """Return what a search changes of the work of a layer for a sample."""
    p, t = c.parallel, c.training
    ranks = p.tensor_model_parallel_size, p.context_parallel_size, p.sequence_parallel
    return (*ranks, c.precision.fp8_format, c.precision.dtype, t.recompute_granularity)


def differs_by_layer(c: TrainConfig) -> bool:
    """Return whether passes do not allocate the same for each layer."""
    return bool(c.model.windowed_layers) or c.precision.first_last_layers_bf16 or c.training.recompute_num_layers > 1


def saved_bytes(c: TrainConfig, padded: int) -> float:
    """Return the bytes that a layer saves of each sample, without what sizes are rounded up by."""
    sizes = sizes_of(with_settings(c, zero_stage=0, micro_batch_size=1), padded, PROCESSORS)
    two, three = (measure_passes(sizes, Stage(n, False, False), True)["F"] for n in (2, 3))
    return max(0, three.rest - two.rest - MOST_SAVED * ROUNDING)


def waiting_layers(c: TrainConfig) -> int:
    """Return the layers that micro-batches pass on the first rank until a backward pass."""
    pp, name, stages = c.parallel.pipeline_model_parallel_size, c.parallel.pipeline_schedule, own_stages(c, 0)
    if pp == 1:
        return stages[0].layers
    passes = passes_of_schedule(name, pp, 0, passed_micro_batches(c, 4), c.chunks)
    return sum(stages[chunk].layers for chunk, _, _ in itertools.takewhile(lambda each: each[2] == "F", passes))


def passes_bytes(c: TrainConfig, padded: int, rank: int) -> int:
    """Return the bytes at the peak of a rank's passes."""
    stage, is_like = own_stages(c, rank)[0], not differs_by_layer(c)
    if c.parallel.pipeline_model_parallel_size > 1 or stage.layers <= 3 or not is_like:
        return sum(step_bytes(c, padded, rank, measure_small if is_like else None).values())
    sizes = sizes_of(c, padded, PROCESSORS)
    two, three = (sum(measure_step(sizes, replace(stage, layers=layers)).values()) for layers in (2, 3))
    return two + (stage.layers - 2) * (three - two)


@functools.lru_cache(4096)
def measure_small(sizes: PassSizes, stage: Stage, is_first: bool) -> dict[str, PassMemory]:
    """Return what passes allocate, from a stage of two layers and what a third one adds."""
    if stage.layers <= 3:
        return measure_passes(sizes, stage, is_first)
    middle = replace(stage, has_embedding=False, has_head=False)
    two, less, more = (
        measure_passes(sizes, replace(each, layers=layers), is_first)
        for each, layers in ((stage, 2), (middle, 2), (middle, 3))
    )
    return {op: extended(two[op], less[op], more[op], stage.layers - 2) for op in two}


def extended(memory: PassMemory, less: PassMemory, more: PassMemory, times: int) -> PassMemory:
    """Return `memory` and so many times the difference of two others."""

    def add(kinds: dict[str, int], less: dict[str, int], more: dict[str, int]) -> dict[str, int]:
        return {kind: kinds.get(kind, 0) + times * (more.get(kind, 0) - less.get(kind, 0)) for kind in kinds | more}

    return PassMemory(
        add(memory.at_peak, less.at_peak, more.at_peak),
        add(memory.left, less.left, more.left),
        memory.most + times * (more.most - less.most),
        memory.rest + times * (more.rest - less.rest),
    )
