"""Splitting of attention's first product into heads, with rotary positions, and its gradient.

Hand-written because torch copies q, k and v, rotates them in five more passes, and goes back with
as many, one of which sums the bias's gradient. Here q, k and v are views of the product unless
they must be rotated, and backward packs the three gradients, rotated back, in one pass that also
sums the columns. As in activation.py, the product adds the bias, detached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.kernels import gradients
from meshwright.kernels.fp8 import Into
from meshwright.kernels.heads_plain import Rotation, Sizes, plain_backward, rotate, split
from meshwright.kernels.twins import is_triton


def split_heads(
    qkv: Tensor, sizes: Sizes, rotation: Rotation | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Split [B, T, columns] into q [B, T, heads, head_dim], k and v [B, T, groups, head_dim].

    qkv includes the bias, but not as an input of its gradient: that is this function's. What is
    returned may be a view of qkv.
    """
    cos, sin = rotation if rotation is not None else (None, None)
    return _Split.apply(qkv, bias, cos, sin, sizes)  # type: ignore[no-any-return,no-untyped-call]


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, bias: Tensor | None, cos: Tensor | None, sin: Tensor | None, sizes: Sizes
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.parameter, ctx.sizes = bias, sizes
        # Autograd would keep track of views of an input, for writes in place; nobody writes.
        return forward(qkv.detach(), sizes, _rotation(cos, sin))

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        rotation = _rotation(*ctx.saved_tensors)
        grad, partials = backward((dq, dk, dv), ctx.sizes, rotation, ctx.needs_input_grad[1])
        of_bias = None if partials is None else gradients.from_columns(ctx.parameter, partials)
        return grad, of_bias, None, None, None


def _rotation(cos: Tensor | None, sin: Tensor | None) -> Rotation | None:
    return None if cos is None or sin is None else (cos, sin)


def forward(qkv: Tensor, sizes: Sizes, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v, views of qkv where no element changes or moves."""
    if rotation is not None and is_triton(qkv):
        from meshwright.kernels import heads_triton

        q, k = heads_triton.rotate(qkv, sizes, rotation)
        return q, k, split(qkv, sizes.per_group, sizes.head_dim)[2]
    q, k, v = split(qkv, sizes.per_group, sizes.head_dim)
    return (q, k, v) if rotation is None else (rotate(q, rotation), rotate(k, rotation), v)


def backward(
    grads: Sequence[Tensor], sizes: Sizes, rotation: Rotation | None, summed: bool, into: Into | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of qkv and, if asked for, partial sums [n, columns] of it."""
    if is_triton(grads[0]):
        from meshwright.kernels import heads_triton

        return heads_triton.pack(grads, sizes, rotation, summed, into=into)
    grad, partials = plain_backward(grads, sizes, rotation, summed)
    return grad if into is None else into.fill(grad), partials
