"""Settings, counters, schedule and loss scale of a Megatron file, under our names."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwright.checkpoint.claims import claimed_steps
from meshwright.checkpoint.run_state import LossScaleState, RunState
from meshwright.checkpoint.sources import MappedSource
from meshwright.compat.formats.megatron.sharded import ModelSizes, RankFile, lay_out
from meshwright.config import flags
from meshwright.config.schema import ABSENT_COMPUTED
from meshwright.optim.schedule import Schedule

Values = Mapping[str, Any]

# Settings that mean the same there and here.
COMMON = (
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
# BigScience's enumeration of positions.
POSITIONS = {1: "rope", 2: "learned_absolute", 3: "alibi"}
# Names of the schedule's values in Megatron of 2022 and 2023, of 2021, and of 2020 and before, when
# it counted iterations.
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
    """Return the arguments that are set."""
    values = args if isinstance(args, dict) else getattr(args, "__dict__", {})
    return {name: value for name, value in values.items() if value is not None}


# Settings


def as_source(
    kind: str,
    folder: Path,
    ranks: list[RankFile],
    sizes: ModelSizes,
    args: Values,
    notes: list[str],
    version: float = 3.0,
) -> MappedSource:
    """Return the ranks' parameters as a source, with the settings that their files state."""
    views = lay_out(ranks, sizes, version)
    return MappedSource(
        kind, folder, 0, config=config(args, sizes, views, notes), notes=notes, views=views
    )


def finish_source(
    source: MappedSource, state: dict[str, Any], layout: str, vocab: int | None
) -> MappedSource:
    """Return the source with the run's state, cut to its vocabulary if the files state its size."""
    source.state = state
    source.step = state.get("iteration", 0)
    source.layout = layout
    return source.of_vocabulary(vocab) if vocab else source


def config(
    args: Mapping[str, Any], sizes: ModelSizes, present: Collection[str], notes: list[str]
) -> dict[str, Any]:
    """Return settings that the shapes prove, then those that the arguments state."""
    out = ABSENT_COMPUTED | {
        "num_layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "num_attention_heads": sizes.heads,
        "kv_channels": sizes.head_dim,
        "ffn_hidden_size": sizes.ffn,
        "num_query_groups": None if sizes.groups == sizes.heads else sizes.groups,
        "normalization": "LayerNorm" if "ln_f.bias" in present else "RMSNorm",
        "add_bias_linear": "h.0.mlp.proj.bias" in present,
        "add_qkv_bias": "h.0.attn.qkv.bias" in present and "h.0.mlp.proj.bias" not in present,
        "untie_embeddings_and_output_weights": "lm_head.weight" in present,
        "embed_layernorm": "ln_emb.weight" in present,
        "qk_layernorm": "h.0.attn.ln_q.weight" in present,
    }
    # The argument's name since 2023.
    args = {"layernorm_epsilon": args.get("norm_epsilon"), **args}
    for name in COMMON:
        if isinstance(args.get(name), bool | int | float | str):
            out[name] = args[name]
    if sizes.gates == 2 and not out.get("swiglu") and not out.get("glu_activation"):
        notes.append(
            " > note: the MLP is gated, and the checkpoint does not say by what: --swiglu or --glu-activation"
        )
    return (
        flags.current_names(out)
        | positions(args, sizes, notes)
        | rope_scaling(args)
        | megatron_windows(args)
    )


def positions(args: Mapping[str, Any], sizes: ModelSizes, notes: list[str]) -> dict[str, Any]:
    if sizes.positions is not None:
        return {
            "position_embedding_type": "learned_absolute",
            "max_position_embeddings": sizes.positions,
        }
    kind = args.get("position_embedding_type")
    # A Stub of an enumeration.
    if isinstance(number := getattr(kind, "args", None), tuple) and len(number) == 1:
        kind = POSITIONS.get(number[0], number[0])
    if kind in ("rope", "rotary") or args.get("use_rotary_position_embeddings"):
        return {"position_embedding_type": "rope"}
    if kind in ("alibi", "none"):
        return {"position_embedding_type": kind}
    notes.append(
        " > note: it has no table of positions and does not name a substitute: give --position-embedding-type"
    )
    return {}


def rope_scaling(args: Mapping[str, Any]) -> dict[str, Any]:
    if args.get("use_rope_scaling"):
        return {
            "rope_scaling": "llama3",
            "rope_scaling_factor": args.get("rope_scaling_factor", 8.0),
        }
    factor = args.get("rotary_seq_len_interpolation_factor") or 1
    if factor == 1:
        return {"rope_scaling": "none"}
    return {"rope_scaling": "linear", "rope_scaling_factor": factor}


def megatron_windows(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of windows, for which Megatron has a pair and a number or a list."""
    size = args.get("window_size")
    skipped = args.get("window_attn_skip_freq")
    if isinstance(size, tuple | list):
        size = ",".join(map(str, size))
    return {
        "window_size": None if size is None else str(size),
        "window_attn_skip_freq": None if skipped is None else str(skipped).replace(" ", ""),
    }


def true_vocabulary(tree: Mapping[str, Any], args: Mapping[str, Any]) -> int | None:
    """Return the unpadded size, which BigScience and some converters save."""
    info = tree.get("checkpoint_info")
    size = args.get("true_vocab_size", args.get("orig_vocab_size"))
    if isinstance(info, dict):
        size = info.get("original_vocab_size")
    return size if isinstance(size, int) and size > 0 else None


# Where a run was


def run_state(
    tree: Values, args: Values, iteration: int, rows: int | None, notes: list[str]
) -> RunState | None:
    """Return where the run was, with a schedule if the file has one.

    None if the file holds weights alone, or does not say how many samples the run has consumed.
    """
    optimizer = tree.get("optimizer")
    if not isinstance(optimizer, dict):
        return None
    schedules = (tree.get(key) for key in ("opt_param_scheduler", "lr_scheduler"))
    saved: Values = next((entry for entry in schedules if isinstance(entry, dict)), {})
    iteration = claimed_steps(iteration, "iteration")
    batch = batch_size(args)
    # Before samples were counted, all batches were equal.
    consumed = args.get("consumed_train_samples") or iteration * batch
    if not consumed and iteration:
        notes.append(
            " > note: it does not say how many samples it consumed, so only the weights are used; add --finetune"
        )
        return None
    curve = schedule(saved, args, optimizer, batch)
    done = curve.pop("done") if curve else consumed
    if curve and curve["style"] == "WSD" and not curve["wsd_samples"]:
        notes.append(
            " > note: it does not say how long the last part of its WSD schedule is (lr_wsd_decay_samples)"
        )
        curve = None
    return RunState(
        iteration,
        consumed_train_samples=claimed_steps(consumed, "consumed_train_samples"),
        schedule_samples=claimed_steps(done, "the schedule's number of steps"),
        optimizer_steps=iteration,
        schedule=Schedule(**curve) if curve else None,
        loss_scale=loss_scale(optimizer),
        positions=rows or args.get("max_position_embeddings"),
        padded_vocab_size=args.get("padded_vocab_size"),
    )


def batch_size(args: Mapping[str, Any]) -> int:
    """Return the samples of one step, 0 if unknown."""
    # In 2019 and 2020 `batch_size` was that of one data rank.
    ranks = args.get("world_size", 0) // args.get("model_parallel_size", 1)
    return int(args.get("global_batch_size", args.get("batch_size", 0) * ranks))


def schedule(saved: Values, args: Values, optimizer: Values, batch: int) -> dict[str, Any] | None:
    """Return the fields of our Schedule, and its samples as `done`; None if some are unknown."""
    out = {
        name: next((saved[key] for key in keys if key in saved), None)
        for name, keys in SCHEDULE.items()
    }
    # What schedules of other years lack: before 2022 the decay of weights was constant, and before
    # 2021 steps were iterations.
    if out["start_wd"] is None:
        out["start_wd"] = out["end_wd"] = weight_decay(args, optimizer)
    if "num_iters" in saved:
        out |= {name: (out[name] or 0) * batch for name in ("warmup", "decay", "done")}
    needed = ("max_lr", "min_lr", "style", "warmup", "done", "end_wd")
    if not out["decay"] or any(out[name] is None for name in needed):
        return None

    # What only the arguments say.
    samples = args.get("train_samples", args.get("train_iters", 0) * batch)
    out["wd_samples"] = out["wd_samples"] or samples or out["decay"]
    wsd_samples = args.get("lr_wsd_decay_samples") or args.get("lr_wsd_decay_iters", 0) * batch
    return out | {
        "wd_style": out["wd_style"] or "constant",
        "init_lr": args.get("lr_warmup_init", 0.0),
        "wsd_samples": int(wsd_samples),
        "wsd_style": args.get("lr_wsd_decay_style", "exponential"),
    }


def weight_decay(args: Mapping[str, Any], optimizer: Mapping[str, Any]) -> float:
    inner = optimizer.get("optimizer", optimizer.get("optimizer_state_dict", optimizer))
    groups = inner.get("param_groups", []) if isinstance(inner, dict) else []
    # That of biases and norms is 0.
    decays = [group.get("weight_decay", 0.0) for group in groups]
    largest = max(decays, default=0.0)
    return float(args.get("weight_decay", largest))


def loss_scale(optimizer: Mapping[str, Any]) -> LossScaleState:
    """Return the state of the loss scale. Until 2020 the scaler object was pickled."""
    scaler = optimizer.get("grad_scaler")
    if isinstance(scaler, dict) and "scale" in scaler:
        return LossScaleState(
            dynamic=True,
            scale=float(scaler["scale"]),
            growth_tracker=int(scaler["growth_tracker"]),
            hysteresis_tracker=int(scaler["hysteresis_tracker"]),
        )
    old = optimizer.get("loss_scaler")
    if old is not None and hasattr(old, "scale_window"):
        # It counted iterations; ours counts those without an overflow since the scale grew.
        since_overflow = max(old.cur_iter - old.last_overflow_iter - 1, 0)
        return LossScaleState(
            dynamic=True,
            scale=float(old.cur_scale),
            growth_tracker=int(since_overflow % max(old.scale_window, 1)),
            hysteresis_tracker=int(getattr(old, "cur_hysteresis", 1)),
        )
    return LossScaleState()


def state_beside_weights(
    tree: Values, args: Values, rows: int | None, notes: list[str]
) -> dict[str, Any]:
    """Return as much of the run's state as is known; without a schedule the flags give it."""
    optimizer = tree.get("optimizer")
    # It may be the first of several in a chain, by number.
    if isinstance(optimizer, dict) and isinstance(optimizer.get(0), dict):
        optimizer = optimizer[0]
    iteration = claimed_steps(tree.get("iteration", 0), "iteration")
    before = len(notes)
    state = run_state({**tree, "optimizer": optimizer}, args, iteration, rows, notes)
    if state is None and len(notes) > before:  # it has one that cannot be followed
        return {}
    if state is None:
        samples = args.get("consumed_train_samples") or iteration * batch_size(args)
        samples = claimed_steps(samples, "consumed_train_samples")
        state = RunState(iteration, samples, samples, iteration)
    steps = [
        claimed_steps(step, key)
        for key in ("step", "common_step")
        for step in values_of(optimizer, key)
        if step is not None
    ]
    state.optimizer_steps = max(steps, default=iteration)
    return state.as_saved()


def values_of(tree: Any, key: str) -> Iterator[Any]:
    """Yield every value under this key in a tree of settings."""
    if isinstance(tree, list):
        for value in tree:
            yield from values_of(value, key)
    elif isinstance(tree, dict):
        for name, value in tree.items():
            if name == key:
                yield value
            else:
                yield from values_of(value, key)
