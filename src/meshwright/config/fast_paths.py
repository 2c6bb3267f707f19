"""Which settings of the network each faster way of computing knows: allow-lists. No torch.

A path runs only if it knows every setting that is not as in a plain network. So a new option is
computed by the plain layers until a path learns it and names it here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from meshwright.config.schema import ABSENT, Model, options_of

# Settings that no path has to know: sizes that it reads from the weights, the vocabulary, and what
# decides how weights begin and are trained.
INDIFFERENT = frozenset(
    {
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "ffn_hidden_size",
        "kv_channels",
        "max_position_embeddings",
        "make_vocab_size_divisible_by",
        "pad_vocab_size_to",
        "untie_embeddings_and_output_weights",
        "init_method_std",
        "init_method_xavier_uniform",
        "zero_init_projections",
        "mup_base_hidden_size",
        "mup_base_num_layers",
        "num_experts",
    }
)
# What both paths compute, or leave to parts of the plain network that they call.
_BOTH = frozenset(
    {
        "num_query_groups",
        "group_query_attention",
        "position_embedding_type",
        "rotary_percent",
        "rotary_base",
        "rope_scaling",
        "rope_scaling_factor",
        "original_max_position_embeddings",
        "rope_low_freq_factor",
        "rope_high_freq_factor",
        "beta_fast",
        "beta_slow",
        "rope_attention_factor",
        "window_size",  # the captured decoder refuses layers with a window by itself
        "window_attn_skip_freq",
        "swiglu",
        "squared_relu",
        "glu_activation",
        "bias_gelu_fusion",
        "normalization",
        "qk_layernorm",
        "layernorm_epsilon",
        "layernorm_bias",
        "apply_layernorm_1p",
        "add_bias_linear",
        "add_qkv_bias",
        "hidden_dropout",
        "attention_dropout",
        "embedding_dropout",
        "attention_impl",
        "final_logit_softcapping",
    }
)
# The block of fused kernels (model/fused.py).
FUSED_BLOCK = _BOTH | {
    "embed_layernorm",
    "apply_residual_connection_post_layernorm",
    "use_parallel_residual",
}
# The step of the decoder that is captured in CUDA graphs (model/decode.py).
CAPTURED_DECODER = _BOTH | {"use_parallel_residual"}


def unknown_to(path: Collection[str], m: Model) -> list[str]:
    """Return the settings of this network that a path does not know."""
    options = options_of(m)
    plain = Model()
    out = []
    for f in dataclasses.fields(Model):
        if f.name in INDIFFERENT or f.name in path:
            continue
        # An option may be as in networks before it existed, though its default is another value.
        is_option = f.name in ABSENT and f.name in options
        if is_option or (f.name not in ABSENT and getattr(m, f.name) != getattr(plain, f.name)):
            out.append(f.name)
    return out
