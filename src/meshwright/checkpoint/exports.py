"""THE table of exports: what each target has for each field of `Model`, or why it is refused there.

A row for every field: tests name one that is missing, so that a new field of the network is decided
for every target and never left out in silence. An option (a field with `absent=`) without a row is
refused by every target.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from meshwright.checkpoint.saved_model import SavedModel
from meshwright.config.check_model import has_megatrons_scaling
from meshwright.config.fields import spelling
from meshwright.config.schema import ABSENT, ABSENT_COMPUTED, OUTCOME, Model


class Expression(NamedTuple):
    """A field in one target: its settings there, or what prevents the export of a model."""

    keys: tuple[str, ...] = ()
    value: Callable[[SavedModel], Any] = lambda saved: None
    obstacle: Callable[[Model], str] = lambda m: ""


class Export(NamedTuple):
    gpt2: Expression  # Hugging Face's, for a learned table of positions
    llama: Expression  # Hugging Face's, for rotation and RMSNorm: Llama, Qwen 2 and 3
    neox: Expression  # Hugging Face's, for rotation and LayerNorm: GPT-NeoX, Pythia
    megatron: Expression


TENSORS = Expression()  # the names and shapes of the tensors say it
# it concerns training or this package: the network computes the same without
TRAINING = Expression()
ELSEWHERE = Expression()  # another field's row says it
SAME = Expression()  # Megatron's or BigScience's argument of this name means the same


def setting(keys: str, value: Callable[[SavedModel], Any]) -> Expression:
    return Expression(tuple(keys.split()), value)


def from_model(keys: str, name: str) -> Expression:
    """Give a field or property of the model under the target's names."""
    return setting(keys, lambda saved: getattr(saved.model, name))


def expressed(gpt2: str, others: str, name: str) -> Export:
    """Give a field to every target: under GPT-2's key, and under the one of Llama and GPT-NeoX."""
    theirs = from_model(others, name)
    return Export(from_model(gpt2, name), theirs, theirs, SAME)


def refuse(obstacle: Callable[[Model], str]) -> Expression:
    return Expression(obstacle=obstacle)


def refuse_switch(flag: str, name: str, refused: object = True) -> Expression:
    return refuse(lambda m: flag if getattr(m, name) == refused else "")


def refuse_option(name: str) -> Expression:
    """Refuse a network with this option, which the target does not have."""

    def obstacle(m: Model) -> str:
        # ABSENT has the value of networks without the option.
        value = getattr(m, name)
        if value == ABSENT[name]:
            return ""
        if isinstance(value, bool):
            return spelling(name) if value else "--no-" + spelling(name)[2:]
        shown = f"{value:g}" if isinstance(value, float) else value
        return f"{spelling(name)} {shown}"

    return refuse(obstacle)


def _activation(*allowed: str) -> Callable[[Model], str]:
    return lambda m: "" if m.activation in allowed else f"the activation {m.activation}"


def _equal_heads(m: Model) -> str:
    heads = m.num_attention_heads or 1
    fits = heads * m.head_dim == m.hidden_size
    return "" if fits else f"{heads} heads of {m.head_dim} for a width of {m.hidden_size}"


def _no_groups(m: Model) -> str:
    heads = m.num_attention_heads or 1
    return "" if m.groups == heads else f"{m.groups} groups of {heads} heads"


def _width_for_llama(m: Model) -> str:
    heads = m.num_attention_heads or 1
    if (m.hidden_size or 0) % heads:
        return f"a width of {m.hidden_size}, not a multiple of {heads} heads"
    return ""


def _norm(allowed: str) -> Expression:
    return refuse(
        lambda m: "" if m.normalization == allowed else f"--normalization {m.normalization}"
    )


_POSITIONS = refuse(
    lambda m: (
        f"--position-embedding-type {m.position_embedding_type}"
        if m.position in ("alibi", "none")
        else ""
    )
)
_ROTARY_PERCENT = refuse(
    lambda m: f"--rotary-percent {m.rotary_percent}" if m.rotating != m.head_dim else ""
)
_QK_NORM = refuse(lambda m: "--qk-layernorm with biases" if m.qk_layernorm and m.qkv_bias else "")
_TIED = setting("tie_word_embeddings", lambda saved: "lm_head.weight" not in saved.source.tensors)
_GELU = Expression(
    ("activation_function",),
    lambda saved: "gelu" if saved.model.activation == "gelu" else "gelu_new",
    _activation("gelu-tanh", "gelu"),
)
_SILU = Expression(("hidden_act",), lambda saved: "silu", _activation("swiglu"))
# rope_parameters, which transformers 5 reads, repeats it
_ROTATION = from_model("rope_theta", "rotary_base")
_SCALING_OF_MEGATRON = refuse(
    lambda m: "" if has_megatrons_scaling(m) else f"this --rope-scaling {m.rope_scaling}"
)
_SCALING = setting("rope_scaling", lambda saved: rope_scaling(saved.model))
_LENGTH = SavedModel.require_positions
_NORM_1P = refuse_switch("--apply-layernorm-1p", "apply_layernorm_1p")
_NORM_BIAS = refuse(
    lambda m: (
        "--disable-layernorm-bias"
        if m.normalization == "LayerNorm" and not m.layernorm_bias
        else ""
    )
)
_EMBED_NORM = refuse_switch("--embed-layernorm", "embed_layernorm")
_POST_NORM = refuse_switch(
    "--apply-residual-connection-post-layernorm", "apply_residual_connection_post_layernorm"
)
_PARALLEL = refuse_option("use_parallel_residual")
_NO_QK_NORM = refuse_option("qk_layernorm")
_ALL_BIASES = refuse_switch("--disable-bias-linear", "add_bias_linear", False)
_WINDOW = refuse(lambda m: f"--window-size {m.window_size}" if m.windowed_layers else "")
_WINDOW_WITH_BIASES = refuse(
    lambda m: "--window-size with biases" if m.windowed_layers and m.add_bias_linear else ""
)
_EXPERTS = refuse(lambda m: "--num-experts" if m.num_experts else "")

# Kinds of Hugging Face's rope_scaling, which are ours -> their settings -> our fields.
_FACTOR = {"factor": "rope_scaling_factor"}
_LENGTHS = _FACTOR | {"original_max_position_embeddings": "original_max_position_embeddings"}
SCALINGS = {"linear": _FACTOR}
SCALINGS["llama3"] = _LENGTHS | {
    f"{end}_freq_factor": f"rope_{end}_freq_factor" for end in ("low", "high")
}
SCALINGS["yarn"] = _LENGTHS | {"beta_fast": "beta_fast", "beta_slow": "beta_slow"}
SCALINGS["yarn"] |= {"attention_factor": "rope_attention_factor"}

EXPORTS = {
    "num_layers": expressed("n_layer", "num_hidden_layers", "num_layers"),
    "hidden_size": Export(
        from_model("n_embd", "hidden_size"),
        from_model("hidden_size", "hidden_size")._replace(obstacle=_width_for_llama),
        from_model("hidden_size", "hidden_size"),
        SAME,
    ),
    "num_attention_heads": expressed("n_head", "num_attention_heads", "num_attention_heads"),
    "ffn_hidden_size": expressed("n_inner", "intermediate_size", "ffn"),
    "kv_channels": Export(
        refuse(_equal_heads), from_model("head_dim", "head_dim"), refuse(_equal_heads), SAME
    ),
    "max_position_embeddings": Export(
        setting("n_positions n_ctx", _LENGTH),  # llama.cpp reads the second
        setting("max_position_embeddings", _LENGTH),
        setting("max_position_embeddings", _LENGTH),
        SAME,
    ),
    "make_vocab_size_divisible_by": Export(TRAINING, TRAINING, TRAINING, SAME),
    "pad_vocab_size_to": Export(TRAINING, TRAINING, TRAINING, SAME),
    "layernorm_epsilon": Export(
        from_model("layer_norm_epsilon", "layernorm_epsilon"),
        from_model("rms_norm_eps", "layernorm_epsilon"),
        from_model("layer_norm_eps", "layernorm_epsilon"),
        SAME,
    ),
    "init_method_std": expressed("initializer_range", "initializer_range", "init_method_std"),
    "hidden_dropout": Export(
        from_model("resid_pdrop", "hidden_dropout"),
        TRAINING,
        from_model("hidden_dropout", "hidden_dropout"),
        SAME,
    ),
    "attention_dropout": expressed("attn_pdrop", "attention_dropout", "attention_dropout"),
    "embedding_dropout": Export(
        from_model("embd_pdrop", "dropout_of_embeddings"), TRAINING, TRAINING, TRAINING
    ),
    "untie_embeddings_and_output_weights": Export(_TIED, _TIED, _TIED, SAME),
    "bias_gelu_fusion": Export(_GELU, ELSEWHERE, _GELU._replace(keys=("hidden_act",)), SAME),
    "attention_impl": Export(TRAINING, TRAINING, TRAINING, TRAINING),
    "num_query_groups": Export(
        refuse(_no_groups), from_model("num_key_value_heads", "groups"), refuse(_no_groups), SAME
    ),
    "group_query_attention": Export(ELSEWHERE, ELSEWHERE, ELSEWHERE, SAME),
    "position_embedding_type": Export(_POSITIONS, _POSITIONS, _POSITIONS, SAME),
    "rotary_percent": Export(
        TRAINING, _ROTARY_PERCENT, from_model("rotary_pct", "rotary_percent"), SAME
    ),
    "rotary_base": Export(TRAINING, _ROTATION, from_model("rotary_emb_base", "rotary_base"), SAME),
    "rope_scaling": Export(TRAINING, _SCALING, _SCALING, _SCALING_OF_MEGATRON),
    **{
        name: Export(TRAINING, *[ELSEWHERE] * 3)
        for table in SCALINGS.values()
        for name in table.values()
    },
    "window_size": Export(_WINDOW, _WINDOW_WITH_BIASES, _WINDOW, _WINDOW),
    "window_attn_skip_freq": Export(*[ELSEWHERE] * 4),
    "swiglu": Export(ELSEWHERE, _SILU, ELSEWHERE, SAME),
    "squared_relu": Export(ELSEWHERE, ELSEWHERE, ELSEWHERE, SAME),
    "glu_activation": Export(ELSEWHERE, ELSEWHERE, ELSEWHERE, SAME),
    "normalization": Export(_norm("LayerNorm"), _norm("RMSNorm"), _norm("LayerNorm"), SAME),
    "layernorm_bias": Export(_NORM_BIAS, TRAINING, _NORM_BIAS, _NORM_BIAS),
    "apply_layernorm_1p": Export(_NORM_1P, _NORM_1P, _NORM_1P, SAME),
    "qk_layernorm": Export(_NO_QK_NORM, _QK_NORM, _NO_QK_NORM, TENSORS),
    "add_bias_linear": Export(
        _ALL_BIASES, from_model("attention_bias mlp_bias", "add_bias_linear"), _ALL_BIASES, SAME
    ),
    "add_qkv_bias": Export(TENSORS, TENSORS, TENSORS, SAME),
    "embed_layernorm": Export(_EMBED_NORM, _EMBED_NORM, _EMBED_NORM, SAME),
    "apply_residual_connection_post_layernorm": Export(_POST_NORM, _POST_NORM, _POST_NORM, SAME),
    "use_parallel_residual": Export(
        _PARALLEL,
        _PARALLEL,
        from_model("use_parallel_residual", "use_parallel_residual"),
        _PARALLEL,
    ),
    "init_method_xavier_uniform": Export(TRAINING, TRAINING, TRAINING, SAME),
    "num_experts": Export(_EXPERTS, _EXPERTS, _EXPERTS, _EXPERTS),
}
# An option without a row above is refused by every target.
EXPORTS |= {
    name: Export(*[refuse_option(name) if name in ABSENT_COMPUTED else TRAINING] * 4)
    for name in ABSENT
    if name not in EXPORTS
}


def rope_scaling(m: Model) -> dict[str, Any] | None:
    """Return Hugging Face's settings of a scaling; None if there is none."""
    if m.rope_scaling == "none":
        return None
    values = {
        key: getattr(m, OUTCOME.get(name, name)) for key, name in SCALINGS[m.rope_scaling].items()
    }
    return {"rope_type": m.rope_scaling} | values


def without_idle_window(m: Model, positions: int | None) -> Model:
    """Leave out a window that covers all positions, as the readers of other formats do."""
    if positions is None or not m.window or m.window + 1 < positions:
        return m
    return dataclasses.replace(m, window_size=None, window_attn_skip_freq=None)


def sliding_window(m: Model, kind: str) -> dict[str, Any]:
    """Return Hugging Face's settings of windows, which count the token itself; empty without.

    A Mistral, which has them in all layers, would become a Ministral by naming the kinds of layers.
    """
    if not m.windowed_layers:
        return {}
    window = {"sliding_window": m.window + 1}
    if kind == "mistral":
        return window
    kinds = [
        "sliding_attention" if i in m.windowed_layers else "full_attention"
        for i in range(m.num_layers or 0)
    ]
    return window | {
        "use_sliding_window": True,
        "layer_types": kinds,
        "max_window_layers": m.windowed_layers[0],
    }


def settings_of(saved: SavedModel, target: str) -> dict[str, Any]:
    """Return the model's settings under the target's names."""
    expressions = (getattr(row, target) for row in EXPORTS.values())
    return {key: expression.value(saved) for expression in expressions for key in expression.keys}


def obstacles(m: Model, target: str) -> list[str]:
    """List what the target cannot express of a model."""
    reasons: Iterator[str] = (getattr(row, target).obstacle(m) for row in EXPORTS.values())
    return [obstacle for obstacle in reasons if obstacle]
