"""Causal attention in bfloat16 on a CPU, out of batched products.

Hand-written because torch's kernel for CPUs reaches a fraction of the speed of oneDNN's products,
above all in its backward pass. A block of queries sees only the keys up to its end. The backward
pass computes the probabilities again, so only q, k, v and a number for each query are kept.

A product rounds its sums to bfloat16, which would make a score of 30 wrong by up to 0.06. So the
scores are computed twice: first only to find each query's largest, which the second product
subtracts before it rounds. The scores near the largest, which make up the result, are then small.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

BLOCK = 128  # queries
SCORES = 1 << 22  # scores of a block that are held at once, but at least one sample's
LENGTHS = range(64, 1025)  # of sequences, where this is faster than torch's kernel


@functools.cache
def has_products() -> bool:
    """Return whether oneDNN has AVX-512's instructions for products of bfloat16.

    For AMX, torch's kernel has a form of its own, beside which this one is rarely faster.
    """
    # The name is missing where torch was built for another kind of CPU.
    known: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(known.get("avx512_bf16") and not known.get("amx_bf16"))


def suits(q: Tensor, k: Tensor) -> bool:
    """Return whether `attend` is faster than torch's for q [B, T, n, d] and k [B, S, g, d]."""
    if q.device.type != "cpu" or q.dtype is not torch.bfloat16:
        return False
    if q.shape[1] != k.shape[1] or k.shape[1] not in LENGTHS:
        return False
    return has_products() and not torch.compiler.is_compiling()


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend with q [B, T, n, d] to the keys and values [B, T, g, d] up to each query's place."""
    return _Causal.apply(q, k, v)  # type: ignore[no-any-return,no-untyped-call]


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, t, n, _ = q.shape
        o = q.new_empty(q.shape)
        largest = q.new_empty(b, n, t, 1)
        scores = ScoreBlocks(q)
        for samples in scores.samples:
            keys = by_head(k[samples], n)
            values = by_head(v[samples], n)
            offsets = largest[samples].flatten(0, 1)
            for rows, seen in scores.blocks:
                queries = by_head(q[samples, rows], n)
                seen_keys = keys[:, seen]
                # The first product of the two: only for the largest score of each query.
                found = scores.of(queries, seen_keys)
                torch.amax(found, -1, keepdim=True, out=offsets[:, rows])
                p = scores.probabilities(queries, seen_keys, offsets[:, rows])
                put_by_token(o[samples, rows], p @ values[:, seen])
        ctx.save_for_backward(q, k, v, largest)
        return o

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        q, k, v, largest = ctx.saved_tensors
        n = q.shape[2]
        of_q = q.new_empty(q.shape)
        of_k = k.new_empty(k.shape)
        of_v = v.new_empty(v.shape)
        # Scores and their gradients, each in a memory of its own.
        scores = ScoreBlocks(q)
        gradients = ScoreBlocks(q)
        for samples in scores.samples:
            keys = by_head(k[samples], n)
            values = by_head(v[samples], n)
            offsets = largest[samples].flatten(0, 1)
            dk = torch.empty_like(keys)
            dv = torch.empty_like(values)
            # From the last queries on: they see all keys, and so set dk and dv. Others add.
            for rows, seen in reversed(scores.blocks):
                first = seen.stop == q.shape[1]
                queries = by_head(q[samples, rows], n)
                seen_keys = keys[:, seen]
                p = scores.probabilities(queries, seen_keys, offsets[:, rows])
                # Through the product with the values.
                do = by_head(grad[samples, rows], n)
                dp = torch.bmm(do, values[:, seen].mT, out=gradients.room(p.shape))
                add_product(dv[:, seen], p.mT, do, 1.0, first)
                # In place of dp, which nothing reads again.
                ds = torch._softmax_backward_data(dp, p, -1, p.dtype, grad_input=dp)
                add_product(dk[:, seen], ds.mT, queries, scores.scale, first)
                dq = torch.empty_like(queries)
                add_product(dq, ds, seen_keys, scores.scale, True)
                put_by_token(of_q[samples, rows], dq)
            put_by_token(of_k[samples], dk)
            put_by_token(of_v[samples], dv)
        return of_q, of_k, of_v


class ScoreBlocks:
    """The blocks of scores of one call, which come one after the other into the same memory.

    `samples` lists the samples whose scores are computed together, `blocks` the queries of each
    block and the keys that they see.
    """

    def __init__(self, q: Tensor) -> None:
        b, t, n, d = q.shape
        self.scale = d**-0.5
        # As many samples at once as keep their scores within the memory meant for them.
        size = min(BLOCK, t)
        sample_scores = n * size * t
        together = min(b, max(1, SCORES // sample_scores))
        self.samples = [slice(i, i + together) for i in range(0, b, together)]
        self.blocks = []
        for begin in range(0, t, size):
            end = begin + size
            seen = slice(min(end, t))
            self.blocks.append((slice(begin, end), seen))
        self.memory = q.new_empty(together * sample_scores)
        # Added to the scores of a block's own keys, which hides those after each query.
        later = q.new_full((size, size), float("-inf"))
        self.later = later.triu(1)

    def room(self, shape: Sequence[int]) -> Tensor:
        return self.memory[: torch.Size(shape).numel()].view(shape)

    def of(self, q: Tensor, k: Tensor, offsets: Tensor | None = None) -> Tensor:
        """Return the scores of a block's queries [N, rows, d] minus their offsets [N, rows, 1]."""
        rows = q.shape[1]
        seen = k.shape[1]
        scores = self.room((len(q), rows, seen))
        if offsets is None:
            torch.baddbmm(scores, q, k.mT, beta=0, alpha=self.scale, out=scores)
        else:
            # The product adds to what is there, so that the offset is subtracted before it rounds.
            torch.neg(offsets.expand_as(scores), out=scores)
            scores.baddbmm_(q, k.mT, alpha=self.scale)
        scores[..., seen - rows :].add_(self.later[:rows, :rows])
        return scores

    def probabilities(self, q: Tensor, k: Tensor, offsets: Tensor) -> Tensor:
        scores = self.of(q, k, offsets)
        return torch.softmax(scores, -1, out=scores)


def by_head(x: Tensor, heads: int) -> Tensor:
    """Copy [B, T, g, d] to [B x heads, T, d]: a group once for each head that reads it."""
    b, t, groups, d = x.shape
    by_group = x.transpose(1, 2).unsqueeze(2)
    each = by_group.expand(b, groups, heads // groups, t, d)
    return each.reshape(b * heads, t, d)


def put_by_token(whole: Tensor, part: Tensor) -> None:
    """Copy [B x heads, T, d] into [B, T, g, d], where heads of a group are summed."""
    b, t, groups, d = whole.shape
    each = part.view(b, groups, -1, t, d)
    # A sum over one head would be another pass over memory.
    by_group = each[:, :, 0]
    if each.shape[2] > 1:
        by_group = each.sum(2)
    whole.copy_(by_group.transpose(1, 2))


def add_product(total: Tensor, a: Tensor, b: Tensor, scale: float, first: bool) -> None:
    torch.baddbmm(total, a, b, beta=0 if first else 1, alpha=scale, out=total)
