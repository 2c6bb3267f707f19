"""The block of arguments at the head of the log: every name that Megatron-LM prints, and ours.

People compare these blocks and scripts read them. A name that is a setting here, under this or
another name, has its value in this run, filled in where the flag was left out; a flag that was
given and has no effect is shown as given; any other name has Megatron's default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.base.files import read_table
from meshwright.compat.flags.megatron_flags import OLD_SWITCHES
from meshwright.config.fields import group_values
from meshwright.config.schema import TrainConfig

ABSENT: dict[str, str] = read_table("compat/flags/argument_dump.toml")["absent"]

# Switches that became spellings of our settings, or have no effect: programs still ask for them.
OFF = dict.fromkeys(
    (*OLD_SWITCHES, "deepspeed", "partition_activations", "universal_checkpoint"), False
)

# What always holds here and is a choice in Megatron; see the reasons in `megatron_flags`.
ALWAYS = {
    "accumulate_allreduce_grads_in_fp32": True,
    "apply_query_key_layer_scaling": False,
    "attention_softmax_in_fp32": True,
    "data_sharding": False,
    "use_cpu_initialization": True,
}

# Flags without effect whose name in the block is another one.
NAMED = {
    "no_barrier_with_level_1_timing": ("barrier_with_L1_time", False),
    "no_contiguous_buffers_in_local_ddp": ("use_contiguous_buffers_in_local_ddp", False),
    "no_initialization": ("perform_initialization", False),
    "no_overlap_p2p_communication": ("overlap_p2p_comm", False),
    "no_query_key_layer_scaling": ("apply_query_key_layer_scaling", False),
    "overlap_p2p_communication": ("overlap_p2p_comm", True),
}
# Settings whose default in Megatron is None.
UNSET = (
    "no_load_optim",
    "no_save_optim",
    "rampup_batch_size",
    "train_data_path",
    "valid_data_path",
    "test_data_path",
)


def dumped_arguments(
    config: TrainConfig, ignored: Mapping[str, Any], device_backend: str
) -> dict[str, Any]:
    """Return name -> value of the block.

    Args:
        ignored: The given flags that have no effect, by name.
        device_backend: The backend of torch.distributed that this run uses.
    """
    values: dict[str, Any] = ABSENT | ALWAYS | OFF
    for group in group_values(config):
        values |= vars(group)
    values |= in_effect(config)
    values |= {name: values[name] or None for name in UNSET}
    values |= {"distributed_backend": device_backend, "rank": 0}
    # Given flags without effect, under the names that Megatron's parser gives them.
    for name, value in ignored.items():
        positive = name.removeprefix("no_")
        named, value = NAMED.get(name, (name, value))
        if named == name != positive and name not in values and positive in values:
            named = positive
            value = False
        values[named] = value
    return values


def in_effect(config: TrainConfig) -> dict[str, Any]:
    """Return the values in this run where they differ from the flags, or have another name."""
    m = config.model
    t = config.training
    o = config.optimizer
    p = config.parallel
    scale = config.precision.initial_loss_scale
    words = config.tokenizer
    # The default type says nothing unless files of a vocabulary go with it.
    has_files = words.vocab_file or words.tokenizer_model
    has_type = has_files or words.tokenizer_type != "GPT2BPETokenizer"
    recompute_method = t.recompute_method
    if not recompute_method and t.recompute_granularity == "full":
        recompute_method = "uniform"
    return {
        "add_position_embedding": m.position == "learned",
        "data_parallel_size": config.dp,
        "encoder_num_layers": m.num_layers,
        "encoder_seq_length": config.data.seq_length,
        "end_weight_decay": o.end_weight_decay if o.ramps_decay else o.weight_decay,
        "ffn_hidden_size": m.ffn,
        "fp8_e4m3": config.precision.fp8_format == "e4m3",
        "fp8_hybrid": config.precision.fp8_format == "hybrid",
        "global_batch_size": config.global_batch,
        # Megatron's default is a whole number
        "initial_loss_scale": 2**32 if scale == 2**32 else scale,
        "kv_channels": m.head_dim,
        "micro_batch_size": t.micro_batch_size or config.micro_batch,
        "overlap_p2p_comm": config.chunks > 1,
        "params_dtype": f"torch.{config.precision.dtype}",
        "recompute_method": recompute_method or None,
        "start_weight_decay": o.start_weight_decay if o.ramps_decay else o.weight_decay,
        "tokenizer_type": words.tokenizer_type if has_type and not words.tokenizer else None,
        "transformer_pipeline_model_parallel_size": p.pipeline_model_parallel_size,
        "use_rotary_position_embeddings": m.position == "rope",
        "virtual_pipeline_model_parallel_size": config.chunks if config.chunks > 1 else None,
        "world_size": config.world,
    }
