"""Causal attention: torch's fused kernels, a plain reference to test them, positions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright import device as devices
from meshwright.kernels import dropout
from meshwright.kernels.heads import rotate, split
from meshwright.model.layers import Linear, Norm
from meshwright.settings.schema import Model

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


BLOCK = 128  # FlexAttention's mask block size
ROOM = 64  # places of a cache are a multiple of this


@dataclass
class Where:
    """Position of a forward pass in the run: all that randomness and positions may depend on."""

    samples: Tensor | None = None  # [B] global sample numbers; None is no dropout
    columns: Tensor | None = None  # [T] places within the sample; None counts from 0
    seed: int = 0
    first_sample: int = 0  # samples[0] on the host, which seeds the fused kernel without a sync
    position_ids: Tensor | None = None  # [B, T] if positions restart; None is `columns`
    documents: Tensor | None = None  # [B, T] numbers of documents; attention stays within one
    # Set if only a part of the network's work is done here:
    stream: Stream | None = None  # if the residual stream is laid out differently from attention
    length: int | None = None  # tokens that attention sees, if `columns` are only some of them
    heads: range | None = None  # of the model's heads
    cached: Cached | None = None  # generation: the texts that the rows continue


@dataclass
class Stream:
    """Sample and place of each row of the residual stream, [1, N]; position, if not the place."""

    samples: Tensor | None
    columns: Tensor
    position_ids: Tensor | None


@dataclass
class Shared:
    """Tensors that the layers of one forward pass share, made by `share`."""

    where: Where
    rotation: tuple[Tensor, Tensor] | None = None  # cosines and sines [1 or B, T, 1, rotating / 2]
    mask: Tensor | BlockMask | None = None  # None: causal; bool; float if ALiBi is added to the scores
    slopes: Tensor | None = None  # [heads] of ALiBi, if the kernel adds it


class Cache:
    """Keys and values of texts of up to `length` tokens, one in each slot.

    The buffers, [slots, room, groups, head_dim] per layer, are allocated when a layer first needs
    them, and never move. A slot's last place takes what belongs to no text, such as padding.
    """

    def __init__(self, slots: int, length: int) -> None:
        self.slots, self.length = slots, length
        self.room = (length // ROOM + 1) * ROOM
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def of_layer(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return a layer's buffers, for keys [B, T, groups, head_dim] such as these."""
        if layer not in self.layers:  # zeros, because a product with a masked NaN is NaN
            shape = self.slots, self.room, *like.shape[2:]
            self.layers[layer] = like.new_zeros(shape), like.new_zeros(shape)
        return self.layers[layer]

    def rearrange(self, rows: Tensor, used: int) -> None:
        """Let slot i continue the text of slot `rows[i]`, of which `used` tokens are known."""
        for buffers in self.layers.values():
            for x in buffers:
                x[: len(rows), :used] = x[rows, :used]


@dataclass
class Cached:
    """The texts that the rows of a forward pass continue; they may have different lengths."""

    cache: Cache
    slots: Tensor  # [B] of the rows
    used: Tensor  # [B] tokens of each text before this pass
    seen: int  # places of the cache that attention reads, above every row's last; 0: the texts begin here
    ends: Tensor | None = None  # [B] place in this pass of each row's last token, which `last_only` means
    at: Tensor | None = None  # [B T] the tokens' places in the flat cache, for all layers

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add a layer's new keys and values, and return all that attention reads."""
        keys, values = self.cache.of_layer(layer, k)
        if self.at is None:
            places = self.places(k.shape[1]).clamp(max=self.cache.room - 1)
            self.at = (self.slots[:, None] * self.cache.room + places).flatten()
        keys.flatten(0, 1)[self.at], values.flatten(0, 1)[self.at] = k.flatten(0, 1), v.flatten(0, 1)
        return (keys[self.slots, : self.seen], values[self.slots, : self.seen]) if self.seen else (k, v)

    def places(self, t: int) -> Tensor:
        """Return the places [B, T] in their texts of a pass's tokens."""
        return self.used[:, None] + torch.arange(t, device=self.used.device)


class Attention(nn.Module):
    def __init__(self, m: Model, layer: int, recompute: bool) -> None:
        super().__init__()
        assert m.hidden_size and m.num_attention_heads
        self.layer, self.head_dim, self.per_group = layer, m.head_dim, m.num_attention_heads // m.groups
        width = m.num_attention_heads * m.head_dim
        # Rows [group, its queries then k then v, head_dim].
        self.qkv = Linear(m.hidden_size, width + 2 * m.groups * m.head_dim, m.qkv_bias)
        self.ln_q = Norm(m, m.head_dim) if m.qk_layernorm else None
        self.ln_k = Norm(m, m.head_dim) if m.qk_layernorm else None
        self.attend = Attend(m, layer, recompute)
        self.proj = Linear(width, m.hidden_size, m.add_bias_linear)

    def forward(self, x: Tensor, shared: Shared) -> Tensor:
        qkv = self.qkv(x)
        q, k, v = split(qkv, self.per_group, self.head_dim)  # [B, T, heads or groups, head_dim]
        if self.ln_q is not None and self.ln_k is not None:
            q, k = self.ln_q(q), self.ln_k(k)
        if shared.rotation is not None:
            q, k = rotate(q, shared.rotation), rotate(k, shared.rotation)
        if shared.where.cached is not None:
            k, v = shared.where.cached.append(self.layer, k, v)
        return self.proj(self.attend(q, k, v, shared).flatten(2))  # type: ignore[no-any-return]


class Attend(nn.Module):
    """The attention kernel: q [B, T, heads, d], k and v [B, S, groups, d] to [B, T, heads, d]."""

    def __init__(self, m: Model, layer: int, recompute: bool) -> None:
        super().__init__()
        self.layer, self.recompute, self.p, self.impl = layer, recompute, m.attention_dropout, m.attention_impl

    def forward(self, q: Tensor, k: Tensor, v: Tensor, shared: Shared) -> Tensor:
        p = self.p if self.training and shared.where.samples is not None else 0.0
        if is_reference(self.impl, p, q.device):
            return self.run(reference, p, q, k, v, shared, p, self.layer)
        return self.run(fused, p, q, k, v, shared, p)

    def run(self, attend: Any, p: float, *arguments: Any) -> Tensor:
        """Run the kernel; selective recomputation keeps only q, k and v for the backward pass."""
        if self.recompute and self.training:
            return checkpoint(attend, *arguments, use_reentrant=False, preserve_rng_state=p > 0)  # type: ignore[no-any-return]
        return attend(*arguments)  # type: ignore[no-any-return]


def is_reference(impl: str, p: float, device: torch.device) -> bool:
    """Whether the reference runs: on a CPU, fused dropout is as slow and sees the micro-batch."""
    return impl == "reference" or (impl == "auto" and p > 0 and device.type == "cpu")


def seed_dropout(where: Where, layer: int, device: torch.device, drawn: int = 0) -> None:
    """Seed the device's generator, from which a layer's fused kernel draws its dropout.

    The seed is a hash of (seed, first sample of the micro-batch, first head), from which each layer
    draws `drawn` numbers after the layer before it. So dropout is the same on resume, on
    recomputation and in every pipeline, but not with another micro-batch size. While a CUDA graph
    is captured nothing can be seeded: all its layers draw one after the other, which is the same,
    and each replay is seeded as layer 0. A generator that does not count its draws is seeded for
    each layer.
    """
    if devices.is_capturing(device):
        return
    mixed = where.seed * 0x9E3779B97F4A7C15 + where.first_sample * 0x94D049BB133111EB
    mixed += (where.heads.start if where.heads else 0) * 0xD6E8FEB86659FD93
    if devices.counts_draws(device):
        devices.seed(device, mixed & 0x7FFFFFFFFFFFFFFF, layer * drawn)
    else:
        devices.seed(device, (mixed + layer * 0xBF58476D1CE4E5B9) & 0x7FFFFFFFFFFFFFFF)


def fused(q: Tensor, k: Tensor, v: Tensor, shared: Shared, p: float) -> Tensor:
    """Attend with q [B, T, n, d] to k, v [B, S, g, d]: query t sees keys up to t + S - T."""
    t, s, grouped = q.shape[1], k.shape[1], q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if shared.mask is None:
        o = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=t == s and t > 1, enable_gqa=grouped)
    elif isinstance(shared.mask, Tensor):
        mask = shared.mask if shared.mask.dtype is torch.bool else shared.mask.to(q.dtype)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p, enable_gqa=grouped)
    else:
        slopes = shared.slopes

        def add_slope(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            assert slopes is not None
            return score + slopes[h] * (j - i)

        scores = add_slope if slopes is not None else None
        o = flex_kernel()(q, k, v, scores, block_mask=shared.mask, enable_gqa=grouped)
    return o.transpose(1, 2)


def flex_kernel() -> Any:
    """Return FlexAttention, which compiled blocks compile with all else, and others by itself."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if torch.compiler.is_compiling() else compiled_flex()


@functools.cache
def compiled_flex() -> Any:
    """Return FlexAttention compiled, which otherwise would keep every score in memory.

    New functions with the same code and other tensors, as each call brings them, compile nothing.
    """
    from torch.nn.attention.flex_attention import flex_attention

    return compile_each_shape(flex_attention)


def compile_each_shape(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function for each of its shapes, of which torch would allow 8."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)
    return torch.compile(function, dynamic=False)


def reference(q: Tensor, k: Tensor, v: Tensor, shared: Shared, p: float, layer: int) -> Tensor:
    """Softmax attention; dropout is a function of (seed, layer, sample, head, query, key)."""
    t, s, where = q.shape[1], k.shape[1], shared.where
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    upcast = torch.float64 if q.dtype is torch.float64 else torch.float32
    scores = torch.einsum("btnd,bsnd->bnts", q.to(upcast), k.to(upcast)) * q.shape[-1] ** -0.5
    seen: Any = shared.mask
    if seen is None:
        seen = torch.ones(t, s, dtype=torch.bool, device=q.device).tril(s - t)
    scores = scores.masked_fill(~seen, float("-inf")) if seen.dtype is torch.bool else scores + seen
    probabilities = scores.softmax(-1)
    if p > 0:
        assert where.samples is not None and where.columns is not None
        first = where.heads.start if where.heads else 0
        heads = torch.arange(first, first + q.shape[2], device=q.device)[:, None]
        rows = dropout.rows(where.seed, where.samples[:, None, None], heads, where.columns)
        probabilities = dropout.dropout(probabilities, dropout.at_site(rows, ~layer), p)
    return torch.einsum("bnts,bsnd->btnd", probabilities.to(v.dtype), v)


def share(m: Model, where: Where, tokens: Tensor, dtype: torch.dtype, flex: bool) -> Shared:
    """Make the positions and masks of one forward pass; fill in `where.columns`.

    `flex` allows FlexAttention, which is compiled even where blocks are not.
    """
    t, device = tokens.shape[1], tokens.device
    length = where.length or t
    if where.columns is None:
        where.columns = torch.arange(t, device=device)
    shared, cached = Shared(where), where.cached
    if cached is not None and where.position_ids is None:  # padding behind a text has a position, too
        where.position_ids = cached.places(t).clamp(max=cached.cache.length - 1)
    if m.position == "rope":
        ids = (where.columns if where.position_ids is None else where.position_ids).view(-1, t, 1, 1)
        shared.rotation = rotations(m, ids, torch.float64 if dtype is torch.float64 else torch.float32)
    alibi = m.position == "alibi"
    marked = alibi or where.documents is not None
    flex = flex and devices.has_kernels(device)  # it can be trained nowhere else
    if cached is not None and cached.seen:  # is_causal would align cached keys wrongly
        distance = torch.arange(cached.seen, device=device) - cached.places(t)[..., None]
        shared.mask = dense(m, where, distance, dtype)
    elif flex and marked and cached is None and not (m.attention_dropout and where.samples is not None):
        shared.mask = blocks(where.documents, length, device)
        shared.slopes = slopes_of(m, where.heads, device).float() if alibi else None
    elif marked:
        places = torch.arange(length, device=device)
        shared.mask = dense(m, where, (places - places[:, None])[None], dtype)
    return shared


def blocks(documents: Tensor | None, t: int, device: torch.device) -> BlockMask:
    """Make a mask for FlexAttention, which skips blocks of scores that no query sees.

    Document numbers never decrease along a sample, so a block's first and last suffice; torch's
    create_block_mask would evaluate every score.
    """
    from torch.nn.attention.flex_attention import BlockMask

    def seen(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) if documents is None else (i >= j) & (documents[batch, i] == documents[batch, j])

    count = -(-t // BLOCK)
    number = torch.arange(count, device=device)
    some, full = (number[:, None] >= number)[None, None], (number[:, None] > number)[None, None]  # [1, 1, query, key]
    if documents is not None:
        first = documents[:, ::BLOCK]
        last = documents[:, (BLOCK * (number + 1) - 1).clamp(max=t - 1)]
        some = some & (last[:, None, None, :] >= first[:, None, :, None])
        full = full & (first[:, None, None, :] == last[:, None, :, None])

    def indices(chosen: Tensor) -> tuple[Tensor, Tensor]:
        order = chosen.int().argsort(dim=-1, descending=True, stable=True)
        return chosen.sum(-1, dtype=torch.int32), order.int()

    return BlockMask.from_kv_blocks(
        *indices(some & ~full), *indices(full), BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(t, t)
    )


def dense(m: Model, where: Where, distance: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask [1 or B, 1 or heads, T, S]: bool, or float to be added to the scores.

    `distance` [1 or B, T, S] is the key's place minus the query's, at most 0 if the key is seen.
    """
    distance = distance[:, None]
    seen = distance <= 0
    if where.documents is not None:
        seen = seen & (where.documents[:, None, :, None] == where.documents[:, None, None, :])
    if m.position != "alibi":
        return seen
    exact = torch.float64 if dtype is torch.float64 else torch.float32
    bias = slopes_of(m, where.heads, distance.device).to(exact)[:, None, None] * distance
    return bias.masked_fill(~seen, float("-inf"))


def slopes_of(m: Model, heads: range | None, device: torch.device) -> Tensor:
    every = slopes(m.num_attention_heads or 1, device)
    return every if heads is None else every[heads.start : heads.stop]


@functools.cache  # a copy from the host would wait for the device
def slopes(heads: int, device: torch.device) -> Tensor:
    """Return ALiBi's slopes (Press et al. 2021): 2^(-8/n), its square, and so on.

    Heads beyond a power of two take every other slope of the next power.
    """
    power = 2 ** math.floor(math.log2(heads))
    first = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    rest = [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(heads - power)]
    with torch.inference_mode(False):  # training may use them too
        return torch.tensor(first + rest, dtype=torch.float64, device=device)


def rotations(m: Model, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of position x frequency; frequencies fall from 1 to 1 / base."""
    powers = torch.arange(0, m.rotating, 2, dtype=dtype, device=ids.device) / m.rotating
    angles = ids.to(dtype) * (1.0 / m.rotary_base**powers)
    return angles.cos(), angles.sin()
