"""An option of the network is one field: what follows from its `absent=`, and what must know it."""

from __future__ import annotations

import dataclasses
import re

import pytest

from meshwright.checkpoint.exports import obstacles
from meshwright.config import check_model
from meshwright.config.check_model import kernel_problems
from meshwright.config.checks import torch_format_problems
from meshwright.config.fast_paths import CAPTURED_DECODER, FUSED_BLOCK, INDIFFERENT, unknown_to
from meshwright.config.fields import spelling
from meshwright.config.schema import (
    ABSENT,
    ABSENT_COMPUTED,
    Checkpoint,
    Model,
    TrainConfig,
    Training,
    options_of,
)
from network_values import VALUES

# Fields as old as the oldest checkpoint that is read: each records them.
ALWAYS_RECORDED = """
    num_layers hidden_size num_attention_heads ffn_hidden_size kv_channels max_position_embeddings
    make_vocab_size_divisible_by pad_vocab_size_to layernorm_epsilon init_method_std hidden_dropout
    attention_dropout embedding_dropout untie_embeddings_and_output_weights bias_gelu_fusion
    attention_impl num_query_groups group_query_attention position_embedding_type rotary_percent
    rotary_base rope_scaling_factor original_max_position_embeddings rope_low_freq_factor
    rope_high_freq_factor beta_fast beta_slow rope_attention_factor swiglu squared_relu
    glu_activation normalization apply_layernorm_1p add_bias_linear add_qkv_bias embed_layernorm
    apply_residual_connection_post_layernorm init_method_xavier_uniform num_experts
""".split()
PLAIN_GPT = Model(num_layers=2, hidden_size=32, num_attention_heads=4)
# Another value of each option.
OTHER = {
    "rope_scaling": "yarn",
    "window_size": "3,0",
    "final_logit_softcapping": 2.0,
}


def with_option(name: str) -> Model:
    value = OTHER.get(name, not ABSENT[name])
    # Scaling is of rotary frequencies.
    position = "rope" if name == "rope_scaling" else PLAIN_GPT.position_embedding_type
    return dataclasses.replace(PLAIN_GPT, position_embedding_type=position, **{name: value})


def test_a_new_field_says_what_networks_without_it_had() -> None:
    fields = {f.name for f in dataclasses.fields(Model)}
    missing = fields - ABSENT.keys() - {*ALWAYS_RECORDED}
    assert not missing, (
        f"config/schema.py: give {sorted(missing)} absent=, as older checkpoints have"
    )
    assert fields == ABSENT.keys() | {*ALWAYS_RECORDED}


@pytest.mark.parametrize("name", sorted(ABSENT_COMPUTED.keys() - {"window_attn_skip_freq"}))
def test_an_option_is_refused_where_it_has_no_place(name: str) -> None:
    m = with_option(name)
    assert options_of(m) == [name]
    c = TrainConfig(model=m, checkpoint=Checkpoint(ckpt_format="torch"))
    assert [problem for problem in torch_format_problems(c) if name in problem.about]
    assert obstacles(m, "megatron" if name == "rope_scaling" else "gpt2")


def test_a_detail_of_an_option_and_of_another_norm_is_none_by_itself() -> None:
    assert options_of(dataclasses.replace(PLAIN_GPT, window_attn_skip_freq="2")) == []
    rms = dataclasses.replace(PLAIN_GPT, normalization="RMSNorm", layernorm_bias=False)
    assert options_of(rms) == []


# What the paths do not compute; they must step aside for it.
DECLINED = {
    "fused": (FUSED_BLOCK, set()),
    "captured": (
        CAPTURED_DECODER,
        {"embed_layernorm", "apply_residual_connection_post_layernorm"},
    ),
}


@pytest.mark.parametrize("path, declined", DECLINED.values(), ids=DECLINED)
def test_each_field_is_known_to_a_path_or_declined_by_it(
    path: frozenset[str], declined: set[str]
) -> None:
    fields = {f.name for f in dataclasses.fields(Model)}
    undecided = fields - path - INDIFFERENT - declined
    assert not undecided, f"config/fast_paths.py: does the path compute {sorted(undecided)}?"
    assert not path & INDIFFERENT and not declined & (path | INDIFFERENT)
    assert path | INDIFFERENT | declined == fields
    for name in declined:
        assert unknown_to(path, dataclasses.replace(PLAIN_GPT, **{name: True})) == [name]
    assert not unknown_to(path, PLAIN_GPT)


def test_a_path_declines_an_option_that_it_does_not_name() -> None:
    m = dataclasses.replace(PLAIN_GPT, final_logit_softcapping=2.0)
    assert unknown_to(FUSED_BLOCK - {"final_logit_softcapping"}, m) == ["final_logit_softcapping"]
    assert unknown_to(FUSED_BLOCK, m) == []


def test_fused_kernels_that_are_asked_for_refuse_what_they_do_not_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = Training(fused_kernels="on")
    for name in ("final_logit_softcapping", "qk_layernorm"):
        m = with_option(name)
        assert not kernel_problems(asked, m)
        with monkeypatch.context() as patched:
            patched.setattr(check_model, "FUSED_BLOCK", FUSED_BLOCK - {name})
            (problem,) = kernel_problems(asked, m)
        assert problem.about == ("fused_kernels", name)
        assert f"they have no {{{name}" in problem.text


# Fields whose values other tables of the fuzz draw: how a run trains or pads, not what is computed.
DRAWN_APART = {
    "make_vocab_size_divisible_by",
    "pad_vocab_size_to",
    "hidden_dropout",
    "attention_dropout",
    "embedding_dropout",
    "attention_impl",
    "num_experts",
}


def test_every_field_of_the_network_is_in_the_table_of_values() -> None:
    """The fuzz, drawn plans and the decoder's tests draw from it."""
    drawn = set(re.findall(r"--[\w-]+", " ".join(" ".join(group) for group in VALUES.values())))
    missing = []
    for f in dataclasses.fields(Model):
        flag = spelling(f.name)
        words = {flag, "--no-" + flag[2:], *f.metadata["aliases"]}
        if f.name not in DRAWN_APART and not words & drawn:
            missing.append(f.name)
    assert not missing, f"tests/network_values.py: add values of {missing}"
