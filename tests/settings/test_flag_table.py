"""The table of flags: for each the test that observes its effect, or "not yet".

Tests compare it with the fields, the tests that it names and the flags that are refused.
"""

import ast
import dataclasses
import functools
import json
import re
import typing
from pathlib import Path

import pytest

from meshwright.errors import UserError
from meshwright.settings import fields, flags
from meshwright.settings.fields import choices_of, inner_type, not_yet
from meshwright.settings.other_programs.megatron_flags import (
    EQUAL,
    NO_EFFECT,
    OLD_SWITCHES,
    OTHER_MODELS,
    REFUSED,
    RETIRED,
)
from meshwright.settings.schema import TrainConfig

TESTS = Path(__file__).parents[1]
CONFIGS = fields.every_config()
E = "test_flag_effects.py::"
# Another spelling, or no effect on one process: equal losses.
SAME = E + "test_leaves_the_losses_equal"
LOSSES = E + "test_changes_the_losses"
OVERWRITE = "test_overwrite.py::test_"
LAYOUTS = "test_same_losses.py::test_layouts"  # these change only where work is done

TABLE = {
    "model": {
        "num_layers": E + "test_sizes",
        "hidden_size": E + "test_sizes",
        "num_attention_heads": LOSSES,
        **dict.fromkeys("ffn_hidden_size kv_channels max_position_embeddings".split(), E + "test_sizes"),
        "make_vocab_size_divisible_by": E + "test_padded_vocabulary",
        "pad_vocab_size_to": E + "test_padded_vocabulary",
        "layernorm_epsilon": LOSSES,
        "init_method_std": E + "test_smaller_initial_weights",
        "hidden_dropout": LOSSES,
        "attention_dropout": LOSSES,
        "embedding_dropout": LOSSES,
        "untie_embeddings_and_output_weights": E + "test_sizes",
        "bias_gelu_fusion": LOSSES,
        "attention_impl": LOSSES,
        **dict.fromkeys(
            """num_query_groups group_query_attention position_embedding_type """.split(), E + "test_sizes"
        ),
        "rotary_percent": E + "test_changes_the_losses_of_another_run",
        "rotary_base": E + "test_changes_the_losses_of_another_run",
        "swiglu": E + "test_sizes",
        "squared_relu": LOSSES,
        "glu_activation": E + "test_sizes",
        "normalization": LOSSES,
        "apply_layernorm_1p": E + "test_changes_the_losses_of_another_run",
        "qk_layernorm": LOSSES,
        "add_bias_linear": E + "test_sizes",
        "add_qkv_bias": E + "test_sizes",
        **dict.fromkeys(
            """embed_layernorm apply_residual_connection_post_layernorm init_method_xavier_uniform""".split(), LOSSES
        ),
        "num_experts": "not yet",
    },
    "tokenizer": {
        "tokenizer": "test_tokenizers.py::test_one_argument_names_any_folder_or_file",
        "tokenizer_type": "test_tokenizers.py::test_bytes_and_null",
        "vocab_file": "test_tokenizers.py::test_trained_bpe_equals_the_library_and_ends_with_eod",
        "merge_file": "test_tokenizers.py::test_trained_bpe_equals_the_library_and_ends_with_eod",
        "tokenizer_model": "test_tokenizers.py::test_tokenizer_json_of_a_file_or_folder",
        "vocab_size": E + "test_sizes",
    },
    "data": {
        "data_path": E + "test_data_path_and_split",
        "seq_length": LOSSES,
        "split": E + "test_data_path_and_split",
        "split_arithmetic": "test_samples.py::test_split_golden_numbers",
        "last_epoch_cutoff": "test_samples.py::test_line_about_the_last_epoch",
        "data_cache_path": "test_samples.py::test_warm_up_and_cache_path",
        "mock_data": "test_samples.py::test_mock_data",
        "data_impl": E + "test_data_path_and_split",
        "mmap_warmup": "test_samples.py::test_warm_up_and_cache_path",
        "dataloader_type": LOSSES,
        "num_workers": "test_loader.py::test_reading_ahead_is_bounded_and_in_a_thread_that_ends",
        **dict.fromkeys("train_data_path valid_data_path test_data_path".split(), E + "test_data_path_and_split"),
        "data_args_path": "test_datasets_blends.py::test_paths_from_files",
        "per_split_data_args_path": "test_datasets_blends.py::test_paths_from_files",
        **dict.fromkeys(
            """train_weighted_split_paths valid_weighted_split_paths test_weighted_split_paths""".split(),
            "test_datasets_blends.py::test_groups_are_ranges_of_documents",
        ),
        **dict.fromkeys(
            [f"{split}_weighted_split_paths_path" for split in ("train", "valid", "test")],
            "test_datasets_blends.py::test_groups_from_a_file",
        ),
        "multiple_validation_sets": "test_datasets_blends.py::test_multiple_validation_sets",
        "validation_set_names": "test_datasets_blends.py::test_multiple_validation_sets",
        "full_validation": "test_datasets_blends.py::test_full_validation_is_the_mean_over_all",
        "blend_change_at": "test_datasets_blends.py::test_a_resumed_run_goes_on_with_its_blends",
        **dict.fromkeys("eod_mask_loss reset_position_ids reset_attention_mask".split(), E + "test_ends_of_documents"),
        "skip_train_iteration_range": "test_loop.py::test_skipped_iterations_use_up_their_samples",
    },
    "training": {
        "micro_batch_size": E + "test_batch_sizes",
        "global_batch_size": E + "test_batch_sizes",
        "num_accumulation_steps": "test_loop.py::test_accumulation_steps",
        "train_iters": E + "test_length_and_validations",
        "train_samples": "test_loop.py::test_length_in_samples",
        "train_tokens": "test_loop.py::test_length_in_samples",
        "rampup_batch_size": "test_loop.py::test_rampup_batch_size",
        "seed": LOSSES,
        "eval_interval": E + "test_length_and_validations",
        "eval_iters": E + "test_length_and_validations",
        "exit_interval": "test_train.py::test_exit_interval_saves_and_leaves",
        "exit_duration_in_mins": "test_loop.py::test_exit_duration_in_mins",
        "exit_signal_handler": E + "test_exit_signal_handler",
        "exit_signal": "test_fit.py::test_exit_signal",
        "kill_switch_path": "test_loop.py::test_kill_switch",
        "skip_train": "test_loop.py::test_evaluation_only",
        "verify_layout": "test_verify_layout.py::test_train_verifies_before_it_begins",
        "loss_mean": E + "test_loss_mean_weighs_tokens_or_micro_batches",
        "on_nonfinite": "test_precision.py::test_on_nonfinite",
        "on_spike": "test_guard.py::test_a_spike",
        "spike_factor": "test_guard.py::test_what_is_a_spike",
        "spike_window": "test_guard.py::test_what_is_a_spike",
        **dict.fromkeys(
            """recompute_granularity recompute_method recompute_num_layers""".split(),
            E + "test_recompute_runs_blocks_again",
        ),
        "checkpoint_in_cpu": E + "test_inputs_of_recomputed_layers_in_host_memory",
        "compile": E + "test_compile",
        "fused_kernels": E + "test_fused_kernels",
        "cuda_graphs": "test_graph.py::test_a_step_is_up_to_three_pieces",
    },
    "optimizer": {
        "optimizer": LOSSES,
        **dict.fromkeys("lr min_lr lr_decay_style".split(), E + "test_learning_rates"),
        "lr_wsd_decay_style": E + "test_changes_the_losses_of_another_run",
        "lr_wsd_decay_iters": E + "test_changes_the_losses_of_another_run",
        "lr_wsd_decay_samples": E + "test_wsd_in_samples",
        "lr_decay_iters": E + "test_learning_rates",
        "lr_decay_samples": E + "test_lengths_in_samples_and_tokens",
        "lr_decay_tokens": E + "test_lengths_in_samples_and_tokens",
        "lr_warmup_fraction": E + "test_learning_rates",
        "lr_warmup_iters": E + "test_learning_rates",
        "lr_warmup_samples": E + "test_lengths_in_samples_and_tokens",
        "lr_warmup_tokens": E + "test_lengths_in_samples_and_tokens",
        "lr_warmup_init": E + "test_changes_the_losses_of_another_run",
        "weight_decay": LOSSES,
        **dict.fromkeys(
            "start_weight_decay end_weight_decay weight_decay_incr_style".split(),
            E + "test_changes_the_losses_of_another_run",
        ),
        **dict.fromkeys("clip_grad adam_beta1 adam_beta2 adam_eps".split(), LOSSES),
        **dict.fromkeys(
            "sgd_momentum muon_momentum muon_num_ns_steps".split(), E + "test_changes_the_losses_of_another_run"
        ),
        "override_opt_param_scheduler": "test_schedule.py::test_a_changed_schedule_needs_a_decision",
        "use_checkpoint_opt_param_scheduler": "test_schedule.py::test_a_changed_schedule_needs_a_decision",
    },
    "precision": {
        **dict.fromkeys("fp16 bf16 params_dtype".split(), "test_train.py::test_precisions_agree"),
        "loss_scale": E + "test_constant_loss_scale",
        "initial_loss_scale": E + "test_dynamic_loss_scale",
        "min_loss_scale": E + "test_least_loss_scale",
        "loss_scale_window": E + "test_dynamic_loss_scale",
        "hysteresis": E + "test_dynamic_loss_scale",
        "deterministic_mode": "test_train.py::test_deterministic_mode_is_set",
        "fp32_residual_connection": E + "test_changes_the_losses_of_another_run",
        "fp8_format": "test_fp8_runs.py::test_losses_fall_as_in_bfloat16",
        "fp8_recipe": "test_fp8_runs.py::test_refusals",
        **dict.fromkeys(
            """fp8_margin fp8_amax_history_len fp8_amax_compute_algo first_last_layers_bf16 num_layers_at_start_in_bf16
            num_layers_at_end_in_bf16""".split(),
            "test_fp8_runs.py::test_each_flag_changes_the_losses",
        ),
    },
    "parallel": {
        **dict.fromkeys(
            """tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size""".split(), LAYOUTS
        ),
        "cp_comm_type": "test_flags.py::test_words_of_whole_configurations",
        **dict.fromkeys(
            """num_layers_per_virtual_pipeline_stage pipeline_layout pipeline_schedule sequence_parallel
            zero_stage num_distributed_optimizer_instances""".split(),
            LAYOUTS,
        ),
        "tp_overlap": "test_overlap.py::test_choice",
        "data_parallel_sums": "test_mapped.py::test_choice",
        "deepspeed_config": "test_deepspeed_config.py::test_taken",
        "remote_device": "test_parallel_config.py::test_remote_device",
        "cpu_optimizer": "test_optimizers.py::test_offload",
        **dict.fromkeys("num_gpus_per_node num_nodes node_ips".split(), "test_launch.py::test_oneflow_flags"),
        "world_size": "test_connect.py::test_world_size_flag",
        "device": "test_train.py::test_bad_settings_are_refused",
        "distributed_backend": SAME,
        "distributed_timeout_minutes": SAME,
        "check_replicas_interval": "test_replicas.py::test_the_rank_that_differs_is_named_within_the_interval",
        "start_timeout_seconds": "test_connect.py::test_the_wait_for_missing_ranks_is_a_flag",
        "local_rank": SAME,
    },
    "checkpoint": {
        **dict.fromkeys("save load save_interval".split(), E + "test_files"),
        "save_overwrite": "test_train.py::test_save_without_load_onto_checkpoints_is_refused",
        "verify": "test_native.py::test_reading_leaves_other_chunks_alone_and_full_does_not",
        "exit_on_missing_checkpoint": "test_train.py::test_missing_checkpoint_can_be_an_error",
        "trust_pickle": "test_hostile_files.py::test_their_payloads_work",
        "ckpt_format": "test_megatron_saving.py::test_a_run_in_megatrons_tree",
        "save_hf": "test_megatron_saving.py::test_save_hf",
        "finetune": "test_loop.py::test_finetune_takes_the_weights_alone",
        "no_load_optim": "test_loop.py::test_no_load_optim",
        "no_save_optim": "test_loop.py::test_no_save_optim",
        "use_checkpoint_args": "test_loop.py::test_use_checkpoint_args",
        "save_at_start": "test_loop.py::test_save_at_start",
        "keep_last": "test_loop.py::test_keep_last_and_every",
        "keep_every": "test_loop.py::test_keep_last_and_every",
        "keep_best": "test_loop.py::test_keep_best",
        "async_save": "test_background_saving.py::test_a_save_holds_the_numbers_of_its_own_step",
        "save_error": "test_background_saving.py::test_going_on_after_a_failed_save",
        "run_dir": E + "test_files",
    },
    "logging": {
        "log_interval": E + "test_length_and_validations",
        "log_format": "test_screen.py::test_megatrons_log_on_a_terminal",
        "progress": E + "test_progress_bar",
        **dict.fromkeys(
            """tensorboard tensorboard_dir tensorboard_log_interval tensorboard_queue_size
            log_timers_to_tensorboard log_batch_size_to_tensorboard""".split(),
            "test_loop.py::test_tensorboard",
        ),
        "log_learning_rate_to_tensorboard": "test_trackers.py::test_flags_choose",
        **dict.fromkeys(
            """log_loss_scale_to_tensorboard log_validation_ppl_to_tensorboard log_memory_to_tensorboard
            log_world_size_to_tensorboard""".split(),
            "test_loop.py::test_tensorboard",
        ),
        "log_params_norm": "test_loop.py::test_num_zeros_and_params_norm",
        "log_num_zeros_in_grad": "test_loop.py::test_num_zeros_and_params_norm",
        "timing_log_level": "test_loop.py::test_timers",
        "timing_log_option": "test_loop.py::test_timers",
        **dict.fromkeys("wandb_project wandb_exp_name wandb_save_dir".split(), "test_trackers.py::test_wandb"),
        **dict.fromkeys("profile profile_step_start profile_step_end".split(), "test_profile.py::test_profile"),
        "steps_per_print": "test_loop.py::test_deepspeeds_lines",
        "log_straggler": "test_stragglers.py::test_a_slow_rank_is_named_and_the_run_goes_on",
        "nvidia_smi_at": "test_loop.py::test_nvidia_smi",
        "trackio_project": "test_trackers.py::test_trackio",
        **dict.fromkeys(
            "sample_interval sample_prompts sample_length sample_temperature".split(),
            "test_written_samples.py::test_flags",
        ),
        "eval_tasks": "test_scores.py::test_scores_are_those_of_the_saved_weights",
        "eval_tasks_interval": "test_scores.py::test_scores_are_those_of_the_saved_weights",
        "eval_tasks_device": "test_scores.py::test_scores_beside_the_run",
    },
    "sampling": {
        "temperature": "test_generate.py::test_temperature",
        "greedy": "test_generate.py::test_greedy",
        "top_k": "test_generate.py::test_top_k",
        "top_p": "test_generate.py::test_top_p",
        "min_p": "test_generate.py::test_min_p",
        "repetition_penalty": "test_generate.py::test_repetition_penalty",
        "out_seq_length": "test_generate.py::test_out_seq_length",
        "recompute": "test_generate.py::test_recompute_equals_cache",
    },
    "texts": {
        "prompt": "test_generate.py::test_prompt",
        "prompts": "test_batches.py::test_lines_of_a_file_and_of_standard_input",
        "output": "test_batches.py::test_output_appears_complete",
        "json": "test_batches.py::test_json_lines",
        "num_return_sequences": "test_batches.py::test_several_texts_of_a_prompt",
        "stop": "test_batches.py::test_stop_strings",
        "logprobs": "test_batches.py::test_log_probabilities_are_the_models",
        "beam_width": "test_batches.py::test_beam_search",
        "length_penalty": "test_batches.py::test_beam_search",
        "interactive": "test_generate.py::test_interactive",
        "dialogue": "test_generate.py::test_interactive",
        "num_samples": "test_generate.py::test_num_samples_and_genfile",
        "genfile": "test_generate.py::test_num_samples_and_genfile",
        "sample_input_file": "test_generate.py::test_sample_input_file",
        "sample_output_file": "test_generate.py::test_sample_output_file",
    },
    "chat": {
        "system": "test_chat.py::test_stop_strings_and_the_systems_words",
        "chat_template": "test_chat.py::test_a_chat_template_is_used",
        "stop": "test_chat.py::test_stop_strings_and_the_systems_words",
        "history": "test_chat.py::test_in_a_terminal",
    },
    "preprocess": {
        "input": "test_preprocess.py::test_several_inputs_patterns_and_standard_input",
        "include": "test_inputs.py::test_a_folder",
        "exclude": "test_inputs.py::test_a_folder",
        "document_separator": "test_inputs.py::test_separators",
        "output_prefix": "test_preprocess.py::test_documents_in_order_with_eod",
        "json_keys": "test_preprocess.py::test_keys_stay_aligned_when_a_text_is_empty",
        "append_eod": "test_preprocess.py::test_documents_in_order_with_eod",
        "on_error": "test_preprocess.py::test_bad_lines_are_counted_by_kind_and_no_good_line_is_lost",
        "dataset_impl": "test_preprocess.py::test_documents_in_order_with_eod",
        "overwrite": OVERWRITE + "preprocess_replaces_other_data_only_with_overwrite",
        "workers": "test_preprocess_workers.py::test_workers_write_the_bytes_of_one",
        "log_interval": "test_preprocess.py::test_a_bar_on_a_terminal",
        "split_sentences": "test_sentences.py::test_each_is_a_sequence",
        "sentence_splitter": "test_sentences.py::test_each_is_a_sequence",
        "keep_newlines": "test_sentences.py::test_each_is_a_sequence",
        "lang": "test_sentences.py::test_languages",
    },
    "evaluate": {
        "input": "test_score.py::test_figures_equal_a_plain_computation",
        "json_keys": "test_score.py::test_each_key_of_a_line_is_a_document",
        "include": "test_inputs.py::test_a_folder",
        "exclude": "test_inputs.py::test_a_folder",
        "document_separator": "test_inputs.py::test_separators",
        "overlapping_eval": "test_score.py::test_overlapping_eval",
        "json": "test_score.py::test_json_and_table_show_the_same_numbers",
        **dict.fromkeys(
            "folders steps results_path picture".split(), "test_tasks.py::test_several_checkpoints_in_one_call"
        ),
        **dict.fromkeys("task valid_data strict_lambada".split(), "test_tasks.py::test_lambada_equals_transformers"),
        **dict.fromkeys("harness harness_path num_fewshot limit".split(), "test_harness.py::test_the_command"),
    },
    "verification": {
        "prefixes": "test_data_commands.py::test_whole_files_and_checksums",
        "checksums": "test_data_commands.py::test_whole_files_and_checksums",
    },
    "inspection": {
        "prefix": "test_data_commands.py::test_counts_lengths_and_frequent_tokens",
        "document": "test_data_commands.py::test_one_document",
        "sample": "test_data_commands.py::test_one_training_sample",
        "sample_set": "test_data_commands.py::test_one_training_sample",
        "top": "test_data_commands.py::test_counts_lengths_and_frequent_tokens",
        "picture": "test_data_commands.py::test_picture",
        "json": "test_data_commands.py::test_counts_lengths_and_frequent_tokens",
    },
    "serve": dict.fromkeys(
        """host port api_key api_key_file allowed_hosts served_model_name chat_template slots queue max_body_size
        read_timeout request_timeout""".split(),
        "test_serve.py::test_every_flag_of_the_server_arrives",
    ),
    "planning": {"json": "test_data_commands.py::test_plan_counts_what_the_training_reads"},
    "merging": {
        "datasets": "test_data_commands.py::test_merged_files_are_megatrons",
        "input": "test_data_commands.py::test_merge_of_a_folder_and_its_script",
        "output_prefix": "test_data_commands.py::test_merged_files_are_megatrons",
        "overwrite": OVERWRITE + "data_merge_replaces_other_data_only_with_overwrite",
        "merge": "test_data_commands.py::test_several_are_copied_at_a_time",
    },
    "fetching": {
        "names": "test_data_commands.py::test_fetch_continues_where_it_was_cut",
        "output": "test_data_commands.py::test_fetch_continues_where_it_was_cut",
        "sha256": "test_data_commands.py::test_a_wrong_checksum_leaves_nothing",
    },
    "conversion": {
        "paths": "test_convert.py::test_a_circle_of_conversions_ends_with_the_same_file",
        "to": "test_convert.py::test_a_circle_of_conversions_ends_with_the_same_file",
        "target_tensor_parallel_size": "test_convert.py::test_impossible_conversions_are_refused",
        "target_pipeline_parallel_size": "test_convert.py::test_impossible_conversions_are_refused",
        "dtype": "test_convert.py::test_precision",
        "no_optimizer": "test_convert.py::test_optimizer_state_and_counters_are_converted",
    },
    "deduplication": {
        **dict.fromkeys(
            "threshold shingle num_seeds num_bands seed".split(),
            "test_dedup.py::test_removes_what_comparing_all_pairs_removes",
        ),
        **dict.fromkeys(
            "inputs output_file removed_file json_key overwrite".split(), "test_dedup.py::test_files_and_their_lines"
        ),
    },
    "loose_text": {
        **dict.fromkeys(
            "json_path output_file each_line overwrite".split(), "test_data_commands.py::test_loose_files_become_one"
        )
    },
}


def entries():
    """Return (group, field name) -> field of all commands."""
    return {(g, n): f for cls in CONFIGS for n, (g, f, _) in fields.config_fields(cls).items()}


def file_of(name):
    """Return the path of a test file."""
    [path] = TESTS.rglob(name)
    return path


@functools.cache
def functions_in(file):
    """Return top-level function -> source with decorators."""
    text = file_of(file).read_text(encoding="utf-8")
    lines, found = text.splitlines(), {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


def test_every_flag_has_an_entry_and_no_entry_is_left_over():
    assert {(g, n) for g, names in TABLE.items() for n in names} == set(entries())


def test_not_yet_marks_exactly_those_flags(capsys):
    marked = {(g, n) for g, names in TABLE.items() for n, where in names.items() if where == "not yet"}
    true = {key for key, f in entries().items() if fields.is_not_yet(f)}
    assert marked == true
    by_step = {}
    for key in sorted(true):
        by_step.setdefault(entries()[key].metadata["step"], []).append(key[1])
    with capsys.disabled():
        for step, names in sorted(by_step.items()):
            print(f"\nnot yet, {f'step {step}' if step < 9 else 'no plan'}: {len(names)}: {', '.join(names)}")


@pytest.mark.parametrize("cls", CONFIGS)
def test_not_yet_is_refused_by_name(cls):
    """Every such flag at once, each with a value other than its default, gives one line each."""
    argv, wanted = [], set()
    for name, (_, f, kind) in fields.config_fields(cls).items():
        if fields.is_not_yet(f):
            flag, default, inner = fields.spelling(name), fields.default_of(f), inner_type(kind)
            wanted.add(flag)
            if kind is bool:
                argv.append("--no-" + flag[2:] if default else flag)
            elif typing.get_origin(inner) is typing.Literal:
                argv += [flag, next(c for c in typing.get_args(inner) if c != default)]
            else:
                argv += [flag, "7"]
    if not wanted:
        return
    with pytest.raises(UserError) as caught:
        flags.parse_settings(cls, argv, "meshwright test")
    refused = [line.split()[0] for line in str(caught.value).splitlines() if " is not yet in" in line]
    assert sorted(refused) == sorted(wanted)


@pytest.mark.parametrize("group", TABLE)
def test_named_tests_exist_and_mention_their_flag(group):
    for name, where in TABLE[group].items():
        if where == "not yet":
            continue
        file, test = where.split("::")
        assert test in functions_in(file), f"{name}: no {test} in {file}"
        # These pass flags; the others call what a flag sets.
        if file in ("test_flag_effects.py", "test_train.py", "test_generate.py"):
            spelled = name.replace("_", "[-_]")
            assert re.search(rf"--(no-)?{spelled}\b", functions_in(file)[test]), f"{name}: not in {where}"


HEAD = """# Flags

Generated from the dataclasses of settings, most of them in `src/meshwright/settings/schema.py`.
Every flag is also a setting of `--config FILE` (`--seq-length` is `seq_length`) and of the environment
(`MESHWRIGHT_SEQ_LENGTH`). A switch `--x` also has `--no-x`. *Not yet*: only the default works, or
all values but those named. [Flags of other programs](#flags-of-other-programs) are at the end.
"""
OTHERS = """## Flags of other programs

Flags of Megatron-LM, Megatron-Core, Megatron-DeepSpeed and OneFlow that `train` knows by name and
does not have, and what it answers. `*` stands for any ending.
"""


def reference() -> str:
    """Return docs/flags.md: a table for each group of settings."""
    out = [HEAD]
    for name, group in {name: group for cls in CONFIGS for name, group in fields.config_groups(cls).items()}.items():
        out += [f"## {name.capitalize().replace('_', ' ')}", "", (group.__doc__ or "").splitlines()[0], ""]
        out += ["| flag | other spellings | default | meaning |", "|---|---|---|---|"]
        kinds = typing.get_type_hints(group)
        for f in dataclasses.fields(group):
            aliases, default = " ".join(f"`{a}`" for a in f.metadata["aliases"]), fields.default_of(f)
            shown = "" if default in (None, []) else f"`{json.dumps(default)}`"
            lacking = not_yet(f, kinds[f.name])
            meaning = f.metadata["help"] + (f" *({lacking})*" if lacking else "")
            cells = [f"`{fields.spelling(f.name)}`", aliases, shown, meaning.replace("|", "\\|")]
            out.append("| " + " | ".join(cells) + " |")
        out.append("")
    return "\n".join(out + elsewhere())


def elsewhere() -> list[str]:
    """Return the tables of flags of other programs, with the answers that they get."""
    idle = {}
    for name, (_, reason) in NO_EFFECT.items():
        idle.setdefault(reason, []).append(name)
    refused = {}
    for name, reason in REFUSED.items():
        refused.setdefault(reason, []).append(name)
    same = {}
    for name, (setting, value) in (EQUAL | OLD_SWITCHES).items():
        flag = name if name in EQUAL else fields.spelling(name)
        same.setdefault(f"{fields.spelling(setting)} {value}", []).append(flag)
    models = {f"for {model}": [f"--{s}*" for s in starts.split()] for model, starts in OTHER_MODELS.items()}
    tables = {
        "Not yet": {reason: names for reason, names in refused.items() if "not yet" in reason},
        "Refused": {reason: names for reason, names in refused.items() if "not yet" not in reason} | models,
        "Without effect": idle,
        "Renamed": {f"use {new}": [old] for old, new in RETIRED.items()} | same,
    }
    out = OTHERS.splitlines()
    for heading, table in tables.items():
        out += ["", f"### {heading}", "", "| flags | answer |", "|---|---|"]
        out += [f"| {' '.join(f'`{name}`' for name in names)} | {reason} |" for reason, names in table.items()]
    return [*out, ""]


def test_the_page_of_flags_is_up_to_date():
    page = (TESTS.parent / "docs" / "flags.md").read_text(encoding="utf-8")
    assert page == reference(), "update it: python tests/settings/test_flag_table.py > docs/flags.md"
    for _, f in entries().items():
        assert f.metadata["help"].replace("|", "\\|") in page


def test_the_page_marks_all_that_answers_not_yet():
    lines = reference().splitlines()
    for _, (_, f, kind) in fields.config_fields(TrainConfig).items():
        if only := f.metadata["only"]:
            [line] = [line for line in lines if line.startswith(f"| `{fields.spelling(f.name)}` |")]
            *_, mark = line.partition(" *(not yet")
            assert mark and all(choice in mark for choice in choices_of(kind) if choice not in only)
    begin, end = lines.index("### Not yet"), lines.index("### Refused")
    listed = "\n".join(lines[begin:end])
    assert all(f"`{name}`" in listed for name, reason in REFUSED.items() if "not yet" in reason)


if __name__ == "__main__":
    print(reference(), end="")
