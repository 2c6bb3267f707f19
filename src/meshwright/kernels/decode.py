"""The parts of a network's step by one token: few rows, so that time goes into reading the weights.

    embed    the last tokens' embeddings, and their positions'
    linear   activation(norm(x) W + bias) + residual, one pass over W
    expand   activation(x W + bias) of several rows
    attend   rotation, the new key and value into the cache, attention over each row's own length
    pick     the likeliest or drawn tokens, with which rows end or the next step begins

Hand-written because torch needs four kernels where these take one, and a kernel of a few rows ends
before the next one could be launched; its attention has no kernel for rows of unequal lengths over
one cache. No gradients. Products and softmax are summed in float32 and rounded where the network
rounds: behind the norm, the product, the activation and the addition.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.device import NVIDIA
from meshwright.kernels import activation
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

__all__ = ["BAD", "NONE", "Draws", "Layer", "Rows", "Texts", "attend", "embed", "expand", "linear", "pick"]


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
    """Map x [B, K] to [B, N]; several rows are a library's work."""
    if len(x) == 1 and is_triton(x):
        from meshwright.kernels import decode_triton

        return decode_triton.linear(x, layer, residual)
    return plain_linear(x, layer, residual)


def expand(x: Tensor, layer: Layer) -> Tensor:
    """Return activation(x W^T + bias) of several rows."""
    if layer.kind == "gelu-tanh" and layer.bias is not None and x.device.type == NVIDIA:
        return torch._addmm_activation(layer.bias, x, layer.weight.t(), use_gelu=True)  # in one kernel of cuBLAS
    return activation.forward(layer.kind, F.linear(x, layer.weight, layer.bias))


def attend(qkv: Tensor, texts: Texts, sizes: Sizes, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return the attention [B, heads head_dim] of new tokens, whose keys and values join the cache.

    qkv [B, columns] as heads.py splits them; `rotation` are cosines and sines [positions, half] in
    float32.
    """
    if is_triton(qkv):
        from meshwright.kernels import decode_triton

        return decode_triton.attend(qkv, texts, sizes, rotation)
    return plain_attend(qkv, texts, sizes, rotation)
