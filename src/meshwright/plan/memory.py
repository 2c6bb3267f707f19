"""The memory of each pipeline rank of a run, in bytes by kind, from its settings alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from meshwright.model.counts import layer_matrices
from meshwright.parallel.pipeline_schedule import schedule, stages_of
from meshwright.plan.sizes import bytes_per_parameter, logits_bytes, parameters_of_ranks
from meshwright.settings.schema import TrainConfig


class Device(Protocol):
    """The part of a device's profile that memory depends on."""

    @property
    def memory_bytes(self) -> int: ...

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
    p = config.parallel
    tp, pp = p.tensor_model_parallel_size, p.pipeline_model_parallel_size
    parameters = parameters_of_ranks(config, padded)[pipeline_rank]
    width = 2 if config.precision.dtype in ("float16", "bfloat16") else 4
    state = round(parameters * bytes_per_parameter(config)[0])
    stages = stages_of(p.pipeline_schedule, pipeline_rank, pp, config.chunks)
    kinds = {"weights": parameters * width, "gradients": parameters * 4}
    kinds["optimizer"] = max(0, state - sum(kinds.values()))
    kinds["activations"] = activation_bytes(config, stages, most_passes(config, pipeline_rank))
    kinds["logits"] = logits_bytes(config, padded // tp) if len(config.stages) - 1 in stages else 0
    kinds |= {"buffers": 65 << 20, "communication": 0, "graphs": 0}
    allocated = sum(kinds.values())
    return RankMemory(kinds, allocated, allocated + allocated // 20, profile.context_bytes)


def most_passes(config: TrainConfig, rank: int) -> int:
    """Return the most forward passes of stages whose backward pass has yet to come."""
    p, count = config.parallel, config.micro_batches(config.global_batch)
    now = most = 0
    for action in schedule(p.pipeline_schedule, p.pipeline_model_parallel_size, rank, count, config.chunks):
        now += {"F": 1, "B": -1, "W": -1}.get(action.op, 0)
        most = max(most, now)
    return most


def activation_bytes(config: TrainConfig, stages: list[int], passes: int) -> int:
    """Return the bytes that so many forward passes keep for their backward passes."""
    m, p, t = config.model, config.parallel, config.training
    tokens = config.micro_batch * (config.data.seq_length or 0) // p.context_parallel_size
    width = 2 if config.precision.dtype in ("float16", "bfloat16") else 4
    cut, rows = p.tensor_model_parallel_size, tokens
    rows = tokens // cut if p.sequence_parallel else tokens
    stream = rows * (m.hidden_size or 0) * width
    layers = max(config.stages[s] for s in stages)
    if t.recompute_granularity == "full":
        return passes * 2 * stream * layers
    outputs = {name: tokens * out * width // cut for name, (out, _) in layer_matrices(m).items() if "proj" not in name}
    inputs = {name: tokens * each * width // cut for name, (_, each) in layer_matrices(m).items() if "proj" in name}
    return passes * layers * (4 * stream + sum(outputs.values()) + sum(inputs.values()))
