"""THE table of a layer's matrices, from settings alone. No torch.

It decides what is cut between tensor ranks and how partial results are added up (parallel/), what
the network's size and operations are (model/counts.py), which products fp8 has (model/fp8.py), what
µP carries over (optim/mup.py), and what the plan counts.

    first   of its pair: reads the residual stream, and tensor ranks cut its outputs
    second  of its pair: leads back into the stream; ranks cut its inputs and add up their results
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from meshwright.config.schema import Model


class LayerMatrix(NamedTuple):
    pair: Literal["first", "second"]
    shape: Callable[[Model], tuple[int, int]]  # outputs, inputs
    has_bias: Callable[[Model], bool]
    exists: Callable[[Model], bool] = lambda m: True
    is_stack: Callable[[Model], bool] = lambda m: False  # [2, F, H]: a gate and what it gates
    fp8: bool = True  # with --fp8-format it multiplies in fp8


def _heads(m: Model) -> int:
    return (m.num_attention_heads or 0) * m.head_dim


MATRICES = {
    "attn.qkv": LayerMatrix(
        "first",
        shape=lambda m: (_heads(m) + 2 * m.groups * m.head_dim, m.hidden_size or 0),
        has_bias=lambda m: m.qkv_bias,
    ),
    "attn.proj": LayerMatrix(
        "second",
        shape=lambda m: (m.hidden_size or 0, _heads(m)),
        has_bias=lambda m: m.add_bias_linear,
    ),
    "mlp.fc": LayerMatrix(
        "first",
        shape=lambda m: ((2 if m.gated else 1) * m.ffn, m.hidden_size or 0),
        has_bias=lambda m: m.add_bias_linear,
        is_stack=lambda m: m.gated,
    ),
    "mlp.proj": LayerMatrix(
        "second",
        shape=lambda m: (m.hidden_size or 0, m.ffn),
        has_bias=lambda m: m.add_bias_linear,
    ),
}


def matrices_of(m: Model) -> dict[str, LayerMatrix]:
    """Return the matrices that a layer of this network has."""
    return {name: matrix for name, matrix in MATRICES.items() if matrix.exists(m)}


def is_second(name: str) -> bool:
    """Whether a matrix, such as h.3.attn.proj, is the second of its pair."""
    matrix = MATRICES.get(".".join(name.split(".")[-2:]))
    return matrix is not None and matrix.pair == "second"
