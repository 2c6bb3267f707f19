"""The table of flags: the tests that observe their effects.

Tests compare it with the fields, the tests that it names and the flags that are refused.
"""

import ast
import dataclasses
import functools
import json
import re
import typing
from collections import Counter
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
# File -> test -> the settings whose effect it observes, as GROUP.NAME if several have the name.
TABLE = {
    "test_flag_effects.py": {
        "test_sizes": """num_layers hidden_size ffn_hidden_size kv_channels max_position_embeddings
            untie_embeddings_and_output_weights num_query_groups group_query_attention position_embedding_type swiglu
            glu_activation add_bias_linear add_qkv_bias vocab_size""",
        "test_changes_the_losses": """
            num_attention_heads layernorm_epsilon hidden_dropout attention_dropout embedding_dropout bias_gelu_fusion
            attention_impl squared_relu normalization qk_layernorm embed_layernorm
            apply_residual_connection_post_layernorm init_method_xavier_uniform seq_length dataloader_type training.seed
            optimizer weight_decay clip_grad adam_beta1 adam_beta2 adam_eps""",
        "test_padded_vocabulary": "make_vocab_size_divisible_by pad_vocab_size_to",
        "test_smaller_initial_weights": "init_method_std",
        "test_changes_the_losses_of_another_run": """
            rotary_percent rotary_base apply_layernorm_1p lr_wsd_decay_style lr_wsd_decay_iters lr_warmup_init
            start_weight_decay end_weight_decay weight_decay_incr_style sgd_momentum muon_momentum muon_num_ns_steps
            fp32_residual_connection""",
        "test_data_path_and_split": "data_path split data_impl train_data_path valid_data_path test_data_path",
        "test_ends_of_documents": "eod_mask_loss reset_position_ids reset_attention_mask",
        "test_batch_sizes": "micro_batch_size global_batch_size",
        "test_length_and_validations": "train_iters eval_interval eval_iters logging.log_interval",
        "test_exit_signal_handler": "exit_signal_handler",
        "test_loss_mean_weighs_tokens_or_micro_batches": "loss_mean",
        "test_recompute_runs_blocks_again": "recompute_granularity recompute_method recompute_num_layers",
        "test_inputs_of_recomputed_layers_in_host_memory": "checkpoint_in_cpu",
        "test_compile": "compile",
        "test_fused_kernels": "fused_kernels",
        "test_learning_rates": "lr min_lr lr_decay_style lr_decay_iters lr_warmup_fraction lr_warmup_iters",
        "test_wsd_in_samples": "lr_wsd_decay_samples",
        "test_lengths_in_samples_and_tokens": "lr_decay_samples lr_decay_tokens lr_warmup_samples lr_warmup_tokens",
        "test_constant_loss_scale": "loss_scale",
        "test_dynamic_loss_scale": "initial_loss_scale loss_scale_window hysteresis",
        "test_least_loss_scale": "min_loss_scale",
        "test_leaves_the_losses_equal": "distributed_backend distributed_timeout_minutes local_rank",
        "test_files": "save load save_interval run_dir",
        "test_progress_bar": "progress",
    },
    "test_tokenizers.py": {
        "test_one_argument_names_any_folder_or_file": "tokenizer",
        "test_bytes_and_null": "tokenizer_type",
        "test_trained_bpe_equals_the_library_and_ends_with_eod": "vocab_file merge_file",
        "test_tokenizer_json_of_a_file_or_folder": "tokenizer_model",
    },
    "test_samples.py": {
        "test_split_golden_numbers": "split_arithmetic",
        "test_line_about_the_last_epoch": "last_epoch_cutoff",
        "test_warm_up_and_cache_path": "data_cache_path mmap_warmup",
        "test_mock_data": "mock_data",
    },
    "test_loader.py": {"test_reading_ahead_is_bounded_and_in_a_thread_that_ends": "num_workers"},
    "test_datasets_blends.py": {
        "test_paths_from_files": "data_args_path per_split_data_args_path",
        "test_groups_are_ranges_of_documents": """
            train_weighted_split_paths valid_weighted_split_paths test_weighted_split_paths""",
        "test_groups_from_a_file": """
            train_weighted_split_paths_path valid_weighted_split_paths_path test_weighted_split_paths_path""",
        "test_multiple_validation_sets": "multiple_validation_sets validation_set_names",
        "test_full_validation_is_the_mean_over_all": "full_validation",
        "test_a_resumed_run_goes_on_with_its_blends": "blend_change_at",
    },
    "test_loop.py": {
        "test_skipped_iterations_use_up_their_samples": "skip_train_iteration_range",
        "test_accumulation_steps": "num_accumulation_steps",
        "test_length_in_samples": "train_samples train_tokens",
        "test_rampup_batch_size": "rampup_batch_size",
        "test_exit_duration_in_mins": "exit_duration_in_mins",
        "test_kill_switch": "kill_switch_path",
        "test_evaluation_only": "skip_train",
        "test_finetune_takes_the_weights_alone": "finetune",
        "test_no_load_optim": "no_load_optim",
        "test_no_save_optim": "no_save_optim",
        "test_use_checkpoint_args": "use_checkpoint_args",
        "test_save_at_start": "save_at_start",
        "test_keep_last_and_every": "keep_last keep_every",
        "test_keep_best": "keep_best",
        "test_tensorboard": """
            tensorboard tensorboard_dir tensorboard_log_interval tensorboard_queue_size log_timers_to_tensorboard
            log_batch_size_to_tensorboard log_loss_scale_to_tensorboard log_validation_ppl_to_tensorboard
            log_memory_to_tensorboard log_world_size_to_tensorboard""",
        "test_num_zeros_and_params_norm": "log_params_norm log_num_zeros_in_grad",
        "test_timers": "timing_log_level timing_log_option",
        "test_deepspeeds_lines": "steps_per_print",
        "test_nvidia_smi": "nvidia_smi_at",
    },
    "test_train.py": {
        "test_exit_interval_saves_and_leaves": "exit_interval",
        "test_precisions_agree": "fp16 bf16 params_dtype",
        "test_deterministic_mode_is_set": "deterministic_mode",
        "test_bad_settings_are_refused": "device",
        "test_save_without_load_onto_checkpoints_is_refused": "save_overwrite",
        "test_missing_checkpoint_can_be_an_error": "exit_on_missing_checkpoint",
    },
    "test_fit.py": {"test_exit_signal": "exit_signal"},
    "test_verify_layout.py": {"test_train_verifies_before_it_begins": "verify_layout"},
    "test_precision.py": {"test_on_nonfinite": "on_nonfinite"},
    "test_guard.py": {"test_a_spike": "on_spike", "test_what_is_a_spike": "spike_factor spike_window"},
    "test_graph.py": {"test_a_step_is_up_to_three_pieces": "cuda_graphs"},
    "test_schedule.py": {
        "test_a_changed_schedule_needs_a_decision": "override_opt_param_scheduler use_checkpoint_opt_param_scheduler"
    },
    "test_fp8_runs.py": {
        "test_losses_fall_as_in_bfloat16": "fp8_format",
        "test_refusals": "fp8_recipe",
        "test_each_flag_changes_the_losses": """
            fp8_margin fp8_amax_history_len fp8_amax_compute_algo first_last_layers_bf16 num_layers_at_start_in_bf16
            num_layers_at_end_in_bf16""",
    },
    "test_same_losses.py": {
        "test_layouts": """tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
            num_layers_per_virtual_pipeline_stage pipeline_layout pipeline_schedule sequence_parallel zero_stage
            num_distributed_optimizer_instances"""
    },
    "test_flags.py": {"test_words_of_whole_configurations": "cp_comm_type"},
    "test_overlap.py": {"test_choice": "tp_overlap"},
    "test_mapped.py": {"test_choice": "data_parallel_sums"},
    "test_deepspeed_config.py": {"test_taken": "deepspeed_config"},
    "test_parallel_config.py": {"test_remote_device": "remote_device"},
    "test_optimizers.py": {"test_offload": "cpu_optimizer"},
    "test_launch.py": {"test_oneflow_flags": "num_gpus_per_node num_nodes node_ips"},
    "test_connect.py": {
        "test_world_size_flag": "world_size",
        "test_the_wait_for_missing_ranks_is_a_flag": "start_timeout_seconds",
    },
    "test_replicas.py": {"test_the_rank_that_differs_is_named_within_the_interval": "check_replicas_interval"},
    "test_native.py": {"test_reading_leaves_other_chunks_alone_and_full_does_not": "verify"},
    "test_hostile_files.py": {"test_their_payloads_work": "trust_pickle"},
    "test_megatron_saving.py": {"test_a_run_in_megatrons_tree": "ckpt_format", "test_save_hf": "save_hf"},
    "test_background_saving.py": {
        "test_a_save_holds_the_numbers_of_its_own_step": "async_save",
        "test_going_on_after_a_failed_save": "save_error",
    },
    "test_screen.py": {"test_megatrons_log_on_a_terminal": "log_format"},
    "test_trackers.py": {
        "test_flags_choose": "log_learning_rate_to_tensorboard",
        "test_wandb": "wandb_project wandb_exp_name wandb_save_dir",
        "test_trackio": "trackio_project",
    },
    "test_profile.py": {"test_profile": "profile profile_step_start profile_step_end"},
    "test_stragglers.py": {"test_a_slow_rank_is_named_and_the_run_goes_on": "log_straggler"},
    "test_written_samples.py": {"test_flags": "sample_interval sample_prompts sample_length sample_temperature"},
    "test_scores.py": {
        "test_scores_are_those_of_the_saved_weights": "eval_tasks eval_tasks_interval",
        "test_scores_beside_the_run": "eval_tasks_device",
    },
    "test_generate.py": {
        "test_temperature": "temperature",
        "test_greedy": "greedy",
        "test_top_k": "top_k",
        "test_top_p": "top_p",
        "test_min_p": "min_p",
        "test_repetition_penalty": "repetition_penalty",
        "test_out_seq_length": "out_seq_length",
        "test_recompute_equals_cache": "recompute",
        "test_prompt": "prompt",
        "test_interactive": "interactive dialogue",
        "test_num_samples_and_genfile": "num_samples genfile",
        "test_sample_input_file": "sample_input_file",
        "test_sample_output_file": "sample_output_file",
    },
    "test_batches.py": {
        "test_lines_of_a_file_and_of_standard_input": "prompts",
        "test_output_appears_complete": "texts.output",
        "test_json_lines": "texts.json",
        "test_several_texts_of_a_prompt": "num_return_sequences",
        "test_stop_strings": "texts.stop",
        "test_log_probabilities_are_the_models": "logprobs",
        "test_beam_search": "beam_width length_penalty",
    },
    "test_chat.py": {
        "test_stop_strings_and_the_systems_words": "system chat.stop",
        "test_a_chat_template_is_used": "chat.chat_template",
        "test_in_a_terminal": "history",
    },
    "test_preprocess.py": {
        "test_several_inputs_patterns_and_standard_input": "preprocess.input",
        "test_documents_in_order_with_eod": "preprocess.output_prefix append_eod dataset_impl",
        "test_keys_stay_aligned_when_a_text_is_empty": "preprocess.json_keys",
        "test_bad_lines_are_counted_by_kind_and_no_good_line_is_lost": "on_error",
        "test_a_bar_on_a_terminal": "preprocess.log_interval",
    },
    "test_inputs.py": {
        "test_a_folder": "preprocess.include preprocess.exclude evaluate.include evaluate.exclude",
        "test_separators": "preprocess.document_separator evaluate.document_separator",
    },
    "test_overwrite.py": {
        "test_preprocess_replaces_other_data_only_with_overwrite": "preprocess.overwrite",
        "test_data_merge_replaces_other_data_only_with_overwrite": "merging.overwrite",
    },
    "test_preprocess_workers.py": {"test_workers_write_the_bytes_of_one": "workers"},
    "test_sentences.py": {
        "test_each_is_a_sequence": "split_sentences sentence_splitter keep_newlines",
        "test_languages": "lang",
    },
    "test_score.py": {
        "test_figures_equal_a_plain_computation": "evaluate.input",
        "test_each_key_of_a_line_is_a_document": "evaluate.json_keys",
        "test_overlapping_eval": "overlapping_eval",
        "test_json_and_table_show_the_same_numbers": "evaluate.json",
    },
    "test_tasks.py": {
        "test_several_checkpoints_in_one_call": "folders steps results_path evaluate.picture",
        "test_lambada_equals_transformers": "task valid_data strict_lambada",
    },
    "test_harness.py": {"test_the_command": "harness harness_path num_fewshot limit"},
    "test_data_commands.py": {
        "test_intact_files_and_checksums": "prefixes checksums",
        "test_counts_lengths_and_frequent_tokens": "prefix top inspection.json",
        "test_one_document": "document",
        "test_one_training_sample": "sample sample_set",
        "test_picture": "inspection.picture",
        "test_plan_counts_what_the_training_reads": "planning.json",
        "test_merged_files_are_megatrons": "datasets merging.output_prefix",
        "test_merge_of_a_folder_and_its_script": "merging.input",
        "test_several_are_copied_at_a_time": "merge",
        "test_fetch_continues_where_it_was_cut": "names fetching.output",
        "test_a_wrong_checksum_leaves_nothing": "sha256",
        "test_loose_files_become_one": "json_path loose_text.output_file each_line loose_text.overwrite",
    },
    "test_serve.py": {
        "test_every_flag_of_the_server_arrives": """
            host port api_key api_key_file allowed_hosts served_model_name serve.chat_template slots queue max_body_size
            read_timeout request_timeout"""
    },
    "test_convert.py": {
        "test_a_circle_of_conversions_ends_with_the_same_file": "paths to",
        "test_impossible_conversions_are_refused": "target_tensor_parallel_size target_pipeline_parallel_size",
        "test_precision": "dtype",
        "test_optimizer_state_and_counters_are_converted": "no_optimizer",
    },
    "test_dedup.py": {
        "test_removes_what_comparing_all_pairs_removes": "threshold shingle num_seeds num_bands deduplication.seed",
        "test_files_and_their_lines": "inputs deduplication.output_file removed_file json_key deduplication.overwrite",
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
    """Except those that are planned: they have no effect yet."""
    groups = Counter(name for _, name in entries())
    working = [key for key, f in entries().items() if not fields.is_not_yet(f)]
    named = [name for tests in TABLE.values() for names in tests.values() for name in names.split()]
    assert sorted(named) == sorted(name if groups[name] == 1 else f"{group}.{name}" for group, name in working)


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


@pytest.mark.parametrize("file", TABLE)
def test_named_tests_exist_and_mention_their_flag(file):
    for test, names in TABLE[file].items():
        assert test in functions_in(file), f"no {test} in {file}"
        # These pass flags; the others call what a flag sets.
        if file in ("test_flag_effects.py", "test_train.py", "test_generate.py"):
            for name in names.split():
                spelled = name.rpartition(".")[2].replace("_", "[-_]")
                assert re.search(rf"--(no-)?{spelled}\b", functions_in(file)[test]), f"{name}: not in {file}::{test}"


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
