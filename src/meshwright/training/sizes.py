"""The bytes that a run's ranks hold throughout, by its settings, and in words. No torch."""

from __future__ import annotations

import itertools
import math
from collections import Counter

from meshwright.base import device
from meshwright.base.device import NVIDIA
from meshwright.config.matrices import matrices_of
from meshwright.config.schema import TrainConfig
from meshwright.optim.rule_table import STATE, Rule, is_rounded, param_group_of
from meshwright.optim.rule_table import state_bytes as bytes_of_moment
from meshwright.parallel.shard import aligned
from meshwright.training.parameters import (
    WIDTHS,
    Shapes,
    data_parts,
    flat_total,
    shapes_of_layer,
    shapes_of_rank,
    stage_numbers,
)

BLOCK = 128  # elements of an entry in the tables of AdamW


def rows(config: TrainConfig) -> int:
    """Return the tokens of a micro-batch on one context rank."""
    return (
        config.micro_batch * (config.data.seq_length or 0) // config.parallel.context_parallel_size
    )


def held_bytes(config: TrainConfig, padded: int, pipeline_rank: int, kind: str) -> dict[str, int]:
    """Return the bytes of weights, gradients and optimizer state that a rank's device holds."""
    p = config.parallel
    parts = data_parts(config)
    low = WIDTHS[config.precision.dtype]
    full = max(low, 4)  # bytes of an element of masters, moments and gradients
    units = shapes_of_rank(config, padded, pipeline_rank)
    by_rule = elements_by_rule(config, units)
    elements = flat_total(units, parts)
    share = elements // parts  # that ZeRO leaves to a rank
    is_gathered = p.zero_stage == 3 and parts > 1

    # With ZeRO 3 gathered weights are held only during a pass.
    weights = elements * low + 2 * fp8_parameters(config, pipeline_rank)
    if is_gathered:
        weights = 0

    keeps_all = p.zero_stage < 2 or parts == 1
    keeps_share = parts > 1 and not (is_gathered and p.offloads)
    gradients = full * (elements * keeps_all + share * keeps_share)

    optimizer = 0
    if not p.offloads:
        # The weights themselves are the masters if they have the same format and are not cut.
        has_masters = low != full or parts > 1
        copies = has_masters + (config.optimizer.ema > 0)
        moments = moments_of(by_rule, parts) * bytes_of_moment(config.optimizer, full)
        optimizer = moments + full * share * copies
    has_kernel = kind == NVIDIA and full == 4 and not p.offloads and not is_gathered
    # The kernel's two tables have 8 bytes for each block: one lists the blocks that AdamW updates,
    # the other those that count in the norm.
    if has_kernel and by_rule["adamw"]:
        optimizer += 8 * (by_rule["adamw"] // parts + share) // BLOCK
        if is_rounded(config.optimizer):  # the place of each block
            optimizer += 4 * by_rule["adamw"] // parts // BLOCK
    return {"weights": weights, "gradients": gradients, "optimizer": optimizer}


def host_bytes(config: TrainConfig, padded: int, pipeline_rank: int) -> int:
    """Return the bytes of optimizer state and gradients that a rank offloads to the host."""
    p = config.parallel
    if not p.offloads:
        return 0
    parts = data_parts(config)
    low = WIDTHS[config.precision.dtype]
    full = max(low, 4)
    units = shapes_of_rank(config, padded, pipeline_rank)
    share = flat_total(units, parts) // parts
    # New weights that are about to be copied to the device.
    leaving = 0 if p.zero_stage == 3 and parts > 1 else low * share
    elements = moments_of(elements_by_rule(config, units), parts)
    moments = elements * bytes_of_moment(config.optimizer, full)
    kept = 2 + (config.optimizer.ema > 0)  # masters, gradients, and the average of --ema
    return full * kept * share + moments + leaving


def elements_by_rule(config: TrainConfig, units: list[tuple[Shapes, int]]) -> Counter[Rule]:
    """Return how many elements each rule updates, before ZeRO cuts them."""
    by_rule = Counter[Rule]()
    for unit, number in units:
        for name, shape in unit.items():
            rule = param_group_of(config.optimizer, config.model, name, len(shape)).rule
            by_rule[rule] += aligned(math.prod(shape)) * number
    return by_rule


def moments_of(by_rule: Counter[Rule], parts: int) -> int:
    """Return how many elements the optimizer's state has on a rank, without masters."""
    return sum(len(STATE[rule]) * count for rule, count in by_rule.items()) // parts


def state_bytes(config: TrainConfig, padded: int, pipeline_rank: int, kind: str) -> int:
    """Return the least bytes that a rank holds; on a CPU they include what it offloads."""
    held = held_bytes(config, padded, pipeline_rank, kind)
    return sum(held.values()) + (host_bytes(config, padded, pipeline_rank) if kind == "cpu" else 0)


def logits_bytes(config: TrainConfig, padded: int, pipeline_rank: int) -> int:
    """Return the bytes of one micro-batch's logits on a pipeline rank."""
    if len(config.stages) - 1 not in stage_numbers(config, pipeline_rank):
        return 0
    tp = config.parallel.tensor_model_parallel_size
    # Logits that are capped exist before and after.
    copies = 2 if config.model.final_logit_softcapping else 1
    return rows(config) * padded // tp * WIDTHS[config.precision.dtype] * copies


def fp8_parameters(config: TrainConfig, pipeline_rank: int) -> int:
    """Return how many parameters a rank keeps casts of in fp8: one plain, one transposed."""
    m, p = config.model, config.parallel
    shapes = shapes_of_layer(m, p.tensor_model_parallel_size)
    begins = [*itertools.accumulate(config.stages, initial=0)]
    layers = [
        i for s in stage_numbers(config, pipeline_rank) for i in range(begins[s], begins[s + 1])
    ]
    each = sum(
        math.prod(shapes[f"{name}.weight"]) for name, matrix in matrices_of(m).items() if matrix.fp8
    )
    return each * sum(config.precision.multiplies_fp8(i, m.num_layers or 0) for i in layers)


# In words, for a run's beginning and its checks


def describe_layout(config: TrainConfig) -> str:
    """Return how many ranks there are, as a product of the layout's sizes."""
    if config.world == 1:
        return "1 rank"
    p = config.parallel
    text = f"{config.world} ranks = {config.dp} data"
    for name, size in (
        ("context", p.context_parallel_size),
        ("tensor", p.tensor_model_parallel_size),
        ("pipeline", p.pipeline_model_parallel_size),
    ):
        if size > 1:
            text += f" x {size} {name}"
    return text


def describe_memory(config: TrainConfig, padded: int) -> str:
    """Return the memory of the rank with the most weights, gradients and optimizer state."""
    kind = "cpu" if config.parallel.device == "cpu" else NVIDIA
    ranks = range(config.parallel.pipeline_model_parallel_size)
    on_device = [sum(held_bytes(config, padded, rank, kind).values()) for rank in ranks]
    on_host = max(host_bytes(config, padded, rank) for rank in ranks)
    text = _bytes(max(on_device))
    if config.world > 1:
        text += describe_place(on_device)
    if on_host:
        text += f" and {_bytes(on_host)} in host memory"
    return text


def describe_lack(config: TrainConfig, padded: int, ranks_here: int) -> str:
    """Return why the run cannot fit this device; "" if it may, or if that is unknown."""
    have, on_cpu = device.memory_without_torch(config.parallel.device)
    each = [
        state_bytes(config, padded, rank, "cpu" if on_cpu else NVIDIA)
        + logits_bytes(config, padded, rank)
        for rank in range(config.parallel.pipeline_model_parallel_size)
    ]
    shared = most_of_a_machine(each, config.world, ranks_here) if on_cpu else max(each)
    if not have or shared <= have:
        return ""
    both = ""
    if on_cpu and ranks_here > 1:
        both = f", and {shared / 2**30:,.1f} GiB for the {ranks_here} ranks that share this machine"
    return (
        f"it does not fit this device ({have / 2**30:,.1f} GiB), where the run would be refused; on another machine it "
        f"needs at least {max(each) / 2**30:,.1f} GiB{both}"
    )


def most_of_a_machine(each: list[int], world: int, ranks: int) -> int:
    """Return the most bytes of the ranks of one machine, from those of a rank of each stage.

    A machine has so many consecutive ranks, and the ranks of a stage are consecutive too.
    """
    of_stage = world // len(each)
    by_rank = [size for size in each for _ in range(of_stage)]
    machines = [by_rank[first : first + ranks] for first in range(0, world, ranks)]
    return max(map(sum, machines))


def ranks_of_machine(config: TrainConfig) -> int:
    """Return the ranks of one machine, as far as the settings say: all, if they name one alone."""
    p = config.parallel
    return p.num_gpus_per_node if p.num_nodes > 1 else config.world


def describe_place(each: list[int]) -> str:
    """Return which pipeline rank has the most, given the parameters or bytes of each."""
    return f" on pipeline rank {each.index(max(each))}" if len(each) > 1 else " on each rank"


def _bytes(x: float) -> str:
    return f"{x / 2**30:,.2f} GiB" if x >= 2**30 else f"{x / 2**20:,.1f} MiB"


def smaller_sizes(config: TrainConfig) -> str:
    """Return the flags that make a run need less memory."""
    t = config.training
    recompute = "" if t.recompute_granularity == "full" else ", or --recompute-granularity full"
    micro = f"a smaller --micro-batch-size (now {t.micro_batch_size or config.micro_batch})"
    return f"{micro} or --seq-length (now {config.data.seq_length}){recompute}"
