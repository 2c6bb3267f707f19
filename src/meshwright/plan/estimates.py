"""Estimates of memory for a search: one prediction of small stages serves many layouts."""

from __future__ import annotations

from typing import NamedTuple

from meshwright.plan.memory import WORKSPACES, batch_bytes, held_bytes, step_bytes
from meshwright.plan.prediction import Prediction, with_settings
from meshwright.settings.schema import TrainConfig

PER_SAMPLE = ("activations", "logits")  # kinds that grow with the micro-batch


class Passes(NamedTuple):
    """Bytes of a rank's passes: for each sample of a micro-batch, and whatever its size."""

    per_sample: float
    fixed: float


class MemoryEstimates:
    """Bytes of the first or last pipeline rank, which need the most as a rule.

    What passes allocate is predicted for stages of two and of three layers and micro-batches of one
    sample; it grows evenly with both.
    """

    def __init__(self) -> None:
        self.passes: dict[tuple[object, ...], Passes] = {}
        self.held: dict[tuple[object, ...], int] = {}

    def total(self, prediction: Prediction) -> int:
        """Return the bytes that the process of the fuller end takes."""
        c, p = prediction.config, prediction.config.parallel
        profile = prediction.machine.profile
        ends = {0, p.pipeline_model_parallel_size - 1}
        each = (self.held_at(prediction, rank) + self.passes_at(prediction, rank, c.micro_batch) for rank in ends)
        return round(max(each)) + profile.context_bytes

    def at_least(self, prediction: Prediction) -> int:
        """Return the same without what passes allocate."""
        ends = {0, prediction.config.parallel.pipeline_model_parallel_size - 1}
        held = max(self.held_at(prediction, rank) for rank in ends)
        return held + prediction.machine.profile.context_bytes

    def held_at(self, prediction: Prediction, rank: int) -> int:
        c, p = prediction.config, prediction.config.parallel
        key = (rank, *layout_of(c), c.dp, p.zero_stage, p.cpu_optimizer)
        if key not in self.held:
            held = held_bytes(c, prediction.padded, rank, prediction.machine.profile.kind)
            self.held[key] = sum(held.values())
        return self.held[key]

    def passes_at(self, prediction: Prediction, rank: int, samples: int) -> float:
        c, p = prediction.config, prediction.config.parallel
        number = min(c.micro_batches(c.global_batch), 2 * p.pipeline_model_parallel_size)
        recompute = c.training.recompute_granularity
        cut = (p.zero_stage, c.dp * (p.zero_stage == 3)) if p.zero_stage > 1 else ()
        key = (rank, *layout_of(c), p.sequence_parallel, cut, recompute, number)
        if key not in self.passes:
            self.passes[key] = passes_of(prediction, rank, number)
        return samples * self.passes[key].per_sample + self.passes[key].fixed


def layout_of(c: TrainConfig) -> tuple[object, ...]:
    p = c.parallel
    sizes = p.tensor_model_parallel_size, p.context_parallel_size, p.pipeline_model_parallel_size
    return (*sizes, p.pipeline_schedule, c.chunks, c.precision.fp8_format, c.precision.dtype)


def passes_of(prediction: Prediction, rank: int, number: int) -> Passes:
    """Return what a rank's passes allocate, from stages of two and three layers."""
    c, stage = prediction.config, max(prediction.config.stages)
    if stage <= 3 or c.model.windowed_layers or c.precision.first_last_layers_bf16:
        return passes_with(prediction, rank, number, None)
    two, three = (passes_with(prediction, rank, number, layers) for layers in (2, 3))
    per_sample, fixed = (a + (b - a) * (stage - 2) for a, b in zip(two, three, strict=True))
    return Passes(per_sample, fixed)


def passes_with(prediction: Prediction, rank: int, number: int, layers: int | None) -> Passes:
    """Return the same of stages with so many layers."""
    c = prediction.config
    small = with_settings(c, micro_batch_size=1, global_batch_size=c.dp * number, num_accumulation_steps=None)
    kinds = step_bytes(small, prediction.padded, rank, layers)
    per_sample = sum(kinds.get(kind, 0) for kind in PER_SAMPLE)
    return Passes(per_sample, sum(kinds.values()) - per_sample + sum(WORKSPACES) + batch_bytes(small))
