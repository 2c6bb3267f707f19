"""Write any source as Megatron-LM's tree, version 3.0, which its release of 2023 saves and loads.

One file per tensor and pipeline rank, each written in a stream: a tensor's part is read when its
bytes are due, so memory holds one part. What Megatron has no field for (`state`, `config`, the true
vocabulary) is stored under the key `meshwright`, which it ignores. The state of its random
generators is missing, hence `--no-load-rng`.

BigScience's form is used where Megatron has none: a norm after the embedding, ALiBi, and GLU other
than SwiGLU, whose activated half comes last there.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from math import prod
from typing import Any

import torch

from meshwright.base.console import notice
from meshwright.checkpoint import exports
from meshwright.checkpoint.pickle.writer import Later, write_torch_file
from meshwright.checkpoint.publish import Produce, Write
from meshwright.checkpoint.saved_model import model_settings
from meshwright.checkpoint.sources import Source, TensorInfo, flat_zeros
from meshwright.compat.flags.argument_dump import OFF
from meshwright.compat.formats.adam import MOMENTS
from meshwright.compat.formats.megatron import names
from meshwright.compat.formats.megatron.reader import MODEL
from meshwright.compat.formats.megatron.state import SCHEDULE
from meshwright.config.problem import SettingsError, plain
from meshwright.config.schema import Model
from meshwright.optim.schedule import Schedule
from meshwright.parallel import shard

PARTS = ("ln_1", "attn.qkv", "attn.proj", "ln_2", "mlp.fc", "mlp.proj")  # in Megatron's order
ENCODER = ("language_model", "encoder")
WORDS = ("language_model", "embedding", "word_embeddings")
BEFORE: dict[tuple[str, ...], str] = {
    (*WORDS, "weight"): "wte.weight",
    **{(*WORDS, f"norm.{kind}"): f"ln_emb.{kind}" for kind in ("weight", "bias")},
    ("language_model", "embedding", "position_embeddings", "weight"): "wpe.weight",
}
BEHIND: dict[tuple[str, ...], str] = {
    (*ENCODER, "final_layernorm.weight"): "ln_f.weight",
    (*ENCODER, "final_layernorm.bias"): "ln_f.bias",
    ("language_model", "output_layer", "weight"): "lm_head.weight",
}
POSITIONS = {"learned": "learned_absolute", "rope": "rope", "alibi": "alibi", "none": "none"}


@dataclass(frozen=True)
class MegatronExport:
    """The source to write, and the layout of the files."""

    source: Source
    tensors: Mapping[str, TensorInfo]
    model: Model
    t: int  # tensor ranks
    p: int  # stages
    padded: int  # rows of the token table
    optimizer: bool

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights: the run's if masters are stored too, else the source's."""
        config = self.source.config
        name = self.tensors["wte.weight"].dtype
        if self.optimizer and config.get("bf16"):
            name = "bfloat16"
        elif self.optimizer and config.get("fp16"):
            name = "float16"
        return getattr(torch, name)  # type: ignore[no-any-return]


def megatron_files(
    source: Source, t: int, p: int, padded: int, with_optimizer: bool
) -> dict[str, Produce]:
    """Return what writes each file of the step's folder; ranks can share them."""
    model = model_settings(source.config, source.folder)
    optimizer = with_optimizer and source.has_optimizer and bool(source.state)
    if optimizer and "schedule" not in source.state:
        notice(
            f"{source.folder} does not state its schedule: Megatron-LM needs --no-load-optim; Meshwright does not"
        )
    target = MegatronExport(source, source.tensors, model, t, p, padded, optimizer)
    check_export(target)
    files: dict[str, Produce] = {}
    for tp, pp in product(range(t), range(p)):
        folder = f"mp_rank_{tp:02d}"
        if p > 1:
            folder += f"_{pp:03d}"
        files[f"{folder}/{MODEL}"] = functools.partial(write_rank, target, tp, pp)
    return files


def check_export(target: MegatronExport) -> None:
    """Refuse, in one list, everything that Megatron could not load."""
    m = target.model
    t = target.t
    p = target.p
    rows = target.tensors["wte.weight"].shape[0]

    # The network, and whether it can be divided.
    wrong = [
        f"{plain(obstacle)} cannot be expressed" for obstacle in exports.obstacles(m, "megatron")
    ]
    wrong += [
        f"{count} {what} cannot be divided by {by} ({{{name}}})"
        for count, what, by, name in (
            (m.num_attention_heads or 1, "heads", t, "target_tensor_parallel_size"),
            (m.groups, "query groups", t, "target_tensor_parallel_size"),
            (m.ffn, "rows of the MLP", t, "target_tensor_parallel_size"),
            (target.padded, "rows of the padded vocabulary", t, "make_vocab_size_divisible_by"),
            (m.num_layers or 1, "layers", p, "target_pipeline_parallel_size"),
        )
        if count % by
    ]
    if rows > target.padded:
        wrong.append(f"{rows} ids do not fit {target.padded} rows ({{pad_vocab_size_to}})")
    state = {name.partition("/")[2] for name in target.tensors} - {""}
    if target.optimizer and state != set(MOMENTS):
        names = ", ".join(sorted(state))
        wrong.append(
            f"the optimizer's state ({names}) is not Adam's: leave it out by {{no_optimizer}}, or keep the native format"
        )

    # Whether each tensor has a place; after other errors, which ones have none says nothing new.
    placed = {ours for pp in range(p) for _, ours in stage_parameters(target, pp)}
    kinds = ("", *MOMENTS) if target.optimizer else ("",)
    left = {name for name in target.tensors if target.optimizer or "/" not in name}
    left -= {f"{ours}/{kind}" if kind else ours for ours in placed for kind in kinds}
    if left and not wrong:
        wrong.append(
            f"{len(left)} tensors have no place in it, such as {plain(min(left))}: save with {{ckpt_format=native}}"
        )
    if wrong:
        raise SettingsError("\n  ".join(["cannot be written as a Megatron-LM checkpoint:", *wrong]))


def write_rank(target: MegatronExport, tp: int, pp: int, out: Write) -> None:
    """Write one rank's file."""
    source = target.source
    stage = list(stage_parameters(target, pp))
    model: dict[str, Any] = {}
    for (*path, last), ours in stage:
        inner = model
        for key in path:
            inner = inner.setdefault(key, {})
        inner[last] = rank_part(target, ours, tp, target.dtype)
    tree: dict[str, Any] = {
        "args": megatron_arguments(target),
        "checkpoint_version": 3.0,
        "iteration": source.state.get("iteration", source.step),
        "model": model,
        "meshwright": {"config": source.config, "state": source.state, "vocab": source.vocab},
    }
    if target.optimizer:
        tree["optimizer"] = adam_state(target, [ours for _, ours in stage], tp)
        if curve := schedule_of(source.state):
            tree["opt_param_scheduler"] = megatron_schedule(
                curve, source.state.get("schedule_samples", 0)
            )
    write_torch_file(tree, out)


def stage_parameters(target: MegatronExport, pp: int) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (path in their tree, our name) of a stage's parameters, in their model's order."""
    tensors = target.tensors
    each = (target.model.num_layers or 0) // target.p
    is_last = pp == target.p - 1
    pairs = dict(BEFORE) if pp == 0 else {}
    # Layers are numbered within a stage there.
    for i, part, kind in product(range(each), PARTS, ("weight", "bias")):
        theirs = names.layer_name(f"{part}.{kind}")
        layer = pp * each + i
        pairs[(*ENCODER, f"layers.{i}.{theirs}")] = f"h.{layer}.{part}.{kind}"
    if is_last:
        pairs |= BEHIND
    for path, ours in pairs.items():
        if ours in tensors:
            yield path, ours
    # A last stage of its own has a copy of the table that it computes the logits with.
    if is_last and pp > 0 and "lm_head.weight" not in tensors:
        yield ("word_embeddings_for_head", "weight"), "wte.weight"


def rank_part(
    target: MegatronExport, name: str, tp: int, dtype: torch.dtype | None = None
) -> Later:
    """Return a tensor rank's part of one of our tensors, by default in its own dtype.

    Moments of fewer bits are written in float32.
    """
    full, stored_dtype = target.tensors[name]
    ours, _, moment = name.partition("/")
    if moment and stored_dtype in ("bfloat16", "int8", "uint8"):
        stored_dtype = "float32"
    dtype = dtype or getattr(torch, stored_dtype)

    # This rank's part: its place and size in our tensor, padded as Megatron's tables are.
    rule = shard.rule(ours)
    local = list(full)
    at = [0] * len(full)
    if rule.rows:
        local[0] = target.padded
    if rule.cut is not None:
        local[rule.cut] //= target.t
        at[rule.cut] = tp * local[rule.cut]

    # Its shape there, and the boxes of ours that fill it from its beginning.
    shape = tuple(local)
    boxes = [(tuple(at), tuple(local))]
    if rule.rows:  # rows beyond the true vocabulary stay zero
        rows = max(min(full[0] - at[0], local[0]), 0)
        boxes = [(tuple(at), (rows, *local[1:]))]
    if ".mlp.fc." in ours and target.model.gated:  # [2, F, H] here, [2 F, H] there
        shape = (2 * local[1], *local[2:])
        halves = (1, 0) if target.model.glu_activation else (0, 1)
        boxes = [((half, *at[1:]), (1, *local[1:])) for half in halves]

    def make() -> torch.Tensor:
        tensor = flat_zeros(prod(shape), dtype).view(shape)
        count = sum(prod(size) for _, size in boxes)
        if count:
            target.source.fill({name: (full, boxes, tensor.view(-1)[:count])})
        return tensor

    return Later(shape, dtype, make)


# Settings and optimizer


def megatron_arguments(target: MegatronExport) -> argparse.Namespace:
    """Return the settings under Megatron's names, which are ours."""
    m = target.model
    config = target.source.config
    state = target.source.state
    position = m.position
    table = target.tensors.get("wpe.weight")
    positions = table.shape[0] if table else config.get("max_position_embeddings")
    interpolation = int(m.rope_scaling_factor) if m.rope_scaling == "linear" else None

    # All that are off, then the settings as they are, then those that mean something else there.
    values = OFF | {name: value for name, value in config.items() if not isinstance(value, dict)}
    values |= {
        "tensor_model_parallel_size": target.t,
        "pipeline_model_parallel_size": target.p,
        "virtual_pipeline_model_parallel_size": None,
        "padded_vocab_size": target.padded,
        "true_vocab_size": target.source.vocab,
        "params_dtype": target.dtype,
        "ffn_hidden_size": m.ffn,
        "kv_channels": m.head_dim,
        "group_query_attention": m.groups != m.num_attention_heads,
        "num_query_groups": m.groups,
        "position_embedding_type": POSITIONS[position],
        "add_position_embedding": position == "learned",
        "use_rotary_position_embeddings": position == "rope",
        "use_rope_scaling": m.rope_scaling == "llama3",
        "rotary_seq_len_interpolation_factor": interpolation,
        "window_size": None,
        "window_attn_skip_freq": None,
        "max_position_embeddings": positions or config.get("seq_length"),
        "norm_epsilon": m.layernorm_epsilon,
        "data_parallel_random_init": False,
        "consumed_train_samples": state.get("consumed_train_samples", 0),
        "consumed_valid_samples": 0,
    }
    if curve := schedule_of(state):  # fields that Megatron's own state of a schedule lacks
        values |= {
            "lr_warmup_init": curve.init_lr,
            "lr_wsd_decay_style": curve.wsd_style,
            "lr_wsd_decay_iters": None,
            "lr_wsd_decay_samples": curve.wsd_samples or None,
        }
    return argparse.Namespace(**values)


def adam_state(target: MegatronExport, stage: list[str], tp: int) -> dict[str, Any]:
    """Return Adam's state by number: first what decays, then biases and norms.

    Masters are added if the model is rounded.
    """
    state = target.source.state
    config = target.source.config

    # Two groups of parameters, which are numbered through.
    plain = [ours for ours in stage if "ln_" in ours or ours.endswith("bias")]
    groups = [[ours for ours in stage if ours not in plain], plain]
    numbers = list(range(len(stage)))
    cut = len(groups[0])
    curve = schedule_of(state)
    at = state.get("schedule_samples", 0), state.get("schedule_tokens")
    common = {
        "lr": curve.lr(*at) if curve else config.get("lr") or 0.0,
        "betas": (config.get("adam_beta1", 0.9), config.get("adam_beta2", 0.999)),
        "eps": config.get("adam_eps", 1e-8),
        "bias_correction": True,
        "lr_mult": 1.0,
        "step": state.get("optimizer_steps", state.get("iteration", 0)),
    }
    decay = curve.wd(*at) if curve else config.get("weight_decay") or 0.0
    param_groups = [
        common | {"params": params, "wd_mult": share, "weight_decay": decay * share}
        for params, share in ((numbers[:cut], 1.0), (numbers[cut:], 0.0))
    ]

    # Their moments.
    moments = {}
    for i, ours in enumerate(groups[0] + plain):
        moments[i] = {kind: rank_part(target, f"{ours}/{kind}", tp) for kind in MOMENTS}
    inner = {"state": moments, "param_groups": param_groups}
    if target.dtype == getattr(torch, target.tensors["wte.weight"].dtype):
        return inner
    masters = [[rank_part(target, ours, tp) for ours in group] for group in groups]
    out: dict[str, Any] = {"optimizer": inner, "fp32_from_fp16_params": masters}
    scale = state.get("loss_scale", {"dynamic": False})
    if scale["dynamic"]:
        trackers = {name: scale[name] for name in ("growth_tracker", "hysteresis_tracker")}
        out["grad_scaler"] = {"scale": torch.tensor([scale["scale"]]), **trackers}
    return out


def schedule_of(state: dict[str, Any]) -> Schedule | None:
    return Schedule(**state["schedule"]) if "schedule" in state else None


def megatron_schedule(curve: Schedule, samples: int) -> dict[str, Any]:
    """Return the schedule under the names of 2022 and 2023."""
    values = {"done": samples, **asdict(curve)}
    return {theirs[0]: values[ours] for ours, theirs in SCHEDULE.items()}
