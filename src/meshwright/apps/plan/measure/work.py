"""The operations of a rank's step, from steps of a few layers on the meta device."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from meshwright.apps.plan.measure.account import Account, Phase
from meshwright.apps.plan.measure.operations import Operation, Operations, PassOperations, StepOperations, total
from meshwright.apps.plan.measure.recorder import OperationRecorder
from meshwright.apps.plan.measure.steps import account_steps
from meshwright.base.device import NVIDIA
from meshwright.config.schema import TrainConfig
from meshwright.model.kind import block_kind
from meshwright.parallel.pipeline_schedule import SPLIT_BACKWARD
from meshwright.training.network import Model
from meshwright.training.parameters import parameters_of_ranks

FEW, MOST = 3, 8  # layers that are measured at least, and at most
FORWARD: dict[Phase, Phase] = {"begin": "embedding"}  # a phase's work is counted with this one's
BACKWARD: dict[Phase, Phase] = {"embedding backward": "embedding", "layer backward": "layer", "head backward": "head"}


class LayerKind(NamedTuple):
    """What distinguishes the work of layers of one model."""

    windowed: bool
    fp8: bool
    recomputed: bool


Part = tuple[Phase, int | None]  # a part of the network by the phase of its forward pass, and the layer


def operations_of_step(config: TrainConfig, padded: int, model: Model | None = None) -> StepOperations:
    """Return what the fullest pipeline rank executes in a step, and all stages for a micro-batch.

    Layers of a kind execute the same; what does not lie in layers may depend on their number all
    the same, and is extended from two sizes.
    """
    layers, count = config.model.num_layers or 0, config.micro_batches(config.global_batch)
    few = min(layers, layers_to_measure(config))
    parts, update = measured_parts(shortened(config, few), padded, min(2, count), model)
    means = {part: mean_micro_batch(passes, count) for part, passes in parts.items()}
    rest = {phase: means.get((phase, None), EMPTY) for phase in ("embedding", "head")}
    if few < layers:
        longer, longer_update = measured_parts(shortened(config, few + 1), padded, 1, model)
        update = extended(update, longer_update, max(rank_layers(config)) - few)
    fullest = max(parameters_of_ranks(config, padded))
    in_one = parameters_of_ranks(shortened(config, max(rank_layers(config))), padded)[0]
    update = total([(update, fullest / in_one)])
    splits = config.parallel.pipeline_model_parallel_size > 1 and config.parallel.pipeline_schedule in SPLIT_BACKWARD

    # Layers of each kind, without the first, which has no residual stream to add to
    few_kinds, kinds = layer_kinds(shortened(config, few)), layer_kinds(config)
    alike: dict[LayerKind, list[PassOperations]] = defaultdict(list)
    for number, kind in enumerate(few_kinds):
        if number or few_kinds.count(kind) == 1:
            alike[kind].append(means.get(("layer", number), EMPTY))
    of_kind = {kind: summed((each, 1 / len(own)) for each in own) for kind, own in alike.items()}

    # Stages
    stages, begin = [], 0
    for number, length in enumerate(config.stages):
        own = Counter(kinds[begin : begin + length])
        ends = [(rest["embedding"], 1.0)] * (number == 0) + [(rest["head"], 1.0)] * (number == len(config.stages) - 1)
        stage = summed([*((of_kind[kind], float(times)) for kind, times in own.items()), *ends])
        stages.append(with_deferred_weights(stage) if splits else stage)
        begin += length
    return StepOperations(tuple(stages), update)


EMPTY = PassOperations({}, {}, {})


def is_measurable(config: TrainConfig) -> bool:
    """Whether a step runs on the meta device: nothing is compiled, and the host updates no weights."""
    block = block_kind(config.training, config.model, config.precision, NVIDIA)
    later = config.parallel.pipeline_schedule in SPLIT_BACKWARD or config.precision.fp8_format
    return (block != "compiled" or bool(later)) and not config.model.windowed_layers and not config.parallel.offloads


def layers_to_measure(config: TrainConfig) -> int:
    """Return with how many layers all kinds of layers, and whole groups of recomputed ones, occur."""
    t, kinds = config.training, layer_kinds(config)
    group = t.recompute_num_layers if t.recompute_granularity == "full" and t.recompute_method == "uniform" else 1
    for few in range(max(FEW, group), MOST):
        if set(layer_kinds(shortened(config, min(few, len(kinds))))) == set(kinds):
            return few
    return MOST


def shortened(config: TrainConfig, layers: int) -> TrainConfig:
    """Return the settings of one stage of so many layers, of which as few as possible are recomputed."""
    t = config.training
    if t.recompute_granularity == "full" and t.recompute_method == "block":
        recomputed = min(t.recompute_num_layers, config.model.num_layers or 0, 2 if layers > FEW - 1 else 1)
        if t.recompute_num_layers >= (config.model.num_layers or 0):
            recomputed = layers
        t = replace(t, recompute_num_layers=recomputed)
    one = as_one_stage(config)
    return replace(one, model=replace(one.model, num_layers=layers), training=t)


def as_one_stage(config: TrainConfig) -> TrainConfig:
    """Return the settings without a pipeline, with as many data-parallel ranks."""
    p = config.parallel
    parallel = replace(
        p,
        pipeline_model_parallel_size=1,
        pipeline_schedule="1f1b",
        pipeline_layout=None,
        num_layers_per_virtual_pipeline_stage=None,
        world_size=config.world // p.pipeline_model_parallel_size,
    )
    return replace(config, parallel=parallel)


def layer_kinds(config: TrainConfig) -> list[LayerKind]:
    """Return the kind of each layer of the model."""
    m, t, precision = config.model, config.training, config.precision
    layers, windowed = m.num_layers or 0, set(m.windowed_layers)
    block = t.recompute_granularity == "full" and t.recompute_method == "block"
    kinds, begin = [], 0
    for length in config.stages:
        for place in range(length):
            number = begin + place
            again = not block or place < t.recompute_num_layers
            kinds.append(LayerKind(number in windowed, precision.multiplies_fp8(number, layers), again))
        begin += length
    return kinds


def rank_layers(config: TrainConfig) -> list[int]:
    pp = config.parallel.pipeline_model_parallel_size
    return [-(-(config.model.num_layers or 0) // pp)]


def measured_parts(
    config: TrainConfig, padded: int, micro_batches: int, model: Model | None
) -> tuple[dict[Part, list[PassOperations]], Operations]:
    """Return the operations of each part for each micro-batch, and those of the update."""
    samples = config.micro_batch * config.dp * micro_batches
    config = replace(config, training=replace(config.training, global_batch_size=samples))
    recorder = OperationRecorder()
    account_steps(config, padded, 0, Account(recorder), 2, model)

    # By part and micro-batch
    forward: dict[tuple[Part, int], Counter[Operation]] = defaultdict(Counter)
    backward: dict[tuple[Part, int], Counter[Operation]] = defaultdict(Counter)
    update: Counter[Operation] = Counter()
    for section, operations in recorder.sections.items():
        if section.phase == "update":
            update += operations
        elif section.phase in BACKWARD:
            backward[(BACKWARD[section.phase], section.layer), section.micro_batch] += operations
        elif section.phase != "set-up":
            forward[(FORWARD.get(section.phase, section.phase), section.layer), max(section.micro_batch, 0)] += (
                operations
            )
    parts: dict[Part, list[PassOperations]] = defaultdict(list)
    for part, number in sorted({*forward, *backward}, key=lambda place: place[1]):
        parts[part].append(PassOperations(forward[part, number], backward[part, number], {}))
    return parts, update


def mean_micro_batch(passes: list[PassOperations], count: int) -> PassOperations:
    """Return the mean of a step's micro-batches: the first writes gradients, the others add to them."""
    first, later = passes[0], passes[-1]
    return summed([(first, 1 / count), (later, (count - 1) / count)])


def summed(parts: Iterable[tuple[PassOperations, float]]) -> PassOperations:
    """Return the sum of passes, each so many times."""
    parts = list(parts)
    return PassOperations(*(total((part[way], times) for part, times in parts) for way in range(3)))


def extended(few: Operations, more: Operations, layers: int) -> Operations:
    """Return what `few` would be with so many layers more, if `more` has one more.

    Operations whose sizes depend on the number of layers then count negatively in one of the two
    sizes; their sums are right.
    """
    return total([(few, 1.0 - layers), (more, float(layers))])


def with_deferred_weights(stage: PassOperations) -> PassOperations:
    """Return the passes of a schedule that computes products for the gradients of weights later."""
    later = {op: count for op, count in stage.backward.items() if op.totals}
    return stage._replace(backward={op: n for op, n in stage.backward.items() if op not in later}, weights=later)
