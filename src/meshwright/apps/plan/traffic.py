"""Bytes that a rank sends in a step, by dimension, from a configuration alone. No torch.

In a ring, an all-gather or a reduce-scatter of x bytes sends x (n - 1) / n from each of n ranks, an
all-reduce twice that. The tables of docs/parallelism.md come from here.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

from meshwright.base.device import NVIDIA
from meshwright.config.matrices import matrices_of
from meshwright.config.schema import TrainConfig
from meshwright.model.counts import layer_matrices
from meshwright.model.kind import block_kind
from meshwright.parallel.layout import MORE_ROOMS, WORTHWHILE_BYTES
from meshwright.training.parameters import parameters_of_ranks, stage_numbers
from meshwright.training.sizes import rows

DIMENSIONS = ("data", "replicas", "muon", "tensor", "context", "pipeline", "embedding")


class Group(NamedTuple):
    """The ranks of a dimension: their number, and the ranks between two neighbours."""

    size: int
    stride: int


def groups(config: TrainConfig) -> dict[str, Group]:
    """Return the groups of ranks, in Megatron's order: tensor, context, data, pipeline."""
    p = config.parallel
    tp = p.tensor_model_parallel_size
    cp = p.context_parallel_size
    copies = p.num_distributed_optimizer_instances
    shard = max(1, config.dp // copies)
    is_sharded = p.zero_stage > 0
    return {
        "tensor": Group(tp, 1),
        "context": Group(cp, tp),
        # Context ranks share parameters too, so sums of gradients go over them; without ZeRO all
        # data-parallel ranks are one group.
        "data": Group(cp * (shard if is_sharded else config.dp), tp),
        "replicas": Group(copies if is_sharded else 1, tp * cp * shard),
        "pipeline": Group(p.pipeline_model_parallel_size, tp * cp * config.dp),
    }


def number_bytes(config: TrainConfig) -> tuple[int, int]:
    """Return the bytes of a weight or activation, and of a gradient."""
    dtype = config.precision.dtype
    # Gradients are summed in 32 bits unless the weights have 64.
    full = 8 if dtype == "float64" else 4
    return (2 if dtype in ("float16", "bfloat16") else full), full


class TensorBytes(NamedTuple):
    """Bytes that a tensor rank sends for a micro-batch."""

    layer_forward: float
    layer_backward: float
    last_sum: float  # of a layer's forward pass, which no recomputation needs
    end: float  # of the embedding, or of the head, forward and backward
    loss: float


def tensor_bytes(config: TrainConfig) -> TensorBytes:
    n = config.parallel.tensor_model_parallel_size
    sequence = config.parallel.sequence_parallel
    part = (n - 1) / n
    low, full = number_bytes(config)
    stream = part * rows(config) * (config.model.hidden_size or 0) * low
    # A collective's bytes: an all-reduce sends as much as a gather and a scatter together.
    each = stream if sequence else 2 * stream
    messages, messages_back = tensor_messages(config)
    # The gradient of a first matrix gathers its rows once more, the head's as well.
    again = stream if sequence else 0.0
    return TensorBytes(
        layer_forward=each * messages,
        layer_backward=each * messages_back,
        last_sum=each,
        end=2 * stream + again / 2,
        loss=2 * part * 3 * rows(config) * full,  # three numbers per token
    )


def tensor_messages(config: TrainConfig) -> tuple[int, int]:
    """Return the collectives of a layer between tensor ranks, forward and backward."""
    # Of a pair, the second's outputs are summed forward, and the gradient of the first's inputs
    # backward. With sequence parallelism a gather and a scatter take the place of each sum.
    pairs = Counter(matrix.pair for matrix in matrices_of(config.model).values())
    first = pairs["first"]
    second = pairs["second"]
    if config.parallel.sequence_parallel:  # the gradient of a first matrix gathers its rows again
        return first + second, 2 * first + second
    return second, first


def overlaps_matmuls(config: TrainConfig, ranks_within: int) -> bool:
    """Return whether products run while rows are copied, as parallel/overlap.py decides.

    `ranks_within`: how many ranks can map each other's memory.
    """
    return not config.precision.fp8_format and symmetric_rows(config, ranks_within) > 0


def symmetric_rows(config: TrainConfig, ranks_within: int) -> int:
    """Return the bytes of symmetric memory for rows, which products in fp8 leave unused."""
    p = config.parallel
    tp = p.tensor_model_parallel_size
    if not p.sequence_parallel or p.tp_overlap == "off" or not 1 < tp <= ranks_within:
        return 0
    low, _ = number_bytes(config)
    size = rows(config) // tp * (config.model.hidden_size or 0) * low
    # By itself the program takes symmetric memory only where messages are large enough to hide.
    is_compiled = block_kind(config.training, config.model, config.precision, NVIDIA) == "compiled"
    if p.tp_overlap == "auto" and (size < WORTHWHILE_BYTES or is_compiled):
        return 0
    return (tp + MORE_ROOMS) * size


def context_bytes(config: TrainConfig) -> float:
    """Return the bytes of a layer's exchanges for a micro-batch, forward; backward has as many."""
    p = config.parallel
    m = config.model
    n = p.context_parallel_size
    heads = m.num_attention_heads or 1
    # Of q, k, v and the output, which change between parts of the tokens and parts of the heads.
    columns = 2 * (heads + m.groups) * m.head_dim // p.tensor_model_parallel_size
    low, _ = number_bytes(config)
    return (n - 1) / n * rows(config) * columns * low


def message_elements(config: TrainConfig) -> int:
    """Return the numbers that a stage sends to the next one for a micro-batch."""
    p = config.parallel
    share = p.tensor_model_parallel_size if p.sequence_parallel else 1
    return rows(config) * (config.model.hidden_size or 0) // share


def message_bytes(config: TrainConfig) -> float:
    low, full = number_bytes(config)
    return message_elements(config) * (full if config.precision.fp32_residual_connection else low)


def data_bytes(config: TrainConfig, parameters: float) -> tuple[float, float]:
    """Return the bytes that a rank with so many parameters sends, and those to its replicas."""
    n, _ = groups(config)["data"]
    copies, _ = groups(config)["replicas"]
    low, full = number_bytes(config)
    part = (n - 1) / n
    count = config.micro_batches(config.global_batch)
    # Gradients are reduced in full precision, weights gathered in that of the model.
    gradients = part * full * parameters
    gathered = part * low * parameters
    sent = {
        0: 2 * gradients,
        1: gradients + gathered,
        # The gradients of every micro-batch are scattered right after it.
        2: count * gradients + gathered,
        # Weights are gathered for each pass as well, forward and backward.
        3: count * (gradients + 2 * gathered),
    }[config.parallel.zero_stage]
    return sent, 2 * (copies - 1) / copies * full * parameters / n


def owner_bytes(config: TrainConfig) -> float:
    """Return the bytes that a rank sends for Muon's matrices (parallel/owner_ranks.py)."""
    if config.optimizer.optimizer != "muon":
        return 0.0
    tp = config.parallel.tensor_model_parallel_size
    data, _ = groups(config)["data"]
    ranks = data * tp
    is_sharded = config.parallel.zero_stage > 0 or data == 1
    layer = sum(math.prod(shape) for shape in layer_matrices(config.model).values())
    low = 8 if config.precision.dtype == "float64" else 2
    numbers = max(layers_of_ranks(config)) * layer / tp
    # Each matrix goes to its owner and comes back: as shards of all ranks with ZeRO, otherwise
    # every data-parallel rank has the gradients, and needs the whole update.
    if is_sharded:
        returned = (ranks - 1) / ranks * low * numbers / data
        return 2 * returned
    returned = (ranks - 1) / ranks * low * numbers
    return returned + (tp - 1) / tp * low * numbers / data


def bytes_sent(config: TrainConfig, padded: int) -> dict[str, int]:
    """Return the most bytes that a rank sends in a step, by dimension; no dimension of one rank."""
    p = config.parallel
    m = config.model
    pp = p.pipeline_model_parallel_size
    count = config.micro_batches(config.global_batch)
    most = max(parameters_of_ranks(config, padded))
    layers = max(layers_of_ranks(config))
    # Recomputation sends what a forward pass sends again, but for the last sum of a segment.
    again, segments = recomputed(config, layers)
    tensor = tensor_bytes(config)
    data, replicas = data_bytes(config, most)
    ends = 2 if pp == 1 else 1
    in_layers = (
        (layers + again) * tensor.layer_forward
        + layers * tensor.layer_backward
        - segments * tensor.last_sum
    )
    # A tied embedding lies on the first and the last stage, which sum its gradient.
    tied = pp > 1 and not m.untie_embeddings_and_output_weights
    _, full = number_bytes(config)
    table = padded // p.tensor_model_parallel_size * (m.hidden_size or 0) * full
    sent = {
        "data": data,
        "replicas": replicas,
        "muon": owner_bytes(config),
        "tensor": count * (in_layers + ends * tensor.end + tensor.loss),
        "context": count * (2 * layers + again) * context_bytes(config),
        "pipeline": 2 * config.chunks * count * message_bytes(config) * (pp > 1),
        "embedding": table * tied,
    }
    return {name: round(size) for name, size in sent.items() if size}


def recomputed(config: TrainConfig, layers: int) -> tuple[int, int]:
    """Return how many of a stage's layers are computed again, and in how many segments."""
    t = config.training
    if t.recompute_granularity != "full":
        return 0, 0
    if t.recompute_method == "block":
        return (min(t.recompute_num_layers, layers),) * 2
    return layers, -(-layers // t.recompute_num_layers)


def layers_of_ranks(config: TrainConfig) -> list[int]:
    """Return the number of layers of each pipeline rank."""
    ranks = range(config.parallel.pipeline_model_parallel_size)
    return [sum(config.stages[s] for s in stage_numbers(config, rank)) for rank in ranks]
