"""A DeepSpeed JSON file as settings: what the flags leave open is taken from it, what contradicts them is refused.

    MAPPED   keys that are settings here
    IDLE     keys that change no result here: told in one line
    REFUSED  keys that would change the result and that we do not have

DeepSpeed's "auto" leaves a key to the flags. Any other key is a mistake: DeepSpeed itself passes over misspelled ones.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

from meshwright.errors import UserError
from meshwright.settings.grammar import did_you_mean
from meshwright.settings.schema import TrainConfig, spelling


def number(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) < 2**62:
        raise ValueError("a number")
    return float(value)


def whole(value: Any) -> int:
    if type(value) not in (int, float) or value % 1:  # of infinity and NaN too, this is NaN
        raise ValueError("a whole number")
    return int(value)


def switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def stage(value: Any) -> int:
    if isinstance(value, bool):  # DeepSpeed's oldest form: "zero_optimization": true
        return int(value)
    if value not in (0, 1, 2, 3):
        raise ValueError("0, 1, 2 or 3")
    return int(value)


def power(value: Any) -> float:
    if not -100 <= whole(value) <= 100:
        raise ValueError("a power of two from -100 to 100")
    return math.ldexp(1.0, whole(value))


def device(value: Any) -> str:
    if value not in (None, "none", "cpu"):
        raise ValueError('"cpu" or "none": offloading to NVMe is not there')
    return value or "none"


# JSON key -> group, setting, and the setting's value for a value.
MAPPED: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "train_batch_size": ("training", "global_batch_size", whole),
    "train_micro_batch_size_per_gpu": ("training", "micro_batch_size", whole),
    "gradient_accumulation_steps": ("training", "num_accumulation_steps", whole),
    "gradient_clipping": ("optimizer", "clip_grad", number),
    "zero_optimization": ("parallel", "zero_stage", stage),
    "zero_optimization.stage": ("parallel", "zero_stage", stage),
    "zero_optimization.offload_optimizer.device": ("parallel", "cpu_optimizer", lambda v: device(v) == "cpu"),
    "zero_optimization.cpu_offload": ("parallel", "cpu_optimizer", switch),
    "zero_optimization.offload_param.device": ("parallel", "remote_device", device),
    "fp16.enabled": ("precision", "fp16", switch),
    "fp16.loss_scale": ("precision", "loss_scale", lambda v: number(v) or None),  # 0: dynamic
    "fp16.initial_scale_power": ("precision", "initial_loss_scale", power),
    "fp16.loss_scale_window": ("precision", "loss_scale_window", number),
    "fp16.hysteresis": ("precision", "hysteresis", whole),
    "fp16.min_loss_scale": ("precision", "min_loss_scale", number),
    "bf16.enabled": ("precision", "bf16", switch),
    "bfloat16.enabled": ("precision", "bf16", switch),
    "checkpoint.load_universal": ("checkpoint", "universal_checkpoint", switch),
}
SECTIONS = {key.rsplit(".", 1)[0] for key in MAPPED if "." in key}

IDLE = {
    *("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "timers", "seed", "vocabulary_size"),
    *(
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "prescale_gradients",
        "gradient_predivide_factor",
    ),
    *("communication_data_type", "seq_parallel_communication_data_type", "data_types", "disable_allgather"),
    *("allgather_size", "activation_checkpointing", "pipeline", "aio", "nebula", "compile"),
    *("flops_profiler", "comms_logger", "tensorboard", "csv_monitor", "wandb", "comet", "monitor_config", "autotuning"),
    *("dataloader_drop_last", "graph_harvesting", "use_data_before_expert_parallelism", "hybrid_engine"),
    *("fp16.auto_cast", "fp16.fused_mode", "bf16.immediate_grad_update", "bf16.check_grad_overflow"),
    *("bf16.accumulate_grads_via_hooks", "bfloat16.immediate_grad_update"),
    *("checkpoint.tag_validation", "checkpoint.use_node_local_storage", "checkpoint.parallel_write"),
    *(
        f"zero_optimization.{key}"
        for key in (
            *("contiguous_gradients", "overlap_comm", "reduce_scatter", "reduce_bucket_size", "allgather_partitions"),
            *("allgather_bucket_size", "use_multi_rank_bucket_allreduce", "load_from_fp32_weights", "sub_group_size"),
            *("elastic_checkpoint", "ignore_unused_parameters", "legacy_stage1", "round_robin_gradients"),
            *("cpu_offload_use_pin_memory", "memory_efficient_linear", "override_module_apply"),
            *("zero_hpz_partition_size", "log_trace_cache_warnings", "enable_sanity_checks", "leaf_module"),
            *("pipeline_loading_checkpoint", "move_params_to_cpu_during_init", "mics_hierarchical_params_gather"),
            *("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size"),
            *("stage3_param_persistence_threshold", "stage3_model_persistence_threshold"),
            *("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"),
            *("stage3_module_granularity_threshold", "stage3_use_all_reduce_for_fetch_params"),
            *("stage3_allgather_sequential", "stage3_partition_stream_chunk_size", "prefetch_bucket_size"),
            *("max_live_parameters", "max_reuse_distance", "param_persistence_threshold"),
        )
    ),
    *(
        f"zero_optimization.offload_{what}.{key}"
        for what in ("optimizer", "param")
        for key in (
            "pin_memory",
            "buffer_count",
            "buffer_size",
            "max_in_cpu",
            "nvme_path",
            "fast_init",
            "pipeline",
            "pipeline_read",
            "pipeline_write",
            "ratio",
        )
    ),
}

REFUSED = {
    "amp": "apex is not used: fp16 or bf16 is",
    "sparse_attention": "attention is dense here",
    "sparse_gradients": "gradients are dense here",
    "curriculum_learning": "samples have one length here",
    "data_efficiency": "samples are read in one order here",
    "progressive_layer_drop": "every layer is trained in every step here",
    "eigenvalue": "it belongs to compression, which is not there",
    "quantize_training": "quantized training is not there",
    "compression_training": "compression is not there",
    "elasticity": "the batch is what --global-batch-size says, for any number of ranks",
    "tensor_parallel": "--tensor-model-parallel-size says it",
    "fp16.consecutive_hysteresis": "the loss scale's hysteresis is Megatron's",
    "fp16.fp16_master_weights_and_grads": "master weights are float32 here",
    "bf16.bf16_master_weights_and_grads": "master weights are float32 here",
    "bf16.bf16_optimizer_states": "optimizer state is float32 here",
    "zero_optimization.zero_quantized_weights": "weights are sent as they are here",
    "zero_optimization.zero_quantized_nontrainable_weights": "weights are sent as they are here",
    "zero_optimization.zero_quantized_gradients": "gradients are sent as they are here",
    "zero_optimization.zeropp_loco_param": "gradients are sent as they are here",
    "zero_optimization.zenflow": "the optimizer's steps do not overlap here",
    "zero_optimization.mics_shard_size": "--num-distributed-optimizer-instances is the number of such groups",
    "zero_optimization.cpu_offload_param": '"offload_param": {"device": "cpu"} is its newer form',
    "zero_optimization.cpu_offload_params": '"offload_param": {"device": "cpu"} is its newer form',
}
OURS = {"optimizer": "--optimizer and its flags", "scheduler": "--lr-decay-style and its flags"}


def apply(config: TrainConfig, given: Collection[str]) -> tuple[TrainConfig, tuple[str, ...]]:
    """The configuration with what --deepspeed_config adds to it, and what the user should be told."""
    filled, notes, wrong = merge(config, given)
    if wrong:
        raise UserError("\n  ".join(["", *wrong]) if len(wrong) > 1 else wrong[0])
    return filled, tuple(notes)


def merge(config: TrainConfig, given: Collection[str]) -> tuple[TrainConfig, list[str], list[str]]:
    """Likewise, with every objection in words.

    `given` are the settings that were said: they are never changed, and a file that says otherwise is refused.
    """
    path = config.parallel.deepspeed_config
    if not path:
        return config, [], []
    try:
        file = read(path)
    except ValueError as error:
        return config, [], [f"--deepspeed_config {path}: {error}"]
    found, wrong, idle, notes = dict[str, Any](), list[str](), list[str](), list[str]()
    for key, value in leaves(file):
        if key in MAPPED:
            try:
                if value != "auto":
                    found[key] = MAPPED[key][2](value)
            except ValueError as error:
                wrong.append(f'"{key}" is {json.dumps(value)[:100]}, not {error}')
        elif key in REFUSED:
            if not is_off(value):
                wrong.append(f'"{key}" is not there: {REFUSED[key]}')
        elif key in SECTIONS:
            wrong.append(f'"{key}" is {json.dumps(value)[:100]}, not a section {{...}}')
        elif key in OURS:
            notes.append(f'{path}: the section "{key}" is not read: {OURS[key]} count')
        elif key in IDLE:
            idle.append(key)
        else:
            wrong.append(f'unknown key "{key}"{did_you_mean(key, [*MAPPED, *REFUSED, *OURS, *IDLE])}')
    if not found.get("fp16.enabled", config.precision.fp16):  # its other keys are not in use
        found = {k: v for k, v in found.items() if k == "fp16.enabled" or not k.startswith("fp16.")}

    taken = dict[str, Any]()
    known = {n: v for f in dataclasses.fields(config) for n, v in vars(getattr(config, f.name)).items()}
    for key, value in found.items():
        name = MAPPED[key][1]
        if name not in given and name not in taken:
            taken[name] = value
        elif (have := known[name] if name in given else taken[name]) != value:
            said = f"{spelling(name)} is" if name in given else "another key says"
            wrong.append(f'"{key}" is {shown(value)}, but {said} {shown(have)}: change one')
    for name, other in (("fp16", "bf16"), ("bf16", "fp16")):
        if taken.get(name) and other in given and known[other]:
            wrong.append(f'"{name}.enabled" is true, but --{other} is given: change one')
            del taken[name]
    if taken.get("fp16") and taken.get("bf16"):
        wrong.append('"fp16.enabled" and "bf16.enabled" are both true: change one')
        del taken["fp16"]
    if taken.get("zero_stage") == 0 and config.parallel.use_distributed_optimizer:
        wrong.append('"zero_optimization.stage" is 0, but --use-distributed-optimizer is ZeRO 1: change one')
    filled = replaced(config, {n: v for n, v in taken.items() if n != "num_accumulation_steps"})
    if (steps := taken.pop("num_accumulation_steps", None)) is not None:
        t = filled.training
        if t.global_batch_size and isinstance(t.micro_batch_size, int) and t.micro_batch_size > 0:
            # The three together are one too many: the file must agree, and the batch sizes go on deciding.
            if (unit := t.micro_batch_size * filled.dp) * steps != t.global_batch_size:
                wrong.append(
                    f'"gradient_accumulation_steps" is {steps}, but a batch of {t.global_batch_size} makes '
                    f"{t.global_batch_size / unit:g} steps of {t.micro_batch_size} x {filled.dp} data-parallel ranks: "
                    "change one"
                )
        else:
            taken["num_accumulation_steps"] = steps
            filled = replaced(filled, {"num_accumulation_steps": steps})

    sets = [spelling(n) + ("" if v is True else f" {shown(v)}") for n, v in taken.items() if v != known[n]]
    if sets:
        notes.append(f"{path} sets {', '.join(sets)}")
    if taken.get("fp16"):
        notes.append(f'{path}: "fp16.enabled" is true and --fp16 is not given: this run is fp16')
    if idle:
        notes.append(f"{path}: without effect here: {', '.join(idle)}")
    return filled, notes, [f"--deepspeed_config {path}: {line}" for line in wrong]


def read(path: str) -> dict[str, Any]:
    """The file as JSON, or ValueError in words; of a key that is there twice nobody can say which one was meant."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [k for k, _ in pairs]
        if twice := next((k for k in keys if keys.count(k) > 1), None):
            raise ValueError(f'"{twice}" is there twice')
        return dict(pairs)

    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file, object_pairs_hook=once)
    except OSError as error:
        raise ValueError(error.strerror) from None
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except json.JSONDecodeError as error:
        line = [*error.doc.split("\n"), ""][error.lineno - 1][error.colno - 1 :]
        comment = "; JSON has no comments" if line.startswith(("//", "#", "/*")) else ""
        raise ValueError(f"line {error.lineno}, column {error.colno}: {error.msg}{comment}") from None
    if not isinstance(found, dict):
        raise ValueError("not a table of settings")
    return found


def leaves(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys with those of the sections before them, as "fp16.enabled", and their values."""
    for key, value in section.items():
        if prefix + key in SECTIONS and isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        elif prefix + key in SECTIONS and value is None:
            pass  # "offload_param": null
        else:
            yield prefix + key, value


def is_off(value: Any) -> bool:
    """Of a key that is refused: it is there, and says no; -1 is "none" where DeepSpeed wants a number."""
    return not value or value == -1 or (isinstance(value, dict) and value.get("enabled", True) in (False, "auto"))


def replaced(config: TrainConfig, values: dict[str, Any]) -> TrainConfig:
    groups = dict[str, Any]()
    for f in dataclasses.fields(config):
        group = getattr(config, f.name)
        groups[f.name] = dataclasses.replace(group, **{n: v for n, v in values.items() if n in vars(group)})
    return dataclasses.replace(config, **groups)


def shown(value: Any) -> str:
    """As JSON and flags spell it alike."""
    if value is None:
        return "dynamic"  # a loss scale; no other value can be none
    return f"{value:g}" if isinstance(value, float) else json.dumps(value) if isinstance(value, bool) else str(value)
