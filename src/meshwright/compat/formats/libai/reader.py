"""Open folders of LiBai and OneFlow-GPT: weights only.

OneFlow writes a variable as a folder of two files: `out`, its bytes, and `meta`, its shape and type
as text of a protobuf (oneflow/python/framework/check_point_v2.py of Oneflow-Inc/oneflow at
097825ab, 2021). OneFlow-GPT's `iter500_snapshot/` holds one such folder per variable. In LiBai's
`model_0004999/`, `model` is a pickle whose tensors name such folders beside it, or, since 0.9, hold
their bytes (python/oneflow/framework/check_point_v2.py at 00d0adea).

In both, query, key and value rows are [head, 3, head_dim], as here; GELU is exact. OneFlow-GPT's
linear weights are [in, out] (LanguageModeling/GPT/oneflow_gpt/model.py of
Oneflow-Inc/OneFlow-Benchmark at 0558f05e), as LiBai's in the spring of 2022 (libai/layers/linear.py
of Oneflow-Inc/libai at 02ec5e8d); later [out, in] (models/utils/model_utils/gpt_loader.py).
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

import torch

from meshwright.base.errors import bad_data
from meshwright.checkpoint import gpt
from meshwright.checkpoint.manifests import plain_size, read_small
from meshwright.checkpoint.pickle import pickles
from meshwright.checkpoint.sources import MappedSource
from meshwright.compat.formats.megatron import names
from meshwright.compat.formats.table import LIBAI, ONEFLOW

META_LIMIT, YAML_LIMIT = 1 << 16, 1 << 20  # bytes
TYPES = {"kFloat": "float32", "kDouble": "float64", "kFloat16": "float16", "kBFloat16": "bfloat16"}
META = re.compile(
    r"\s*shape\s*\{((?:\s*dim:\s*\d{1,18}){1,8})\s*\}(?:\s*stride\s*\{[^{}]*\})?\s*data_type:\s*(\w+)\s*"
)

# OneFlow-GPT's names; a layer is `model-h0-`.
LAYER = {
    "layernorm_1": "ln_1",
    "layernorm_2": "ln_2",
    "attn-c_attn": "attn.qkv",
    "attn-c_proj": "attn.proj",
    "mlp-c_fc": "mlp.fc",
    "mlp-c_proj": "mlp.proj",
}
KINDS = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}
# LiBai's, where they are not Megatron's.
LIKE_MEGATRON = {
    "embeddings.token_embeddings.": "embedding.word_embeddings.",
    "embeddings.position_embeddings.": "embedding.position_embeddings.",
    "transformer.layernorm_f.": "transformer.final_layernorm.",
}

# LiBai's config.yaml
DROPOUTS = {"output_dropout_prob": "hidden_dropout", "attention_dropout_prob": "attention_dropout"}
DROPOUTS |= {"embedding_dropout_prob": "embedding_dropout", "initializer_range": "init_method_std"}


def open_libai(
    folder: Path, trust: bool = False, heads: int | None = None, optimizer: bool = True
) -> MappedSource:
    """Open one step.

    The number of heads does not follow from the shapes; LiBai's config.yaml or the flags give it.
    """
    notes: list[str] = []
    stated: dict[str, Any] = {}
    is_libai = (folder / "model").exists()
    if is_libai:
        weights = gpt.rename_tensors(folder, libai_tensors(folder / "model", trust), libai_name)
        stated = libai_settings(folder, notes)
    else:
        weights = gpt.rename_tensors(folder, variables(folder), oneflow_name)
    if heads is not None:
        stated.setdefault("num_attention_heads", heads)
    weights = turned(weights)
    settings = gpt.measure_gpt(folder, weights) | stated
    views = {name: gpt.one_view(tensor) for name, tensor in weights.items()}
    kind = LIBAI if is_libai else ONEFLOW
    return MappedSource(kind, folder, config=settings, notes=notes, views=views)


# Files


def variables(folder: Path) -> dict[str, torch.Tensor]:
    """Return every variable that has a folder of its name."""
    # A link could lead out of the folder.
    folders = sorted(
        entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)
    )
    # Without counters and Adam's moments.
    wanted = [name for name in folders if not re.search(r"^System-|-(m|v)$", name)]
    return {name: variable(folder, name) for name in wanted}


def variable(folder: Path, name: str) -> torch.Tensor:
    """Return a view of the mapped file `out`."""
    of_name = folder / name
    is_plain = re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name) and not of_name.is_symlink()
    if not is_plain:
        raise bad_data(f"{folder}: {name[:200]!r} is not a plain folder; nothing outside is read")
    path = of_name / "out"
    meta = of_name / "meta"
    text = read_small(meta, META_LIMIT).decode(errors="replace")
    parts = META.fullmatch(text)
    if not parts or parts[2] not in TYPES:
        raise bad_data(f"{meta}: {text[:100]!r} is not a shape and one of {', '.join(TYPES)}")
    sizes, kind = parts.groups()
    shape = [int(n) for n in re.findall(r"\d+", sizes)]
    dtype: torch.dtype = getattr(torch, TYPES[kind])

    # The file must be as long as that: a shorter one would end the process when it is touched.
    count = math.prod(shape)
    expected = count * dtype.itemsize
    size = plain_size(path, f"; {meta.name} gives it {expected:,} bytes")
    if size != expected or not count:
        raise bad_data(f"{path}: {size:,} bytes, by {meta.name} it has {expected:,} bytes")
    flat = torch.from_file(str(path), shared=False, size=count, dtype=dtype)
    return flat.view(shape)


def libai_tensors(path: Path, trust: bool) -> dict[str, torch.Tensor]:
    """Read what flow.save wrote: a folder with or without a pickle, or a pickle."""
    if path.is_dir() and not (path / "pickled_data").exists():
        return variables(path)
    file = path / "pickled_data" if path.is_dir() else path
    tree = pickles.load_pickle(file, trust=trust)
    data = tree.get("data") if isinstance(tree, dict) else None
    if not isinstance(data, dict) or tree.get("protocol_version") != 1:
        raise bad_data(f"{file}: not what flow.save wrote, a dict with protocol_version 1")
    out = {}
    for name, tensor in data.items():
        # A tensor names its folder, or holds its bytes.
        state = getattr(tensor, "state", None)
        if not isinstance(state, dict):
            state = {}
        subfolder = state.get("path")
        values = state.get("data")
        if isinstance(subfolder, str) and path.is_dir():
            out[str(name)] = variable(path, subfolder)
        elif isinstance(values, torch.Tensor) and values.is_floating_point():
            out[str(name)] = values
        else:
            raise bad_data(f"{file}: {str(name)[:100]} is not one of OneFlow's tensors")
    return out


def libai_settings(folder: Path, notes: list[str]) -> dict[str, Any]:
    """Return the network's settings in config.yaml beside the step, which is optional."""
    import yaml

    path = folder.parent / "config.yaml"
    if not path.is_file():
        return {}
    try:
        stated = yaml.safe_load(read_small(path, YAML_LIMIT))["model"]["cfg"]
        names = {
            "num_attention_heads": int,
            "layernorm_epsilon": float,
            "apply_residual_post_layernorm": bool,
        }
        settings = {name: kind(stated[name]) for name, kind in names.items() if name in stated}
        settings |= {
            ours: float(stated[theirs]) for theirs, ours in DROPOUTS.items() if theirs in stated
        }
    except (
        yaml.YAMLError,
        RecursionError,
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
    ) as error:
        notes.append(f"{path} is ignored, its settings cannot be read: {str(error)[:200]}")
        return {}
    if "apply_residual_post_layernorm" in settings:
        settings["apply_residual_connection_post_layernorm"] = settings.pop(
            "apply_residual_post_layernorm"
        )
    return settings


# Names and shapes


def oneflow_name(key: str) -> str | None:
    key = key.removeprefix("model-")
    if key in ("wte", "wpe"):
        return f"{key}.weight"
    match = re.fullmatch(r"(?:h(\d+)-(.+)|layernorm_f)-(weight|bias|gamma|beta)", key)
    if not match:
        return None
    layer, part, kind = match.groups()
    if not layer:
        return f"ln_f.{KINDS[kind]}"
    return f"h.{int(layer)}.{LAYER[part]}.{KINDS[kind]}" if part in LAYER else None


def libai_name(key: str) -> str | None:
    key = re.sub(r"^.*?(?=(embeddings|transformer)\.)", "", key)  # GPT_model., and what wraps it
    for theirs, megatron in LIKE_MEGATRON.items():
        if key.startswith(theirs):
            key = megatron + key.removeprefix(theirs)
    # The patterns of names would take long on a very long one.
    name = names.parse_name(key) if len(key) < 200 else None
    return name.full() if name else None


def turned(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return all weights as [out, in]; the first layer's shape shows whether they are [in, out]."""
    width = weights["wte.weight"].shape[1]
    qkv = weights.get("h.0.attn.qkv.weight")
    if qkv is None or tuple(qkv.shape) != (width, 3 * width):
        return weights
    out = {}
    for name, tensor in weights.items():
        is_linear = name.endswith(("qkv.weight", "proj.weight", "fc.weight"))
        out[name] = tensor.t() if is_linear else tensor
    return out
