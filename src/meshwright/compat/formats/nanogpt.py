"""Open nanoGPT's `ckpt.pt`: the weights, and AdamW's state by number.

Weights are named as GPT-2's, with a prefix if the model was compiled; linear ones are [out, in].
Rows of c_attn are all queries, then all keys, then all values. The output layer is the embedding.
With bias=False nothing has biases, norms neither. Before torch 2 each layer also kept its causal
mask, as `attn.bias`. The optimizer has two groups: matrices and tables, which decay, then the rest,
each in the network's order.

A checkpoint is written before step `iter_num` (counted from 0), after its learning rate was set.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import torch

from meshwright.base.errors import UserError, bad_data
from meshwright.checkpoint import gpt
from meshwright.checkpoint.claims import claimed_heads, claimed_steps
from meshwright.checkpoint.pickle import pickles
from meshwright.checkpoint.run_state import RunState, check_saved_state
from meshwright.checkpoint.sources import MappedSource, TensorView
from meshwright.compat.formats.adam import (
    MOMENTS,
    match_numbered,
    step_counts,
    torch_state,
    unreadable_state,
)
from meshwright.compat.formats.table import NANOGPT
from meshwright.optim.schedule import Schedule

FILE = "ckpt.pt"
LAYER = {  # in the order of its parameters
    "ln_1": "ln_1",
    "attn.c_attn": "attn.qkv",
    "attn.c_proj": "attn.proj",
    "ln_2": "ln_2",
    "mlp.c_fc": "mlp.fc",
    "mlp.c_proj": "mlp.proj",
}
KINDS = ("weight", "bias")
TABLES = ("wte.weight", "wpe.weight")
HEAD = "lm_head.weight"
OUTSIDE = {f"transformer.{name}": name for name in (*TABLES, "ln_f.weight", "ln_f.bias")} | {
    HEAD: HEAD
}
# What its model_args say of the shapes, and all else that they may hold.
SIZES = {"n_layer": "num_layers", "n_embd": "hidden_size", "block_size": "max_position_embeddings"}
SIZES |= {"vocab_size": "vocab_size"}
OPTIONS = {*SIZES, "n_head", "bias", "dropout"}
# Settings of train.py that a run needs to continue.
NEEDED = (
    "batch_size",
    "gradient_accumulation_steps",
    "learning_rate",
    "min_lr",
    "warmup_iters",
    "lr_decay_iters",
    "max_iters",
)


def open_nanogpt(
    folder: Path, trust: bool = False, heads: int | None = None, optimizer: bool = True
) -> MappedSource:
    """Open a run's folder; its heads are the file's, and loading compares them with the flags."""
    path = folder / FILE
    notes: list[str] = []
    tree = pickles.load_pickle(path, trust=trust)
    parts = [tree.get(key) for key in ("model", "model_args")] if isinstance(tree, dict) else []
    if not parts or not all(isinstance(part, dict) for part in parts):
        raise bad_data(f"{path}: not nanoGPT's, it has no `model` and `model_args`")
    weights = read_weights(path, tree["model"])
    args = tree["model_args"]
    settings = gpt.measure_gpt(folder, weights, biased=bool(args.get("bias", True)))
    check_arguments(path, args, settings | {"vocab_size": weights[TABLES[0]].shape[0]})
    claimed_heads(settings["num_layers"], args["n_head"], "n_head")

    def arrange(name: str, tensor: torch.Tensor) -> list[TensorView]:
        if not tensor.is_floating_point():
            raise bad_data(f"{path}: {name} is of type {tensor.dtype}")
        if ".attn.qkv." not in name:
            return gpt.one_view(tensor)
        q, k, v = tensor.tensor_split(3)
        heads = args["n_head"]
        return gpt.qkv_views(q, k, v, groups=heads, head=settings["hidden_size"] // heads)

    # The network; what model.py fixes is stated nowhere.
    views = {name: arrange(name, tensor) for name, tensor in weights.items()}
    settings |= {
        "num_attention_heads": args["n_head"],
        "layernorm_epsilon": 1e-5,
        "init_method_std": 0.02,
        "hidden_dropout": float(args["dropout"]),
        "attention_dropout": float(args["dropout"]),
    }

    # Where the run was.
    state: dict[str, Any] = {}
    if tree.get("optimizer") and (stated := train_settings(tree, notes)):
        if optimizer:
            order = parameter_order(path, tree, weights)
            for (name, _), values in zip(order, match_numbered(path, tree, order), strict=True):
                views |= {f"{name}/{kind}": arrange(name, values[kind]) for kind in MOMENTS}
        adam = adam_settings(path, tree, stated, optimizer)
        state = read_state(path, tree, stated, adam, optimizer)
        settings |= recipe(stated, adam)
    return MappedSource(
        NANOGPT,
        folder,
        config=settings,
        state=state,
        vocab=args["vocab_size"],
        notes=notes,
        views=views,
    )


# The network


def our_name(theirs: str) -> str | None:
    match = re.fullmatch(r"transformer\.h\.(\d{1,6})\.(\w+(?:\.\w+)?)\.(weight|bias)", theirs)
    if not match:
        return OUTSIDE.get(theirs)
    layer, part, kind = match.groups()
    return f"h.{int(layer)}.{LAYER[part]}.{kind}" if part in LAYER else None


def read_weights(path: Path, model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the parameters under our names."""
    tensors = {name.removeprefix("_orig_mod."): tensor for name, tensor in model.items()}
    masks = [name for name in tensors if re.fullmatch(r"transformer\.h\.\d+\.attn\.bias", name)]
    weights = gpt.rename_tensors(
        path, {n: t for n, t in tensors.items() if n not in masks}, our_name
    )
    table = weights[TABLES[0]]
    if not torch.equal(weights.pop(HEAD, table), table):
        raise bad_data(f"{path}: {HEAD} is not the table of tokens, which nanoGPT ties to it")
    return weights


def check_arguments(path: Path, args: dict[str, Any], measured: dict[str, Any]) -> None:
    """Refuse another program's options, and sizes that the tensors contradict."""
    if unknown := sorted(str(name) for name in args.keys() - OPTIONS):
        names = ", ".join(unknown[:5])
        raise bad_data(
            f"{path}: model_args name {names:.200}, which nanoGPT does not have; its network may be another"
        )
    wrong = [
        f"{theirs} {args.get(theirs)!r:.50}, the tensors have {measured[ours]}"
        for theirs, ours in SIZES.items()
        if args.get(theirs) != measured[ours]
    ]
    heads = args.get("n_head")
    dropout = args.get("dropout", math.nan)
    if type(heads) is not int or heads < 1 or measured["hidden_size"] % heads:
        wrong.append(
            f"n_head {heads!r:.50}, which does not divide the width {measured['hidden_size']}"
        )
    if type(dropout) not in (int, float) or not 0 <= dropout < 1:
        wrong.append(f"dropout {dropout!r:.50}")
    if wrong:
        raise bad_data("\n  ".join([f"{path}: model_args are not those of its network:", *wrong]))


# Where the run was


def train_settings(tree: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return train.py's settings if they are enough to continue, else note what is missing."""
    stated = tree.get("config")
    lacking = [
        n for n in NEEDED if not isinstance(stated, dict) or type(stated.get(n)) not in (int, float)
    ]
    if lacking:
        missing = f"its config does not state {', '.join(lacking)}"
        notes.append(
            f" > note: {missing}, so only the weights are used; `train` needs --finetune for that"
        )
    return stated if stated and not lacking else {}


def adam_settings(
    path: Path, tree: dict[str, Any], stated: dict[str, Any], optimizer: bool
) -> dict[str, Any]:
    """Return rate, betas, epsilon and decay of AdamW, or train.py's if it is not wanted."""
    try:
        group = torch_state(path, tree)["param_groups"][0]
        return {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
    except (UserError, IndexError, KeyError, TypeError):
        if optimizer:
            raise unreadable_state(path, "it is not laid out as torch's AdamW's") from None
    betas = stated.get("beta1", 0.9), stated.get("beta2", 0.95)
    return {
        "lr": math.nan,
        "betas": betas,
        "eps": 1e-8,
        "weight_decay": stated.get("weight_decay", 0.1),
    }


def read_state(
    path: Path, tree: dict[str, Any], stated: dict[str, Any], adam: dict[str, Any], optimizer: bool
) -> dict[str, Any]:
    """Return the counters and the schedule; the steps to accumulate are those of all ranks."""
    iteration = tree.get("iter_num")
    batch = stated["batch_size"] * stated["gradient_accumulation_steps"]
    if type(iteration) is not int or type(batch) is not int or batch < 1:
        raise bad_data(
            f"{path}: iter_num {iteration!r:.50} and {batch!r:.50} samples a step are no counts"
        )
    steps = set(step_counts(path, tree)) if optimizer else {iteration}
    if len(steps) != 1:
        raise unreadable_state(path, f"its parameters have had {sorted(steps)[:5]} steps")
    decays = bool(stated.get("decay_lr", True))
    top = stated["learning_rate"]
    warmup = stated["warmup_iters"] if decays else 0
    # Newer versions warm up from 1 / (warmup_iters + 1) of the rate, older ones from 0.
    is_newer = iteration < warmup and math.isclose(adam["lr"], top * (iteration + 1) / (warmup + 1))
    schedule = Schedule(
        max_lr=top,
        min_lr=stated["min_lr"],
        warmup=warmup * batch,
        decay=stated["lr_decay_iters"] * batch,
        style="cosine" if decays else "constant",
        start_wd=adam["weight_decay"],
        end_wd=adam["weight_decay"],
        wd_samples=stated["max_iters"] * batch,
        wd_style="constant",
        init_lr=top / (warmup + 1) if is_newer else 0.0,
    )
    samples = claimed_steps(iteration * batch, "consumed_train_samples")
    state = RunState(
        iteration, samples, samples, optimizer_steps=steps.pop(), schedule=schedule
    ).as_saved()
    check_saved_state(state, path)
    return state


def recipe(stated: dict[str, Any], adam: dict[str, Any]) -> dict[str, Any]:
    """Return settings that a run which continues is compared with."""
    batch = stated["batch_size"]
    beta1, beta2 = adam["betas"]
    out = {
        "micro_batch_size": batch,
        "global_batch_size": batch * stated["gradient_accumulation_steps"],
        "adam_beta1": beta1,
        "adam_beta2": beta2,
        "adam_eps": adam["eps"],
        "clip_grad": stated.get("grad_clip"),
    }
    return {name: value for name, value in out.items() if type(value) in (int, float)}


def parameter_order(
    path: Path, tree: dict[str, Any], weights: dict[str, torch.Tensor]
) -> list[tuple[str, torch.Tensor]]:
    """Return the weights in the order of the optimizer's groups."""
    # In the order of the model's modules.
    layers = {name.split(".")[1] for name in weights if name.startswith("h.")}
    modules = [f"h.{n}.{part}" for n in range(len(layers)) for part in LAYER.values()]
    modules.append("ln_f")
    names = list(TABLES)
    for module in modules:
        names += [f"{module}.{kind}" for kind in KINDS]

    # Two groups: what decays, which are matrices, and then biases and norms.
    present = [(name, weights[name]) for name in names if name in weights]
    matrices = [item for item in present if item[1].ndim > 1]
    vectors = [item for item in present if item[1].ndim < 2]
    # Groups have numbers, not names: their sizes show whether they are as we think.
    sizes = [len(group.get("params", ())) for group in torch_state(path, tree)["param_groups"]]
    if sizes != [len(matrices), len(vectors)]:
        why = f"its groups are of {sizes} parameters, where {len(matrices)} decay and {len(vectors)} do not"
        raise unreadable_state(path, f"{why} (old versions of nanoGPT let no table decay)")
    return matrices + vectors
