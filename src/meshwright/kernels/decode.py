"""The parts of a network's step by one token: few rows, so that time goes into reading the weights.

    linear   activation(norm(x) W + bias) + residual, one pass over W
    attend   rotation, the new key and value into the cache, attention over each row's own length

Hand-written because torch needs four kernels where these take one, and a kernel of a few rows ends
before the next one could be launched; its attention has no kernel for rows of unequal lengths over
one cache. No gradients. Products and softmax are summed in float32 and rounded where the network
rounds: behind the norm, the product, the activation and the addition.
"""

from __future__ import annotations

from torch import Tensor

from meshwright.kernels.decode_plain import Layer, Texts, plain_attend, plain_linear
from meshwright.kernels.heads_plain import Sizes
from meshwright.kernels.twins import is_triton

__all__ = ["FEW", "Layer", "Texts", "attend", "linear", "plain_attend", "plain_linear"]

FEW = 16  # most rows for which `linear` is faster than a library's product


def linear(x: Tensor, layer: Layer, residual: Tensor | None = None) -> Tensor:
    """Map x [B, K] to [B, N]."""
    if is_triton(x):
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
