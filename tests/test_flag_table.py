"""THE table: each flag and the test that observes what it changes, or "not yet".

A field without an entry, an entry without a field, a test that does not exist, a "not yet" that is not one, and a flag
of which only the default works that does not say so are failures. The run prints what is not yet there.
"""

import ast
import functools
import re
import typing
from pathlib import Path

import pytest

from meshwright import config as settings
from meshwright import flags
from meshwright.errors import UserError

TESTS = Path(__file__).parent
CONFIGS = settings.EVERY
E = "test_flag_effects.py::"
SAME = E + "test_another_word_for_the_same"  # another spelling, or nothing to do for one process: equal losses
LOSSES = E + "test_changes_the_losses"

TABLE = {
    "model": {
        "num_layers": E + "test_sizes",
        "hidden_size": E + "test_sizes",
        "num_attention_heads": LOSSES,
        "ffn_hidden_size": E + "test_sizes",
        "kv_channels": E + "test_sizes",
        "max_position_embeddings": E + "test_sizes",
        "make_vocab_size_divisible_by": E + "test_padded_vocabulary",
        "pad_vocab_size_to": E + "test_padded_vocabulary",
        "layernorm_epsilon": LOSSES,
        "init_method_std": E + "test_smaller_initial_weights",
        "hidden_dropout": LOSSES,
        "attention_dropout": LOSSES,
        "untie_embeddings_and_output_weights": E + "test_sizes",
        "bias_gelu_fusion": LOSSES,
        "openai_gelu": SAME,
        "attention_impl": LOSSES,
        "num_query_groups": "not yet",
        "group_query_attention": "not yet",
        "position_embedding_type": SAME,
        "use_rotary_position_embeddings": "not yet",
        "rotary_percent": "not yet",
        "swiglu": "not yet",
        "squared_relu": "not yet",
        "glu_activation": "not yet",
        "normalization": "not yet",
        "apply_layernorm_1p": "not yet",
        "qk_layernorm": "not yet",
        "add_bias_linear": "not yet",
        "embed_layernorm": "not yet",
        "apply_residual_connection_post_layernorm": "not yet",
        "init_method_xavier_uniform": "not yet",
        "num_experts": "not yet",
    },
    "tokenizer": {
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
        "dataloader_type": "not yet",
        "num_workers": "test_loader.py::test_reading_ahead_is_bounded_and_in_a_thread_that_ends",
        "train_data_path": "not yet",
        "valid_data_path": "not yet",
        "test_data_path": "not yet",
        "eod_mask_loss": "not yet",
        "reset_position_ids": "not yet",
        "reset_attention_mask": "not yet",
        "skip_train_iteration_range": "not yet",
    },
    "training": {
        "micro_batch_size": E + "test_batch_sizes",
        "global_batch_size": E + "test_batch_sizes",
        "train_iters": E + "test_length_and_validations",
        "train_samples": "not yet",
        "train_tokens": "not yet",
        "num_accumulation_steps": "not yet",
        "rampup_batch_size": "not yet",
        "seed": LOSSES,
        "eval_interval": E + "test_length_and_validations",
        "eval_iters": E + "test_length_and_validations",
        "exit_interval": "test_train.py::test_exit_interval_saves_and_leaves",
        "exit_duration_in_mins": "not yet",
        "exit_signal_handler": E + "test_exit_signal_handler",
        "kill_switch_path": "not yet",
        "skip_train": "not yet",
        "eval_only": "not yet",
        "loss_mean": E + "test_loss_mean_weighs_tokens_or_micro_batches",
        "on_nonfinite": "not yet",
        "recompute_granularity": E + "test_recompute_runs_each_block_again",
        "recompute_method": E + "test_recompute_runs_each_block_again",
        "recompute_num_layers": "not yet",
        "checkpoint_activations": E + "test_recompute_runs_each_block_again",
        "recompute_activations": "not yet",
    },
    "optimizer": {
        "optimizer": SAME,
        "lr": E + "test_learning_rates",
        "min_lr": E + "test_learning_rates",
        "lr_decay_style": E + "test_learning_rates",
        "lr_decay_iters": E + "test_learning_rates",
        "lr_decay_samples": "not yet",
        "lr_warmup_fraction": E + "test_learning_rates",
        "lr_warmup_iters": E + "test_learning_rates",
        "lr_warmup_samples": "not yet",
        "weight_decay": LOSSES,
        "start_weight_decay": "not yet",
        "end_weight_decay": "not yet",
        "weight_decay_incr_style": "not yet",
        "clip_grad": LOSSES,
        "adam_beta1": LOSSES,
        "adam_beta2": LOSSES,
        "adam_eps": LOSSES,
        "sgd_momentum": "not yet",
        "override_opt_param_scheduler": "test_schedule.py::test_a_changed_schedule_needs_a_decision",
        "use_checkpoint_opt_param_scheduler": "test_schedule.py::test_a_changed_schedule_needs_a_decision",
    },
    "precision": {
        "fp16": "test_train.py::test_precisions_agree",
        "bf16": "test_train.py::test_precisions_agree",
        "params_dtype": "test_train.py::test_precisions_agree",
        "loss_scale": E + "test_constant_loss_scale",
        "initial_loss_scale": E + "test_dynamic_loss_scale",
        "min_loss_scale": E + "test_least_loss_scale",
        "loss_scale_window": E + "test_dynamic_loss_scale",
        "hysteresis": E + "test_dynamic_loss_scale",
        "deterministic_mode": "test_train.py::test_deterministic_mode_is_set",
        "fp32_residual_connection": "not yet",
        "fp16_lm_cross_entropy": "not yet",
    },
    "parallel": {
        "tensor_model_parallel_size": "not yet",
        "pipeline_model_parallel_size": "not yet",
        "context_parallel_size": "not yet",
        "num_layers_per_virtual_pipeline_stage": "not yet",
        "sequence_parallel": "not yet",
        "use_distributed_optimizer": "not yet",
        "zero_stage": "not yet",
        "deepspeed": "not yet",
        "deepspeed_config": "not yet",
        "deepspeed_activation_checkpointing": "not yet",
        "partition_activations": "not yet",
        "remote_device": "not yet",
        "cpu_optimizer": "not yet",
        "num_gpus_per_node": "not yet",
        "num_nodes": "not yet",
        "node_ips": "not yet",
        "device": "test_train.py::test_bad_settings_are_refused_in_words",
        "distributed_backend": SAME,
        "distributed_timeout_minutes": SAME,
        "local_rank": SAME,
    },
    "checkpoint": {
        "save": E + "test_files",
        "load": E + "test_files",
        "save_interval": E + "test_files",
        "save_overwrite": "test_train.py::test_save_without_load_onto_checkpoints_is_refused",
        "verify": "test_native.py::test_reading_leaves_other_chunks_alone_and_full_does_not",
        "exit_on_missing_checkpoint": "test_train.py::test_missing_checkpoint_can_be_an_error",
        "ckpt_format": "not yet",
        "finetune": "not yet",
        "no_load_optim": "not yet",
        "no_load_rng": "not yet",
        "no_save_optim": "not yet",
        "no_save_rng": "not yet",
        "use_checkpoint_args": "not yet",
        "universal_checkpoint": "not yet",
        "async_save": "not yet",
        "run_dir": E + "test_files",
    },
    "logging": {
        "log_interval": E + "test_length_and_validations",
        "progress": E + "test_progress_bar",
        "tensorboard_dir": "not yet",
        "tensorboard_log_interval": "not yet",
        "tensorboard_queue_size": "not yet",
        "log_timers_to_tensorboard": "not yet",
        "log_batch_size_to_tensorboard": "not yet",
        "log_learning_rate_to_tensorboard": "not yet",
        "log_loss_scale_to_tensorboard": "not yet",
        "log_validation_ppl_to_tensorboard": "not yet",
        "log_memory_to_tensorboard": "not yet",
        "log_world_size_to_tensorboard": "not yet",
        "log_params_norm": "not yet",
        "log_num_zeros_in_grad": "not yet",
        "timing_log_level": "not yet",
        "timing_log_option": "not yet",
        "wandb_project": "not yet",
    },
    "sampling": {
        "temperature": "test_generate.py::test_temperature",
        "greedy": "test_generate.py::test_greedy",
        "top_k": "test_generate.py::test_top_k",
        "top_p": "test_generate.py::test_top_p",
        "out_seq_length": "test_generate.py::test_out_seq_length",
        "num_samples": "test_generate.py::test_num_samples_and_genfile",
        "genfile": "test_generate.py::test_num_samples_and_genfile",
        "sample_input_file": "test_generate.py::test_sample_input_file",
        "sample_output_file": "test_generate.py::test_sample_output_file",
        "interactive": "test_generate.py::test_interactive",
        "prompt": "test_generate.py::test_prompt",
        "recompute": "test_generate.py::test_recompute_equals_cache",
    },
    "preprocess": {
        "input": "test_preprocess.py::test_several_inputs_patterns_and_standard_input",
        "output_prefix": "test_preprocess.py::test_documents_in_order_with_eod",
        "json_keys": "test_preprocess.py::test_keys_stay_aligned_when_a_text_is_empty",
        "append_eod": "test_preprocess.py::test_documents_in_order_with_eod",
        "on_error": "test_preprocess.py::test_bad_lines_are_counted_by_kind_and_no_good_line_is_lost",
        "dataset_impl": "test_preprocess.py::test_notices",
        "workers": "test_preprocess.py::test_notices",
        "log_interval": "test_preprocess.py::test_a_bar_on_a_terminal",
        "split_sentences": "not yet",
        "keep_newlines": "not yet",
        "lang": "not yet",
        "partitions": "not yet",
    },
    "evaluate": {
        "input": "test_evaluate.py::test_input",
        "json_keys": "test_evaluate.py::test_json_keys",
        "overlapping_eval": "test_evaluate.py::test_overlapping_eval",
        "json": "test_evaluate.py::test_json",
    },
}  # fmt: skip


def entries():
    """(group, field name) -> field, of all commands."""
    return {(g, n): f for cls in CONFIGS for n, (g, f, _) in flags.fields(cls).items()}


@functools.cache
def functions_in(file):
    """Top-level function -> its source, decorators included."""
    text = (TESTS / file).read_text(encoding="utf-8")
    lines, found = text.splitlines(), {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


def test_every_flag_has_an_entry_and_no_entry_is_left_over():
    assert {(g, n) for g, names in TABLE.items() for n in names} == set(entries())


def test_not_yet_is_said_of_exactly_what_is_not_yet(capsys):
    said = {(g, n) for g, names in TABLE.items() for n, where in names.items() if where == "not yet"}
    true = {key for key, f in entries().items() if flags.is_not_yet(f)}
    assert said == true
    by_step = {}
    for key in sorted(true):
        by_step.setdefault(entries()[key].metadata["step"], []).append(key[1])
    with capsys.disabled():  # part of what a test run says
        for step, names in sorted(by_step.items()):
            print(f"\nnot yet, {f'step {step}' if step < 9 else 'no plan'}: {len(names)}: {', '.join(names)}")


@pytest.mark.parametrize("cls", CONFIGS)
def test_not_yet_is_refused_by_name(cls):
    """Every such flag at once, each with a value other than its default, gives one line each."""
    argv, wanted = [], set()
    for name, (_, f, kind) in flags.fields(cls).items():
        if flags.is_not_yet(f):
            flag, default, inner = settings.spelling(name), flags.default_of(f), flags._inner(kind)
            wanted.add(flag)
            if kind is bool:
                argv.append("--no-" + flag[2:] if default else flag)
            elif typing.get_origin(inner) is typing.Literal:
                argv += [flag, next(c for c in typing.get_args(inner) if c != default)]
            else:
                argv += [flag, "7"]
    with pytest.raises(UserError) as caught:
        flags.parse(cls, argv, "meshwright test")
    told = [line.split()[0] for line in str(caught.value).splitlines() if ": not yet (" in line]
    assert sorted(told) == sorted(wanted)


@pytest.mark.parametrize("group", TABLE)
def test_named_tests_exist_and_speak_of_their_flag(group):
    for name, where in TABLE[group].items():
        if where == "not yet":
            continue
        file, test = where.split("::")
        assert (TESTS / file).is_file(), f"{name}: no file {file}"
        assert test in functions_in(file), f"{name}: no {test} in {file}"
        # These speak in flags; the others call what a flag sets.
        if file in ("test_flag_effects.py", "test_train.py", "test_generate.py"):
            spelled = name.replace("_", "[-_]")
            assert re.search(rf"--(no-)?{spelled}\b", functions_in(file)[test]), f"{name}: not in {where}"


MAKE = "PYTHONPATH=src python -c \"from meshwright import flags; print(flags.reference(), end='')\" > docs/flags.md"


def test_the_page_of_flags_is_up_to_date():
    page = (TESTS.parent / "docs" / "flags.md").read_text(encoding="utf-8")
    assert page == flags.reference(), f"docs/flags.md is out of date; make it anew with\n{MAKE}"
    for _, f in entries().items():
        assert f.metadata["help"].replace("|", "\\|") in page
