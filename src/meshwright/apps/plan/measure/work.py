"""What a step executes on all pipeline ranks, measured with torch."""

from __future__ import annotations

from meshwright.apps.plan.measure.operations import PassOperations, StepOperations, total
from meshwright.apps.plan.measure.stages import memory_of_steps
from meshwright.base.device import NVIDIA
from meshwright.config.schema import TrainConfig
from meshwright.model.kind import block_kind
from meshwright.training.parameters import parameters_of_ranks, stage_numbers


def is_measurable(config: TrainConfig) -> bool:
    """Return whether a step's operations are known: nothing is compiled or updated by the host."""
    block = block_kind(config.training, config.model, config.precision, NVIDIA)
    compiles_attention = config.model.windowed_layers or config.data.document_effects[2]
    is_compiled = bool(compiles_attention) or (
        block == "compiled" and not config.precision.fp8_format
    )
    return not is_compiled and not config.parallel.offloads


def operations_of_step(config: TrainConfig, padded: int) -> StepOperations:
    """Return what all stages execute for a mean micro-batch, and the fullest rank's update."""
    count = max(1, config.micro_batches(config.global_batch))
    numbers = parameters_of_ranks(config, padded)
    stages: dict[int, PassOperations] = {}
    updates = []
    for rank in range(config.parallel.pipeline_model_parallel_size):
        executed = memory_of_steps(config, padded, rank).operations
        updates.append(executed.update)
        for chunk, number in enumerate(stage_numbers(config, rank)):
            parts = (executed.first[chunk], 1 / count), (executed.later[chunk], 1 - 1 / count)
            stages[number] = PassOperations(
                *(total((part[way], times) for part, times in parts) for way in range(2))
            )
    return StepOperations(
        tuple(stages[number] for number in sorted(stages)), updates[numbers.index(max(numbers))]
    )
