"""The rule whether a run's steps are CUDA graphs, by its settings alone. No torch."""

from __future__ import annotations

from meshwright.base.device import NVIDIA
from meshwright.config.schema import TrainConfig
from meshwright.model.kind import block_kind
from meshwright.optim.rule_table import is_rounded
from meshwright.training.parameters import data_parts
from meshwright.training.sizes import rows

# Each forward and backward pass of a pipeline rank is a graph, which takes memory.
MOST_PASSES = 256
# Tokens x hidden size^2 up to which graphs pay, by ZeRO stage: see `reason_against`.
HOST_BOUND = {1: 2**34, 3: 2**36}


def reason_against(config: TrainConfig, kind: str, is_custom: bool = False) -> str | None:
    """Return why a run's steps cannot be CUDA graphs on such a device, or with "auto" should not.

    ZeRO 1 gathers the new weights while the next forward pass is already under way, which a graph
    would prevent, as it ends with its step. So "auto" uses no graphs with ZeRO 1 where the host
    keeps ahead of the device anyway. It takes about 2 ms to launch a layer of fused kernels, in
    which an H200 does about 10^12 operations. A layer has 72 x tokens x hidden^2 of them, so the
    bound is 2^34 tokens x hidden^2. With ZeRO 3, fully_shard takes the host several times as long.
    """
    t, m, p, o = config.training, config.model, config.parallel, config.optimizer
    sharded = data_parts(config) > 1
    sampled = m.attention_dropout > 0 and m.attention_impl != "reference"
    block = block_kind(t, m, config.precision, kind)
    never = {
        "the device is not an NVIDIA GPU": kind != NVIDIA,
        f"a step has more than {MOST_PASSES} forward passes of a stage": (
            p.pipeline_model_parallel_size > 1
            and config.micro_batches(config.global_batch) * config.chunks > MOST_PASSES
        ),
        "ZeRO 2 allocates and frees gradients within the step": sharded and p.zero_stage == 2,
        "weights are gathered by the stages of a pipeline": (
            sharded and p.zero_stage == 3 and p.pipeline_model_parallel_size > 1
        ),
        "the optimizer runs on the host": p.offloads,
        "inputs of recomputed layers are kept on the host": t.checkpoint_in_cpu,
        "SGD takes the learning rate from the host": o.optimizer == "sgd" and not is_rounded(o),
        "AdamW in float64 takes the learning rate from the host": (
            config.precision.dtype == "float64" and o.optimizer != "lion" and not is_rounded(o)
        ),
        "--timing-log-level times the parts of a step": config.logging.timing_log_level != "0",
        "compiled layers seed their attention dropout anew when they are recomputed": (
            sampled and t.recompute_granularity == "full" and block == "compiled"
        ),
    }
    is_staged = p.pipeline_model_parallel_size > 1
    is_gathered = sharded and p.zero_stage == 3
    size = rows(config) * (m.hidden_size or 0) ** 2
    # A graph that no run on GPUs has tried is not recorded unasked.
    divides_layers = p.tensor_model_parallel_size * p.context_parallel_size > 1
    has_replicas = p.num_distributed_optimizer_instances > 1
    is_mixed = (is_staged and (divides_layers or config.dp > 1)) or (
        is_gathered and (divides_layers or has_replicas)
    )
    unasked = {
        "this layout has not run in graphs on GPUs yet; --cuda-graphs on tries it": is_mixed,
        "a custom model or loss may need the host": is_custom,
        "ZeRO 1 gathers new weights between the steps": (
            sharded and p.zero_stage == 1 and size > HOST_BOUND[1]
        ),
        "the host keeps ahead of such large micro-batches with ZeRO 3": (
            is_gathered and size > HOST_BOUND[3]
        ),
    }
    chosen = {"of --cuda-graphs off": t.cuda_graphs == "off"}
    reasons = chosen | never | (unasked if t.cuda_graphs == "auto" else {})
    return next((reason for reason, holds in reasons.items() if holds), None)
