"""The table of a layer's matrices is what the network has, and what its readers take from it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from meshwright.config.matrices import MATRICES, matrices_of
from meshwright.config.schema import Model
from meshwright.model import counts
from meshwright.model.gpt import GPT
from meshwright.parallel import shard
from network_values import models_beyond

PLAIN = Model(num_layers=1, hidden_size=32, num_attention_heads=4, kv_channels=12)
# Each value of the table of networks, with and without biases: no size equals the width by chance.
NETWORKS = {"plain": PLAIN} | {
    words: dataclasses.replace(
        m, num_layers=1, hidden_size=32, num_attention_heads=4, kv_channels=12
    )
    for words, m in models_beyond(set()).items()
    if m.groups in (2, 4)
}
NETWORKS |= {
    f"{words} unbiased": dataclasses.replace(m, add_bias_linear=False)
    for words, m in NETWORKS.items()
}


@pytest.mark.parametrize("m", NETWORKS.values(), ids=NETWORKS)
def test_the_table_lists_the_matrices_of_a_layer(m: Model) -> None:
    """A matrix that is not in the table would be whole on every tensor rank, and uncounted."""
    with torch.device("meta"):
        block = GPT(m, 61, 64, 16).h["0"]
    built = {name: tuple(p.shape) for name, p in block.named_parameters()}
    has_product = {name for name, part in block.named_modules() if hasattr(part, "product")}
    assert has_product == matrices_of(m).keys()
    assert built == counts.layer_shapes(m)


@pytest.mark.parametrize("m", NETWORKS.values(), ids=NETWORKS)
def test_a_pair_begins_and_ends_at_the_residual_stream(m: Model) -> None:
    """A matrix whose pair is wrong would be cut the wrong way."""
    for name, matrix in matrices_of(m).items():
        outputs, inputs = matrix.shape(m)
        stream, inner = (inputs, outputs) if matrix.pair == "first" else (outputs, inputs)
        assert stream == m.hidden_size != inner, name


def test_every_parameter_of_a_layer_has_a_rule() -> None:
    """One without a rule counts as a custom model's, whose gradient is never partial."""
    m = dataclasses.replace(PLAIN, qk_layernorm=True)
    names = [f"h.0.{name}" for name in counts.layer_shapes(m)]
    assert not [name for name in names if shard.rule(name).partial == "never"]


def test_a_product_that_no_table_names_is_seen() -> None:
    """The first test can fail: a block with one more map has another list."""
    with torch.device("meta"):
        block = GPT(PLAIN, 61, 64, 16).h["0"]
    assert isinstance(block, nn.Module)
    block.attn.extra = type(block.attn.proj)(4, 4)
    has_product = {name for name, part in block.named_modules() if hasattr(part, "product")}
    assert has_product - MATRICES.keys() == {"attn.extra"}
