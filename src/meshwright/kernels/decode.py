"""The parts of a network's step by one token: few rows, so that time goes into reading the weights.

    embed          the last tokens' embeddings, and their positions'
    linear         activation(norm(x) W + bias) + residual, one pass over W
    expand         activation(x W + bias) of several rows
    attend         norms of heads, rotation, the new key and value into the cache, attention over
                   each row's length
    choose_tokens  the likeliest or drawn tokens, with which rows end or the next step begins

Hand-written because torch needs four kernels where these take one, and a kernel of a few rows ends
before the next one could be launched; its attention has no kernel for rows of unequal lengths over
one cache. No gradients. Products and softmax are summed in float32 and rounded where the network
rounds: after a norm, the product, the activation and the addition.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.base.device import NVIDIA
from meshwright.kernels import activation, norm
from meshwright.kernels.draws import gumbel
from meshwright.kernels.heads import HeadSizes, rotate, split
from meshwright.kernels.norm import NormWeights, Operands
from meshwright.kernels.qk_norm import HeadNorms
from meshwright.kernels.references import reference, upcast


class DecodeLinear(NamedTuple):
    """A linear map [N, K] and what surrounds it."""

    weight: Tensor  # of a gated kind [2 N, K]: the gate, then what it gates
    bias: Tensor | None
    norm: NormWeights | None = None
    kind: str = ""  # of activation.py


class CachedTexts(NamedTuple):
    """The rows' places in the cache of a layer."""

    keys: Tensor  # [slots, room, groups, head_dim]
    values: Tensor
    slots: Tensor  # [B]
    used: Tensor  # [slots] tokens in the cache, the place of the new one
    longest: int  # above every row's `used`; decides how the work is split


class TextState(NamedTuple):
    """What the host does not see of the texts between two steps, one element per slot."""

    token: Tensor  # int64, the last one, whose keys and values are not in the cache yet
    used: Tensor  # int64, tokens in the cache
    limit: Tensor  # int64, tokens at which the text ends
    active: Tensor  # bool, whether it goes on


class Draws(NamedTuple):
    """How the slots' tokens are drawn; with temperature 0 the likeliest is taken."""

    temperature: Tensor  # float64
    key: Tensor  # int64, the stream of draws.py


# What is reported in the place of a token.
NONE = -1  # the row had ended
BAD = -2  # its logits were not finite


@reference("decode.embed", of=lambda state, slots, wte, wpe: wte)
def embed(state: TextState, slots: Tensor, wte: Tensor, wpe: Tensor | None) -> Tensor:
    """Return the embeddings [B, H] of the slots' last tokens."""
    x = F.embedding(state.token[slots], wte)
    return x if wpe is None else x + F.embedding(state.used[slots], wpe)


@reference("decode.choose_tokens")
def choose_tokens(
    logits: Tensor,
    vocab: int,
    slots: Tensor,
    state: TextState,
    eod: int,
    draws: Draws | None = None,
) -> Tensor:
    """Choose among the first `vocab` logits [B, padded], and begin the next step.

    Without `draws` the likeliest token is taken. Return what to report [B]: the token, NONE or BAD.
    """
    logits = logits[:, :vocab]
    active = state.active[slots]
    new = logits.argmax(-1)
    is_finite = logits.amax(-1).isfinite()  # amax is NaN if any logit is
    position = state.used[slots] + active
    if draws is not None:
        temperature = draws.temperature[slots]
        # The likeliest after Gumbel noise is a draw from the softmax.
        divisor = torch.where(temperature > 0, temperature, 1.0)
        scaled = logits.double() / divisor[:, None]
        drawn = (scaled + gumbel(draws.key[slots], position, vocab)).argmax(-1)
        new = torch.where(temperature > 0, drawn, new)
    state.token[slots] = new
    state.used[slots] = position
    # A row that has ended is computed on with the others, and reports nothing.
    has_room = position + 1 < state.limit[slots]
    state.active[slots] = active & is_finite & (new != eod) & has_room
    reported = torch.where(is_finite, new, BAD)
    return torch.where(active, reported, NONE)


def linear(x: Tensor, layer: DecodeLinear, residual: Tensor | None = None) -> Tensor:
    """Map x [B, K] to [B, N]; several rows are a library's work."""
    return linear_of_row(x, layer, residual) if len(x) == 1 else linear_of_rows(x, layer, residual)


def linear_of_rows(x: Tensor, layer: DecodeLinear, residual: Tensor | None = None) -> Tensor:
    """Return activation(norm(x) W^T + bias) + residual, by torch alone."""
    if layer.norm is not None:
        x = norm_rows(x, layer.norm)
    y = F.linear(x, layer.weight, layer.bias)
    if layer.kind:
        parts = activation.halves(layer.kind, upcast(y))
        y = activation.plain(layer.kind, parts).to(y.dtype)
    return y if residual is None else residual + y


linear_of_row = reference("decode.linear_of_row")(linear_of_rows)


def norm_rows(x: Tensor, weights: NormWeights) -> Tensor:
    """Return the norm of x over its last dimension, by torch alone."""
    operands = Operands(None, x.reshape(-1, x.shape[-1]), None, None, 0.0)
    _, y, *_ = norm.forward.plain(operands, weights)  # type: ignore[attr-defined]
    return y.view(x.shape)  # type: ignore[no-any-return]


def expand(x: Tensor, layer: DecodeLinear) -> Tensor:
    """Return activation(x W^T + bias) of several rows."""
    bias = layer.bias
    # cuBLAS does all of it in one kernel.
    if layer.kind == "gelu-tanh" and bias is not None and x.device.type == NVIDIA:
        return torch._addmm_activation(bias, x, layer.weight.t(), use_gelu=True)
    u = F.linear(x, layer.weight, bias)
    return activation.forward(layer.kind, u)


@reference("decode.attend")
def attend(
    qkv: Tensor,
    texts: CachedTexts,
    sizes: HeadSizes,
    rotation: tuple[Tensor, Tensor] | None,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Return the attention [B, heads head_dim] of new tokens, whose keys and values join the cache.

    qkv [B, columns] as heads.py splits them; `rotation` are cosines and sines [positions, half] in
    float32. Queries and keys are normalised before they are rotated, if at all.
    """
    slots = texts.slots
    used = texts.used[slots]
    q, k, v = split(qkv[:, None], sizes.per_group, sizes.head_dim)
    if norms is not None:
        q = norm_rows(q, norms.q)
        k = norm_rows(k, norms.k)
    if rotation is not None:
        cos, sin = rotation
        angles = cos[used][:, None, None], sin[used][:, None, None]
        q = rotate(q, angles)
        k = rotate(k, angles)
    # Each row's new place is behind its last one.
    texts.keys[slots, used] = k[:, 0]
    texts.values[slots, used] = v[:, 0]
    # Attend to the longest row's keys; each row sees its own, up to the new one.
    end = min(texts.longest + 1, texts.keys.shape[1])
    seen = torch.arange(end, device=qkv.device) <= used[:, None]
    o = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        texts.keys[slots, :end].transpose(1, 2),
        texts.values[slots, :end].transpose(1, 2),
        attn_mask=seen[:, None, None],
        enable_gqa=sizes.per_group > 1,
    )
    return o.transpose(1, 2).flatten(1)
