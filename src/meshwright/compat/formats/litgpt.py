"""Open litgpt's folders: weights in `lit_model.pth`, settings in `model_config.yaml`.

Rows of attn.qkv are all queries, then all keys, then all values; those of attn.attn, its name in
older versions, are by group as ours. litgpt has no dropout, and only rotary positions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.base.errors import bad_data
from meshwright.checkpoint.folder import COUNT, POSITIVE, WINDOW, ForeignFolder, Views
from meshwright.checkpoint.gpt import PLAIN, one_view, qkv_views
from meshwright.checkpoint.huggingface.reader import (
    RotationKeys,
    rotation,
    sizes_of,
    window_settings,
)
from meshwright.checkpoint.manifests import read_small
from meshwright.checkpoint.pickle import pickles
from meshwright.checkpoint.sources import MappedSource, TensorView
from meshwright.compat.formats.table import LITGPT

FILE = "lit_model.pth"
CONFIG = "model_config.yaml"
CONFIG_LIMIT = 1 << 20  # bytes
# Settings that our network lacks, and the values at which they do nothing.
_OFF = (  # by None, False or 0
    "post_attention_norm",
    "post_mlp_norm",
    "shared_attention_norm",
    "scale_embeddings",
    "rope_interleave",
    "rope_indices",
    "rope_local_base_freq",
    "lm_head_bias",
    "n_expert",
    "latent_attention",
    "attention_scores_scalar",
    "attention_logit_softcapping",
)
OFF: dict[str, Any] = dict.fromkeys(_OFF)
OFF |= {"norm_1": True, "norm_2": True, "norm_qk_type": "default"}
ACTIVATIONS: dict[tuple[str, str | None], dict[str, Any]] = {
    ("GptNeoxMLP", "none"): {"bias_gelu_fusion": False},
    ("GptNeoxMLP", "tanh"): {"bias_gelu_fusion": True},
    ("GemmaMLP", "none"): {"glu_activation": "geglu"},
    ("LLaMAMLP", None): {"swiglu": True},
}
FIXED = PLAIN | {
    "apply_residual_connection_post_layernorm": False,
    "position_embedding_type": "rope",
}
FIXED |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "init_method_std": 0.02}
# The keys of rope_adjustments -> Hugging Face's kind of rotation.
LLAMA3 = frozenset(["factor", "low_freq_factor", "high_freq_factor", "original_max_seq_len"])
KINDS: dict[frozenset[str], str] = {
    frozenset(): "default",
    frozenset(["factor"]): "linear",
    LLAMA3: "llama3",
}
ROTATION = RotationKeys("rope_theta", "rotary_percentage", 0.25)


def open_litgpt(
    folder: Path, trust: bool = False, heads: int | None = None, optimizer: bool = True
) -> MappedSource:
    """Open the folder; its heads are the file's, and loading compares them with the flags."""
    if (folder / FILE).is_dir():
        raise bad_data(
            f"{folder / FILE} is in parts, one a rank; join them with `litgpt convert_pretrained_checkpoint`"
        )
    tree = pickles.load_pickle(folder / FILE, trust=trust)
    model = tree.get("model", tree) if isinstance(tree, dict) else None
    if not isinstance(model, dict):
        raise bad_data(f"{folder / FILE}: not litgpt's, it is no table of tensors")
    # torch.compile puts this before the names of what it wraps.
    tensors = {name.removeprefix("_orig_mod."): tensor for name, tensor in model.items()}
    lit = ForeignFolder(folder, CONFIG, read_config(folder / CONFIG), tensors)
    if "optimizer" in tree:
        lit.notes.append(
            f" > note: only the weights of {FILE} are read, not its optimizer's state; add --finetune"
        )
    settings = read_settings(lit)
    views = read_views(lit, settings)
    lit.check_used()
    vocab = lit.get("padded_vocab_size", COUNT)
    return MappedSource(LITGPT, folder, config=settings, vocab=vocab, notes=lit.notes, views=views)


def read_config(path: Path) -> dict[str, Any]:
    import yaml

    if not path.is_file():
        raise bad_data(
            f"{path} does not exist, and the weights alone do not say what they compute; copy it there"
        )
    try:
        stated = yaml.safe_load(read_small(path, CONFIG_LIMIT))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise bad_data(f"{path}: not YAML: {str(error)[:200]}") from error
    if not isinstance(stated, dict):
        raise bad_data(f"{path}: not a table of settings")
    return stated


def read_settings(lit: ForeignFolder) -> dict[str, Any]:
    """Return the settings under our names; refuse those that our network does not have."""
    config = lit.config
    for name, value in OFF.items():
        if name in config and (config[name] or None) != value:
            raise lit.refused(f"{name} is {str(config[name])[:100]}", f"{value} would do")
    # The MLP's class and the kind of GELU are one activation of ours.
    mlp = str(config.get("mlp_class_name"))
    gelu = None if mlp == "LLaMAMLP" else str(config.get("gelu_approximate", "none"))
    if (mlp, gelu) not in ACTIVATIONS:
        kinds = ", ".join(sorted({name for name, _ in ACTIVATIONS}))
        raise lit.refused(
            f"mlp_class_name is {mlp:.50} with gelu_approximate {gelu}", f"{kinds} can be read"
        )
    h, heads, layers = lit.sizes("n_embd", "n_head", "n_layer")
    groups = lit.get("n_query_groups", COUNT, heads)
    if heads % groups:
        raise bad_data(
            f"{lit.folder / CONFIG}: n_head {heads} is not a multiple of n_query_groups {groups}"
        )
    kind = lit.want("norm_class_name", "LayerNorm", "RMSNorm", default="LayerNorm")
    bias = bool(config.get("bias", True))
    cap = config.get("final_logit_softcapping")
    positions = lit.get("block_size", COUNT)
    return (
        FIXED
        | ACTIVATIONS[mlp, gelu]
        | sizes_of(h, layers, heads, lit.get("intermediate_size", COUNT, 4 * h), positions)
        | {
            "num_query_groups": None if groups == heads else groups,
            "kv_channels": lit.get("head_size", COUNT, h // heads or None),
            "normalization": kind,
            "apply_layernorm_1p": kind == "RMSNorm" and "Gemma" in str(config.get("name")),
            "layernorm_epsilon": lit.get("norm_eps", POSITIVE, 1e-5),
            "qk_layernorm": bool(config.get("norm_qk")),
            "add_bias_linear": bias,
            "add_qkv_bias": bool(config.get("attn_bias")) and not bias,
            "use_parallel_residual": bool(config.get("parallel_residual", True)),
            "final_logit_softcapping": lit.get("final_logit_softcapping", POSITIVE) if cap else 0.0,
            "untie_embeddings_and_output_weights": True,
        }
        | rotation(scaled(lit), positions, ROTATION)
        | windows(lit, layers)
    )


def scaled(lit: ForeignFolder) -> ForeignFolder:
    """Add the rotation in Hugging Face's words; its scaling is linear or Llama 3's, if any."""
    stated = lit.config.get("rope_adjustments") or {}
    ratio = lit.get("rope_condense_ratio", POSITIVE, 1.0)
    # Both at once would scale the rotation twice.
    kind = KINDS.get(frozenset(stated)) if ratio == 1.0 or not stated else None
    if kind is None:
        what = f"rope_adjustments is {str(stated)[:100]} with a rope_condense_ratio of {ratio:g}"
        raise lit.refused(what, "one of them, with a factor alone or all of Llama 3's, would do")
    rope = {"rope_type": kind, **stated}
    if ratio != 1.0:
        rope = {"rope_type": "linear", "factor": ratio}
    rope["original_max_position_embeddings"] = stated.get("original_max_seq_len")
    lit.config |= {"rope_theta": lit.get("rope_base", POSITIVE, 1e4), "rope_scaling": rope}
    return lit


def windows(lit: ForeignFolder, layers: int) -> dict[str, Any]:
    """Return the settings of windows, which count the token itself, in layers whose index is 1."""
    if lit.config.get("sliding_window_size") is None:
        return {}
    size = lit.get("sliding_window_size", WINDOW)
    kinds = lit.config.get("sliding_window_indices")
    if kinds is None:
        kinds = [1] * layers
    if not isinstance(kinds, list) or len(kinds) < layers or not {*map(str, kinds)} <= {"0", "1"}:
        what = f"sliding_window_indices is {str(kinds)[:100]}"
        raise bad_data(
            f"{lit.folder / CONFIG}: {what}; it must be a 0 or a 1 for each of {layers} layers"
        )
    own = kinds[:layers]
    return window_settings(size - 1, [int(kind) for kind in own]) if any(own) else {}


def read_views(lit: ForeignFolder, s: dict[str, Any]) -> Views:
    """Return every tensor of our network as views of theirs."""
    h = s["hidden_size"]
    ffn = s["ffn_hidden_size"]
    heads = s["num_attention_heads"]
    head = s["kv_channels"]
    groups = s["num_query_groups"] or heads
    wte = lit.take("transformer.wte.weight", lit.get("padded_vocab_size", COUNT), h)
    out: Views = {"wte.weight": one_view(wte)}
    lit.add_head(out, wte, tied=False)

    def copy(ours: str, theirs: str, *shape: int, biased: bool) -> None:
        weight = lit.take(f"{theirs}.weight", *shape)
        out[f"{ours}.weight"] = one_view(weight)
        if biased:
            bias = lit.take(f"{theirs}.bias", shape[0])
            out[f"{ours}.bias"] = one_view(bias)

    has_bias = s["add_bias_linear"]
    is_layer_norm = s["normalization"] == "LayerNorm"
    copy("ln_f", "transformer.ln_f", h, biased=is_layer_norm)
    for i in range(s["num_layers"]):
        ours = f"h.{i}"
        theirs = f"transformer.h.{i}"
        copy(f"{ours}.ln_1", f"{theirs}.norm_1", h, biased=is_layer_norm)
        copy(f"{ours}.ln_2", f"{theirs}.norm_2", h, biased=is_layer_norm)
        if s["qk_layernorm"]:
            for kind in "qk":
                norm = f"{theirs}.attn.norm_{kind}"
                copy(f"{ours}.attn.ln_{kind}", norm, head, biased=is_layer_norm)
        # litgpt can have a bias in attention's first product alone.
        for end in ("weight", "bias") if has_bias or s["add_qkv_bias"] else ("weight",):
            qkv = qkv_of(lit, f"{theirs}.attn", end, (heads, groups, head, h))
            out[f"{ours}.attn.qkv.{end}"] = qkv
        copy(f"{ours}.attn.proj", f"{theirs}.attn.proj", h, heads * head, biased=has_bias)
        copy(f"{ours}.mlp.proj", f"{theirs}.mlp.proj", h, ffn, biased=has_bias)
        if not (s["swiglu"] or s["glu_activation"]):
            copy(f"{ours}.mlp.fc", f"{theirs}.mlp.fc", ffn, h, biased=has_bias)
            continue
        # A gated MLP: ours is one tensor [2, rows, columns].
        shapes: dict[str, tuple[int, ...]] = {"weight": (ffn, h)}
        if has_bias:
            shapes["bias"] = (ffn,)
        for end, shape in shapes.items():
            halves = []
            for n in range(2):
                half = lit.take(f"{theirs}.mlp.fc_{n + 1}.{end}", *shape)[None]
                offset = (n, *[0] * len(shape))
                halves.append(TensorView(offset, half))
            out[f"{ours}.mlp.fc.{end}"] = halves
    return out


def qkv_of(
    lit: ForeignFolder, name: str, end: str, sizes: tuple[int, int, int, int]
) -> list[TensorView]:
    """Return the rows of queries, keys and values; `sizes` are heads, groups, head and width."""
    heads, groups, head, width = sizes
    rows = (heads + 2 * groups) * head
    shape = (rows,) if end == "bias" else (rows, width)
    # Older files have the rows in our order: group by group.
    older = f"{name}.attn.{end}"
    if lit.has(older):
        return one_view(lit.take(older, *shape))
    tensor = lit.take(f"{name}.qkv.{end}", *shape)
    q, k, v = tensor.tensor_split((heads * head, (heads + groups) * head))
    return qkv_views(q, k, v, groups, head)
