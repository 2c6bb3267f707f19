"""Splitting of attention's first product into heads, with rotary positions, and its gradient.

Hand-written because torch copies q, k and v, rotates them in five more passes, and goes back with
as many, one of which sums the bias's gradient. Here q, k and v are views of the product unless
they must be rotated, and backward packs the three gradients, rotated back, in one pass that also
sums the columns. As in activation.py, the product adds the bias, detached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.kernels import gradients
from meshwright.kernels.fp8 import Into
from meshwright.kernels.references import reference, upcast

Rotation = tuple[Tensor, Tensor]  # cosines and sines [1 or B, T, 1, rotating / 2]


class HeadSizes(NamedTuple):
    """Sizes of the columns [groups, per_group queries then key then value, head_dim]."""

    groups: int
    per_group: int
    head_dim: int


def split_heads(
    qkv: Tensor, sizes: HeadSizes, rotation: Rotation | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Split [B, T, columns] into q [B, T, heads, head_dim], k and v [B, T, groups, head_dim].

    The product before has added the bias to qkv, detached; the bias gets its gradient here. The
    results may be views of qkv.
    """
    cos, sin = rotation if rotation is not None else (None, None)
    return _Split.apply(qkv, bias, cos, sin, sizes)  # type: ignore[no-any-return,no-untyped-call]


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        bias: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        sizes: HeadSizes,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.parameter = bias
        ctx.sizes = sizes
        # Detached: autograd would watch views of an input for writes in place, and nobody writes.
        return split_and_rotate(qkv.detach(), sizes, rotation_of(cos, sin))

    @staticmethod
    def backward(
        ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor
    ) -> tuple[Tensor, Tensor | None, None, None, None]:
        rotation = rotation_of(*ctx.saved_tensors)
        grad, partials = pack((dq, dk, dv), ctx.sizes, rotation, ctx.needs_input_grad[1])
        of_bias = None if partials is None else gradients.from_columns(ctx.parameter, partials)
        return grad, of_bias, None, None, None


def rotation_of(cos: Tensor | None, sin: Tensor | None) -> Rotation | None:
    return None if cos is None or sin is None else (cos, sin)


def split_and_rotate(
    qkv: Tensor, sizes: HeadSizes, rotation: Rotation | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v, views of qkv where no element changes or moves."""
    q, k, v = split(qkv, sizes.per_group, sizes.head_dim)
    if rotation is not None:
        q, k = rotate_qk(qkv, sizes, rotation)
    return q, k, v


@reference("heads.rotate_qk")
def rotate_qk(qkv: Tensor, sizes: HeadSizes, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Return the rotated queries [B, T, heads, head_dim] and keys [B, T, groups, head_dim]."""
    q, k, _ = split(qkv, sizes.per_group, sizes.head_dim)
    return rotate(q, rotation), rotate(k, rotation)


@reference("heads.pack", of=lambda grads, *_: grads[0])
def pack(
    grads: Sequence[Tensor],
    sizes: HeadSizes,
    rotation: Rotation | None,
    summed: bool,
    into: Into | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of qkv and, if asked for, partial sums [n, columns] of it."""
    dq, dk, dv = (upcast(x) for x in grads)
    if rotation is not None:
        # The transpose of a rotation is the rotation by the opposite angle.
        cos, sin = rotation
        back = cos, -sin
        dq = rotate(dq, back)
        dk = rotate(dk, back)
    wide = join_columns(dq, dk, dv, sizes.per_group)
    grad = wide.to(grads[0].dtype)
    sums = wide.sum((0, 1))[None] if summed else None
    return grad if into is None else into.fill(grad), sums


def split(qkv: Tensor, per_group: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split columns [group, its queries then k then v, head_dim]; q is a copy if it must be."""
    b, t, _ = qkv.shape
    groups = qkv.view(b, t, -1, per_group + 2, head_dim)
    q, k, v = torch.split(groups, [per_group, 1, 1], dim=3)
    return (
        q.reshape(b, t, -1, head_dim),
        k.reshape(b, t, -1, head_dim),
        v.reshape(b, t, -1, head_dim),
    )


def join_columns(q: Tensor, k: Tensor, v: Tensor, per_group: int) -> Tensor:
    """Return the columns that `split` splits: a group's queries, its key, its value."""
    queries = q.reshape(*k.shape[:3], per_group, -1)
    return torch.cat((queries, k.unsqueeze(3), v.unsqueeze(3)), dim=3).flatten(2)


class _Rotate(torch.autograd.Function):
    """Rotation of whole heads on a CPU; autograd through `rotate_pairs` takes 1.6 times as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate_rolled(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate_rolled(grad, cos, -sin), None, None


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the pairs (i, i + rotating / 2) of each head, as in Megatron and Llama."""
    half = rotation[0].shape[-1]
    is_whole = 2 * half == x.shape[-1]
    is_eager_cpu = x.device.type == "cpu" and not torch.compiler.is_compiling()
    if is_whole and is_eager_cpu:
        return _Rotate.apply(x, *rotation)  # type: ignore[no-any-return,no-untyped-call]
    return rotate_pairs(x, rotation)


def rotate_rolled(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `rotate_pairs` of whole heads, in fewer passes over them."""
    wide = x.to(torch.promote_types(x.dtype, cos.dtype))
    # x cos + roll(x) (-sin, sin): each element meets the other one of its pair.
    sines = torch.cat((-sin, sin), -1)
    cosines = torch.cat((cos, cos), -1)
    other = torch.roll(wide, cos.shape[-1], -1)
    other.mul_(sines).addcmul_(wide, cosines)
    return other.to(x.dtype)


def rotate_pairs(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the pairs one half after the other."""
    cos, sin = rotation
    half = cos.shape[-1]
    # Columns beyond the pairs do not turn.
    a, b, rest = torch.tensor_split(x, (half, 2 * half), dim=-1)
    first = a * cos - b * sin
    second = b * cos + a * sin
    return torch.cat((first.to(x.dtype), second.to(x.dtype), rest), dim=-1)
