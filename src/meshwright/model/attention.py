"""Causal attention: torch's fused kernels, a CPU's products, and a plain reference to test them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright.base import device as devices
from meshwright.config.schema import Model
from meshwright.kernels import causal, dropout
from meshwright.kernels.heads import rotate, split
from meshwright.model.kind import uses_reference
from meshwright.model.layers import Linear, Norm
from meshwright.model.positions import Mask, Positions, Shared


class Attention(nn.Module):
    def __init__(self, m: Model, layer: int, recompute: bool) -> None:
        super().__init__()
        assert m.hidden_size and m.num_attention_heads
        self.layer = layer
        self.head_dim = m.head_dim
        self.per_group = m.num_attention_heads // m.groups
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
            q = self.ln_q(q)
            k = self.ln_k(k)
        if shared.rotation is not None:
            q = rotate(q, shared.rotation)
            k = rotate(k, shared.rotation)
        cached = shared.where.cached
        if cached is not None:
            k, v = cached.append(self.layer, k, v)
        o = self.attend(q, k, v, shared)
        return self.proj(o.flatten(2))  # type: ignore[no-any-return]


class Attend(nn.Module):
    """The attention kernel: q [B, T, heads, d], k and v [B, S, groups, d] to [B, T, heads, d]."""

    def __init__(self, m: Model, layer: int, recompute: bool) -> None:
        super().__init__()
        self.layer = layer
        self.recompute = recompute
        self.p = m.attention_dropout
        self.impl = m.attention_impl
        self.windowed = layer in m.windowed_layers

    def forward(self, q: Tensor, k: Tensor, v: Tensor, shared: Shared) -> Tensor:
        where = shared.where
        p = 0.0
        if self.training and where.samples is not None:
            p = self.p
        mask = shared.window_mask if self.windowed else shared.mask
        if uses_reference(self.impl, p, q.device.type):
            return self.run(reference, p, q, k, v, mask, where, p, self.layer)
        # Our own kernel for CPUs has neither masks nor dropout.
        if self.impl == "auto" and mask is None and p == 0 and causal.suits(q, k):
            return self.run(causal.attend, p, q, k, v)
        if self.recompute or shared.kept is not None:
            return self.run_fused(q, k, v, mask, shared, p)
        return fused(q, k, v, mask, shared.slopes, p)

    def run_fused(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, shared: Shared, p: float
    ) -> Tensor:
        """Run the kernel of a layer that is recomputed, whole or in its attention."""
        if shared.kept is not None:
            with shared.kept.used():
                return fused(q, k, v, mask, shared.slopes, p)
        if stores_scores(q, k, mask):
            return self.run(fused, p, q, k, v, mask, shared.slopes, p)
        return fused(q, k, v, mask, shared.slopes, p)

    def run(self, attend: Any, p: float, *arguments: Any) -> Tensor:
        """Run the kernel; selective recomputation keeps only q, k and v for the backward pass."""
        if self.recompute and self.training:
            return checkpoint(attend, *arguments, use_reentrant=False, preserve_rng_state=p > 0)  # type: ignore[no-any-return]
        return attend(*arguments)  # type: ignore[no-any-return]


def stores_scores(q: Tensor, k: Tensor, mask: Mask) -> bool:
    """Return whether torch attends by products and a softmax, which selective recomputation saves.

    Its fused kernels keep a number for each query instead, so nothing is to be saved there.
    """
    if not devices.has_kernels(q.device) or q.dtype is torch.float64:
        return True
    grouped = q.shape[2] != k.shape[2]
    return grouped and (q.dtype is torch.float32 or isinstance(mask, Tensor))


def seed_dropout(where: Positions, layer: int, device: torch.device, drawn: int = 0) -> None:
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
    # Odd 64-bit multipliers, as in splitmix64: they spread numbers that are near over all bits.
    mixed = where.seed * 0x9E3779B97F4A7C15 + where.first_sample * 0x94D049BB133111EB
    mixed += (where.heads.start if where.heads else 0) * 0xD6E8FEB86659FD93
    # Only 63 bits of the hash are the seed: it is not negative as a signed number either.
    if devices.counts_draws(device):
        devices.seed_generator(device, mixed & 0x7FFFFFFFFFFFFFFF, layer * drawn)
    else:
        devices.seed_generator(device, (mixed + layer * 0xBF58476D1CE4E5B9) & 0x7FFFFFFFFFFFFFFF)


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Mask, slopes: Tensor | None, p: float) -> Tensor:
    """Attend with q [B, T, n, d] to k, v [B, S, g, d]; without a mask T must be S or 1.

    Query t then sees the keys up to t + S - T.
    """
    t = q.shape[1]
    s = k.shape[1]
    grouped = q.shape[2] != k.shape[2]
    # torch's kernels take [B, heads, T, d]; these are views of the layout that the products make.
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if mask is None:
        # is_causal aligns query 0 with key 0; a single query may see every key.
        o = F.scaled_dot_product_attention(
            q, k, v, dropout_p=p, is_causal=t == s and t > 1, enable_gqa=grouped
        )
    elif isinstance(mask, Tensor):
        mask = mask if mask.dtype is torch.bool else mask.to(q.dtype)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p, enable_gqa=grouped)
    else:

        def add_slope(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            assert slopes is not None
            return score + slopes[h] * (j - i)

        scores = add_slope if slopes is not None else None
        o = flex_kernel()(q, k, v, scores, block_mask=mask, enable_gqa=grouped)
    return o.transpose(1, 2)


def flex_kernel() -> Any:
    """Return FlexAttention: as it is for a block that is being compiled, else compiled alone."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if torch.compiler.is_compiling() else compiled_flex()


@functools.cache
def compiled_flex() -> Any:
    """Return FlexAttention compiled: otherwise it would keep every score in memory.

    Each call brings new functions for mask and scores. Since their code is the same as before, and
    only the tensors differ, nothing is compiled again.
    """
    from torch.nn.attention.flex_attention import flex_attention

    return compile_each_shape(flex_attention)


def compile_each_shape(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function anew for each shape, up to 32 of them: torch alone would stop at 8."""
    allow_shapes(0)
    return torch.compile(function, dynamic=False)


def allow_shapes(more: int) -> None:
    """Let torch compile a function for 32 shapes and so many more before it gives up."""
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, 32 + more)
    # The sum over all functions with the same code.
    limits.accumulated_recompile_limit = max(
        limits.accumulated_recompile_limit, limits.recompile_limit
    )


def reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, where: Positions, p: float, layer: int
) -> Tensor:
    """Softmax attention; dropout is a function of (seed, layer, sample, head, query, key)."""
    t = q.shape[1]
    s = k.shape[1]
    # A group's keys and values, for each head that reads them.
    per_group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(per_group, dim=2) for x in (k, v))

    # Scores [B, heads, T, S], in float32 or float64.
    upcast = torch.float64 if q.dtype is torch.float64 else torch.float32
    scores = torch.einsum("btnd,bsnd->bnts", q.to(upcast), k.to(upcast))
    scores = scores * q.shape[-1] ** -0.5

    # The last query sees every key, so the diagonal begins at s - t.
    seen: Any = mask
    if seen is None:
        seen = torch.ones(t, s, dtype=torch.bool, device=q.device)
        seen = seen.tril(s - t)
    is_bias = seen.dtype is not torch.bool  # ALiBi's, with -inf where nothing is seen
    scores = scores + seen if is_bias else scores.masked_fill(~seen, float("-inf"))
    probabilities = scores.softmax(-1)

    if p > 0:
        assert where.samples is not None and where.columns is not None
        # A tensor rank has some of the heads; they are hashed by their numbers in the model.
        first = where.heads.start if where.heads else 0
        heads = torch.arange(first, first + q.shape[2], device=q.device)
        samples = where.samples[:, None, None]
        rows = dropout.rows(where.seed, samples, heads[:, None], where.columns)
        # ~layer is no site of the hidden states' dropout, whose numbers begin at 0.
        rows = dropout.at_site(rows, ~layer)
        probabilities = dropout.dropout(probabilities, rows, p)
    return torch.einsum("bnts,bsnd->btnd", probabilities.to(v.dtype), v)
