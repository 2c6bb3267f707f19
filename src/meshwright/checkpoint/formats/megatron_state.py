"""What a Megatron file says beside its tensors, in our words: settings, counters, schedule, loss scale."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from meshwright.optim.schedule import Schedule

if TYPE_CHECKING:
    from meshwright.checkpoint.formats.megatron_ranks import Sizes

# Settings that mean there what they mean here.
TOLD = (
    "layernorm_epsilon",
    "init_method_std",
    "hidden_dropout",
    "attention_dropout",
    "bias_gelu_fusion",
    "openai_gelu",
    "rotary_percent",
    "rotary_base",
    "squared_relu",
    "swiglu",
    "glu_activation",
    "apply_layernorm_1p",
    "apply_residual_connection_post_layernorm",
    "make_vocab_size_divisible_by",
    "seq_length",
    "micro_batch_size",
    "global_batch_size",
    "fp16",
    "bf16",
)
# Positions as BigScience's enumeration numbers them.
POSITIONS = {1: "rope", 2: "learned_absolute", 3: "alibi"}
# Names of the schedule's values: Megatron's of 2022 and 2023, of 2021, of 2020 and before, when it counted iterations.
SCHEDULE = {
    "max_lr": ("max_lr", "start_lr"),
    "min_lr": ("min_lr",),
    "style": ("lr_decay_style", "decay_style"),
    "warmup": ("lr_warmup_steps", "warmup_steps", "warmup_iter"),
    "decay": ("lr_decay_steps", "decay_steps", "end_iter"),
    "done": ("num_steps", "num_iters"),
    "start_wd": ("start_wd",),
    "end_wd": ("end_wd",),
    "wd_samples": ("wd_incr_steps",),
    "wd_style": ("wd_incr_style",),
}


def namespace(args: Any) -> dict[str, Any]:
    """What is set to nothing is left out."""
    told = args if isinstance(args, dict) else getattr(args, "__dict__", {})
    return {name: value for name, value in told.items() if value is not None}


# Settings


def config(args: Mapping[str, Any], sizes: Sizes, held: Collection[str], notes: list[str]) -> dict[str, Any]:
    """What the shapes prove, then what the arguments tell."""
    out = {
        "num_layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "num_attention_heads": sizes.heads,
        "kv_channels": sizes.head_dim,
        "ffn_hidden_size": sizes.ffn,
        "num_query_groups": None if sizes.groups == sizes.heads else sizes.groups,
        "normalization": "LayerNorm" if "ln_f.bias" in held else "RMSNorm",
        "add_bias_linear": "h.0.mlp.proj.bias" in held,
        "add_qkv_bias": "h.0.attn.qkv.bias" in held and "h.0.mlp.proj.bias" not in held,
        "untie_embeddings_and_output_weights": "lm_head.weight" in held,
        "embed_layernorm": "ln_emb.weight" in held,
        "qk_layernorm": "h.0.attn.ln_q.weight" in held,
    }
    args = {"layernorm_epsilon": args.get("norm_epsilon"), **args}
    out |= {name: args[name] for name in TOLD if isinstance(args.get(name), bool | int | float | str)}
    if sizes.gates == 2 and not out.get("swiglu") and not out.get("glu_activation"):
        notes.append(" > note: the MLP is gated, and the checkpoint does not say by what: --swiglu or --glu-activation")
    return out | positions(args, sizes, notes)


def positions(args: Mapping[str, Any], sizes: Sizes, notes: list[str]) -> dict[str, Any]:
    if sizes.positions is not None:
        return {"position_embedding_type": "learned_absolute", "max_position_embeddings": sizes.positions}
    kind = args.get("position_embedding_type")
    if isinstance(number := getattr(kind, "args", None), tuple) and len(number) == 1:  # what is left of an enumeration
        kind = POSITIONS.get(number[0], number[0])
    if kind in ("rope", "rotary") or args.get("use_rotary_position_embeddings"):
        return {"position_embedding_type": "rope"}
    if kind in ("alibi", "none"):
        return {"position_embedding_type": kind}
    notes.append(
        " > note: it has no table of positions and does not say what is in its place: give --position-embedding-type"
    )
    return {}


def true_vocabulary(tree: Mapping[str, Any], args: Mapping[str, Any]) -> int | None:
    """BigScience's trees tell it, and what converters of Megatron and Hugging Face wrote; `padded_vocab_size` is another."""
    info = tree.get("checkpoint_info")
    told = (
        info.get("original_vocab_size")
        if isinstance(info, dict)
        else args.get("true_vocab_size", args.get("orig_vocab_size"))
    )
    return told if isinstance(told, int) and told > 0 else None


# Where a run was


def state(
    tree: Mapping[str, Any], args: Mapping[str, Any], iteration: int, rows: int | None, notes: list[str]
) -> dict[str, Any]:
    """As resume.State saves it; nothing where the file holds weights alone, or cannot tell how many samples it has seen.
    Without a schedule in the file there is none here."""
    optimizer = tree.get("optimizer")
    if not isinstance(optimizer, dict):
        return {}
    told: dict[str, Any] = next(
        (tree[key] for key in ("opt_param_scheduler", "lr_scheduler") if isinstance(tree.get(key), dict)), {}
    )
    batch = batch_size(args)
    consumed = args.get("consumed_train_samples") or iteration * batch
    if not consumed and iteration:
        notes.append(
            " > note: it does not say how many samples it has seen, so the weights alone are taken; add --finetune"
        )
        return {}
    curve = schedule(told, args, optimizer, batch)
    done = curve.pop("done") if curve else consumed
    if curve and curve["style"] == "WSD" and not curve["wsd_samples"]:
        notes.append(" > note: it does not say how long the last part of its WSD schedule is (lr_wsd_decay_samples)")
        curve = None
    out: dict[str, Any] = {
        "iteration": iteration,
        "consumed_train_samples": int(consumed),
        "schedule_samples": int(done),
        "nonfinite_in_a_row": 0,
        "best_iteration": None,
        "best_loss": None,
        "padded_vocab_size": args.get("padded_vocab_size"),
        "positions": rows or args.get("max_position_embeddings"),
        "loss_scale": loss_scale(optimizer),
        "skips": [],
        "epochs": None,
        "blends": None,
        "optimizer_steps": iteration,
    }
    return out | ({"schedule": dataclasses.asdict(Schedule(**curve))} if curve else {})


def batch_size(args: Mapping[str, Any]) -> int:
    """Samples of one step; 0: it is not known."""
    parameters_of_ranks = (
        args.get("batch_size", 0) * args.get("world_size", 0) // args.get("model_parallel_size", 1)
    )  # 2019, 2020
    return int(args.get("global_batch_size", parameters_of_ranks))


def schedule(
    told: Mapping[str, Any], args: Mapping[str, Any], optimizer: Mapping[str, Any], batch: int
) -> dict[str, Any] | None:
    """The fields of our Schedule, and in `done` the samples it has seen. None: they are not all known, in samples."""
    out = {name: next((told[key] for key in keys if key in told), None) for name, keys in SCHEDULE.items()}
    if out["start_wd"] is None:
        out["start_wd"] = out["end_wd"] = weight_decay(args, optimizer)
    if "num_iters" in told:
        out |= {name: (out[name] or 0) * batch for name in ("warmup", "decay", "done")}
    if not out["decay"] or any(out[name] is None for name in ("max_lr", "min_lr", "style", "warmup", "done", "end_wd")):
        return None
    out["wd_samples"] = (
        out["wd_samples"] or args.get("train_samples", args.get("train_iters", 0) * batch) or out["decay"]
    )
    return out | {
        "wd_style": out["wd_style"] or "constant",
        "init_lr": args.get("lr_warmup_init", 0.0),
        "wsd_samples": int(args.get("lr_wsd_decay_samples") or args.get("lr_wsd_decay_iters", 0) * batch),
        "wsd_style": args.get("lr_wsd_decay_style", "exponential"),
    }


def weight_decay(args: Mapping[str, Any], optimizer: Mapping[str, Any]) -> float:
    inner = optimizer.get("optimizer", optimizer.get("optimizer_state_dict", optimizer))
    groups = inner.get("param_groups", []) if isinstance(inner, dict) else []
    return float(args.get("weight_decay", max((group.get("weight_decay", 0.0) for group in groups), default=0.0)))


def loss_scale(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """As precision.LossScale saves it. Until 2020 the scaler itself was pickled."""
    scaler, old = optimizer.get("grad_scaler"), optimizer.get("loss_scaler")
    dynamic, scale, clean, hysteresis = False, 1.0, 0, 2
    if isinstance(scaler, dict) and "scale" in scaler:
        dynamic, scale = True, scaler["scale"]
        clean, hysteresis = scaler["growth_tracker"], scaler["hysteresis_tracker"]
    elif old is not None and hasattr(old, "scale_window"):
        dynamic, scale, hysteresis = True, old.cur_scale, getattr(old, "cur_hysteresis", 1)
        clean = max(old.cur_iter - old.last_overflow_iter - 1, 0) % max(old.scale_window, 1)
    return {
        "dynamic": dynamic,
        "scale": float(scale),
        "growth_tracker": int(clean),
        "hysteresis_tracker": int(hysteresis),
        "in_a_row": 0,
    }
