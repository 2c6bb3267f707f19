"""Write Megatron-LM folders of 2019 to 2023 from a plain GPT, without `meshwright.checkpoint`.

A plain model is a dict of float32 tensors: `tokens`, `positions`, `norm.w`, `norm.b`, and for each
layer `0.q.w` (heads in order), `0.k.w`, `0.v.w`, `0.o.w`, `0.up.w`, `0.gate.w` (if gated),
`0.down.w`, `0.norm1.w`, `0.norm2.w`, each with its `.b`. `forward` computes it without our modules;
`write` cuts it as one of Megatron's versions did.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import math
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

Plain = dict[str, Tensor]


@dataclass(frozen=True)
class Form:
    """What to write, and in which form."""

    layers: int = 2
    hidden: int = 32
    heads: int = 4
    groups: int = 4
    ffn: int = 64
    vocab: int = 61
    padded: int = 64
    positions: int = 16
    gated: bool = False
    bias: bool = True
    rms: bool = False
    untied: bool = False
    embed_norm: bool = False

    version: float | None = 3.0  # none: the key is absent
    tp: int = 1
    pp: int = 1
    chunks: int = 1  # virtual stages
    words: str = "2022"  # of names: 2019, 2022, late 2023, core
    flat: bool = False  # one dictionary with dots, as state_dict() makes it
    dtype: torch.dtype = torch.float16
    state: str = "none"  # of the optimizer: none, fp32, 2019, masters, sharded, flat, buckets
    dp: int = 3  # of sharded, flat and buckets
    args: bool = True
    bigscience: bool = False
    place: str = "absolute"  # BigScience's word for how positions enter: absolute, alibi, rotary
    multi_query: bool = False  # BigCode's, its query and key_value apart
    iteration: int = 7

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


def plain(f: Form, seed: int = 0) -> Plain:
    """Return a plain model of random numbers, norms and biases included."""
    g = torch.Generator().manual_seed(seed)
    h, n = f.hidden, f.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "tokens": (f.vocab, h),
        "positions": (f.positions, h),
        "norm": (h,),
    }
    if f.place != "absolute":
        del shapes["positions"]
    shapes |= {"head": (f.vocab, h)} if f.untied else {}
    shapes |= {"embed_norm": (h,)} if f.embed_norm else {}
    for i in range(f.layers):
        shapes |= {
            f"{i}.norm1": (h,),
            f"{i}.q": (f.heads * n, h),
            f"{i}.k": (f.groups * n, h),
            f"{i}.v": (f.groups * n, h),
            f"{i}.o": (h, f.heads * n),
            f"{i}.norm2": (h,),
            f"{i}.up": (f.ffn, h),
        }
        shapes |= ({f"{i}.gate": (f.ffn, h)} if f.gated else {}) | {f"{i}.down": (h, f.ffn)}
    out: Plain = {}
    for name, shape in shapes.items():
        table, norm = name in ("tokens", "positions", "head"), len(shape) == 1
        out[name if table else f"{name}.w"] = (
            torch.randn(shape, generator=g) * (0.3 if norm else 0.12) + norm
        )
        if not table and (not f.rms if norm else f.bias):
            out[f"{name}.b"] = torch.randn(shape[:1], generator=g) * 0.3
    return out


def rounded(p: Plain, dtype: torch.dtype) -> Plain:
    return {name: tensor.to(dtype).float() for name, tensor in p.items()}


def forward(f: Form, p: Plain, tokens: Tensor) -> Tensor:
    """Return logits [B, T, vocab]."""

    def norm(x: Tensor, name: str) -> Tensor:
        if f.rms:
            return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * p[f"{name}.w"]
        x = x - x.mean(-1, keepdim=True)
        return (
            x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * p[f"{name}.w"] + p[f"{name}.b"]
        )

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ p[f"{name}.w"].t() + p.get(f"{name}.b", torch.zeros(()))

    b, t = tokens.shape
    x = p["tokens"][tokens]
    if f.embed_norm:
        x = norm(x, "embed_norm")
    x = x + p["positions"][:t]
    for i in range(f.layers):
        y = norm(x, f"{i}.norm1")
        q, k, v = (linear(y, f"{i}.{s}").view(b, t, -1, f.head_dim).transpose(1, 2) for s in "qkv")
        k, v = (each.repeat_interleave(f.heads // f.groups, dim=1) for each in (k, v))
        later = torch.ones(t, t).triu(1).bool()
        scores = (q @ k.transpose(2, 3) / math.sqrt(f.head_dim)).masked_fill(later, float("-inf"))
        x = x + linear((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, -1), f"{i}.o")
        y = norm(x, f"{i}.norm2")
        up = linear(y, f"{i}.up")
        if f.gated:
            up = (F.gelu if f.bigscience else F.silu)(linear(y, f"{i}.gate")) * up
        else:
            up = 0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
        x = x + linear(up, f"{i}.down")
    return norm(x, "norm") @ p["head" if f.untied else "tokens"].t()


def ours(f: Form, p: Plain) -> Plain:
    """Return the tensors under Meshwright's names, in its shapes."""
    names = {"tokens": "wte.weight", "positions": "wpe.weight", "head": "lm_head.weight"}
    parts = {"norm1": "ln_1", "o": "attn.proj", "norm2": "ln_2", "up": "mlp.fc", "down": "mlp.proj"}
    out = {names[name]: tensor for name, tensor in p.items() if name in names}
    for kind, last in (("w", "weight"), ("b", "bias")):
        for name, new in (("norm", "ln_f"), ("embed_norm", "ln_emb")):
            if f"{name}.{kind}" in p:
                out[f"{new}.{last}"] = p[f"{name}.{kind}"]
        for i in range(f.layers):
            for name, new in parts.items():
                if f"{i}.{name}.{kind}" in p:
                    out[f"h.{i}.{new}.{last}"] = p[f"{i}.{name}.{kind}"]
            if f.gated and f"{i}.up.{kind}" in p:
                out[f"h.{i}.mlp.fc.{last}"] = torch.stack(
                    [p[f"{i}.gate.{kind}"], p[f"{i}.up.{kind}"]]
                )
            if f"{i}.q.{kind}" in p:
                out[f"h.{i}.attn.qkv.{last}"] = qkv(
                    f, *(p[f"{i}.{s}.{kind}"] for s in "qkv"), version=3.0
                )
    return out


def qkv(f: Form, q: Tensor, k: Tensor, v: Tensor, version: float) -> Tensor:
    """Return one matrix or bias of these heads, its rows in that version's order."""
    n, rest = f.head_dim, q.shape[1:]
    q, k, v = (x.reshape(-1, n, *rest) for x in (q, k, v))
    if version == 0:
        return torch.cat([q, k, v]).reshape(-1, *rest)
    if version == 1:
        return torch.stack([q, k, v], dim=2).reshape(-1, *rest)
    groups = [[*q.chunk(len(k))[i], k[i], v[i]] for i in range(len(k))]
    return torch.stack([row for group in groups for row in group]).reshape(-1, *rest)


# One rank's part


def held(f: Form, p: Plain, tp: int, pp: int, chunk: int) -> list[tuple[str, Tensor]]:
    """Return a virtual stage's tensors in module order, under the file's names."""
    first, last = pp == 0 and chunk == 0, pp == f.pp - 1 and chunk == f.chunks - 1
    out: list[tuple[str, Tensor]] = []

    def rows(x: Tensor) -> Tensor:
        return x.chunk(f.tp, 0)[tp].clone()

    def columns(x: Tensor) -> Tensor:
        return x.chunk(f.tp, 1)[tp].clone()

    def pad(x: Tensor) -> Tensor:
        return rows(torch.cat([x, torch.full((f.padded - f.vocab, f.hidden), 0.125)]))

    def both(theirs: str, name: str, cut: Any = lambda x: x, cut_bias: Any = lambda x: x) -> None:
        for kind, end, how in (("w", "weight", cut), ("b", "bias", cut_bias)):
            if f"{name}.{kind}" in p:
                out.append((f"{theirs}.{end}", how(p[f"{name}.{kind}"])))

    lm = "language_model."
    if first:
        out.append((f"{lm}embedding.word_embeddings.weight", pad(p["tokens"])))
        both(f"{lm}embedding.word_embeddings.norm", "embed_norm")
        if "positions" in p:
            out.append((f"{lm}embedding.position_embeddings.weight", p["positions"]))
    each = f.layers // (f.pp * f.chunks)
    stack = lm + {"2019": "transformer", "core": "decoder"}.get(f.words, "encoder")
    norms = {"late 2023": ("input_norm", "post_attention_norm", "final_norm")}.get(
        f.words, ("input_layernorm", "post_attention_layernorm", "final_layernorm")
    )
    for local in range(each):
        i = chunk * (f.layers // f.chunks) + pp * each + local
        at = f"{stack}.layers.{local}."
        attention = at + ("attention." if f.words == "2019" else "self_attention.")
        both(at + norms[0], f"{i}.norm1")
        if f.multi_query:
            both(f"{attention}query", f"{i}.q", rows, rows)
            for kind, end in (("w", "weight"), ("b", "bias")):
                if f"{i}.k.{kind}" in p:
                    out.append(
                        (
                            f"{attention}key_value.{end}",
                            torch.cat([p[f"{i}.k.{kind}"], p[f"{i}.v.{kind}"]]),
                        )
                    )
        else:
            for kind, end in (("w", "weight"), ("b", "bias")):
                if f"{i}.q.{kind}" in p:
                    three = [rows(p[f"{i}.{s}.{kind}"]) for s in "qkv"]
                    out.append(
                        (
                            f"{attention}query_key_value.{end}",
                            qkv(f, *three, version=f.version or 0),
                        )
                    )
        both(f"{attention}dense", f"{i}.o", columns)
        both(at + norms[1], f"{i}.norm2")
        for kind, end in (("w", "weight"), ("b", "bias")):
            if f"{i}.up.{kind}" in p:
                halves = [f"{i}.gate.{kind}", f"{i}.up.{kind}"] if f.gated else [f"{i}.up.{kind}"]
                halves = halves[::-1] if f.bigscience else halves
                out.append(
                    (f"{at}mlp.dense_h_to_4h.{end}", torch.cat([rows(p[half]) for half in halves]))
                )
        both(f"{at}mlp.dense_4h_to_h", f"{i}.down", columns)
    if last:
        both(f"{stack}.{norms[2]}", "norm")
        if f.untied:
            out.append((f"{lm}output_layer.weight", pad(p["head"])))
        elif f.pp > 1:
            out.append(("word_embeddings_for_head.weight", pad(p["tokens"])))
    return [(core(name), tensor) for name, tensor in out] if f.words == "core" else out


def core(name: str) -> str:
    """Return Megatron-Core's name, with Transformer Engine's fused norms."""
    spellings = {
        "language_model.": "",
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "post_attention_layernorm.": "mlp.linear_fc1.layer_norm_",
        "query_key_value": "linear_qkv",
        ".dense.": ".linear_proj.",
        "dense_h_to_4h": "linear_fc1",
        "dense_4h_to_h": "linear_fc2",
    }
    for old, new in spellings.items():
        name = name.replace(old, new)
    return name


def nested(f: Form, tensors: list[tuple[str, Tensor]]) -> dict[str, Any]:
    if f.flat or f.words == "core":
        return OrderedDict(tensors)
    out: dict[str, Any] = {}
    for name, tensor in tensors:
        if name.startswith("language_model.embedding."):
            _, _, which, end = name.split(".", 3)
            embedding = out.setdefault("language_model", {}).setdefault("embedding", {})
            embedding.setdefault(which, OrderedDict())[end] = tensor
        elif name.startswith("language_model."):
            _, which, end = name.split(".", 2)
            out.setdefault("language_model", {}).setdefault(which, OrderedDict())[end] = tensor
        else:
            which, end = name.split(".", 1)
            out[which] = {end: tensor}
    return out


# Files


def write(folder: Path, f: Form, p: Plain, m: Plain | None = None, v: Plain | None = None) -> Path:
    """Write all ranks' files; `m` and `v` are Adam's moments in the model's form."""
    for tp in range(f.tp):
        for pp in range(f.pp):
            name = f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if f.pp > 1 else "")
            chunks = [[held(f, x, tp, pp, c) for x in (p, m or p, v or p)] for c in range(f.chunks)]
            write_rank(folder / name, f, chunks)
    return folder


def write_rank(folder: Path, f: Form, chunks: list[list[list[tuple[str, Tensor]]]]) -> None:
    tree: dict[str, Any] = {"iteration": f.iteration}
    tree |= {} if f.version is None else {"checkpoint_version": f.version}
    models = [nested(f, [(name, t.to(f.dtype)) for name, t in weights]) for weights, _, _ in chunks]
    tree |= (
        {"model": models[0]}
        if f.chunks == 1
        else {f"model{c}": model for c, model in enumerate(models)}
    )
    if f.words == "core":
        tree["model"]["decoder.layers.0.self_attention.linear_qkv._extra_state"] = torch.zeros(
            3, dtype=torch.uint8
        )
    rng = {
        "random_rng_state": (3, (1, 2), None),
        "np_rng_state": np.random.RandomState(1).get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "rng_tracker_states": {"model-parallel-rng": torch.zeros(8)},
    }
    tree |= rng if f.words == "2019" else {"rng_state": [rng]}
    with megatron_classes():
        if f.args:
            tree["args"] = arguments(f)
        if f.bigscience:
            tree["checkpoint_info"] = {
                "padded_vocab_size": f.padded,
                "original_vocab_size": f.vocab,
            }
        if f.state != "none":
            tree |= optimizer(folder, f, chunks)
        folder.mkdir(parents=True, exist_ok=True)
        if f.state == "sharded":
            beside = ("optimizer", "opt_param_scheduler")
            torch.save({k: x for k, x in tree.items() if k not in beside}, folder / "model_rng.pt")
        else:
            torch.save(
                tree,
                folder / "model_optim_rng.pt",
                _use_new_zipfile_serialization=f.words != "2019",
            )


def arguments(f: Form) -> argparse.Namespace:
    sizes = {
        "num_layers": f.layers,
        "hidden_size": f.hidden,
        "num_attention_heads": f.heads,
        "seq_length": f.positions,
    }
    sizes |= {
        "max_position_embeddings": f.positions,
        "padded_vocab_size": f.padded,
        "world_size": f.tp * f.pp * 2,
    }
    options = {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "layernorm_epsilon": 1e-5,
        "weight_decay": 0.01,
    }
    options |= {"fp16": f.dtype is torch.float16, "params_dtype": f.dtype, "rank": 0}
    args = argparse.Namespace(**sizes, **options)
    if f.words == "2019":
        args.model_parallel_size, args.batch_size = f.tp * f.pp, 4
        return args
    args.global_batch_size, args.micro_batch_size, args.consumed_train_samples = (
        8,
        4,
        f.iteration * 8,
    )
    args.train_iters, args.kv_channels, args.swiglu, args.true_vocab_size = (
        100,
        f.head_dim,
        f.gated,
        f.vocab,
    )
    args.group_query_attention, args.num_query_groups = f.groups != f.heads, f.groups
    args.bias_gelu_fusion = not f.gated
    if f.bigscience:
        del args.swiglu, args.true_vocab_size
        args.glu_activation = "geglu" if f.gated else None
        args.position_embedding_type = sys.modules["megatron.enums"].PositionEmbeddingType[f.place]  # type: ignore[attr-defined]
    return args


@contextlib.contextmanager
def megatron_classes() -> Iterator[None]:
    """Provide classes that honest files hold pickled, under their original names."""
    scaler = types.ModuleType("megatron.fp16.loss_scaler")
    enums = types.ModuleType("megatron.enums")
    scaler.DynamicLossScaler = type("DynamicLossScaler", (), {"__module__": scaler.__name__})  # type: ignore[attr-defined]
    enums.PositionEmbeddingType = enum.Enum(  # type: ignore[attr-defined]
        "PositionEmbeddingType", {"rotary": 1, "absolute": 2, "alibi": 3}, module="megatron.enums"
    )
    parents = {name: types.ModuleType(name) for name in ("megatron", "megatron.fp16")}
    added = parents | {module.__name__: module for module in (scaler, enums)}
    with pytest.MonkeyPatch.context() as patch:
        for name, module in added.items():
            patch.setitem(sys.modules, name, module)
        yield


SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
CURVE = {
    "max_lr": 1e-3,
    "min_lr": 1e-5,
    "lr_warmup_steps": 16.0,
    "num_steps": 48,
    "lr_decay_style": "cosine",
}
CURVE |= {"lr_decay_steps": 800, "start_wd": 0.01, "end_wd": 0.01, "wd_incr_style": "constant"}
CURVE_2019 = {"start_lr": 1e-3, "min_lr": 1e-5, "warmup_iter": 2, "num_iters": 6}
CURVE_2019 |= {"decay_style": "cosine", "end_iter": 100}
Three = tuple[Tensor, Tensor, Tensor]  # a weight and its moments


def optimizer(
    folder: Path, f: Form, chunks: list[list[list[tuple[str, Tensor]]]]
) -> dict[str, Any]:
    """Return the optimizer's entry; write the states that lie beside the file."""
    # [((name, weight), (name, m), (name, v)), ...]
    everything = [list(zip(*chunk, strict=True)) for chunk in chunks]
    params = [(w[1], m[1], v[1]) for chunk in everything for w, m, v in chunk]
    groups = [[x for x in params if x[0].ndim > 1], [x for x in params if x[0].ndim == 1]]
    scaler = {"scale": torch.tensor([4096.0]), "growth_tracker": 5, "hysteresis_tracker": 1}
    if f.state == "2019":
        return {"lr_scheduler": CURVE_2019, "optimizer": optimizer_of_2019(groups)}
    if f.state in ("fp32", "masters"):
        outer = torch_adam(f, groups)
        if f.state == "masters":
            masters = [[torch.nn.Parameter(x[0]) for x in group] for group in groups]
            outer = {"optimizer": outer, "grad_scaler": scaler, "fp32_from_fp16_params": masters}
        return {"optimizer": outer, "opt_param_scheduler": CURVE}
    if f.state == "sharded":
        for rank in range(f.dp):
            tree = {
                "optimizer": shard(f, everything, rank) | {"grad_scaler": scaler},
                "opt_param_scheduler": CURVE,
            }
            beside = folder.with_name(f"{folder.name}_{rank:03d}")
            beside.mkdir(parents=True)
            torch.save(tree, beside / "optim.pt")
        return {}
    write_buffers(folder, f, everything)
    inner = {"param_groups": [SETTINGS | {"step": 6}, SETTINGS | {"step": 6, "weight_decay": 0.0}]}
    return {"optimizer": {"optimizer": inner, "grad_scaler": scaler}, "opt_param_scheduler": CURVE}


def optimizer_of_2019(groups: list[list[Three]]) -> dict[str, Any]:
    """Return the state of 2019: keys are addresses, as torch numbered parameters then."""
    old = sys.modules["megatron.fp16.loss_scaler"].DynamicLossScaler()  # type: ignore[attr-defined]
    vars(old).update(
        cur_scale=4096.0, cur_iter=7, last_overflow_iter=1, scale_window=1000, cur_hysteresis=1
    )
    keys = iter(range(140_000_000_000_000, 140_000_000_100_000, 48))
    numbered = [[(next(keys), x) for x in group] for group in groups]
    state = {
        key: {"step": 6, "exp_avg": x[1], "exp_avg_sq": x[2]}
        for group in numbered
        for key, x in group
    }
    param_groups = [SETTINGS | {"params": [key for key, _ in group]} for group in numbered]
    return {
        "loss_scaler": old,
        "dynamic_loss_scale": True,
        "overflow": False,
        "first_closure_call_this_step": True,
        "optimizer_state_dict": {"state": state, "param_groups": param_groups},
        "fp32_from_fp16": [[x[0] for x in group] for group in groups],
    }


def torch_adam(f: Form, groups: list[list[Three]]) -> dict[str, Any]:
    """Return the state_dict of torch's Adam (with its step counts), or of apex's."""
    flat = [x for group in groups for x in group]
    step = {"step": torch.tensor(6.0)} if f.state == "fp32" else {}
    state = {i: {"exp_avg": x[1], "exp_avg_sq": x[2]} | step for i, x in enumerate(flat)}
    numbers = [list(range(len(groups[0]))), list(range(len(groups[0]), len(flat)))]
    return {"state": state, "param_groups": [SETTINGS | {"step": 6, "params": n} for n in numbers]}


def write_buffers(folder: Path, f: Form, chunks: list[list[Any]]) -> None:
    """Write `distrib_optim.pt`: one buffer per chunk, or buckets."""
    out: dict[Any, Any] = {} if f.state == "flat" else {"bucket_sizes": [2000] * len(chunks)}
    for c, chunk in enumerate(chunks):
        kinds = enumerate(("param", "exp_avg", "exp_avg_sq"))
        values = {name: [x[k][1].flatten() for x in reversed(chunk)] for k, name in kinds}
        split = {
            name: buckets(f, x, 2000 if f.state == "buckets" else 1 << 60)
            for name, x in values.items()
        }
        out[c] = {
            torch.float32: split
            if f.state == "buckets"
            else {name: x[0] for name, x in split.items()}
        }
    folder.mkdir(parents=True)
    torch.save(out, folder / "distrib_optim.pt")


def buckets(f: Form, tensors: list[Tensor], size: int) -> list[Tensor]:
    """Return padded rows of tensors, each ended once it has `size` numbers and two tensors."""
    out: list[list[Tensor]] = [[]]
    for tensor in tensors:
        if len(out[-1]) > 1 and sum(map(len, out[-1])) >= size:
            out.append([])
        out[-1].append(tensor)
    rows = [torch.cat(row) for row in out]
    return [torch.cat([row, torch.full((-len(row) % f.dp,), 9.0)]) for row in rows]


def shard(f: Form, chunks: list[list[Any]], rank: int) -> dict[str, Any]:
    """Return a data rank's state of early 2023: an equal part of a buffer, last parameter first."""
    mine: list[list[Three]] = [[], []]
    for chunk in chunks:
        owners = {}
        total = sum(w.numel() for (_, w), _, _ in chunk)
        size, start = math.ceil(total / f.dp), 0
        for number, ((_, w), _, _) in reversed(list(enumerate(chunk))):
            places = torch.arange(start, start + w.numel()) // size
            owners[number], start = places == rank, start + w.numel()
        for number, three in enumerate(chunk):
            if owners[number].any():
                group = mine[0 if three[0][1].ndim > 1 else 1]
                group.append(tuple(x.flatten()[owners[number]] for _, x in three))  # type: ignore[arg-type]
    full = [group for group in mine if group]
    flat = [x for group in full for x in group]
    count = iter(range(len(flat)))
    groups = [SETTINGS | {"step": 6, "params": [next(count) for _ in group]} for group in full]
    state = {i: {"exp_avg": x[1], "exp_avg_sq": x[2]} for i, x in enumerate(flat)}
    return {
        "optimizer": {"state": state, "param_groups": groups},
        "shard_fp32_from_float16_groups": [[x[0] for x in group] for group in full],
    }


__all__ = ["Form", "forward", "ours", "plain", "replace", "rounded", "write"]
