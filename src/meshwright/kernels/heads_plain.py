"""Types that the parts of heads.py share, and its plain twin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.kernels.twins import upcast

Rotation = tuple[Tensor, Tensor]  # cosines and sines [1 or B, T, 1, rotating / 2]


class Sizes(NamedTuple):
    """Sizes of the columns [groups, per_group queries then key then value, head_dim]."""

    groups: int
    per_group: int
    head_dim: int


def plain_backward(
    grads: Sequence[Tensor], sizes: Sizes, rotation: Rotation | None, summed: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of qkv and, if asked for, sums [1, columns] of it."""
    dq, dk, dv = (upcast(x) for x in grads)
    if rotation is not None:
        back = rotation[0], -rotation[1]
        dq, dk = rotate(dq, back), rotate(dk, back)
    parts = dq.reshape(*dk.shape[:3], sizes.per_group, -1), dk.unsqueeze(3), dv.unsqueeze(3)
    grad = torch.cat(parts, dim=3).flatten(2)
    return grad.to(grads[0].dtype), grad.sum((0, 1))[None] if summed else None


def split(qkv: Tensor, per_group: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split columns [group, its queries then k then v, head_dim]; q is a copy if it must be."""
    b, t, _ = qkv.shape
    q, k, v = torch.split(qkv.view(b, t, -1, per_group + 2, head_dim), [per_group, 1, 1], dim=3)
    return q.reshape(b, t, -1, head_dim), k.reshape(b, t, -1, head_dim), v.reshape(b, t, -1, head_dim)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the pairs (i, i + rotating / 2) of each head, as in Megatron and Llama."""
    cos, sin = rotation
    half = cos.shape[-1]
    a, b, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat(((a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), rest), dim=-1)
