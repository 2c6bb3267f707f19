"""What readers of GPT-2's form share: our names, shapes, and the settings that these prove.

GPT-2's form has a learned table of positions, LayerNorm, biases everywhere or nowhere, GELU, and an
output table that is the embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from meshwright.base.errors import bad_data
from meshwright.checkpoint.boxes import Shape
from meshwright.checkpoint.sources import TensorView
from meshwright.config.schema import ABSENT_COMPUTED, Model

# The parts that every network has, each of GPT-2's kind: what a program's files do not speak of.
_KINDS = (
    "swiglu",
    "squared_relu",
    "glu_activation",
    "num_query_groups",
    "group_query_attention",
    "position_embedding_type",
    "rotary_percent",
    "normalization",
    "apply_layernorm_1p",
    "add_bias_linear",
    "add_qkv_bias",
    "embed_layernorm",
    "untie_embeddings_and_output_weights",
)
# A plain GPT-2: these kinds, and no option.
PLAIN: dict[str, Any] = {name: getattr(Model(), name) for name in _KINDS} | ABSENT_COMPUTED


def rename_tensors(
    folder: Path, tensors: Mapping[str, torch.Tensor], our_name: Callable[[str], str | None]
) -> dict[str, torch.Tensor]:
    """Return the tensors under our names; refuse one for which `our_name` has none."""
    ours = {name: our_name(name) for name in tensors}
    unknown = [name for name, our in ours.items() if our is None]
    tables = [name for name, our in ours.items() if our == "wte.weight" and tensors[name].ndim == 2]
    what = ""
    if unknown:
        what = f"{', '.join(unknown[:5])} has no place in a GPT"
    elif not tables:
        what = "it has no table of tokens"
    if what:
        raise bad_data(f"{folder}: not a GPT: {what}")
    return {our: tensors[name] for name, our in ours.items() if our is not None}


def measure_gpt(
    folder: Path, weights: Mapping[str, torch.Tensor], biased: bool = True
) -> dict[str, Any]:
    """Return the settings that the shapes prove, once all weights are there, [out, in], and fit.

    The number of heads and the kind of GELU do not follow from shapes; GELU is exact here.
    """
    # The sizes, each from one tensor; one that is missing, or no matrix, is found below.
    layers = len({name.split(".")[1] for name in weights if name.startswith("h.")})
    rows, width = weights["wte.weight"].shape
    fc = weights.get("h.0.mlp.fc.weight")
    wpe = weights.get("wpe.weight")
    ffn, positions = (0 if t is None or t.ndim != 2 else t.shape[0] for t in (fc, wpe))

    # The shapes of all tensors by these sizes.
    parts: dict[str, Shape] = {
        "ln_1": (width,),
        "attn.qkv": (3 * width, width),
        "attn.proj": (width, width),
        "ln_2": (width,),
        "mlp.fc": (ffn, width),
        "mlp.proj": (width, ffn),
    }
    modules = {f"h.{i}.{name}": shape for i in range(layers) for name, shape in parts.items()}
    modules["ln_f"] = (width,)
    shapes: dict[str, Shape] = {"wte.weight": (rows, width), "wpe.weight": (positions, width)}
    for name, shape in modules.items():
        shapes[f"{name}.weight"] = shape
        if biased:
            shapes[f"{name}.bias"] = shape[:1]

    # What is there must be exactly that.
    wrong = [f"{name} has no place" for name in weights if name not in shapes]
    wrong += [
        f"{name}: {list(weights[name].shape) if name in weights else 'missing'}, expected {list(shape)}"
        for name, shape in shapes.items()
        if name not in weights or tuple(weights[name].shape) != shape
    ]
    if wrong:
        raise bad_data("\n  ".join([f"{folder} is not a complete GPT:", *wrong[:10]]))
    sizes = {
        "num_layers": layers,
        "hidden_size": width,
        "ffn_hidden_size": ffn,
        "max_position_embeddings": positions,
    }
    return (
        PLAIN
        | sizes
        | {"bias_gelu_fusion": False, "add_bias_linear": biased, "layernorm_bias": biased}
    )


def one_view(tensor: torch.Tensor) -> list[TensorView]:
    """Return the table of a tensor that is stored as ours is."""
    return [TensorView((0,) * tensor.ndim, tensor)]


def qkv_views(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: int, head: int
) -> list[TensorView]:
    """Join the rows of all queries, keys and values by head, as our attn.qkv has them.

    Each group has its queries, then its key and value; without grouped queries a group is a head.
    """
    queries = q.shape[0] // groups
    views = []
    at = 0
    for group in range(groups):
        for tensor, rows in ((q, queries), (k, head), (v, head)):
            offset = (at,) + (0,) * (q.ndim - 1)
            views.append(TensorView(offset, tensor[group * rows : (group + 1) * rows]))
            at += rows
    return views
