"""The parameters of each pipeline rank, and the sizes of the flat buffers that hold them."""

from __future__ import annotations

import functools
import math

from meshwright.config.schema import Model, TrainConfig
from meshwright.model import counts
from meshwright.parallel import shard
from meshwright.parallel.pipeline_schedule import stages_of
from meshwright.parallel.shard import aligned

# Answers of `parameters_of_ranks`, for which a search of layouts asks thousands of times.
COUNTED: dict[tuple[object, ...], list[int]] = {}
Shapes = dict[str, tuple[int, ...]]
WIDTHS = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}  # bytes of an element


@functools.lru_cache
def shapes_of_layer(m: Model, tp: int) -> Shapes:
    """Return the shapes of a tensor rank's part of one layer."""
    return {
        name: shard_shape(f"h.0.{name}", shape, tp)
        for name, shape in counts.layer_shapes(m).items()
    }


def shard_shape(name: str, shape: tuple[int, ...], tp: int) -> tuple[int, ...]:
    """Return the shape of a tensor rank's part of a parameter."""
    at, out = shard.rule(name).cut, list(shape)
    if at is not None:
        out[at] //= tp
    return tuple(out)


def stage_numbers(config: TrainConfig, pipeline_rank: int) -> list[int]:
    """Return the numbers of a pipeline rank's stages."""
    p = config.parallel
    return stages_of(pipeline_rank, p.pipeline_model_parallel_size, config.chunks)


def shapes_of_rank(
    config: TrainConfig, padded: int, pipeline_rank: int
) -> list[tuple[Shapes, int]]:
    """Return each kind of a rank's units of communication, and how many it has of that kind."""
    m, p = config.model, config.parallel
    tp, own = p.tensor_model_parallel_size, stage_numbers(config, pipeline_rank)
    first, last = 0 in own, len(config.stages) - 1 in own
    # Outside the layers each module is a unit of its own.
    outside = counts.outer_shapes(
        m, padded, m.max_position_embeddings or config.data.seq_length or 0
    )
    tied = not m.untie_embeddings_and_output_weights
    # A pipeline has the embedding on its first stage and the head on its last.
    held = {
        "wte": first or (last and tied),
        "wpe": first,
        "ln_emb": first,
        "ln_f": last,
        "lm_head": last,
    }
    layer = {f"h.0.{name}": shape for name, shape in shapes_of_layer(m, tp).items()}
    by_unit: dict[str, Shapes] = {}
    for name, shape in outside.items():
        if held[shard.unit(name)]:
            by_unit.setdefault(shard.unit(name), {})[name] = shard_shape(name, shape, tp)
    return [(layer, sum(config.stages[s] for s in own)), *((unit, 1) for unit in by_unit.values())]


def parameters_of_ranks(config: TrainConfig, padded: int) -> list[int]:
    """Return the number of parameters of each pipeline rank, with embedding and head."""
    tp = config.parallel.tensor_model_parallel_size
    pp = config.parallel.pipeline_model_parallel_size
    positions = config.model.max_position_embeddings or config.data.seq_length
    # By everything that decides the answer.
    key = config.model, padded, positions, (tp, pp, *config.stages)
    if key not in COUNTED:
        counts = []
        for rank in range(pp):
            units = shapes_of_rank(config, padded, rank)
            counts.append(sum(count(unit) * number for unit, number in units))
        COUNTED[key] = counts
    return COUNTED[key]


def count(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes.values()))


def data_parts(config: TrainConfig) -> int:
    """Return the number of ranks that ZeRO shards over."""
    p = config.parallel
    if not p.zero_stage:
        return 1
    return config.dp * p.context_parallel_size // p.num_distributed_optimizer_instances


def bucket_of(config: TrainConfig, name: str) -> str:
    """Return the bucket of the flat buffers that a parameter is in."""
    p = config.parallel
    return shard.bucket(name, p.tensor_model_parallel_size, p.sequence_parallel)


def flat_total(units: list[tuple[Shapes, int]], parts: int) -> int:
    """Return how many elements a rank's units take in its flat buffers."""
    return sum(flat_size(unit, parts) * number for unit, number in units)


def flat_size(unit: Shapes, parts: int) -> int:
    """Return how many elements a unit takes in a flat buffer, with padding."""
    return aligned(sum(aligned(math.prod(shape)) for shape in unit.values()), parts)
