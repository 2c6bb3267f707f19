"""What tests of foreign checkpoints share: reading every tensor of a source, and comparing it."""

import importlib.util
from collections.abc import Mapping

import torch

from meshwright.checkpoint import native
from meshwright.checkpoint.sources import Source

try:
    HAS_CORE = importlib.util.find_spec("megatron.core") is not None
except ModuleNotFoundError:
    HAS_CORE = False


# Ours under the names of Megatron-LM and Megatron-Core.
NAMES = {
    "embedding.word_embeddings.norm": "ln_emb",
    "embedding.word_embeddings": "wte",
    "embedding.position_embeddings": "wpe",
    "encoder.final_layernorm": "ln_f",
    "decoder.final_layernorm": "ln_f",
    "output_layer": "lm_head",
    "encoder.layers": "h",
    "decoder.layers": "h",
    "self_attention.query_key_value": "attn.qkv",
    "self_attention.linear_qkv": "attn.qkv",
    "self_attention.dense": "attn.proj",
    "self_attention.linear_proj": "attn.proj",
    "mlp.dense_h_to_4h": "mlp.fc",
    "mlp.linear_fc1": "mlp.fc",
    "mlp.dense_4h_to_h": "mlp.proj",
    "mlp.linear_fc2": "mlp.proj",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "pre_mlp_layernorm": "ln_2",
}


def our_name(name: str) -> str:
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


def read_tensors(source: Source, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Return every tensor of the source, in its own dtype or this one."""
    known = source.tensors.items()
    out = {
        name: torch.empty(of.shape, dtype=dtype or getattr(torch, of.dtype)) for name, of in known
    }
    source.fill({name: native.undivided(tensor) for name, tensor in out.items()})
    return out


def assert_reads(source: Source, expected: Mapping[str, torch.Tensor]) -> None:
    """Assert that the source holds exactly these tensors, to the last bit and in these dtypes."""
    read = read_tensors(source)
    assert sorted(read) == sorted(expected)
    for name, tensor in expected.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor), name
