"""Parameters and floating-point operations from a configuration alone. No torch."""

from __future__ import annotations

from meshwright.config import Model


def parameters(m: Model, vocab: int, positions: int) -> int:
    """Weights and biases; `vocab` is the padded size for Megatron's printed count, the true one for a saved model."""
    assert m.num_layers and m.hidden_size and m.num_attention_heads
    h, width = m.hidden_size, m.num_attention_heads * m.head_dim
    attention = 3 * width * (h + 1) + h * (width + 1)
    mlp = m.ffn * (h + 1) + h * (m.ffn + 1)
    head = vocab * h if m.untie_embeddings_and_output_weights else 0
    return vocab * h + positions * h + m.num_layers * (attention + mlp + 4 * h) + 2 * h + head


def flops_per_token(m: Model, vocab: int, seq: int, recompute: bool = False) -> float:
    """Of training: forward once, backward twice, and once more when activations are recomputed.

    Matrix products only, attention counted over the full square as Megatron does:
    with ffn = 4h and width = h this is 24 L h^2 (1 + S/6h + V/12Lh) times 3 or 4, the recomputation leaving out the head.
    """
    assert m.num_layers and m.hidden_size and m.num_attention_heads
    h, width = m.hidden_size, m.num_attention_heads * m.head_dim
    layer = 2 * (3 * h * width + width * h + 2 * h * m.ffn) + 4 * seq * width
    return (4 if recompute else 3) * m.num_layers * layer + 3 * 2 * h * vocab
