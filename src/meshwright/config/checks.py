"""Check a configuration: `problems` lists every error; no torch."""

from __future__ import annotations

import os
from typing import Any

from meshwright.base.storage import addresses
from meshwright.config.check_data import data_problems
from meshwright.config.check_layout import naming_problems, parallel_problems, ranks_problems
from meshwright.config.check_model import architecture_problems, has_megatrons_scaling, kernel_problems
from meshwright.config.check_mup import given_bases, mup_problems
from meshwright.config.check_steps import batch_problems, schedule_problems, state_problems
from meshwright.config.check_values import out_of_bounds, planned_values, unusable
from meshwright.config.fields import spelling
from meshwright.config.grammar import ON_NONFINITE, ON_SPIKE, eval_tasks, reaction
from meshwright.config.schema import (
    EXIT_SIGNALS,
    LENGTHS,
    Checkpoint,
    GenerateConfig,
    Logging,
    Precision,
    TrainConfig,
    Training,
)


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
    t, o, k = c.training, c.optimizer, c.checkpoint
    layout, sizes = parallel_problems(c), batch_problems(c)
    has_length = not sizes and not out_of_bounds(t) and c.lengths != ["train_epochs"]
    out = architecture_problems(c.model, c.data) + layout + precision_problems(c.precision) + sizes
    out += schedule_problems(c, has_length) + kernel_problems(t, c.model) + data_problems(c.data, needs_data)
    out += mup_problems(c) + logging_problems(c.logging) + eval_tasks_problems(c.logging)
    if c.logging.eval_tasks_device and not (k.run_dir or k.save):
        out.append("--eval-tasks-device reads a snapshot from the run's folder; give --run-dir or --save")
    if t.seed >= 2**32 - 2:
        out.append(f"--seed {t.seed} must be below {2**32 - 2}: numpy takes 32 bits, and up to 2 is added")
    out += state_problems(o) + reaction_problems(t, k) + torch_format_problems(c) + averaging_problems(c)
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
    return out


def averages_problems(k: Checkpoint) -> list[str]:
    if k.weights == "ema" and k.average_last:
        return ["--weights ema and --average-last each replace the weights that are read; give one of them"]
    return []


def averaging_problems(c: TrainConfig) -> list[str]:
    """Check the averages of weights that a training keeps, reads or validates."""
    k, t, number = c.checkpoint, c.training, c.checkpoint.average_last
    out = []
    if k.weights == "ema" and not (k.load and k.finetune):
        out.append("--weights ema begins a new run from averaged weights; give --load and --finetune, or leave it out")
    if not number:
        return out
    flag = f"--average-last {number}"
    if t.skip_train:
        out.append(f"{flag} follows a training, which --skip-train leaves out; use meshwright evaluate {flag}")
    if k.ckpt_format == "torch":
        out.append(f"{flag} reads our own steps, and --ckpt-format torch saves Megatron's; give --ckpt-format native")
    if k.keep_last and k.keep_last < number:
        out.append(f"{flag} needs that many saved steps, --keep-last {k.keep_last} keeps fewer; raise --keep-last")
    if k.save and number > 1 and not k.save_interval:
        out.append(f"{flag} needs several saved steps, and only the last one is saved; give --save-interval")
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
        "the average of --ema": c.optimizer.ema,
        **dict.fromkeys(given_bases(m), True),
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
    out += averages_problems(c.checkpoint)
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
