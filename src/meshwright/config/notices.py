"""Find flags that are valid and have no effect together with the others."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any

from meshwright.base.storage import addresses
from meshwright.config import data_paths
from meshwright.config.dialects import old_switches
from meshwright.config.fields import group_values
from meshwright.config.problem import FLAGS, Wording
from meshwright.config.schema import Data, Model, TokenizerFlags, TrainConfig

# Conditions in `needs` of flags: each name follows "has no effect without".
CONDITIONS: dict[str, Callable[[TrainConfig], Any]] = {
    "--fp16": lambda c: c.precision.fp16,
    "--tokenizer-type TikTokenizer": lambda c: c.tokenizer.tokenizer_type == "TikTokenizer",
    "--fp16 or --bf16": lambda c: c.precision.fp16 or c.precision.bf16,
    "--fp8-format": lambda c: c.precision.fp8_format,
    "--fp8-format and --fp8-recipe delayed": lambda c: (
        c.precision.fp8_format and c.precision.fp8_recipe == "delayed"
    ),
    "--first-last-layers-bf16": lambda c: c.precision.first_last_layers_bf16,
    "--recompute-granularity full": lambda c: c.training.recompute_granularity == "full",
    "--load": lambda c: c.checkpoint.load,
    "--packing stream": lambda c: c.data.packing == "stream",
    "--eval-iters above 0": lambda c: c.training.eval_iters,
    "--save": lambda c: c.checkpoint.save,
    "--save or --run-dir": lambda c: c.checkpoint.save or c.checkpoint.run_dir,
    "--keep-last": lambda c: c.checkpoint.keep_last or not c.checkpoint.save,
    "learned or rotary positions": lambda c: c.model.position in ("learned", "rope"),
    "--position-embedding-type rope": lambda c: c.model.position == "rope",
    "LayerNorm": lambda c: c.model.normalization == "LayerNorm",
    "--rope-scaling": lambda c: c.model.rope_scaling != "none",
    "--window-size": lambda c: c.model.window,
    "--rope-scaling llama3": lambda c: c.model.rope_scaling == "llama3",
    "--rope-scaling yarn": lambda c: c.model.rope_scaling == "yarn",
    "--rope-scaling llama3 or yarn": lambda c: c.model.rope_scaling in ("llama3", "yarn"),
    "a GELU activation": lambda c: not c.model.gated and not c.model.squared_relu,
    "--optimizer sgd": lambda c: c.optimizer.optimizer == "sgd",
    "--optimizer lion": lambda c: c.optimizer.optimizer == "lion",
    "--optimizer muon": lambda c: c.optimizer.optimizer == "muon",
    "--optimizer adam, adamw or muon": lambda c: c.optimizer.optimizer not in ("sgd", "lion"),
    "--lr-decay-style WSD": lambda c: c.optimizer.lr_decay_style == "WSD",
    "a warm-up": lambda c: c.warmup_samples,
    "--on-spike": lambda c: c.training.on_spike.word != "off",
    "an address such as s3://bucket/run": lambda c: has_address(c),
    "several processes": lambda c: c.world > 1,
    "several data-parallel ranks": lambda c: c.dp * c.parallel.context_parallel_size > 1,
    "--tensor-model-parallel-size above 1": lambda c: c.parallel.tensor_model_parallel_size > 1,
    "--sequence-parallel": lambda c: c.parallel.sequence_parallel,
    "--pipeline-model-parallel-size above 1": lambda c: c.parallel.pipeline_model_parallel_size > 1,
    "several pieces on a pipeline rank": lambda c: c.chunks > 1,
    "--profile": lambda c: c.logging.profile,
    "--sample-interval": lambda c: c.logging.sample_interval,
    "--eval-tasks": lambda c: c.logging.eval_tasks,
}
# The files that types of tokenizers read; the others read --tokenizer-model alone.
VOCABULARY_FILES: dict[str, tuple[str, ...]] = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "BertWordPieceLowerCase": ("vocab_file",),
    "BertWordPieceCase": ("vocab_file",),
    "ByteTokenizer": (),
    "NullTokenizer": (),
}


def without_effect(config: Any, words: Wording = FLAGS) -> list[str]:
    """Return notes about flags that are valid and have no effect together with the others."""

    def name(of: str) -> str:
        """Return how a setting was given, which may be by another program's switch."""
        names = [of]
        for switch, (setting, _) in old_switches().items():
            if setting == of:
                names.append(switch)
        given = [one for one in names if one in words.given]
        return words.name(given[0] if given else of)

    unread = unread_files(getattr(config, "tokenizer", None), name)
    if not isinstance(config, TrainConfig):
        return unread
    c = config
    m = c.model
    t = c.training
    d = c.data
    g = c.logging
    o = c.optimizer
    out = unread
    # Each field names the conditions under which it counts.
    for group in group_values(c):
        defaults = type(group)()
        for f in dataclasses.fields(group):
            if getattr(group, f.name) == getattr(defaults, f.name):
                continue
            for condition in f.metadata["needs"]:
                if not CONDITIONS[condition](c):
                    out.append(f"{name(f.name)} has no effect without {condition}")
    with contextlib.suppress(ValueError):  # reported as a problem
        out += data_paths.overlaps(d)
        is_divided = not d.mock_data and (d.data_path or d.data_args_path)
        if t.eval_iters and is_divided and not d.split.shares[1]:
            out.append(
                f"--split {d.split} leaves nothing for validation, so there is none; raise its second number"
            )
    with contextlib.suppress(ValueError):
        out += idle_long_context(m, d)

    # Settings that only certain values of others leave without effect.
    if m.swiglu and m.glu_activation:
        out.append("--swiglu and --glu-activation are both given; --glu-activation is used")
    if o.cautious_weight_decay and not o.ramps_decay and not o.weight_decay:
        out.append("--cautious-weight-decay has no effect with --weight-decay 0")
    if o.optimizer_state_dtype != "float32" and o.optimizer == "sgd" and not o.sgd_momentum:
        state = f"--optimizer-state-dtype {o.optimizer_state_dtype}"
        out.append(f"{state} has no effect with --sgd-momentum 0, which keeps none")
    if d.mock_data and data_paths.path_settings(d):
        out.append("--mock-data: the files of --data-path and similar flags are not read")
    # A run whose length is in samples or tokens may have any number of steps.
    last_step = math.inf if t.train_iters is None else t.train_iters
    if g.profile and g.profile_step_start > last_step:
        start = f"--profile-step-start {g.profile_step_start}"
        out.append(f"{start} is after the last step; nothing is profiled")
    if beyond := [str(step) for step in g.nvidia_smi_at if step > last_step]:
        out.append(f"--nvidia-smi-at {' '.join(beyond)}: after the last step, so not printed")
    if g.log_timers_to_tensorboard and g.timing_log_level == "0":
        out.append("--log-timers-to-tensorboard logs only iterations with --timing-log-level 0")
    return out


def unread_files(t: Any, name: Callable[[str], str]) -> list[str]:
    """Return notes about files of a vocabulary that the type of the tokenizer does not read."""
    if not isinstance(t, TokenizerFlags) or t.tokenizer is not None:
        return []  # that one is refused beside them
    read = VOCABULARY_FILES.get(t.tokenizer_type, ("tokenizer_model",))
    named = [n for n in ("vocab_file", "merge_file", "tokenizer_model") if getattr(t, n)]
    # Without any file that it reads, the type itself says which it needs.
    if read and not set(read) & set(named):
        return []
    return [
        f"{name(file)} is not read by {t.tokenizer_type}"
        + (f", which takes {' and '.join(map(name, read))}" if read else "")
        for file in named
        if file not in read
    ]


def has_address(config: Any) -> bool:
    """Return whether a path is an address of object storage or the local folder of one."""
    for group in group_values(config):
        for f in dataclasses.fields(group):
            if not f.metadata["remote"]:
                continue
            value = getattr(group, f.name)
            for path in value if isinstance(value, list) else [value]:
                if path and addresses.address_of(addresses.localize(path)):
                    return True
    return False


def idle_long_context(m: Model, d: Data) -> list[str]:
    """Report a window that hides no token of a sample, and a scaling of rotary frequencies by 1."""
    out = []
    if m.window and not m.windowed_layers and m.num_layers:
        out.append(
            f"--window-size {m.window_size} has no effect: --window-attn-skip-freq leaves no layer with a window"
        )
    elif m.window and m.window + 1 >= (d.seq_length or math.inf):
        tokens = f"a sample has only {d.seq_length} tokens (--seq-length)"
        out.append(f"--window-size {m.window_size} has no effect in this training: {tokens}")
    is_scaled = m.position == "rope" and m.rope_scaling != "none"
    if is_scaled and m.rope_scaling_factor == m.attention_factor == 1:
        out.append(f"--rope-scaling {m.rope_scaling} has no effect with --rope-scaling-factor 1")
    return out
