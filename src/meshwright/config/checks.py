"""Check a configuration: `problems` lists every error; no torch."""

from __future__ import annotations

import os
from typing import Any

from meshwright.base.storage import addresses
from meshwright.config.check_data import data_problems
from meshwright.config.check_layout import naming_problems, parallel_problems, ranks_problems
from meshwright.config.check_model import (
    architecture_problems,
    has_megatrons_scaling,
    kernel_problems,
    option_words,
)
from meshwright.config.check_mup import given_bases, mup_problems
from meshwright.config.check_steps import batch_problems, schedule_problems, state_problems
from meshwright.config.check_values import out_of_bounds, planned_values, unusable
from meshwright.config.problem import Problem, missing, named, plain, stated, with_value
from meshwright.config.schema import (
    EXIT_SIGNALS,
    LENGTHS,
    Checkpoint,
    GenerateConfig,
    Logging,
    Precision,
    TrainConfig,
    Training,
    options_of,
)


def problems(config: Any, needs_data: bool = True) -> list[Problem]:
    """Return every problem; a command's own configuration adds its method `problems`."""
    out = planned_values(config) + unusable(config)
    if hasattr(config, "problems"):
        out += config.problems()
    elif isinstance(config, TrainConfig):
        out += training_problems(config, needs_data)
    elif isinstance(config, GenerateConfig):
        out += generation_problems(config)
    return out


def training_problems(c: TrainConfig, needs_data: bool) -> list[Problem]:
    t = c.training
    batch = batch_problems(c)
    has_length = not batch and not out_of_bounds(t) and c.lengths != ["train_epochs"]
    # The order is that of the messages.
    out = [
        *architecture_problems(c.model, c.data),
        *parallel_problems(c),
        *precision_problems(c.precision),
        *batch,
        *schedule_problems(c, has_length),
        *kernel_problems(t, c.model),
        *data_problems(c.data, needs_data),
        *mup_problems(c),
        *logging_problems(c.logging),
        *eval_tasks_problems(c.logging),
    ]
    # Tasks are scored by another process, which gets the weights through a file.
    if c.logging.eval_tasks_device and not (c.checkpoint.run_dir or c.checkpoint.save):
        text = (
            "{eval_tasks_device} reads a snapshot from the run's folder; give {run_dir} or {save}"
        )
        out.append(Problem(("eval_tasks_device",), text))
    if t.seed >= 2**32 - 2:
        limit = f"must be below {2**32 - 2}: numpy takes 32 bits, and up to 2 is added"
        out.append(Problem(("seed",), f"{stated(t, 'seed')} {limit}"))
    return [
        *out,
        *state_problems(c.optimizer),
        *reaction_problems(t, c.checkpoint),
        *torch_format_problems(c),
        *averaging_problems(c),
        *saving_problems(c),
        *loading_problems(c),
    ]


def saving_problems(c: TrainConfig) -> list[Problem]:
    """Check where a training saves, and its export."""
    k = c.checkpoint
    out = []
    # An export replaces what its folder holds.
    if k.save_hf and k.save and os.path.realpath(k.save_hf) == os.path.realpath(k.save):
        text = f"{{save}} and {{save_hf}} must differ (both are {plain(k.save)}); give two different folders"
        out.append(Problem(("save", "save_hf"), text))
    if k.save_hf and c.training.skip_train:
        text = "{save_hf} exports at the end of training, which {skip_train=True} leaves out; use meshwright convert"
        out.append(Problem(("save_hf", "skip_train"), text))
    if k.save and k.save_overwrite:
        address = addresses.address_of(addresses.localize(k.save))
        # Object storage has no rename: a move would copy the whole run.
        if address:
            text = f"{{save_overwrite=True}} would have to move what is at {address}; give another address to {{save}}"
            out.append(Problem(("save_overwrite", "save"), text))
    if k.save_hf and not k.save:
        out.append(Problem(("save_hf",), "{save_hf} needs {save}: it exports the last checkpoint"))
    return out


def loading_problems(c: TrainConfig) -> list[Problem]:
    """Check what a run that continues, or only validates, reads."""
    k = c.checkpoint
    o = c.optimizer
    t = c.training
    out = []
    if k.use_checkpoint_args and not k.load:
        text = "{use_checkpoint_args=True} needs {load}; give the folder of the checkpoint, or leave it out"
        out.append(Problem(("use_checkpoint_args",), text))
    if t.skip_train and not k.load and not t.eval_iters:
        text = "{skip_train=True} with {eval_iters=0} leaves nothing to do; raise {eval_iters}"
        out.append(Problem(("skip_train", "eval_iters"), text))
    if o.override_opt_param_scheduler and o.use_checkpoint_opt_param_scheduler:
        both = ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler")
        text = "{override_opt_param_scheduler=True} contradicts {use_checkpoint_opt_param_scheduler=True}; give one"
        out.append(Problem(both, text))
    return out


def averages_problems(k: Checkpoint) -> list[Problem]:
    if k.weights == "ema" and k.average_last:
        text = "{weights=ema} and {average_last} each replace the weights that are read; give one of them"
        return [Problem(("weights", "average_last"), text)]
    return []


def averaging_problems(c: TrainConfig) -> list[Problem]:
    """Check the averages of weights that a training keeps, reads or validates."""
    k = c.checkpoint
    number = c.checkpoint.average_last
    out = []
    if k.weights == "ema" and not (k.load and k.finetune):
        needed = "give {load} and {finetune=True}, or leave it out"
        text = f"{{weights=ema}} begins a new run from averaged weights; {needed}"
        out.append(Problem(("weights",), text))
    if not number:
        return out
    average = stated(k, "average_last")
    if c.training.skip_train:
        text = f"which {{skip_train=True}} leaves out; use `meshwright evaluate --average-last {number}`"
        out.append(Problem(("average_last", "skip_train"), f"{average} follows a training, {text}"))
    # The average is of the steps that the run has saved.
    if k.ckpt_format == "torch":
        text = f"{average} reads our own steps, and {{ckpt_format=torch}} saves Megatron's; give {{ckpt_format=native}}"
        out.append(Problem(("average_last", "ckpt_format"), text))
    # Without it all steps are kept.
    if k.keep_last and k.keep_last < number:
        text = f"{average} needs that many saved steps, {stated(k, 'keep_last')} keeps fewer; raise {{keep_last}}"
        out.append(Problem(("average_last", "keep_last"), text))
    if k.save and number > 1 and not k.save_interval:
        text = f"{average} needs several saved steps, and only the last one is saved; give {{save_interval}}"
        out.append(Problem(("average_last",), text))
    return out


def torch_format_problems(c: TrainConfig) -> list[Problem]:
    """Check that --ckpt-format torch, which is Megatron's, can hold what is trained."""
    k = c.checkpoint
    m = c.model
    kind = c.optimizer.optimizer
    if k.ckpt_format != "torch":
        return []
    # Megatron's file has no place for an option of the network, but for some scalings of rotation.
    unknown = {name: option_words(m, name) for name in options_of(m)}
    if "rope_scaling" in unknown:
        unknown["rope_scaling"] = f"this {stated(m, 'rope_scaling')}"
        if has_megatrons_scaling(m):
            del unknown["rope_scaling"]
    if c.optimizer.ema:
        unknown["ema"] = "the average of {ema}"
    if c.decays_by_tokens:
        unknown["seq_length_schedule"] = (
            "the tokens of samples that grow, which {lr_decay_tokens} counts"
        )
    for name in given_bases(m):
        unknown[name] = f"{{{name}}}"
    reasons = {name: f"has no place for {what}" for name, what in unknown.items()}
    # It has Adam's exp_avg and exp_avg_sq, and numbers the layers within equal stages.
    if kind not in ("adam", "adamw"):
        reasons["optimizer"] = f"holds Adam's state, not {kind}'s ({{optimizer}})"
    if (m.num_layers or 0) % c.parallel.pipeline_model_parallel_size:
        stages = stated(c.parallel, "pipeline_model_parallel_size")
        reasons["num_layers"] = (
            f"needs equal stages, but {stated(m, 'num_layers')} is not a multiple of {stages}"
        )
    out = []
    for name, reason in reasons.items():
        text = f"{{ckpt_format=torch}} {reason}; give {{ckpt_format=native}}"
        out.append(Problem(("ckpt_format", name), text))
    if k.save and (address := addresses.address_of(addresses.localize(k.save))):
        text = (
            f"does not work with {with_value('save', address)}; save natively, and convert the run"
        )
        out.append(Problem(("ckpt_format", "save"), f"{{ckpt_format=torch}} {text}"))
    return out


def reaction_problems(t: Training, k: Checkpoint) -> list[Problem]:
    """Check what follows a step that is not finite or a loss spike, and the signals that end."""
    out = []
    if unknown := [name for name in t.exit_signal if name not in EXIT_SIGNALS]:
        text = f"{with_value('exit_signal', unknown)}: give some of {', '.join(EXIT_SIGNALS)}"
        out.append(Problem(("exit_signal",), text))
    # Going back needs a checkpoint with everything that decides the next steps.
    for name, reaction in (("on_nonfinite", t.on_nonfinite), ("on_spike", t.on_spike)):
        if reaction.word == "rollback" and not k.save:
            text = f"{stated(t, name)} goes back to a checkpoint of {{save}}, which is not given; give {{save=DIR}}"
            out.append(Problem((name,), text))
        elif reaction.word == "rollback" and k.no_save_optim:
            state = "the optimizer's state, which {no_save_optim=True} leaves out"
            out.append(
                Problem(
                    (name, "no_save_optim"), f"{stated(t, name)} needs {state}; give one of them"
                )
            )
    return out


def precision_problems(p: Precision) -> list[Problem]:
    out = []
    if p.fp16 and p.loss_scale is None and p.min_loss_scale > p.initial_loss_scale:
        text = f"{stated(p, 'min_loss_scale')} is above {stated(p, 'initial_loss_scale')}"
        out.append(Problem(("min_loss_scale", "initial_loss_scale"), text))
    if p.fp16 and p.bf16:
        out.append(
            Problem(("fp16", "bf16"), "{fp16=True} and {bf16=True} cannot be combined; give one")
        )
    if (p.fp16 or p.bf16) and p.params_dtype == "float64":
        other = "fp16" if p.fp16 else "bf16"
        out.append(
            Problem(
                ("params_dtype", other), f"{{params_dtype=float64}} contradicts {{{other}=True}}"
            )
        )
    # Numbers are rounded to bfloat16 before they are cast to fp8.
    if p.fp8_format and not p.bf16:
        other = "{fp16=True} scales the loss for its own range" if p.fp16 else "all else is float32"
        text = (
            f"{stated(p, 'fp8_format')} needs bfloat16 around it, and {other}; give {{bf16=True}}"
        )
        out.append(Problem(("fp8_format", "bf16", "fp16"), text))
    return out


def eval_tasks_problems(g: Logging) -> list[Problem]:
    try:
        if g.eval_tasks is not None:
            g.eval_tasks.check()
    except ValueError as error:
        return [Problem(("eval_tasks",), f"{stated(g, 'eval_tasks')}: {plain(error)}")]
    return []


def logging_problems(g: Logging) -> list[Problem]:
    out = []
    if g.profile and g.profile_step_end <= g.profile_step_start:
        text = f"{stated(g, 'profile_step_end')} is not above {stated(g, 'profile_step_start')}"
        out.append(Problem(("profile_step_end", "profile_step_start"), text))
    if not g.wandb_project and (g.wandb_exp_name or g.wandb_save_dir):
        text = "{wandb_exp_name} and {wandb_save_dir} need {wandb_project}"
        out.append(Problem(("wandb_exp_name", "wandb_save_dir"), text))
    return out


def forecast_problems(c: TrainConfig, needs_data: bool = True) -> list[Problem]:
    """Check only what decides which samples a training will read."""
    t = c.training
    p = c.parallel
    out = data_problems(c.data, needs_data)
    if c.data.seq_length is None:
        out.append(missing("seq_length", "tokens of one sample"))
    # Two lengths could contradict each other.
    if len(c.lengths) != 1:
        given = f"{named(c.lengths)} are given" if c.lengths else "none is given"
        *others, last = (f"{{{name}}}" for name in LENGTHS)
        units = f"{', '.join(others)} and {last}"
        text = f"one of {units} is needed for the length; {given}"
        out.append(Problem(LENGTHS, text, "missing"))
    # The data-parallel ranks decide the batch, and the model's ranks how many of them there are.
    if t.global_batch_size is None and p.world_size is None and p.model_ranks > 1:
        needed = f"the model will run on {p.model_ranks} ranks or more"
        text = f"{{global_batch_size}} or {{world_size}} is needed: {needed}"
        out.append(Problem(("global_batch_size", "world_size"), text, "missing"))
    if t.global_batch_size is None and t.micro_batch_size in (None, "auto"):
        text = "{global_batch_size} or {micro_batch_size} is needed: samples of one step"
        out.append(Problem(("global_batch_size", "micro_batch_size"), text, "missing"))
    return out


def reading_problems(c: Any, command: str, copies: bool = False) -> list[Problem]:
    """Check a command that reads a trained model.

    With `copies` it uses all ranks, for several copies of the model and parts of sequences.
    """
    p = c.parallel
    out = precision_problems(c.precision)
    if c.training.micro_batch_size == "auto":
        text = "{micro_batch_size=auto} is only for training; give a number"
        out.append(Problem(("micro_batch_size",), text))
    out += naming_problems(p)
    if not out_of_bounds(p):
        cp = p.context_parallel_size
        world = p.world_size or p.num_gpus_per_node * p.num_nodes
        if cp > 1 and not copies:
            text = f"{stated(p, 'context_parallel_size')} divides sequences, which {command} makes token by token"
            out.append(Problem(("context_parallel_size",), f"{text}; give 1"))
        # Without copies, ranks after the first copy end, so that any larger number will do.
        elif copies or world < p.model_ranks:
            out += ranks_problems(p, world)
    out += averages_problems(c.checkpoint)
    if not c.checkpoint.load:
        text = f"a checkpoint is needed: `meshwright {command} DIR` or {{load=DIR}}"
        # `evaluate` takes several, as folders.
        out.append(Problem(("load", "folders"), text, "missing"))
    return out


def generation_problems(c: GenerateConfig) -> list[Problem]:
    t = c.texts
    out = reading_problems(c, "generate")
    if t.num_samples and not t.genfile:
        text = f"{stated(t, 'num_samples')} writes to a file; name it with {{genfile}}"
        out.append(Problem(("num_samples", "genfile"), text))
    if t.sample_output_file and not t.sample_input_file:
        text = "{sample_output_file} holds continuations; name the prompts with {sample_input_file}"
        out.append(Problem(("sample_output_file",), text))
    # Each of these decides where texts come from and go to.
    has_prompts = t.prompt is not None or t.prompts is not None
    modes = [
        bool(t.num_samples),
        bool(t.sample_input_file),
        t.interactive,
        t.prompt is not None,
        t.prompts is not None,
    ]
    if sum(modes) > 1:
        names = "{num_samples}, {sample_input_file}, {prompt}, {prompts} and {interactive=True}"
        about = ("num_samples", "sample_input_file", "prompt", "prompts", "interactive")
        out.append(Problem(about, f"{names} cannot be combined; give one"))
    # Flags that were left out and those that repeat the default are treated alike.
    default = type(t)()
    of_prompts = ("output", "json", "num_return_sequences", "logprobs")
    others = [name for name in of_prompts if getattr(t, name) != getattr(default, name)]
    others += [name for name in ("beam_width", "length_penalty") if getattr(t, name) is not None]
    if others and not has_prompts:
        out += [
            Problem((n,), f"{{{n}}} is for {{prompt}} and {{prompts}}; give one of them")
            for n in others
        ]
    if t.stop and (t.num_samples or t.sample_input_file or t.dialogue == "megatron"):
        text = "{stop} is for {prompt}, {prompts} and a plain dialogue; leave it out"
        out.append(Problem(("stop",), text))
    if t.length_penalty is not None and t.beam_width is None:
        text = f"{stated(t, 'length_penalty')} is for beam search; give {{beam_width}} too"
        out.append(Problem(("length_penalty", "beam_width"), text))
    if (
        t.logprobs is not None
        and has_prompts
        and not t.json
        and not (t.output or "").endswith(".jsonl")
    ):
        text = f"{stated(t, 'logprobs')} writes numbers beside the text; give {{json=True}} too"
        out.append(Problem(("logprobs", "json"), text))
    return out + (beam_problems(c) if t.beam_width is not None else [])


def beam_problems(c: GenerateConfig) -> list[Problem]:
    t = c.texts
    s = c.sampling
    default = type(c.sampling)()
    # A setting that differs from its default was meant to have an effect.
    of_draws = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "recompute")
    drawing = [name for name in of_draws if getattr(s, name) != getattr(default, name)]
    width = stated(t, "beam_width")
    out = []
    if drawing:
        named = ", ".join(f"{{{name}}}" for name in drawing)
        text = f"{width} searches and draws nothing; leave {named} out"
        out.append(Problem(("beam_width", *drawing), text))
    if t.logprobs:
        text = f"{stated(t, 'logprobs')} lists other tokens, which {{beam_width}} does not; give {{logprobs=0}}"
        out.append(Problem(("logprobs", "beam_width"), text))
    if t.num_return_sequences > (t.beam_width or 1):
        text = f"{stated(t, 'num_return_sequences')} is more than {width}; raise the width"
        out.append(Problem(("num_return_sequences", "beam_width"), text))
    return out
