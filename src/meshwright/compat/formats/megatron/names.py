"""Names of parameters in Megatron-LM and related programs, and ours, for readers and writers.

There, layers are numbered from 0 in each pipeline stage; here, over the complete model. Readers add
the number of layers that lie before a stage.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# Spellings of Megatron-LM since 2019. The first of each kind, of 2022 and 2023, is written.
LAYER = {
    "input_layernorm": "ln_1",
    "input_norm": "ln_1",
    "self_attention.query_key_value": "attn.qkv",
    "attention.query_key_value": "attn.qkv",
    # Parts of our attn.qkv, where all heads share one key and value (BigCode).
    "self_attention.query": "attn.query",
    "self_attention.key_value": "attn.key_value",
    "self_attention.dense": "attn.proj",
    "attention.dense": "attn.proj",
    "post_attention_layernorm": "ln_2",
    "post_attention_norm": "ln_2",
    "mlp.dense_h_to_4h": "mlp.fc",
    "mlp.dense_4h_to_h": "mlp.proj",
    # megatron-core
    "self_attention.linear_qkv": "attn.qkv",
    "self_attention.linear_proj": "attn.proj",
    "self_attention.q_layernorm": "attn.ln_q",
    "self_attention.k_layernorm": "attn.ln_k",
    "pre_mlp_layernorm": "ln_2",
    "mlp.linear_fc1": "mlp.fc",
    "mlp.linear_fc2": "mlp.proj",
}
# Norms that Transformer Engine fuses with the following product.
JOINED = {"self_attention.linear_qkv": "ln_1", "mlp.linear_fc1": "ln_2"}
OUTSIDE = {
    r"embedding\.word_embeddings\.weight": "wte.weight",
    r"embedding\.position_embeddings\.weight": "wpe.weight",
    r"embedding\.word_embeddings\.norm\.(weight|bias)": r"ln_emb.\1",  # BigScience
    r"(?:transformer|encoder|decoder)\.final_(?:layer)?norm\.(weight|bias)": r"ln_f.\1",
    r"output_layer\.weight": "lm_head.weight",
    # The last stage's copy of the first one's table.
    r"word_embeddings(?:_for_head)?\.weight": "wte.copy",
}
NO_PARAMETER = re.compile(r"(.*\.)?(_extra_state|(rotary_pos_emb|rotary_emb)\.inv_freq)")


class ParameterName(NamedTuple):
    layer: int | None  # as the file counts
    ours: str  # without the layer: "attn.qkv.weight", "ln_f.bias"

    def full(self, begin: int = 0) -> str:
        """Return the name with its layer, `begin` added: "h.3.attn.qkv.weight"."""
        return self.ours if self.layer is None else f"h.{begin + self.layer}.{self.ours}"


def parse_name(key: str) -> ParameterName | None:
    """Return our name, or None if the key is no known parameter of a GPT."""
    key = key.removeprefix("module.")
    # The decoder in a language_model is the second half of a T5.
    key = "?" if key.startswith("language_model.decoder.") else key.removeprefix("language_model.")
    for pattern, ours in OUTSIDE.items():
        if match := re.fullmatch(pattern, key):
            return ParameterName(None, match.expand(ours))
    match = re.fullmatch(
        r"(?:transformer|encoder|decoder)\.layers\.(\d+)\.(.+?)[._](weight|bias)", key
    )
    if not match:
        return None
    number, stem, kind = match.groups()
    part = (
        JOINED.get(stem.removesuffix(".layer_norm"))
        if stem.endswith(".layer_norm")
        else LAYER.get(stem)
    )
    return ParameterName(int(number), f"{part}.{kind}") if part else None


def layer_name(ours: str) -> str:
    """Return the name of 2022 and 2023 for a part of a layer, such as "attn.qkv.bias"."""
    part, _, kind = ours.rpartition(".")
    return f"{next(theirs for theirs, name in LAYER.items() if name == part)}.{kind}"
