"""The pages of the documentation that explain a flag; a test compares them with its text."""

from __future__ import annotations

PAGES = {
    "docs/schedules.md": """global_batch_size rampup_batch_size optimizer lr min_lr lr_decay_style lr_wsd_decay_style
        lr_wsd_decay_iters lr_wsd_decay_samples lr_decay_iters lr_decay_samples
        lr_decay_tokens lr_warmup_fraction lr_warmup_iters lr_warmup_samples
        lr_warmup_tokens lr_warmup_init weight_decay start_weight_decay end_weight_decay
        weight_decay_incr_style sgd_momentum muon_momentum muon_num_ns_steps
        override_opt_param_scheduler use_checkpoint_opt_param_scheduler fp16 loss_scale
        initial_loss_scale min_loss_scale loss_scale_window hysteresis cpu_optimizer""",
    "docs/parallelism.md": """recompute_granularity compile optimizer tensor_model_parallel_size
        pipeline_model_parallel_size context_parallel_size
        num_layers_per_virtual_pipeline_stage pipeline_layout pipeline_schedule
        sequence_parallel tp_overlap data_parallel_sums use_distributed_optimizer zero_stage
        num_distributed_optimizer_instances cpu_optimizer world_size""",
    "docs/verifying-layouts.md": "verify_layout",
    "docs/memory.md": """attention_impl micro_batch_size recompute_granularity recompute_method recompute_num_layers
        recompute_activations checkpoint_in_cpu fused_kernels compile cuda_graphs optimizer cpu_optimizer
        fp8_format fp8_margin
        fp8_amax_history_len fp8_amax_compute_algo first_last_layers_bf16 num_layers_at_start_in_bf16
        num_layers_at_end_in_bf16 timing_log_level profile""",
    "docs/checkpoints.md": """num_attention_heads layernorm_epsilon rotary_percent rotary_base qk_layernorm vocab_file
        merge_file tokenizer_model vocab_size seq_length skip_train optimizer save load
        save_overwrite verify trust_pickle ckpt_format save_hf finetune no_load_optim
        no_save_optim use_checkpoint_args keep_last keep_every keep_best async_save""",
    "docs/data.md": """num_layers vocab_file merge_file vocab_size data_path split split_arithmetic
        last_epoch_cutoff data_cache_path dataloader_type train_data_path valid_data_path
        test_data_path data_args_path per_split_data_args_path train_weighted_split_paths
        valid_weighted_split_paths test_weighted_split_paths train_weighted_split_paths_path
        multiple_validation_sets validation_set_names full_validation blend_change_at
        eod_mask_loss reset_position_ids reset_attention_mask skip_train_iteration_range
        global_batch_size rampup_batch_size eval_iters world_size keep_best input
        output_prefix json_keys append_eod on_error workers split_sentences sentence_splitter lang json
        checksums document sample sample_set top picture merge sha256 json_path output_file
        each_line""",
    "docs/evaluation.md": """data_path split overlapping_eval task valid_data strict_lambada eval_tasks steps
        results_path picture eval_tasks_interval eval_tasks_device harness harness_path num_fewshot limit input""",
    "docs/randomness.md": """attention_impl micro_batch_size deterministic_mode context_parallel_size""",
    "docs/extending.md": """init_method_std apply_layernorm_1p init_method_xavier_uniform""",
    "docs/tutorial.md": """hidden_size hidden_dropout attention_dropout train_iters eval_interval bf16 save_interval
        log_interval output""",
    "docs/generation.md": """temperature greedy top_k top_p min_p repetition_penalty out_seq_length prompt prompts
        num_return_sequences stop logprobs beam_width length_penalty system chat_template history""",
}


def where(name: str) -> list[str]:
    """Return the pages about the flag of a field; the table of all flags, if there is no other."""
    return [page for page, names in PAGES.items() if name in names.split()][:2] or ["docs/flags.md"]
