"""Check a configuration: `problems` lists every error, `notices` flags without effect; no torch."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import re
from collections.abc import Callable, Collection
from typing import Any

from meshwright.settings import data_paths
from meshwright.settings.fields import group_values, shown_name, spelling
from meshwright.settings.grammar import (
    ON_NONFINITE,
    ON_SPIKE,
    eval_tasks,
    reaction,
    skipped,
    split_layers,
    split_shares,
)
from meshwright.settings.hints import find_address, refuse_address
from meshwright.settings.schema import (
    ARCHITECTURE,
    EXIT_SIGNALS,
    LENGTHS,
    OUTCOME,
    Checkpoint,
    Data,
    GenerateConfig,
    Logging,
    Model,
    Parallel,
    Precision,
    TrainConfig,
    Training,
)
from meshwright.settings.text_inputs import TextInputs
from meshwright.storage import addresses


def problems(config: Any, needs_data: bool = True) -> list[str]:
    """Return every objection; a command's own configuration adds its method `problems`."""
    out = planned_values(config) + unusable(config)
    if hasattr(config, "problems"):
        out += config.problems()
    elif isinstance(config, TrainConfig):
        out += training_problems(config, needs_data)
    elif isinstance(config, GenerateConfig):
        out += generation_problems(config)
    return out


def training_problems(c: TrainConfig, needs_data: bool) -> list[str]:
    t, o, k, p = c.training, c.optimizer, c.checkpoint, c.parallel
    layout, sizes = parallel_problems(c), batch_problems(c)
    has_length = not sizes and not out_of_bounds(t) and c.lengths != ["train_epochs"]
    out = architecture_problems(c.model, c.data) + layout + precision_problems(c.precision) + sizes
    out += (
        schedule_problems(c, has_length)
        + recompute_problems(t, c.model)
        + kernel_problems(t, c.model)
        + data_problems(c.data, needs_data)
    )
    out += logging_problems(c.logging) + eval_tasks_problems(c.logging)
    if c.logging.eval_tasks_device and not (k.run_dir or k.save):
        out.append("--eval-tasks-device reads a snapshot from the run's folder; give --run-dir or --save")
    if t.seed >= 2**32 - 2:
        out.append(f"--seed {t.seed} must be below {2**32 - 2}: numpy takes 32 bits, and up to 2 is added")
    out += reaction_problems(t, k) + torch_format_problems(c)
    if k.save_hf and k.save and os.path.realpath(k.save_hf) == os.path.realpath(k.save):
        out.append(f"--save and --save-hf must differ (both are {k.save}); give two different folders")
    if k.save_hf and t.skip_train:
        out.append("--save-hf exports at the end of training, which --skip-train leaves out; use meshwright convert")
    if k.save_overwrite and k.save and (address := addresses.address_of(addresses.localize(k.save))):
        out.append(f"--save-overwrite would have to move what is at {address}; give another address to --save")
    if k.save_hf and not k.save:
        out.append("--save-hf needs --save: it exports the last checkpoint")
    if k.use_checkpoint_args and not k.load:
        out.append("--use-checkpoint-args needs --load; give the folder of the checkpoint, or leave it out")
    if t.skip_train and not k.load and not t.eval_iters:
        out.append("--skip-train with --eval-iters 0 leaves nothing to do; raise --eval-iters")
    if o.override_opt_param_scheduler and o.use_checkpoint_opt_param_scheduler:
        out.append("--override-opt_param-scheduler contradicts --use-checkpoint-opt_param-scheduler; give one")
    if p.offloads and o.optimizer == "muon":
        flag = "--cpu-optimizer" if p.cpu_optimizer else "--remote-device cpu"
        out.append(f"{flag} with --optimizer muon, which needs its matrices on the device; give --optimizer adam")
    return out


def torch_format_problems(c: TrainConfig) -> list[str]:
    """Check that --ckpt-format torch, which is Megatron's, can hold what is trained."""
    k, m, kind, stages = c.checkpoint, c.model, c.optimizer.optimizer, c.parallel.pipeline_model_parallel_size
    if k.ckpt_format != "torch":
        return []
    unknown = {
        "--qk-layernorm": m.qk_layernorm,
        f"this --rope-scaling {m.rope_scaling}": not has_megatrons_scaling(m),
        "--final-logit-softcapping": m.final_logit_softcapping,
        "--use-parallel-residual": m.use_parallel_residual,
        "--window-size": m.window_size,
        "--disable-layernorm-bias": m.normalization == "LayerNorm" and not m.layernorm_bias,
    }
    reasons = [f"has no place for {flag}" for flag, is_on in unknown.items() if is_on]
    if kind not in ("adam", "adamw"):
        reasons.append(f"holds Adam's state, not {kind}'s (--optimizer)")
    if (m.num_layers or 0) % stages:
        layers = f"--num-layers {m.num_layers} is not a multiple of --pipeline-model-parallel-size {stages}"
        reasons.append(f"needs equal stages, but {layers}")
    out = [f"--ckpt-format torch {reason}; give --ckpt-format native" for reason in reasons]
    if k.save and (address := addresses.address_of(addresses.localize(k.save))):
        out.append(f"--ckpt-format torch does not work with --save {address}; save natively, and convert the run")
    return out


def reaction_problems(t: Training, k: Checkpoint) -> list[str]:
    """Check what follows a step that is not finite or a loss spike, and the signals that end."""
    out = []
    if unknown := [name for name in t.exit_signal if name not in EXIT_SIGNALS]:
        out.append(f"--exit-signal {' '.join(unknown)}: give some of {', '.join(EXIT_SIGNALS)}")
    if not 8 <= t.spike_window <= 10_000:
        out.append(f"--spike-window {t.spike_window} is not in 8 to 10000: a median of few losses says little")
    both = ("--on-nonfinite", t.on_nonfinite, ON_NONFINITE), ("--on-spike", t.on_spike, ON_SPIKE)
    for flag, text, known in both:
        found = reaction(text, known)
        if found is None:
            forms = f"{', '.join(known[:-1])} nor {known[-1]}"
            out.append(f"{flag} {text!r} is neither {forms}; K is a whole number above 0")
        elif found[0] == "rollback" and not k.save:
            out.append(f"{flag} {text} goes back to a checkpoint of --save, which is not given; give --save DIR")
        elif found[0] == "rollback" and k.no_save_optim:
            out.append(f"{flag} {text} needs the optimizer's state, which --no-save-optim leaves out; give one of them")
    return out


def forecast_problems(c: TrainConfig, needs_data: bool = True) -> list[str]:
    """Check only what decides which samples a training will read."""
    t, p = c.training, c.parallel
    out = data_problems(c.data, needs_data)
    if c.data.seq_length is None:
        out.append("--seq-length is needed: tokens of one sample")
    if len(c.lengths) != 1:
        few = f"{' and '.join(map(spelling, c.lengths))} are given" if c.lengths else "none is given"
        units = f"{', '.join(map(spelling, LENGTHS[:-1]))} and {spelling(LENGTHS[-1])}"
        out.append(f"one of {units} is needed for the length; {few}")
    if t.global_batch_size is None and p.world_size is None and p.model_ranks > 1:
        out.append(
            f"--global-batch-size or --world-size is needed: the model will run on {p.model_ranks} ranks or more"
        )
    if t.micro_batch_size in (None, "auto") and t.global_batch_size is None:
        out.append("--global-batch-size or --micro-batch-size is needed: samples of one step")
    return out


def reading_problems(c: Any, command: str, copies: bool = False) -> list[str]:
    """Check a command that reads a trained model.

    With `copies` it uses all ranks, for several copies of the model and parts of sequences.
    """
    p, out = c.parallel, precision_problems(c.precision)
    if c.training.micro_batch_size == "auto":
        out.append("--micro-batch-size auto is only for training; give a number")
    out += naming_problems(p)
    if not out_of_bounds(p):
        cp, world = p.context_parallel_size, p.world_size or p.num_gpus_per_node * p.num_nodes
        if cp > 1 and not copies:
            out.append(f"--context-parallel-size {cp} divides sequences, which {command} makes token by token; give 1")
        elif copies or world < p.model_ranks:
            out += ranks_problems(p, world)
    return out if c.checkpoint.load else [*out, f"a checkpoint is needed: `meshwright {command} DIR` or --load DIR"]


def generation_problems(c: GenerateConfig) -> list[str]:
    t, out = c.texts, reading_problems(c, "generate")
    if t.num_samples and not t.genfile:
        out.append(f"--num-samples {t.num_samples} writes to a file; name it with --genfile")
    if t.sample_output_file and not t.sample_input_file:
        out.append("--sample-output-file holds continuations; name the prompts with --sample-input-file")
    has_prompts = t.prompt is not None or t.prompts is not None
    modes = [bool(t.num_samples), bool(t.sample_input_file), t.interactive, t.prompt is not None, t.prompts is not None]
    if sum(modes) > 1:
        names = "--num-samples, --sample-input-file, --prompt, --prompts and --interactive"
        out.append(f"{names} cannot be combined; give one")
    default = type(t)()
    others = [n for n in "output json num_return_sequences logprobs".split() if getattr(t, n) != getattr(default, n)]
    others += [n for n in ("beam_width", "length_penalty") if getattr(t, n) is not None]
    if others and not has_prompts:
        out += [f"{spelling(n)} is for --prompt and --prompts; give one of them" for n in others]
    if t.stop and (t.num_samples or t.sample_input_file or t.dialogue == "megatron"):
        out.append("--stop is for --prompt, --prompts and a plain dialogue; leave it out")
    if t.length_penalty is not None and t.beam_width is None:
        out.append(f"--length-penalty {t.length_penalty:g} is for beam search; give --beam-width too")
    if t.logprobs is not None and has_prompts and not t.json and not (t.output or "").endswith(".jsonl"):
        out.append(f"--logprobs {t.logprobs} writes numbers beside the text; give --json too")
    return out + (beam_problems(c) if t.beam_width is not None else [])


def beam_problems(c: GenerateConfig) -> list[str]:
    t, s, default = c.texts, c.sampling, type(c.sampling)()
    names = "temperature top_k top_p min_p repetition_penalty recompute".split()
    drawing = [spelling(n) for n in names if getattr(s, n) != getattr(default, n)]
    out = [f"--beam-width {t.beam_width} searches and draws nothing; leave {', '.join(drawing)} out"] if drawing else []
    if t.logprobs:
        out.append(f"--logprobs {t.logprobs} lists other tokens, which --beam-width does not; give --logprobs 0")
    if t.num_return_sequences > (t.beam_width or 1):
        n = t.num_return_sequences
        out.append(f"--num-return-sequences {n} is more than --beam-width {t.beam_width}; raise the width")
    return out


# Conditions in `needs` of flags: each name follows "has no effect without".
CONDITIONS: dict[str, Callable[[TrainConfig], Any]] = {
    "--fp16": lambda c: c.precision.fp16,
    "--tokenizer-type TikTokenizer": lambda c: c.tokenizer.tokenizer_type == "TikTokenizer",
    "--fp16 or --bf16": lambda c: c.precision.fp16 or c.precision.bf16,
    "--fp8-format": lambda c: c.precision.fp8_format,
    "--first-last-layers-bf16": lambda c: c.precision.first_last_layers_bf16,
    "--recompute-granularity full": lambda c: c.training.recompute_granularity == "full",
    "--load": lambda c: c.checkpoint.load,
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
    "--on-spike": lambda c: c.training.on_spike != "off",
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


def has_address(config: Any) -> bool:
    """Return whether a path is an address of object storage or the local folder of one."""
    fields = [(group, f) for group in group_values(config) for f in dataclasses.fields(group) if f.metadata["remote"]]
    values = [getattr(group, f.name) for group, f in fields]
    paths = [path for value in values for path in (value if isinstance(value, list) else [value]) if path]
    return any(addresses.address_of(addresses.localize(path)) for path in paths)


def notices(config: Any) -> list[str]:
    """Return notes about flags that are valid and have no effect together with the others."""
    if not isinstance(config, TrainConfig):
        return []
    c = config
    m, t, d, g = c.model, c.training, c.data, c.logging
    out = [
        f"{spelling(f.name)} has no effect without {condition}"
        for group in group_values(c)
        for f in dataclasses.fields(group)
        for condition in f.metadata["needs"]
        if getattr(group, f.name) != getattr(type(group)(), f.name) and not CONDITIONS[condition](c)
    ]
    start = f"--profile-step-start {g.profile_step_start}"
    is_late = g.profile and t.train_iters is not None and g.profile_step_start > t.train_iters
    beyond = [n for n in g.nvidia_smi_at if t.train_iters is not None and n > t.train_iters]
    others = {
        "--swiglu and --glu-activation are both given; --glu-activation is used": m.swiglu and m.glu_activation,
        "--mock-data: the files of --data-path and similar flags are not read": d.mock_data
        and data_paths.path_settings(d),
        f"{start} is after the last step; nothing is profiled": is_late,
        f"--nvidia-smi-at {' '.join(map(str, beyond))}: after the last step, so not printed": beyond,
        "--log-timers-to-tensorboard logs only iterations with --timing-log-level 0": g.log_timers_to_tensorboard
        and g.timing_log_level == "0",
    }
    with contextlib.suppress(ValueError):  # reported as a problem
        out += data_paths.overlaps(d)
    with contextlib.suppress(ValueError):
        out += idle_long_context(m, d)
    return out + [line for line, applies in others.items() if applies]


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


def contradictions(asked: Model, saved: Model, names: Collection[str] = ARCHITECTURE) -> list[str]:
    """Describe each of these settings that differs from the checkpoint's."""
    defaults = Model()
    out: list[str] = []
    left_open: list[str] = []
    for name in names:
        value, outcome = getattr(asked, name), OUTCOME.get(name, name)
        ours, theirs = (getattr(m, outcome) for m in (asked, saved))
        if ours == theirs:
            continue
        # If several flags decide one outcome, report those that differ, and of them those that were
        # given. If none differs, the outcome follows another flag, as key/value heads follow heads.
        group = [n for n in names if OUTCOME.get(n, n) == outcome]
        differing = [n for n in group if getattr(asked, n) != getattr(saved, n)]
        given = [n for n in differing if getattr(asked, n) != getattr(defaults, n)]
        if name in (given or differing):
            shown = "none" if value is None else value
            (left_open if value is None else out).append(f"{spelling(name)} {shown}, the checkpoint has {theirs}")
    return out or left_open  # what was left open may only follow another flag


def planned_values(config: Any) -> list[str]:
    """Report values that are planned and not in this release."""
    out = []
    for group in group_values(config):
        for f in dataclasses.fields(group):
            value, only = getattr(group, f.name), f.metadata["only"]
            if only is not None and value not in only:
                flag = spelling(f.name) if value is True else f"{spelling(f.name)} {value}"
                works = ", or ".join(f"give {v}" for v in only if v not in (None, False)) or "leave it out"
                out.append(f"{flag} is not yet in this version; {works}")
    return out


def unusable(config: Any) -> list[str]:
    """Report empty strings, often unset shell variables, and numbers out of bounds."""
    out = remote_paths(config)
    for group in group_values(config):
        out += out_of_bounds(group)
        for f in dataclasses.fields(group):
            value = getattr(group, f.name)
            # A launched command may have empty arguments.
            may_be_empty = f.metadata["value"] == "WORDS" or f.metadata["positional"] == "rest"
            if not may_be_empty and (value == "" or (isinstance(value, list) and "" in value)):
                out.append(f"{spelling(f.name)} is empty; leave the flag out, or is a shell variable unset?")
            most = 2**62 if f.name.endswith(("_samples", "_tokens")) else 2**31
            if type(value) is int and abs(value) >= most and f.name != "seed":
                out.append(f"{spelling(f.name)} {str(value)[:20]} must be below {most}")
    return out


def remote_paths(config: Any) -> list[str]:
    """Report addresses, such as s3://bucket, where a path of this machine is needed.

    Without this, pathlib would make a folder named "s3:".
    """
    out = []
    for group in group_values(config):
        for f in dataclasses.fields(group):
            value = getattr(group, f.name)
            if value is None or isinstance(value, int | float) or f.metadata["value"] in ("NAME", "WORDS"):
                continue
            for one in value if isinstance(value, list) else [value]:
                text = addresses.as_typed(one)
                is_read_there = isinstance(group, TextInputs) and f.name == "input"
                if is_read_there and str(one).startswith("hf://"):
                    continue
                if (is_read_there or f.metadata["remote"]) and addresses.is_address(text):
                    continue
                if isinstance(text, str) and (address := find_address(text)):
                    out.append(f"{shown_name(f)} {refuse_address(address)}")
    return out


def out_of_bounds(group: Any, name: Callable[[str], str] = spelling) -> list[str]:
    """Report numbers outside the range of their flag, whose `name` begins the report."""
    out = []
    for f in dataclasses.fields(group):
        bound, value = f.metadata["bound"], getattr(group, f.name)
        for number in value if isinstance(value, list) else [value]:
            if bound is None or not isinstance(number, int | float):
                continue
            is_inside, rule = {
                ">0": (number > 0, "must be above 0"),
                ">=0": (number >= 0, "must not be below 0"),
                "[0,1)": (0 <= number < 1, "is not in [0, 1)"),
                "[0,1]": (0 <= number <= 1, "must be from 0 to 1"),
            }[bound]
            if not is_inside:
                out.append(f"{name(f.name)} {number} {rule}")
    return out


def architecture_problems(m: Model, d: Data) -> list[str]:
    out = []
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if getattr(m, name) is None:
            out.append(f"{spelling(name)} is needed (or --preset, which gives a whole architecture)")
    if d.seq_length is None:
        most = f"; the model reads up to {m.max_position_embeddings}" if m.max_position_embeddings else ""
        out.append(f"--seq-length is needed: tokens of one sample{most}")
    elif m.position == "learned" and m.max_position_embeddings and m.max_position_embeddings < d.seq_length:
        out.append(
            f"--max-position-embeddings {m.max_position_embeddings} is below --seq-length {d.seq_length}: "
            "positions past the table have no embedding; lower --seq-length, or give a new model a longer table"
        )
    h, n = m.hidden_size, m.num_attention_heads
    if h and n and n > 0 and not m.kv_channels and h % n:
        out.append(f"--hidden-size {h} is not a multiple of --num-attention-heads {n}; change one or set --kv-channels")
    if n and m.num_query_groups and m.num_query_groups > 0 and n % m.num_query_groups:
        out.append(f"--num-attention-heads {n} is not a multiple of --num-query-groups {m.num_query_groups}")
    if m.position == "rope" and (m.rotary_percent > 1 or m.rotating % 2 or m.rotating < 2):
        out.append(
            f"--rotary-percent {m.rotary_percent} of heads of {m.head_dim} rotates {m.rotating} numbers; "
            "they must be even and fit the head"
        )
    if m.squared_relu and (m.swiglu or m.glu_activation):
        out.append("--squared-relu contradicts --swiglu and --glu-activation; give one activation")
    return out + rope_problems(m) + (window_problems(m) if m.num_layers else [])


def has_megatrons_scaling(m: Model) -> bool:
    """Return whether Megatron's arguments can express the scaling of rotary frequencies."""
    constants = m.rope_low_freq_factor, m.rope_high_freq_factor, m.original_positions
    expressed = {"none": True, "linear": m.rope_scaling_factor % 1 == 0, "llama3": constants == (1.0, 4.0, 8192)}
    return m.position != "rope" or expressed.get(m.rope_scaling, False)


def rope_problems(m: Model) -> list[str]:
    """Check the numbers of a scaling of rotary frequencies; those of a folder are checked too."""
    out = []
    if m.rope_scaling == "llama3" and m.rope_high_freq_factor <= m.rope_low_freq_factor:
        out.append(
            f"--rope-high-freq-factor {m.rope_high_freq_factor:g} must be above --rope-low-freq-factor "
            f"{m.rope_low_freq_factor:g}"
        )
    if m.rope_scaling == "yarn":
        if m.original_max_position_embeddings is None:
            out.append("--rope-scaling yarn needs --original-max-position-embeddings: positions before the scaling")
        if m.beta_fast <= m.beta_slow:
            out.append(f"--beta-fast {m.beta_fast:g} must be above --beta-slow {m.beta_slow:g}")
        if m.rotary_base <= 1:
            out.append(f"--rope-scaling yarn needs a --rotary-base above 1, not {m.rotary_base:g}")
    return out


def window_problems(m: Model) -> list[str]:
    """Check the form of the settings of windows; those of a checkpoint are checked too."""
    for name, outcome in (("window_size", "window"), ("window_attn_skip_freq", "windowed_layers")):
        try:
            getattr(m, outcome)
        except ValueError as error:
            return [f"{spelling(name)} {str(getattr(m, name))[:100]}: {error}"]
    return []


def batch_problems(c: TrainConfig) -> list[str]:
    """Check micro-batch, accumulation, global batch, ramp-up and the length of the run."""
    t = c.training
    micro, batch, number = t.micro_batch_size, t.global_batch_size, t.num_accumulation_steps
    if out_of_bounds(t):
        return []  # reported already
    if micro == "auto" and number is not None:
        return [
            f"--micro-batch-size auto contradicts --num-accumulation-steps {number}; give --global-batch-size instead"
        ]
    if micro == "auto" and batch is None:
        return ["--micro-batch-size auto needs --global-batch-size: samples of one step"]
    p = c.parallel
    if micro == "auto" and (p.model_ranks > 1 or p.zero_stage > 1):
        layout = f"ZeRO {p.zero_stage}" if p.model_ranks == 1 else f"a model on {p.model_ranks} ranks"
        return [f"--micro-batch-size auto with {layout}: each rank measures alone what fits; give a number"]
    out = []
    ranks = f" x {c.dp} data-parallel ranks" if c.dp > 1 else ""
    if micro is None and not (batch and number):
        out.append("--micro-batch-size is needed: samples of one forward pass (or auto)")
    elif isinstance(micro, int) and batch and number and micro * number * c.dp != batch:
        out.append(
            f"--micro-batch-size {micro} x --num-accumulation-steps {number}{ranks} is {micro * number * c.dp}, "
            f"not the --global-batch-size {batch}; leave one of the three out"
        )
    elif batch and batch % (unit := (number or 1 if micro is None else c.micro_batch) * c.dp):
        product = f"--num-accumulation-steps {number}" if micro is None else f"--micro-batch-size {micro}"
        product += f"{ranks} = {unit}" if ranks else ""
        nearest = max(1, round(batch / unit)) * unit
        out.append(f"--global-batch-size {batch} is not a multiple of {product}; the nearest multiple is {nearest}")
    if not c.lengths:
        others = ", ".join(map(spelling, LENGTHS[1:]))
        out.append(f"--train-iters is needed: how many steps (or one of {others})")
    elif len(c.lengths) > 1:
        both = "both" if len(c.lengths) == 2 else "all"
        out.append(f"{' and '.join(map(spelling, c.lengths))} {both} set the length of the run; give one")
    if t.step_batch_size_schedule is not None:
        out += batch_schedule_problems(c)
    elif t.rampup_batch_size:
        out += rampup_problems(c)
    if not out and c.lengths[0] not in ("train_iters", "train_epochs") and c.steps == 0:
        length = f"{spelling(c.lengths[0])} {getattr(t, c.lengths[0])}"
        out.append(f"{length} is less than one global batch of {c.batch(0)} samples; raise it")
    return out


def rampup_problems(c: TrainConfig) -> list[str]:
    ramp, batch, micro = c.training.rampup_batch_size, c.global_batch, c.micro_batch
    flag = f"--rampup-batch-size {' '.join(map(str, ramp))}"
    if len(ramp) != 3 or min(ramp) <= 0:
        return [f"{flag}: give three numbers above 0: START INCREMENT SAMPLES"]
    start, increment, samples = ramp
    out = []
    if c.lengths == ["train_iters"]:
        out.append(f"{flag} needs the length in samples: --train-samples or --train-tokens instead of --train-iters")
    if samples / start > 10**6:
        out.append(f"{flag}: up to {samples / start:.0f} steps of ramp-up; give at most a million")
    elif start > batch or (batch - start) % increment:
        out.append(f"{flag}: --global-batch-size {batch} is never reached from {start} in steps of {increment}")
    elif start % (micro * c.dp) or increment % (micro * c.dp):
        # auto counts as 1: a divisor of every size is chosen.
        ranks = f" x {c.dp} data-parallel ranks = {micro * c.dp}" if c.dp > 1 else ""
        unit = f"--micro-batch-size {c.training.micro_batch_size or micro}{ranks}"
        out.append(f"{flag}: {start} and {increment} must be multiples of {unit}")
    return out


def batch_schedule_problems(c: TrainConfig) -> list[str]:
    t = c.training
    flag = f"--step-batch-size-schedule {t.step_batch_size_schedule!r}"
    if t.rampup_batch_size:
        return ["--step-batch-size-schedule contradicts --rampup-batch-size; give only one of them"]
    try:
        starts, batches = zip(*c.batch_schedule or [(0, 0)], strict=True)
    except ValueError as error:
        return [f"{flag}: {error}; write for example '0:768 250B:1536'"]
    out = []
    if starts[0] or any(a >= b for a, b in itertools.pairwise(starts)):
        out.append(f"{flag}: its tokens must begin with 0 and grow, by a sample of {c.data.seq_length} or more")
    if min(batches) < 1 or any(a >= b for a, b in itertools.pairwise(batches)):
        out.append(f"{flag}: its batches must grow, from 1")
    if batches[-1] != c.global_batch:
        out.append(f"{flag} ends with a batch of {batches[-1]}, not of {c.global_batch}; leave --global-batch-size out")
    if c.lengths == ["train_iters"]:
        out.append(f"{flag} needs the length in samples: --train-samples or --train-tokens instead of --train-iters")
    unit = c.micro_batch * c.dp
    if not out and (odd := [n for n in batches if n % unit]):
        ranks = f" x {c.dp} data-parallel ranks = {unit}" if c.dp > 1 else ""
        out.append(f"{flag}: {odd[0]} is not a multiple of --micro-batch-size {t.micro_batch_size}{ranks}")
    return out


def parallel_problems(c: TrainConfig) -> list[str]:
    """Check that ranks, model and batches can be divided as asked."""
    p, m = c.parallel, c.model
    out = naming_problems(p)
    if p.deepspeed_config and not find_address(p.deepspeed_config):
        try:
            with open(p.deepspeed_config, "rb"):
                pass
        except (OSError, ValueError) as error:
            out.append(f"--deepspeed_config {p.deepspeed_config}: {getattr(error, 'strerror', error)}")
    for name, least, most in (("distributed_timeout_minutes", 0.01, 10**5), ("start_timeout_seconds", 1, 10**5)):
        if not least <= getattr(p, name) <= most:
            out.append(f"{spelling(name)} {getattr(p, name):g} is not between {least} and {most}")
    if out_of_bounds(p) or out_of_bounds(m) or out_of_bounds(c.data):
        return out  # reported already
    tp, cp = p.tensor_model_parallel_size, p.context_parallel_size
    by_tp, by_cp = f"--tensor-model-parallel-size {tp}", f"--context-parallel-size {cp}"
    out += ranks_problems(p, c.world)
    heads, groups, seq = m.num_attention_heads or 0, m.groups, c.data.seq_length or 0
    by_both = f"{by_tp} x {by_cp}" if tp > 1 and cp > 1 else by_cp if cp > 1 else by_tp
    divided = [
        ("--num-attention-heads", heads, tp * cp, by_both),
        ("--num-query-groups", 0 if heads % (tp * cp) else groups, tp * cp, by_both),
        ("--ffn-hidden-size", m.ffn, tp, by_tp),
        ("--pad-vocab-size-to", m.pad_vocab_size_to or 0, tp, by_tp),
        ("--seq-length", seq, cp, by_cp),
        ("--sequence-parallel: --seq-length", 0 if seq % cp or not p.sequence_parallel else seq, tp * cp, by_both),
    ]
    out += [f"{flag} {n} is not a multiple of {by}" for flag, n, size, by in divided if n % size]
    if cp > 1 and m.attention_dropout > 0:
        dropout = f"--attention-dropout {m.attention_dropout}"
        out.append(f"{by_cp} with {dropout}: its mask would depend on the layout; give --attention-dropout 0")
    if c.optimizer.optimizer == "muon" and (tp > 1 or p.zero_stage):
        other = by_tp if tp > 1 else f"ZeRO {p.zero_stage}"
        advice = "give --tensor-model-parallel-size 1 and --zero-stage 0, or --optimizer adam"
        out.append(f"--optimizer muon with {other}: Muon needs whole matrices; {advice}")
    return out + pipeline_problems(c) + zero_problems(c) + fp8_problems(c)


def ranks_problems(p: Parallel, world: int) -> list[str]:
    """Check that the ranks hold whole copies of the model."""
    if world % p.model_ranks == 0:
        return []
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    product = " x ".join(f"{spelling(n)} {getattr(p, n)}" for n in names if getattr(p, n) > 1)
    least = -(-world // p.model_ranks) * p.model_ranks
    return [
        f"{world} {'ranks are' if world > 1 else 'rank is'} not a multiple of {product} = {p.model_ranks}: "
        f"start {least} (meshwright launch --nproc-per-node {least} on one machine), or change a size"
    ]


def fp8_problems(c: TrainConfig) -> list[str]:
    p, m, fp8 = c.parallel, c.model, f"--fp8-format {c.precision.fp8_format}"
    if not c.precision.fp8_format:
        return []
    out, tp = [], p.tensor_model_parallel_size
    if p.zero_stage == 3 and c.dp * p.context_parallel_size > 1:
        out.append(f"{fp8} with ZeRO 3, which keeps no weights to be cast once a step; give --zero-stage 2 or less")
    if p.pipeline_model_parallel_size > 1 and p.pipeline_schedule not in ("1f1b", "gpipe"):
        advice = "which computes weights' gradients later, in bfloat16; give 1f1b"
        out.append(f"{fp8} with --pipeline-schedule {p.pipeline_schedule}, {advice}")
    if m.hidden_size and m.num_attention_heads:
        widths = {"--hidden-size": m.hidden_size, "--ffn-hidden-size": m.ffn // tp}
        widths["the width of the heads"] = m.num_attention_heads * m.head_dim // tp
        widths["the width of keys and values"] = 2 * m.groups * m.head_dim // tp
        on = " on each tensor rank" if tp > 1 else ""
        wrong = [f"{name} {n}{on}" for name, n in widths.items() if n % 16]
        out += [f"{fp8}: {one} is not a multiple of 16, as fp8 products need" for one in wrong]
    if (layers := m.num_layers) and not any(c.precision.multiplies_fp8(i, layers) for i in range(layers)):
        out.append(
            f"{fp8}: --first-last-layers-bf16 leaves none of {layers} layers; lower --num-layers-at-start-in-bf16"
        )
    return out


def naming_problems(p: Parallel) -> list[str]:
    """Check the form of names that torch will read; torch itself checks their meaning."""
    out = []
    if not re.fullmatch(r"auto|(?!auto|gpu)[a-z]+(:[0-9]{1,4})?", p.device):
        out.append(f"--device {p.device!r} is not auto, cpu, cuda, npu ..., or one device as cuda:1")
    if p.distributed_backend is not None and not re.fullmatch(r"[A-Za-z0-9_:,]+", p.distributed_backend):
        out.append(f"--distributed-backend {p.distributed_backend!r} is not a name such as nccl, gloo or hccl")
    return out


def pipeline_problems(c: TrainConfig) -> list[str]:
    p, layers = c.parallel, c.model.num_layers
    pp, virtual = p.pipeline_model_parallel_size, p.num_layers_per_virtual_pipeline_stage
    by_pp = f"--pipeline-model-parallel-size {pp}"
    if not layers:
        return []
    if pp > layers:
        return [f"{by_pp} is above --num-layers {layers}: a stage would have no layer"]
    kind = p.pipeline_schedule
    if pp > 1 and kind in ("zero-bubble", "zbv"):
        schedule = f"--pipeline-schedule {kind}"
        if kind == "zbv" and (virtual or layers < 2 * pp):
            rule = (
                f"--num-layers {layers} must be at least 2 x {by_pp}, without --num-layers-per-virtual-pipeline-stage"
            )
            return [f"{schedule} gives each rank two stages: {rule}"]
        if p.zero_stage == 3 or c.training.compile == "on":
            other = "--zero-stage 3" if p.zero_stage == 3 else "--compile on"
            return [f"{schedule} with {other}: weight gradients are computed separately; give --pipeline-schedule 1f1b"]
    if virtual:
        by_virtual = f"--num-layers-per-virtual-pipeline-stage {virtual}"
        if pp == 1:
            return [f"{by_virtual} needs --pipeline-model-parallel-size above 1"]
        if layers % (pp * virtual):
            return [f"--num-layers {layers} is not a multiple of {by_pp} x {by_virtual} = {pp * virtual}"]
        if c.chunks > 1 and kind == "gpipe":
            return [f"--pipeline-schedule gpipe contradicts {by_virtual}, which interleaves 1f1b; leave one out"]
    out = []
    if p.pipeline_layout:
        try:
            split_layers(p.pipeline_layout, layers, pp * c.chunks)
        except ValueError as error:
            out.append(f"--pipeline-layout {p.pipeline_layout[:100]}: {error}")
    t = c.training
    if kind != "zbv" and (c.chunks > 1 or kind == "zero-bubble") and not batch_problems(c) and not out_of_bounds(t):
        for size in c.batches:
            number = c.micro_batches(size)
            if number % pp:
                growing = "--rampup-batch-size" if t.rampup_batch_size else "--step-batch-size-schedule"
                flag = growing if size != c.global_batch else "--global-batch-size"
                user = "--num-layers-per-virtual-pipeline-stage" if virtual else f"--pipeline-schedule {kind}"
                count = f"{flag} {size} makes {number} micro-batches for each rank"
                out.append(f"{count}, not a multiple of {by_pp}, as {user} needs")
    return out


def zero_problems(c: TrainConfig) -> list[str]:
    p, out = c.parallel, []
    copies = p.num_distributed_optimizer_instances
    if p.zero_stage not in (0, 1, 2, 3):
        return [f"--zero-stage {p.zero_stage:g} is none of 0, 1, 2, 3"]
    if copies > 1 and not p.zero_stage:
        out.append(f"--num-distributed-optimizer-instances {copies} needs --zero-stage 1, 2 or 3")
    elif c.dp % copies:
        out.append(f"--num-distributed-optimizer-instances {copies} does not divide the {c.dp} data-parallel ranks")
    if p.remote_device == "cpu" and p.zero_stage != 3:
        other = "--cpu-optimizer works with every stage"
        out.append(f"--remote-device cpu needs --zero-stage 3, not {p.zero_stage}; {other}")
    return out


def schedule_problems(c: TrainConfig, has_length: bool) -> list[str]:
    """Check the update and its schedule; `has_length`: the length of the run is known."""
    o, t = c.optimizer, c.training
    out = []
    if o.lr is None and not t.skip_train:
        out.append("--lr is needed: the peak learning rate")
    for name in ("min_lr", "lr_warmup_init"):
        if o.lr is not None and getattr(o, name) > o.lr > 0:
            out.append(f"{spelling(name)} {getattr(o, name)} is above --lr {o.lr}")
    by_steps = [n for n in ("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters") if getattr(o, n)]
    names = "lr_decay_samples lr_decay_tokens lr_warmup_samples lr_warmup_tokens lr_wsd_decay_samples"
    by_samples = [n for n in names.split() if getattr(o, n)]
    in_steps = "train_iters" in c.lengths
    wrong = by_samples if in_steps else by_steps
    if wrong and c.lengths:
        length, unit = spelling(c.lengths[0]), "steps" if in_steps else "samples"
        out.append(f"{' and '.join(map(spelling, wrong))} cannot be mixed with {length}; give all lengths in {unit}")
    warmups = [n for n in ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_tokens") if getattr(o, n)]
    warmups += ["lr_warmup_fraction"] * (o.lr_warmup_fraction is not None)
    if len(warmups) > 1:
        out.append(f"{' and '.join(map(spelling, sorted(warmups)))} both set the warm-up; give one")
    if o.lr_decay_samples and o.lr_decay_tokens:
        out.append("--lr-decay-samples and --lr-decay-tokens both set the decay; give one")
    if o.muon_num_ns_steps >= 100:
        out.append(f"--muon-num-ns-steps {o.muon_num_ns_steps} must be below 100; 5 are enough")
    if out or wrong or out_of_bounds(o) or not has_length or not c.steps:
        return out
    if c.decay_samples <= c.warmup_samples:
        decay, warmup = (
            f"{x / c.global_batch:g} iterations" if c.samples is None else f"{x:g} samples"
            for x in (c.decay_samples, c.warmup_samples)
        )
        fitting = (c.decay_samples - 1) // c.global_batch
        most = f" to {fitting} or less" if warmups[0] == "lr_warmup_iters" and fitting > 0 else ""
        out.append(
            f"{spelling(warmups[0])}: the warm-up of {warmup} is not below the decay's {decay}; shorten it{most}"
        )
    if o.lr_decay_style == "WSD" and not 0 < c.wsd_samples <= c.decay_samples - c.warmup_samples:
        out.append(
            "--lr-decay-style WSD needs --lr-wsd-decay-iters or --lr-wsd-decay-samples, the length of its last part "
            "between the warm-up and the end of the decay"
        )
    if o.weight_decay_incr_style == "constant":
        for name in ("start_weight_decay", "end_weight_decay"):
            if getattr(o, name) is not None:
                out.append(f"{spelling(name)} needs --weight-decay-incr-style linear or cosine")
    elif o.start_weight_decay is None or o.end_weight_decay is None:
        style = f"--weight-decay-incr-style {o.weight_decay_incr_style}"
        out.append(f"{style} needs --start-weight-decay and --end-weight-decay")
    return out


def kernel_problems(t: Training, m: Model) -> list[str]:
    out = []
    if t.fused_kernels == "on" and t.compile == "on":
        out.append("--fused-kernels on and --compile on are two ways to run the layers; give one")
    if t.fused_kernels == "on" and m.qk_layernorm:
        out.append("--fused-kernels on: they do not norm queries and keys (--qk-layernorm); leave it at auto")
    if t.fused_kernels == "on" and m.use_parallel_residual:
        out.append("--fused-kernels on: they have no --use-parallel-residual; leave it at auto")
    if m.use_parallel_residual and m.apply_residual_connection_post_layernorm:
        out.append("--use-parallel-residual adds to the stream, not to --apply-residual-connection-post-layernorm's")
    return out


def recompute_problems(t: Training, m: Model) -> list[str]:
    out = []
    if m.num_layers and t.recompute_num_layers > m.num_layers and t.recompute_granularity == "full":
        out.append(f"--recompute-num-layers {t.recompute_num_layers} is above --num-layers {m.num_layers}")
    return out


def data_problems(d: Data, needed: bool) -> list[str]:
    out = []
    if d.num_workers > 1024:
        out.append(f"--num-workers {d.num_workers} is above 1024; lower it")
    if not 0 <= d.last_epoch_cutoff <= 1:
        out.append(f"--last-epoch-cutoff {d.last_epoch_cutoff} is not in [0, 1]")
    try:
        trains = any(one.split == "train" for one in data_paths.path_sets(d))
        if needed and not trains and not d.mock_data:
            out.append("--data-path is needed (a prefix written by `meshwright preprocess`), or --mock-data")
    except ValueError as error:
        out.append(str(error))
    at = d.blend_change_at
    if at is not None and at != "now" and not re.fullmatch("[0-9]{1,18}", at):
        out.append(f"--blend-change-at {at!r} is neither a sample number nor now")
    if at is not None and d.dataloader_type == "cyclic":
        out.append("--blend-change-at with --dataloader-type cyclic, which reshuffles all samples; give single")
    try:
        skipped(d.skip_train_iteration_range)
    except ValueError as error:
        out.append(f"--skip-train-iteration-range: {error}")
    return out + split_problems(d.split)


def split_problems(split: str) -> list[str]:
    try:
        shares = split_shares(split)
    except ValueError:
        return [f"--split {split!r} is not three numbers such as 949,50,1"]
    if len(shares) > 3 or not 0 < sum(shares) < math.inf or min(shares) < 0:
        return [f"--split {split!r} must be at most three numbers, none below 0 and not all 0"]
    return []


def precision_problems(p: Precision) -> list[str]:
    out = []
    if p.fp16 and p.loss_scale is None and p.min_loss_scale > p.initial_loss_scale:
        out.append(f"--min-loss-scale {p.min_loss_scale:g} is above --initial-loss-scale {p.initial_loss_scale:g}")
    if p.fp16 and p.bf16:
        out.append("--fp16 and --bf16 cannot be combined; give one")
    if (p.fp16 or p.bf16) and p.params_dtype == "float64":
        out.append(f"--params-dtype float64 contradicts --{'fp16' if p.fp16 else 'bf16'}")
    if p.fp8_format and not p.bf16:
        other = "--fp16 scales the loss for its own range" if p.fp16 else "all else is float32"
        out.append(f"--fp8-format {p.fp8_format} needs bfloat16 around it, and {other}; give --bf16")
    return out


def eval_tasks_problems(g: Logging) -> list[str]:
    try:
        eval_tasks(g.eval_tasks or "")
    except ValueError as e:
        return [f"--eval-tasks {g.eval_tasks}: {e}"]
    return []


def logging_problems(g: Logging) -> list[str]:
    out = []
    if g.profile and g.profile_step_end <= g.profile_step_start:
        out.append(f"--profile-step-end {g.profile_step_end} is not above --profile-step-start {g.profile_step_start}")
    if not g.wandb_project and (g.wandb_exp_name or g.wandb_save_dir):
        out.append("--wandb-exp-name and --wandb-save-dir need --wandb-project")
    return out
