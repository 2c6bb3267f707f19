"""The parts of a network's step by one token: few rows, so that time goes into reading the weights.

    embed    the last tokens' embeddings, and their positions'
    linear   activation(norm(x) W + bias) + residual, one pass over W
    attend   rotation, the new key and value into the cache, attention over each row's own length
    pick     the likeliest or drawn tokens, with which rows end or the next step begins

Hand-written because torch needs four kernels where these take one, and a kernel of a few rows ends
before the next one could be launched; its attention has no kernel for rows of unequal lengths over
one cache. No gradients. Products and softmax are summed in float32 and rounded where the network
rounds: behind the norm, the product, the activation and the addition.
"""

from __future__ import annotations

from torch import Tensor

from meshwright.kernels.decode_plain import (
    BAD,
    NONE,
    Draws,
    Layer,
    Rows,
    Texts,
    plain_attend,
    plain_embed,
    plain_linear,
    plain_pick,
)
from meshwright.kernels.heads_plain import Sizes
from meshwright.kernels.twins import is_triton

FEW = 8

__all__ = ["BAD", "NONE", "Draws", "Layer", "Rows", "Texts", "attend", "embed", "linear", "pick"]


def embed(rows: Rows, slots: Tensor, wte: Tensor, wpe: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the embeddings [B, H] of the slots' last tokens, and `used` [B]."""
    if is_triton(wte):
        from meshwright.kernels import decode_triton

        return decode_triton.embed(rows, slots, wte, wpe)
    return plain_embed(rows, slots, wte, wpe)


def pick(logits: Tensor, vocab: int, slots: Tensor, rows: Rows, eod: int, draws: Draws | None = None) -> Tensor:
    """Choose among the first `vocab` logits [B, padded], and begin the next step.

    Without `draws` the likeliest token is taken. Return what to report [B]: the token, NONE or BAD.
    """
    if is_triton(logits):
        from meshwright.kernels import decode_triton

        return decode_triton.pick(logits, vocab, slots, rows, eod, draws)
    return plain_pick(logits, vocab, slots, rows, eod, draws)


def linear(x: Tensor, layer: Layer, residual: Tensor | None = None) -> Tensor:
    """Map x [B, K] to [B, N]; more rows than FEW are a library's work."""
    if len(x) <= FEW and is_triton(x):
        from meshwright.kernels import decode_triton

        return decode_triton.linear(x, layer, residual)
    return plain_linear(x, layer, residual)


def attend(qkv: Tensor, texts: Texts, sizes: Sizes, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return the attention [B, heads head_dim] of new tokens, whose keys and values join the cache.

    qkv [B, columns] as heads.py splits them; `rotation` are cosines and sines [positions, half] in
    float32.
    """
    if is_triton(qkv):
        from meshwright.kernels import decode_triton

        return decode_triton.attend(qkv, texts, sizes, rotation)
    return plain_attend(qkv, texts, sizes, rotation)
