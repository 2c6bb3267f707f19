"""Each field of the network is decided for each target of an export, and what is decided holds."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from meshwright.checkpoint import exports
from meshwright.checkpoint.exports import ELSEWHERE, EXPORTS, SAME, TENSORS, TRAINING
from meshwright.checkpoint.huggingface.writer import choose_architecture, family
from meshwright.checkpoint.saved_model import SavedModel
from meshwright.checkpoint.sources import MappedSource
from meshwright.config.schema import Model

SMALL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
GPT2 = Model(**SMALL)
LLAMA = Model(
    **SMALL,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
)
NEOX = Model(
    **SMALL, position_embedding_type="rope", rotary_percent=0.25, use_parallel_residual=True
)
# Another value of each field than in these models.
OTHER: dict[str, Any] = dict.fromkeys(
    "num_layers num_attention_heads num_query_groups num_experts".split(), 1
)
OTHER |= dict.fromkeys(
    "hidden_size ffn_hidden_size kv_channels max_position_embeddings pad_vocab_size_to".split(), 48
)
OTHER |= dict.fromkeys(
    "hidden_dropout attention_dropout embedding_dropout layernorm_epsilon".split(), 0.3
)
OTHER |= {
    "make_vocab_size_divisible_by": 1,
    "init_method_std": 0.5,
    "rotary_percent": 0.5,
    "rotary_base": 5.0,
}
OTHER |= {
    "attention_impl": "reference",
    "position_embedding_type": "alibi",
    "glu_activation": "geglu",
}
OTHER |= {"window_size": "1,0", "window_attn_skip_freq": "2"}
OTHER |= {"rope_scaling": "yarn", "original_max_position_embeddings": 5}
OTHER |= dict.fromkeys(
    "rope_scaling_factor rope_low_freq_factor rope_high_freq_factor".split(), 2.0
)
OTHER |= dict.fromkeys("beta_fast beta_slow rope_attention_factor".split(), 2.0)


def other(m: Model, name: str) -> Any:
    if name == "normalization":
        return {"LayerNorm": "RMSNorm", "RMSNorm": "LayerNorm"}[m.normalization]
    return OTHER[name] if name in OTHER else not getattr(m, name)


def saved(m: Model, positions: int = 16) -> SavedModel:
    source = MappedSource("memory", Path("x"))
    return SavedModel(source, m, 61, m.max_position_embeddings or positions, None, None)


def test_every_field_is_decided_for_every_target() -> None:
    fields = {f.name for f in dataclasses.fields(Model)}
    assert not fields - EXPORTS.keys(), (
        "decide in checkpoint/exports.py how each target has these fields"
    )
    assert not EXPORTS.keys() - fields


@pytest.mark.parametrize("name", sorted(EXPORTS))
@pytest.mark.parametrize("model", [GPT2, LLAMA, NEOX], ids=["gpt2", "llama", "neox"])
def test_another_value_is_exported_or_refused(model: Model, name: str) -> None:
    target = family(choose_architecture(model))
    expression = getattr(EXPORTS[name], target)
    changed = dataclasses.replace(model, **{name: other(model, name)})
    before, after = (exports.settings_of(saved(m), target) for m in (model, changed))
    is_noticed = bool(exports.obstacles(changed, target)) or after != before
    is_noticed |= choose_architecture(changed) != choose_architecture(model)
    silent = any(expression is constant for constant in (TENSORS, TRAINING, ELSEWHERE, SAME))
    # the tensors show that
    assert is_noticed or silent or name == "untie_embeddings_and_output_weights"
    if expression is TRAINING:
        assert not is_noticed
    assert not exports.obstacles(model, target)


def test_megatron_refuses_what_it_has_no_field_for() -> None:
    assert exports.obstacles(dataclasses.replace(GPT2, num_experts=2), "megatron") == [
        "--num-experts"
    ]
    unbiased = dataclasses.replace(GPT2, layernorm_bias=False)
    assert exports.obstacles(unbiased, "megatron") == ["--disable-layernorm-bias"]
    yarn = dataclasses.replace(LLAMA, rope_scaling="yarn", original_max_position_embeddings=64)
    assert exports.obstacles(yarn, "megatron") == ["this --rope-scaling yarn"]
    for change, fits in [
        ({}, True),
        ({"original_max_position_embeddings": 4096}, False),
        ({"beta_fast": 9.0}, True),
    ]:
        llama3 = dataclasses.replace(LLAMA, rope_scaling="llama3", **change)
        assert exports.obstacles(llama3, "megatron") == (
            [] if fits else ["this --rope-scaling llama3"]
        )
    half = dataclasses.replace(LLAMA, rope_scaling="linear", rope_scaling_factor=1.5)
    assert exports.obstacles(half, "megatron") == ["this --rope-scaling linear"]
