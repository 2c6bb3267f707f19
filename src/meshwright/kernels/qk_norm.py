"""The split into heads of heads.py with norms of each head's queries and keys (QK-norm).

    q = rotate(norm(q))        k = rotate(norm(k))        v as it is

Hand-written because apart, these are two more passes over queries and keys in each direction, and
one to copy them. Here a head is read, normalised, rotated and written at once; backward goes back
through all of it and packs the three gradients in one pass. It keeps nothing of its own: it reads
the product's output, of which the values are views, and computes the statistics again. Between norm
and rotation numbers stay in float32, where the plain network rounds them to the weights' format.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.kernels import gradients, norm
from meshwright.kernels.fp8 import Into
from meshwright.kernels.heads import HeadSizes, Rotation, join_columns, rotate, rotation_of, split
from meshwright.kernels.norm import NormWeights, Operands, SavedRows
from meshwright.kernels.references import reference, upcast


class HeadNorms(NamedTuple):
    """The norms of queries and of keys; they differ in their weights and biases only."""

    q: NormWeights
    k: NormWeights

    @property
    def vectors(self) -> tuple[Tensor | None, ...]:
        """The parameters: the queries' weight and bias, the keys' weight and bias."""
        return *self.q[:2], *self.k[:2]


class PackedGradients(NamedTuple):
    """The gradient of qkv, and what is still to be summed for the gradients of vectors."""

    of_qkv: Tensor
    sums: Tensor | None  # [n, columns], of the bias that the product has added
    of_q: Tensor  # [1 or 2, n, head_dim], of the norm's weight and, if it has one, its bias
    of_k: Tensor


def split_and_norm_heads(
    qkv: Tensor,
    sizes: HeadSizes,
    rotation: Rotation | None,
    bias: Tensor | None,
    norms: HeadNorms,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do heads.split_heads with normalised queries and keys."""
    cos, sin = rotation if rotation is not None else (None, None)
    return _NormAndSplit.apply(qkv, bias, cos, sin, sizes, norms, *norms.vectors)  # type: ignore[no-any-return,no-untyped-call]


class _NormAndSplit(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        bias: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        sizes: HeadSizes,
        norms: HeadNorms,
        *vectors: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(qkv, cos, sin)
        ctx.parameter = bias
        ctx.sizes = sizes
        ctx.norms = norms
        return norm_and_split(qkv.detach(), sizes, rotation_of(cos, sin), norms)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, *angles = ctx.saved_tensors
        packed = pack(
            grads, qkv, ctx.sizes, rotation_of(*angles), ctx.norms, ctx.needs_input_grad[1]
        )
        of_bias = None
        if packed.sums is not None:
            of_bias = gradients.from_columns(ctx.parameter, packed.sums)
        of_norms = give_gradients(packed, ctx.norms, ctx.needs_input_grad[6:])
        return packed.of_qkv, of_bias, None, None, None, None, *of_norms


def norm_and_split(
    qkv: Tensor, sizes: HeadSizes, rotation: Rotation | None, norms: HeadNorms
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q and k, normalised and rotated, and v, a view of qkv."""
    q, k = norm_qk(qkv, sizes, rotation, norms)
    return q, k, split(qkv, sizes.per_group, sizes.head_dim)[2]


def give_gradients(
    packed: PackedGradients, norms: HeadNorms, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients of the norms' four vectors, or add them to the vectors' totals."""
    vectors = [
        vector if is_needed else None
        for vector, is_needed in zip(norms.vectors, needed, strict=True)
    ]
    out: list[Tensor | None] = []
    for pair, partials in ((vectors[:2], packed.of_q), (vectors[2:], packed.of_k)):
        # A norm without a bias has sums of its weight alone.
        found = gradients.from_several(pair[: len(partials)], partials)
        out += [*found, None][:2]
    return out


@reference("qk_norm.norm_qk")
def norm_qk(
    qkv: Tensor, sizes: HeadSizes, rotation: Rotation | None, norms: HeadNorms
) -> tuple[Tensor, Tensor]:
    """Return the queries [B, T, heads, head_dim] and keys [B, T, groups, head_dim]."""
    out = []
    for x, weights in zip(split(qkv, sizes.per_group, sizes.head_dim), norms, strict=False):
        rows = Operands(None, upcast(x).reshape(-1, sizes.head_dim), None, None, 0.0)
        y = norm.forward.plain(rows, _upcast_weights(weights))[1].view(x.shape)  # type: ignore[attr-defined]
        out.append((y if rotation is None else rotate(y, rotation)).to(qkv.dtype))
    return out[0], out[1]


@reference("qk_norm.pack", of=lambda grads, *_: grads[0])
def pack(
    grads: Sequence[Tensor],
    qkv: Tensor,
    sizes: HeadSizes,
    rotation: Rotation | None,
    norms: HeadNorms,
    summed: bool,
    into: Into | None = None,
) -> PackedGradients:
    """Return the gradient of qkv and partial sums; those of its columns if asked for."""
    heads = split(qkv, sizes.per_group, sizes.head_dim)
    back = None if rotation is None else (rotation[0], -rotation[1])
    through = []
    partials = []
    for x, grad, weights in zip(heads, grads, norms, strict=False):
        dy = upcast(grad)
        if back is not None:
            dy = rotate(dy, back)
        # The norm's statistics again, and then its gradients.
        weights = _upcast_weights(weights)
        rows = upcast(x).reshape(-1, sizes.head_dim)
        _, _, mean, rstd = norm.forward.plain(Operands(None, rows, None, None, 0.0), weights)  # type: ignore[attr-defined]
        saved = SavedRows(
            rows, mean, rstd, None, weights.weight, 0.0, weights.plus, False, rows.dtype
        )
        _, dx, sums = norm.backward.plain(None, dy.reshape(rows.shape), saved)  # type: ignore[attr-defined]
        through.append(dx.view(x.shape))
        partials.append(sums[: 1 if weights.bias is None else 2])
    wide = join_columns(through[0], through[1], upcast(grads[2]), sizes.per_group)
    of_qkv = wide.to(grads[0].dtype)
    return PackedGradients(
        of_qkv if into is None else into.fill(of_qkv),
        wide.sum((0, 1))[None] if summed else None,
        *partials,
    )


def _upcast_weights(weights: NormWeights) -> NormWeights:
    """Return the weights in float32, so that a norm's output is not rounded."""
    bias = None if weights.bias is None else upcast(weights.bias)
    return weights._replace(weight=upcast(weights.weight), bias=bias)
