"""Counts of parameters and floating-point operations, from a configuration alone. No torch."""

from __future__ import annotations

import math

from meshwright.config.matrices import matrices_of
from meshwright.config.problem import SettingsError
from meshwright.config.schema import Model


def layer_matrices(m: Model) -> dict[str, tuple[int, int]]:
    """Return name -> (outputs, inputs) for every matrix product of one layer."""
    assert m.hidden_size and m.num_attention_heads
    return {name: matrix.shape(m) for name, matrix in matrices_of(m).items()}


def layer_shapes(m: Model) -> dict[str, tuple[int, ...]]:
    """Return name -> shape for every parameter of one layer."""
    assert m.hidden_size
    out: dict[str, tuple[int, ...]] = {}
    for name, matrix in matrices_of(m).items():
        outputs, inputs = matrix.shape(m)
        # The matrices of a gated MLP are a stack: the gate, then what it gates.
        rows = (2, outputs // 2) if matrix.is_stack(m) else (outputs,)
        out[f"{name}.weight"] = (*rows, inputs)
        if matrix.has_bias(m):
            out[f"{name}.bias"] = rows
    norms = {"ln_1": m.hidden_size, "ln_2": m.hidden_size}
    if m.qk_layernorm:
        norms |= {"attn.ln_q": m.head_dim, "attn.ln_k": m.head_dim}
    for name, width in norms.items():
        out |= _norm(m, name, width)
    return out


def outer_shapes(m: Model, vocab: int, positions: int) -> dict[str, tuple[int, ...]]:
    """Return name -> shape for every parameter outside the layers."""
    assert m.hidden_size
    h = m.hidden_size
    out: dict[str, tuple[int, ...]] = {"wte.weight": (vocab, h)}
    if m.position == "learned":
        out["wpe.weight"] = (positions, h)
    if m.embed_layernorm:
        out |= _norm(m, "ln_emb", h)
    out |= _norm(m, "ln_f", h)
    if m.untie_embeddings_and_output_weights:
        out["lm_head.weight"] = (vocab, h)
    return out


def _norm(m: Model, name: str, width: int) -> dict[str, tuple[int, ...]]:
    out: dict[str, tuple[int, ...]] = {f"{name}.weight": (width,)}
    if m.norm_bias:
        out[f"{name}.bias"] = (width,)
    return out


def parameters(m: Model, vocab: int, positions: int) -> int:
    """Count weights and biases: with the padded `vocab` as in memory, the true one as saved."""
    assert m.num_layers
    layer = sum(map(math.prod, layer_shapes(m).values()))
    outer = sum(map(math.prod, outer_shapes(m, vocab, positions).values()))
    return m.num_layers * layer + outer


def attention_flops(m: Model, seq: int, windowed: bool = False) -> float:
    """Return FLOPs of a layer's attention per token, forward, over the full square or a window."""
    assert m.num_attention_heads
    keys = min(seq, m.window + 1) if windowed else seq  # of each query
    # A score and its share of the output: d multiplications and d additions each.
    return 4.0 * keys * m.num_attention_heads * m.head_dim


def head_flops(m: Model, vocab: int) -> float:
    """Return FLOPs of the head per token, forward."""
    assert m.hidden_size
    return 2.0 * m.hidden_size * vocab


def flops_per_token(m: Model, vocab: int, seq: int, recompute: str | None = None) -> float:
    """Return FLOPs per trained token: forward once, backward twice, plus what is recomputed.

    Only matrix products count, and attention over the full square, as in Megatron, or over the
    width of a window. With ffn = 4h and width = h this is 24 L h^2 (1 + S/6h + V/12Lh) times 3, or
    4 with full recomputation, which leaves out the head.
    """
    assert m.num_layers
    windowed = len(m.windowed_layers)
    attention = (m.num_layers - windowed) * attention_flops(m, seq)
    attention += windowed * attention_flops(m, seq, True)

    # A multiplication and an addition for each element of each matrix.
    elements = sum(map(math.prod, layer_matrices(m).values()))
    products = m.num_layers * 2 * elements

    # The backward pass has two products for each of the forward pass: for the inputs' gradients
    # and for the weights'.
    trained = 3 * (products + attention + head_flops(m, vocab))
    if recompute == "full":
        return trained + products + attention
    return trained + attention if recompute == "selective" else trained


def padded_size(size: int, divisible_by: int, tensor_parallel: int, pad_to: int | None) -> int:
    """Return `pad_to`, or without it `size` rounded up to divisible_by * tensor_parallel."""
    multiple = divisible_by * tensor_parallel
    if pad_to is None:
        return -(-size // multiple) * multiple
    if pad_to < size:
        raise SettingsError(f"{{pad_vocab_size_to={pad_to}}} is below the tokenizer's {size} ids")
    if pad_to % multiple:
        following = -(-pad_to // multiple) * multiple
        raise SettingsError(
            f"{{pad_vocab_size_to={pad_to}}} is not a multiple of {multiple} ({{make_vocab_size_divisible_by}} "
            f"{divisible_by} x tensor parallel size {tensor_parallel}); the next one is {following}"
        )
    return pad_to
