"""What Megatron-LM and its kin call each parameter, and what we do: for all readers and writers of their files.

Layers are numbered from 0 in each pipeline stage there, over the whole model here; whoever reads adds what lies before.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# Spellings of Megatron-LM from 2019 on. The first of each kind is the one of 2022 and 2023, which is written.
LAYER = {
    "input_layernorm": "ln_1",
    "input_norm": "ln_1",
    "self_attention.query_key_value": "attn.qkv",
    "attention.query_key_value": "attn.qkv",
    "self_attention.query": "attn.query",  # of one key and value for all heads (BigCode); parts of our attn.qkv
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
# A norm that Transformer Engine joins with the product behind it.
JOINED = {"self_attention.linear_qkv": "ln_1", "mlp.linear_fc1": "ln_2"}
OUTSIDE = {
    r"embedding\.word_embeddings\.weight": "wte.weight",
    r"embedding\.position_embeddings\.weight": "wpe.weight",
    r"embedding\.word_embeddings\.norm\.(weight|bias)": r"ln_emb.\1",  # BigScience
    r"(?:transformer|encoder|decoder)\.final_(?:layer)?norm\.(weight|bias)": r"ln_f.\1",
    r"output_layer\.weight": "lm_head.weight",
    r"word_embeddings(?:_for_head)?\.weight": "wte.copy",  # the last stage's, of the first one's table
}
NO_PARAMETER = re.compile(r"(.*\.)?(_extra_state|(rotary_pos_emb|rotary_emb)\.inv_freq)")


class Name(NamedTuple):
    layer: int | None  # as the file counts
    ours: str  # without the layer: "attn.qkv.weight", "ln_f.bias"

    def full(self, begin: int = 0) -> str:
        """With the layer, of which `begin` lie before those that the file counts: "h.3.attn.qkv.weight"."""
        return self.ours if self.layer is None else f"h.{begin + self.layer}.{self.ours}"


def of_megatron(key: str) -> Name | None:
    """None: it is no parameter of a GPT that is known here."""
    key = key.removeprefix("module.")
    # In language_model a decoder is the second half of a T5.
    key = "?" if key.startswith("language_model.decoder.") else key.removeprefix("language_model.")
    for pattern, ours in OUTSIDE.items():
        if found := re.fullmatch(pattern, key):
            return Name(None, found.expand(ours))
    found = re.fullmatch(r"(?:transformer|encoder|decoder)\.layers\.(\d+)\.(.+?)[._](weight|bias)", key)
    if not found:
        return None
    number, stem, kind = found.groups()
    part = JOINED.get(stem.removesuffix(".layer_norm")) if stem.endswith(".layer_norm") else LAYER.get(stem)
    return Name(int(number), f"{part}.{kind}") if part else None


def of_layer(ours: str) -> str:
    """The name that Megatron-LM of 2022 and 2023 gives a part of a layer: "attn.qkv.bias"."""
    part, _, kind = ours.rpartition(".")
    return f"{next(theirs for theirs, name in LAYER.items() if name == part)}.{kind}"
