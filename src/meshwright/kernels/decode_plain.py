"""Types that the parts of decode.py share, and its plain twin."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels import activation
from meshwright.kernels.draws import gumbel
from meshwright.kernels.heads_plain import Sizes, rotate, split
from meshwright.kernels.norm_plain import Join, NormWeights, plain_forward
from meshwright.kernels.twins import upcast


class Layer(NamedTuple):
    """A linear map [N, K] and what surrounds it."""

    weight: Tensor  # of a gated kind [2 N, K]: the gate, then what it gates
    bias: Tensor | None = None
    norm: NormWeights | None = None
    kind: str = ""  # of activation.py


class Texts(NamedTuple):
    """The rows' places in the cache of a layer."""

    keys: Tensor  # [slots, room, groups, head_dim]
    values: Tensor
    slots: Tensor  # [B]
    used: Tensor  # [B] tokens in the cache, the place of the new one
    longest: int  # above every row's `used`; decides how the work is split


class Rows(NamedTuple):
    """What the host does not see of the texts between two steps, one element per slot."""

    token: Tensor  # int64, the last one, whose keys and values are not in the cache yet
    used: Tensor  # int64, tokens in the cache
    limit: Tensor  # int64, tokens at which the text ends
    active: Tensor  # bool, whether it goes on


class Draws(NamedTuple):
    """How the slots' tokens are drawn; with temperature 0 the likeliest is taken."""

    temperature: Tensor  # float64
    key: Tensor  # int64, the stream of draws.py


NONE, BAD = -1, -2  # in the place of a token: the row had ended; its logits were not finite


def plain_embed(rows: Rows, slots: Tensor, wte: Tensor, wpe: Tensor | None) -> tuple[Tensor, Tensor]:
    used = rows.used[slots]
    x = F.embedding(rows.token[slots], wte)
    return (x if wpe is None else x + F.embedding(used, wpe)), used


def plain_pick(logits: Tensor, vocab: int, slots: Tensor, rows: Rows, eod: int, draws: Draws | None) -> Tensor:
    logits, active = logits[:, :vocab], rows.active[slots]
    new, is_finite = logits.argmax(-1), logits.amax(-1).isfinite()  # not if there is a NaN
    position = rows.used[slots] + active
    if draws is not None:
        temperature = draws.temperature[slots]
        scaled = logits.double() / torch.where(temperature > 0, temperature, 1.0)[:, None]
        drawn = (scaled + gumbel(draws.key[slots], position, vocab)).argmax(-1)
        new = torch.where(temperature > 0, drawn, new)
    rows.token[slots], rows.used[slots] = new, position
    rows.active[slots] = active & is_finite & (new != eod) & (position + 1 < rows.limit[slots])
    return torch.where(active, torch.where(is_finite, new, BAD), NONE)


def plain_linear(x: Tensor, layer: Layer, residual: Tensor | None = None) -> Tensor:
    if layer.norm is not None:
        x = plain_forward(Join(None, x, None, None, 0.0), layer.norm)[1]
    y = F.linear(x, layer.weight, layer.bias)
    if layer.kind:
        y = activation.plain(layer.kind, activation.halves(layer.kind, upcast(y))).to(y.dtype)
    return y if residual is None else residual + y


def plain_attend(qkv: Tensor, texts: Texts, sizes: Sizes, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
    q, k, v = split(qkv[:, None], sizes.per_group, sizes.head_dim)
    if rotation is not None:
        here = rotation[0][texts.used][:, None, None], rotation[1][texts.used][:, None, None]
        q, k = rotate(q, here), rotate(k, here)
    texts.keys[texts.slots, texts.used], texts.values[texts.slots, texts.used] = k[:, 0], v[:, 0]
    end = min(texts.longest + 1, texts.keys.shape[1])
    k, v = texts.keys[texts.slots, :end], texts.values[texts.slots, :end]
    seen = torch.arange(end, device=qkv.device) <= texts.used[:, None]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None], enable_gqa=sizes.per_group > 1)
    return o.transpose(1, 2).flatten(1)
