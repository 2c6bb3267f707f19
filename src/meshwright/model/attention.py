"""Causal attention: torch's fused kernel, and the plain twin it is tested against."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels import dropout


@dataclass
class Where:
    """Where the numbers of a forward pass stand in the run: all that randomness may depend on."""

    samples: Tensor | None = None  # [B] global sample numbers; None: no dropout
    positions: Tensor | None = None  # [T] positions within the sample
    seed: int = 0
    first_sample: int = 0  # samples[0] on the host, to seed the fused kernel without waiting for the device
    caches: dict[int, Cache] = field(default_factory=dict)  # generation: layer -> keys and values so far

    @functools.cached_property
    def rows(self) -> Tensor:
        """[B, T] hashes of (seed, sample, position), shared by every dropout of the residual stream."""
        assert self.samples is not None and self.positions is not None
        return dropout.rows(self.seed, self.samples[:, None], self.positions)


class Cache:
    """Keys and values of the tokens seen so far, in buffers of the full length: [B, length, heads, head_dim]."""

    def __init__(self, batch: int, length: int) -> None:
        self.batch, self.length, self.used = batch, length, 0
        self.k = self.v = torch.empty(0)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.used == 0:
            self.k, self.v = (x.new_empty(self.batch, self.length, *x.shape[2:]) for x in (k, v))
        end = self.used + k.shape[1]
        self.k[:, self.used : end], self.v[:, self.used : end] = k, v
        self.used = end
        return self.k[:, :end], self.v[:, :end]


def attend(q: Tensor, k: Tensor, v: Tensor, p: float, impl: str, layer: int, where: Where) -> Tensor:
    """q [B, T, n, d] over k, v [B, S, n, d] with S >= T: query t sees keys up to t + S - T. Returns [B, T, n, d]."""
    if impl == "reference" or (impl == "auto" and p > 0 and q.device.type == "cpu"):
        return reference(q, k, v, p, layer, where)
    return fused(q, k, v, p, layer, where)


def fused(q: Tensor, k: Tensor, v: Tensor, p: float, layer: int, where: Where) -> Tensor:
    """torch's scaled_dot_product_attention.

    Its dropout draws from the device's generator, which is seeded here from (seed, layer, first sample of the
    micro-batch): equal on resume and when recomputed, not equal to another micro-batch size.
    """
    if p > 0:
        mixed = where.seed * 0x9E3779B97F4A7C15 + layer * 0xBF58476D1CE4E5B9 + where.first_sample * 0x94D049BB133111EB
        (torch.cuda if q.device.type == "cuda" else torch.random).manual_seed(mixed & 0x7FFFFFFFFFFFFFFF)
    t, s = q.shape[1], k.shape[1]
    # A mask is only needed when several new tokens follow cached ones; "causal" alone would align them at the start.
    mask = torch.ones(t, s, dtype=torch.bool, device=q.device).tril(s - t) if 1 < t < s else None
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p, is_causal=t == s and t > 1)
    return o.transpose(1, 2)


def reference(q: Tensor, k: Tensor, v: Tensor, p: float, layer: int, where: Where) -> Tensor:
    """Softmax of scaled scores, written out; dropout is a function of (seed, layer, sample, head, query, key)."""
    t, s = q.shape[1], k.shape[1]
    upcast = torch.float64 if q.dtype is torch.float64 else torch.float32
    scores = torch.einsum("btnd,bsnd->bnts", q.to(upcast), k.to(upcast)) * q.shape[-1] ** -0.5
    later = torch.ones(t, s, dtype=torch.bool, device=q.device).triu(s - t + 1)
    probabilities = scores.masked_fill(later, float("-inf")).softmax(-1)
    if p > 0:
        assert where.samples is not None and where.positions is not None
        heads = torch.arange(q.shape[2], device=q.device)[:, None]
        rows = dropout.rows(where.seed, where.samples[:, None, None], heads, where.positions)
        probabilities = dropout.dropout(probabilities, rows, ~layer, p)
    return torch.einsum("bnts,bsnd->btnd", probabilities.to(v.dtype), v)
