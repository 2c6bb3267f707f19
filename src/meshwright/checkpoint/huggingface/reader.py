"""Open a Hugging Face folder: GPT-2, GPT-NeoX, or Llama and its relatives (Mistral, Qwen, ...).

The weights become views of the mapped files, `model.safetensors` or `pytorch_model.bin`, in one
file or in parts. Code in a folder (`auto_map`) is never read. An option that this package cannot
compute is refused by name, since a model that runs and gives other results would be worse.
writer.py is the counterpart.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from meshwright.base.errors import BAD_DATA, bad_data
from meshwright.checkpoint.exports import SCALINGS
from meshwright.checkpoint.folder import (
    COUNT,
    NUMBER,
    POSITIVE,
    SHARE,
    WINDOW,
    ForeignFolder,
    Tensors,
    Views,
)
from meshwright.checkpoint.formats import HUGGING_FACE
from meshwright.checkpoint.gpt import PLAIN, one_view, qkv_views
from meshwright.checkpoint.huggingface import names
from meshwright.checkpoint.manifests import parse_json, read_small
from meshwright.checkpoint.pickle import pickles
from meshwright.checkpoint.sources import MappedSource, TensorView
from meshwright.config.check_model import rope_problems
from meshwright.config.problem import SettingsError, plain
from meshwright.config.schema import Model

CONFIG = "config.json"
JSON_LIMIT = 16 << 20  # bytes, enough for an index of 100,000 tensors
HEADER_LIMIT = 16 << 20  # bytes of a file's own list; the library would read 100 MB
SINGLE = ("model.safetensors", "pytorch_model.bin")


def open_huggingface(
    folder: Path, trust: bool = False, heads: int | None = None, optimizer: bool = True
) -> MappedSource:
    """Open the folder; its heads are config.json's, and loading compares them with the flags."""
    stated = read_object(inside(folder, CONFIG))
    kind = stated.get("model_type")
    if not isinstance(kind, str) or kind not in READERS:
        what = f"it is a {kind!r} model, which this package does not compute"
        raise bad_data(f"{folder / CONFIG}: {what}; it loads {', '.join(READERS)}")
    hf = ForeignFolder(folder, CONFIG, stated, dict(tensors_of(folder, trust)))
    settings, views = READERS[kind](hf)
    hf.check_used()
    config = PLAIN | {"apply_residual_connection_post_layernorm": False} | settings
    source = MappedSource(HUGGING_FACE, folder, 0, config=config, notes=hf.notes, views=views)
    return source.of_vocabulary(hf.get("vocab_size", COUNT))


# Files


def read_object(path: Path) -> dict[str, Any]:
    value = parse_json(read_small(path, JSON_LIMIT), path)
    if not isinstance(value, dict):
        raise bad_data(f"{path}: not a JSON object")
    return value


def inside(folder: Path, name: str) -> Path:
    """Return the plain file of that name; links may lead within the folder or the hub's cache."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        raise bad_data(
            f"{folder}: {name[:200]!r} is not a plain name; nothing outside the folder is read"
        )
    real = folder.resolve()
    # The hub's cache has links in snapshots/COMMIT to files in blobs.
    cache = real.parent.parent / "blobs" if real.parent.name == "snapshots" else real
    path = (folder / name).resolve()
    if not any(path.is_relative_to(root) for root in (real, cache)):
        raise bad_data(f"{folder / name} leads to {path}; nothing outside the folder is read")
    if not path.is_file():
        raise bad_data(f"{folder / name} does not exist; the folder is incomplete")
    return path


def tensors_of(folder: Path, trust: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of the folder, without reading it."""
    for single in SINGLE:
        if (folder / single).exists():
            yield from read_tensors(inside(folder, single), trust).items()
            return
        if (folder / f"{single}.index.json").exists():
            index = inside(folder, f"{single}.index.json")
            yield from indexed(folder, index, read_object(index).get("weight_map"), trust)
            return
    raise bad_data(f"{folder} has neither {' nor '.join(SINGLE)}, nor an index of parts of one")


def indexed(
    folder: Path, index: Path, where: Any, trust: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
        raise bad_data(f"{index}: weight_map does not give each tensor a file")
    files = {
        name: read_tensors(inside(folder, name), trust) for name in sorted(set(where.values()))
    }
    for name, file in where.items():
        if name not in files[file]:
            raise bad_data(f"{folder / file} lacks {name}, which {index.name} puts there")
        yield name, files[file][name]


def read_tensors(path: Path, trust: bool) -> Tensors:
    from safetensors import SafetensorError, safe_open

    if path.suffix == ".bin" or not is_safetensors(path):
        tree = pickles.load_pickle(path, trust=trust)
        if not isinstance(tree, dict) or not all(
            isinstance(t, torch.Tensor) for t in tree.values()
        ):
            raise bad_data(f"{path}: not a state dict of tensors alone")
        return tree
    try:
        with safe_open(path, framework="pt") as file:
            # These are views of the mapped file: no byte is read.
            return {name: file.get_tensor(name) for name in list(file.keys())}
    except (SafetensorError, OSError) as error:
        raise bad_data(f"{path}: not a complete safetensors file: {str(error)[:200]}") from error


def is_safetensors(path: Path) -> bool:
    """Return whether the file begins as one; links into the hub's cache have no suffix."""
    # Eight bytes of the header's length, then the header, a JSON object.
    with path.open("rb") as file:
        begin = file.read(9)
    if begin[8:] != b"{":
        if path.suffix == ".safetensors":
            found = f"begins with {begin!r}" if begin else "is empty"
            raise bad_data(f"{path}: not a safetensors file, it {found}")
        return False
    length = int.from_bytes(begin[:8], "little")
    if length > HEADER_LIMIT:
        raise bad_data(
            f"{path}: its list of tensors has {length:,} bytes; at most {HEADER_LIMIT:,} are read"
        )
    return True


# Settings and tensors


# transformers' values where config.json states none.
GPT2_DEFAULTS = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
GPT2_DEFAULTS |= {"layer_norm_epsilon": 1e-5, "initializer_range": 0.02}
NEOX_DEFAULTS = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "layer_norm_eps": 1e-5,
    "initializer_range": 0.02,
}
LLAMA_DEFAULTS = {"attention_dropout": 0.0, "rms_norm_eps": 1e-6, "initializer_range": 0.02}
# GPT-2's and GPT-NeoX's; only the last is exact
GELUS = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu")


def sizes_of(h: int, layers: int, heads: int, f: int, positions: int) -> dict[str, Any]:
    """Return the sizes of a network; its heads together are as wide as it is."""
    sizes = {
        "num_layers": layers,
        "hidden_size": h,
        "num_attention_heads": heads,
        "kv_channels": h // heads,
    }
    return sizes | {"ffn_hidden_size": f, "max_position_embeddings": positions}


def read_gpt2(hf: ForeignFolder) -> tuple[dict[str, Any], Views]:
    """Read GPT-2.

    Its linear weights are [in, out]; the columns of c_attn are all queries, then keys, then values.
    """
    hf.want("scale_attn_weights", True, default=True)
    hf.want("scale_attn_by_inverse_layer_idx", False, default=False)
    hf.want("add_cross_attention", False, default=False)
    activation = hf.want("activation_function", *GELUS, default="gelu_new")
    h, heads, layers = hf.sizes("n_embd", "n_head", "n_layer")
    f = hf.get("n_inner", COUNT, 4 * h)
    positions = hf.get("n_positions", COUNT, 1024)
    if h % heads:
        raise bad_data(f"{hf.folder / CONFIG}: n_embd {h} is not a multiple of n_head {heads}")

    # The tables; OpenAI's own files have no prefix, those of GPT2LMHeadModel do.
    prefix = "transformer." if hf.has("transformer.wte.weight") else ""
    wte = hf.take(f"{prefix}wte.weight", None, h)
    pieces = {
        "wte.weight": one_view(wte),
        "wpe.weight": one_view(hf.take(f"{prefix}wpe.weight", positions, h)),
    }

    def linear(ours: str, theirs: str, rows: int, columns: int) -> None:
        pieces[f"{ours}.weight"] = one_view(hf.take(f"{theirs}.weight", columns, rows).t())
        pieces[f"{ours}.bias"] = one_view(hf.take(f"{theirs}.bias", rows))

    def norm(ours: str, theirs: str) -> None:
        for end in (".weight", ".bias"):
            pieces[ours + end] = one_view(hf.take(theirs + end, h))

    # The layers.
    shapes = {"attn.proj": (h, h), "mlp.fc": (f, h), "mlp.proj": (h, f)}
    for i in range(layers):
        ours = f"h.{i}"
        theirs = f"{prefix}h.{i}"
        qkv = f"{theirs}.{names.GPT2_LINEAR['attn.qkv']}"
        for end, shape in ((".weight", (h, 3 * h)), (".bias", (3 * h,))):
            # A bias is its own transpose.
            q, k, v = hf.take(qkv + end, *shape).t().tensor_split(3)
            pieces[f"{ours}.attn.qkv{end}"] = qkv_views(q, k, v, heads, h // heads)
        for name, (rows, columns) in shapes.items():
            linear(f"{ours}.{name}", f"{theirs}.{names.GPT2_LINEAR[name]}", rows, columns)
        for name, norm_name in names.GPT2_NORMS.items():
            norm(f"{ours}.{name}", f"{theirs}.{norm_name}")
    norm("ln_f", f"{prefix}ln_f")
    untied = hf.add_head(pieces, wte, hf.config.get("tie_word_embeddings", True) is True)

    # The settings.
    hf.note_defaults(**GPT2_DEFAULTS)
    hidden = hf.get("resid_pdrop", SHARE, 0.1)
    embedding = hf.get("embd_pdrop", SHARE, 0.1)
    settings = {
        **sizes_of(h, layers, heads, f, positions),
        "hidden_dropout": hidden,
        "attention_dropout": hf.get("attn_pdrop", SHARE, 0.1),
        "init_method_std": hf.get("initializer_range", POSITIVE, 0.02),
        "bias_gelu_fusion": activation != "gelu",
        "layernorm_epsilon": hf.get("layer_norm_epsilon", POSITIVE, 1e-5),
        "untie_embeddings_and_output_weights": untied,
    }
    # Without it, the embedding has the dropout of the other layers.
    if embedding != hidden:
        settings["embedding_dropout"] = embedding
    return settings, pieces


def read_neox(hf: ForeignFolder) -> tuple[dict[str, Any], Views]:
    """Read GPT-NeoX and Pythia, whose rows of query_key_value are by head as ours."""
    hf.want("attention_bias", True, default=True)
    activation = hf.want("hidden_act", *GELUS, default="gelu")
    h, heads, layers = hf.sizes("hidden_size", "num_attention_heads", "num_hidden_layers")
    f = hf.get("intermediate_size", COUNT)
    positions = hf.get("max_position_embeddings", COUNT, 2048)
    if h % heads:
        raise bad_data(
            f"{hf.folder / CONFIG}: hidden_size {h} is not a multiple of num_attention_heads {heads}"
        )

    # All modules have a weight and a bias, as long as the weight has rows.
    wte = hf.take(f"gpt_neox.{names.NEOX_OUTSIDE['wte']}.weight", None, h)
    pieces: Views = {"wte.weight": one_view(wte)}

    def module(ours: str, theirs: str, shape: tuple[int, ...]) -> None:
        pieces[f"{ours}.weight"] = one_view(hf.take(f"gpt_neox.{theirs}.weight", *shape))
        pieces[f"{ours}.bias"] = one_view(hf.take(f"gpt_neox.{theirs}.bias", shape[0]))

    shapes = {
        "ln_1": (h,),
        "ln_2": (h,),
        "attn.qkv": (3 * h, h),
        "attn.proj": (h, h),
        "mlp.fc": (f, h),
        "mlp.proj": (h, f),
    }
    for i in range(layers):
        for name, shape in shapes.items():
            module(f"h.{i}.{name}", f"layers.{i}.{names.NEOX_LAYER[name]}", shape)
    module("ln_f", names.NEOX_OUTSIDE["ln_f"], (h,))
    head = names.NEOX_HEAD if hf.has(f"{names.NEOX_HEAD}.weight") else names.HEAD
    untied = hf.add_head(pieces, wte, hf.config.get("tie_word_embeddings", False) is True, head)
    hf.note_defaults(**NEOX_DEFAULTS)
    settings = {
        **rotation(hf, positions, NEOX_ROTATION),
        **sizes_of(h, layers, heads, f, positions),
        "bias_gelu_fusion": activation != "gelu",
        "hidden_dropout": hf.get("hidden_dropout", SHARE, 0.0),
        "attention_dropout": hf.get("attention_dropout", SHARE, 0.0),
        "init_method_std": hf.get("initializer_range", POSITIVE, 0.02),
        "layernorm_epsilon": hf.get("layer_norm_eps", POSITIVE, 1e-5),
        "untie_embeddings_and_output_weights": untied,
        "position_embedding_type": "rope",
        "use_parallel_residual": hf.want("use_parallel_residual", True, False, default=True),
    }
    return settings, pieces


class RotationKeys(NamedTuple):
    """Keys of config.json; rope_parameters has rope_theta and partial_rotary_factor."""

    base: str
    share: str
    default_share: float


NEOX_ROTATION = RotationKeys("rotary_emb_base", "rotary_pct", 0.25)
LLAMA_ROTATION = RotationKeys("rope_theta", "partial_rotary_factor", 1.0)


class LlamaSizes(NamedTuple):
    hidden: int
    ffn: int
    heads: int
    groups: int
    head: int


def read_llama(hf: ForeignFolder) -> tuple[dict[str, Any], Views]:
    """Read Llama and its relatives.

    The rotation pairs (i, i + head / 2) within a head, as ours does. Some linear layers may have
    biases and others not: with qkv's only this is a setting of ours, otherwise the others are zero.
    """
    hf.want("hidden_act", "silu", "swish", default="silu")
    h, heads, layers = hf.sizes("hidden_size", "num_attention_heads", "num_hidden_layers")
    groups = hf.get("num_key_value_heads", COUNT, heads)
    head = hf.get("head_dim", COUNT, h // heads or None)
    s = LlamaSizes(h, hf.get("intermediate_size", COUNT), heads, groups, head)
    if heads % groups:
        raise bad_data(
            f"{hf.folder / CONFIG}: {heads} heads are not a multiple of {groups} key-value heads"
        )
    positions = hf.get("max_position_embeddings", COUNT, 2048)
    wte = hf.take(f"model.{names.LLAMA_OUTSIDE['wte']}.weight", None, h)
    pieces: Views = {
        "wte.weight": one_view(wte),
        "ln_f.weight": one_view(hf.take("model.norm.weight", h)),
    }
    # What is optional is in all layers or in none.
    qkv_bias, proj_bias, mlp_bias = (
        hf.has(f"model.layers.0.{name}.bias")
        for name in (names.LLAMA_QKV[0], *names.LLAMA_LINEAR.values())
    )
    qk_norm = hf.has("model.layers.0.self_attn.q_norm.weight")
    all_biases = proj_bias or mlp_bias
    if all_biases and not (qkv_bias and proj_bias and mlp_bias):
        hf.notes.append("only some of its linear layers have biases: the others get zeros")

    # The layers.
    for i in range(layers):
        ours = f"h.{i}"
        theirs = f"model.layers.{i}"
        for name, norm in names.LLAMA_NORMS.items():
            is_of_heads = name.startswith("attn.")
            if is_of_heads and not qk_norm:
                continue
            size = head if is_of_heads else h
            pieces[f"{ours}.{name}.weight"] = one_view(hf.take(f"{theirs}.{norm}.weight", size))
        for name, linear in linears(hf, s, theirs, "weight"):
            pieces[f"{ours}.{name}.weight"] = linear
        if qkv_bias or all_biases:
            for name, bias in linears(hf, s, theirs, "bias"):
                if all_biases or name == "attn.qkv":
                    pieces[f"{ours}.{name}.bias"] = bias

    # The settings.
    untied = hf.add_head(pieces, wte, hf.config.get("tie_word_embeddings", False) is True)
    hf.note_defaults(**LLAMA_DEFAULTS)
    return sizes_of(h, layers, heads, s.ffn, positions) | {
        "hidden_dropout": 0.0,  # these networks have none
        "attention_dropout": hf.get("attention_dropout", SHARE, 0.0),
        "init_method_std": hf.get("initializer_range", POSITIVE, 0.02),
        "kv_channels": head,
        "layernorm_epsilon": hf.get("rms_norm_eps", POSITIVE, 1e-6),
        "untie_embeddings_and_output_weights": untied,
        "swiglu": True,
        "num_query_groups": groups,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "add_bias_linear": all_biases,
        "add_qkv_bias": qkv_bias and not all_biases,
        "qk_layernorm": qk_norm,
        **rotation(hf, positions, LLAMA_ROTATION),
        **windows(hf, layers, positions),
    }, pieces


def linears(
    hf: ForeignFolder, s: LlamaSizes, layer: str, end: str
) -> Iterator[tuple[str, list[TensorView]]]:
    """Yield our four linear layers: their weights, or their biases, zero where missing."""

    def get(name: str, rows: int, columns: int) -> torch.Tensor:
        name = f"{layer}.{name}.{end}"
        if end == "weight":
            return hf.take(name, rows, columns)
        if hf.has(name):
            return hf.take(name, rows)
        # A zero of the checkpoint's type that takes no memory.
        return hf.tensors["model.norm.weight"].new_zeros(1).expand(rows)

    heads = zip(names.LLAMA_QKV, (s.heads, s.groups, s.groups), strict=True)
    q, k, v = (get(name, n * s.head, s.hidden) for name, n in heads)
    yield "attn.qkv", qkv_views(q, k, v, s.groups, s.head)
    width = s.heads * s.head
    yield "attn.proj", one_view(get(names.LLAMA_LINEAR["attn.proj"], s.hidden, width))
    # Ours is one tensor [2, rows, columns] of gate and up.
    halves = []
    for i, name in enumerate(names.LLAMA_GATES):
        half = get(name, s.ffn, s.hidden)[None]
        offset = (i, *[0] * (half.ndim - 1))
        halves.append(TensorView(offset, half))
    yield "mlp.fc", halves
    yield "mlp.proj", one_view(get(names.LLAMA_LINEAR["mlp.proj"], s.hidden, s.ffn))


def windows(hf: ForeignFolder, layers: int, positions: int) -> dict[str, Any]:
    """Return the settings of windows; one that covers all positions is none.

    Theirs is the number of tokens that a token sees, ours without itself. Llama has none.
    """
    kind = hf.config["model_type"]
    numbers = {"full_attention": 0, "sliding_attention": 1}
    if kind == "llama":
        hf.want("use_sliding_window", False, None)
    is_off = kind.startswith("qwen") and hf.config.get("use_sliding_window") is not True
    if kind == "llama" or is_off or hf.config.get("sliding_window", "") is None:
        return {}
    hf.note_defaults(sliding_window=4096)
    size = hf.get("sliding_window", WINDOW, 4096)

    # The kind of each layer, if a newer transformers listed them; else Qwen's first have no window.
    full = 0
    if kind.startswith("qwen"):
        full = min(layers, hf.get("max_window_layers", NUMBER, 28))
    by_number = ["full_attention"] * full + ["sliding_attention"] * (layers - full)
    types = hf.config.get("layer_types") or by_number
    if not isinstance(types, list) or len(types) < layers:
        raise bad_data(
            f"{hf.folder / CONFIG}: layer_types is {str(types)[:200]}; it must name {layers} kinds"
        )
    for name in types:
        if name not in numbers:
            raise hf.refused(
                f"layer_types names {str(name)[:50]}", f"{' or '.join(numbers)} would do"
            )
    kinds = [numbers[name] for name in types[:layers]]
    return window_settings(size - 1, kinds) if size < positions and any(kinds) else {}


def window_settings(reach: int, kinds: list[int]) -> dict[str, str | None]:
    """Return our settings of windows of so many tokens before each, in the layers of kind 1."""
    pattern = None
    if not all(kinds):
        # The shorter form says that every so-many-th layer has none.
        every = kinds.index(0) + 1
        regular = [int(number % every > 0) for number in range(1, len(kinds) + 1)]
        pattern = str(kinds).replace(" ", "")
        if every > 1 and kinds == regular:
            pattern = str(every)
    return {"window_size": f"{reach},0", "window_attn_skip_freq": pattern}


def rotation(hf: ForeignFolder, positions: int, keys: RotationKeys) -> dict[str, Any]:
    """Return base, share and scaling: rope_scaling of transformers 4, rope_parameters of 5."""
    rope = hf.config.get("rope_scaling") or hf.config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else None
    if kind not in ("default", *SCALINGS) or any(
        isinstance(value, dict) for value in rope.values()
    ):
        what = f"the kind of rotation (rope_parameters, rope_scaling) is {str(rope)[:200]}"
        raise hf.refused(what, f"default, {', '.join(SCALINGS)} would do")
    # What our rotation does not have.
    wanted: dict[str, Any] = {"truncate": True}
    if keys is LLAMA_ROTATION:
        wanted["partial_rotary_factor"] = 1.0
    for key, good in wanted.items():
        if (value := rope.get(key, hf.config.get(key, good))) != good:
            raise hf.refused(f"{key} is {str(value)[:100]}", f"{good} would do")
    # A key within the rotation's own table comes before one beside it.
    share = hf.get(
        "partial_rotary_factor", POSITIVE, hf.get(keys.share, POSITIVE, keys.default_share), rope
    )
    base = hf.get("rope_theta", POSITIVE, hf.get(keys.base, POSITIVE, 1e4), rope)
    out: dict[str, Any] = {"rotary_base": base, "rotary_percent": share}
    out["rope_scaling"] = "none" if kind == "default" else kind
    defaults: dict[str, float] = {
        "original_max_position_embeddings": positions,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
    if kind == "yarn":
        defaults["attention_factor"] = attention_factor(hf, rope)
    for key, name in SCALINGS.get(kind, {}).items():
        bound = COUNT if key == "original_max_position_embeddings" else POSITIVE
        out[name] = hf.get(key, bound, defaults.get(key), rope)
    if problems := rope_problems(Model(**out)):
        raise SettingsError(f"{plain(hf.folder / hf.file)}: {problems[0].text}", BAD_DATA)
    return out


def attention_factor(hf: ForeignFolder, rope: dict[str, Any]) -> float:
    """Return YaRN's own factor of attention, or the quotient that both mscales ask for."""
    scales = [
        hf.get(key, POSITIVE, 1.0, rope) for key in ("mscale", "mscale_all_dim") if rope.get(key)
    ]
    growth = math.log(max(hf.get("factor", POSITIVE, among=rope), 1.0))

    def grown(scale: float) -> float:
        return 0.1 * scale * growth + 1.0

    # One of the two without the other has no effect in transformers.
    if len(scales) < 2:
        return grown(1.0)
    return float(grown(scales[0]) / grown(scales[1]))


READERS: dict[str, Callable[[ForeignFolder], tuple[dict[str, Any], Views]]]
READERS = {
    "gpt2": read_gpt2,
    "gpt_neox": read_neox,
    "llama": read_llama,
    "mistral": read_llama,
    "ministral": read_llama,
    "qwen2": read_llama,
    "qwen3": read_llama,
}
