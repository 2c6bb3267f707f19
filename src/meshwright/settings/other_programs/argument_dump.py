"""The block of arguments at the head of the log: every name that Megatron-LM prints, and ours.

People compare these blocks and scripts read them. A name that is a setting here, under this or
another name, has its value in this run, filled in where the flag was left out; a flag that was
given and has no effect is shown as given; any other name has Megatron's default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.settings import flags
from meshwright.settings.other_programs.megatron_flags import OLD_SWITCHES
from meshwright.settings.schema import TrainConfig

# Names without a setting here, with Megatron's defaults: they have no meaning here, or belong to
# models other than GPT.
ABSENT = """
adlr_autoresume False           adlr_autoresume_interval 1000       async_tensor_model_parallel_allreduce True
barrier_with_L1_time True       bert_binary_head True               bert_embedder_type megatron
bert_load None                  bias_dropout_fusion True            biencoder_projection_dim 0
block_data_path None            biencoder_shared_query_context_model False
classes_fraction 1.0            consumed_train_samples 0            consumed_valid_samples 0
data_parallel_random_init False data_per_class_fraction 1.0         DDP_impl local
decoder_num_layers None         decoder_seq_length None             dino_bottleneck_size 256
dino_freeze_last_layer 1        dino_head_hidden_size 2048          dino_local_crops_number 10
dino_local_img_size 96          dino_norm_last_layer False          dino_teacher_temp 0.07
dino_warmup_teacher_temp 0.04   dino_warmup_teacher_temp_epochs 30  distribute_saved_activations False
embedding_path None             empty_unused_memory_level 0         evidence_data_path None
fp16_lm_cross_entropy False     fp8_interval 1                      fp8_wgrad True
gradient_accumulation_fusion True
head_lr_mult 1.0                ict_head_size None                  ict_load None
img_h 224                       img_w 224                           indexer_batch_size 128
indexer_log_interval 1000       iter_per_epoch 1250                 inference_batch_times_seqlen_threshold 512
lazy_mpu_init None              mask_factor 1.0                     mask_prob 0.15
mask_type random                masked_softmax_fusion True          max_tokens_to_oom 12000
no_load_rng None                no_persist_layer_norm False         no_save_rng None
num_channels 3                  num_classes 1000                    onnx_safe None
output_bert_embeddings False    patch_dim 16                        perform_initialization True
query_in_block_prob 0.1         pipeline_model_parallel_split_rank None
retriever_score_scaling False   retriever_seq_length 256            retriever_report_topk_accuracies []
retro_add_retriever False       retro_cyclic_train_iters None       retro_encoder_attention_dropout 0.1
retro_encoder_layers 2          retro_num_neighbors 2               retro_encoder_hidden_dropout 0.1
retro_num_retrieved_chunks 2    retro_return_doc_ids False          retro_workdir None
sample_rate 1.0                 short_seq_prob 0.1                  scatter_gather_tensors_in_pipeline True
standalone_embedding_stage False swin_backbone_type tiny            titles_data_path None
transformer_impl local          use_flash_attn False                use_contiguous_buffers_in_local_ddp True
use_one_sent_docs False         use_ring_exchange_p2p False         variable_seq_lengths False
vision_backbone_type vit        vision_pretraining False            vision_pretraining_type classify
vocab_extra_ids 0
""".split()

# Switches that became spellings of our settings, or have no effect: programs still ask for them.
OFF = dict.fromkeys((*OLD_SWITCHES, "deepspeed", "partition_activations", "universal_checkpoint"), False)

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
UNSET = "no_load_optim no_save_optim rampup_batch_size train_data_path valid_data_path test_data_path".split()


def dumped_arguments(config: TrainConfig, idle: Mapping[str, Any], device_backend: str) -> dict[str, Any]:
    """Return name -> value of the block.

    Args:
        idle: The given flags that have no effect, by name.
        device_backend: The backend of torch.distributed that this run uses.
    """
    values: dict[str, Any] = dict(zip(ABSENT[::2], ABSENT[1::2], strict=True)) | ALWAYS
    values |= OFF | flags.to_dict(config) | in_effect(config)
    values |= {name: values[name] or None for name in UNSET}  # Megatron's defaults of these are None
    values |= {"distributed_backend": device_backend, "rank": 0}
    for name, value in idle.items():
        positive = name.removeprefix("no_")
        named, value = NAMED.get(name, (name, value))
        if named == name != positive and name not in values and positive in values:
            named, value = positive, False
        values[named] = value
    return values


def in_effect(config: TrainConfig) -> dict[str, Any]:
    """Return the values in this run where they differ from the flags, or have another name."""
    m, t, o, p = config.model, config.training, config.optimizer, config.parallel
    scale, words = config.precision.initial_loss_scale, config.tokenizer
    has_type = words.vocab_file or words.tokenizer_model or words.tokenizer_type != "GPT2BPETokenizer"
    is_ramp = o.weight_decay_incr_style != "constant"
    return {
        "add_position_embedding": m.position == "learned",
        "data_parallel_size": config.dp,
        "encoder_num_layers": m.num_layers,
        "encoder_seq_length": config.data.seq_length,
        "end_weight_decay": o.end_weight_decay if is_ramp else o.weight_decay,
        "ffn_hidden_size": m.ffn,
        "fp8_e4m3": config.precision.fp8_format == "e4m3",
        "fp8_hybrid": config.precision.fp8_format == "hybrid",
        "global_batch_size": config.global_batch,
        "initial_loss_scale": 2**32 if scale == 2**32 else scale,  # Megatron's default is a whole number
        "kv_channels": m.head_dim,
        "micro_batch_size": t.micro_batch_size or config.micro_batch,
        "overlap_p2p_comm": config.chunks > 1,
        "params_dtype": f"torch.{config.precision.dtype}",
        "recompute_method": t.recompute_method or ("uniform" if t.recompute_granularity == "full" else None),
        "start_weight_decay": o.start_weight_decay if is_ramp else o.weight_decay,
        "tokenizer_type": words.tokenizer_type if has_type and not words.tokenizer else None,
        "transformer_pipeline_model_parallel_size": p.pipeline_model_parallel_size,
        "use_rotary_position_embeddings": m.position == "rope",
        "virtual_pipeline_model_parallel_size": config.chunks if config.chunks > 1 else None,
        "world_size": config.world,
    }
