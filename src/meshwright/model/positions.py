"""Positions of a forward pass, and the masks and rotations that its layers share."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from meshwright.base import device as devices
from meshwright.config.schema import Model
from meshwright.model.cache import ContinuedTexts
from meshwright.model.rotary import rotations

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

FLEX_BLOCK = 128  # queries, and keys, of a block of FlexAttention's mask


@dataclass
class Positions:
    """Position of a forward pass in the run: all that randomness and positions may depend on."""

    samples: Tensor | None = None  # [B] global sample numbers; None is no dropout
    columns: Tensor | None = None  # [T] places within the sample; None counts from 0
    seed: int = 0
    first_sample: int = 0  # samples[0] on the host, which seeds the fused kernel without a sync
    position_ids: Tensor | None = None  # [B, T] if positions restart; None is `columns`
    documents: Tensor | None = None  # [B, T] numbers of documents; attention stays within one
    # Set if only a part of the network's work is done here:
    # if the residual stream is laid out differently from attention
    stream: StreamPositions | None = None
    length: int | None = None  # tokens that attention sees, if `columns` are only some of them
    heads: range | None = None  # of the model's heads
    cached: ContinuedTexts | None = None  # generation: the texts that the rows continue


@dataclass
class StreamPositions:
    """Sample and place of each row of the residual stream, [1, N]; position, if not the place."""

    samples: Tensor | None
    columns: Tensor
    position_ids: Tensor | None


# None: causal; bool; float if ALiBi is added to the scores
Mask: TypeAlias = "Tensor | BlockMask | None"


@dataclass
class Shared:
    """Tensors that the layers of one forward pass share, made by `share`."""

    where: Positions
    rotation: tuple[Tensor, Tensor] | None = None  # cosines and sines [1 or B, T, 1, rotating / 2]
    mask: Mask = None
    window_mask: Mask = None  # of layers with a window
    slopes: Tensor | None = None  # [heads] of ALiBi, if the kernel adds it


def share(m: Model, where: Positions, tokens: Tensor, dtype: torch.dtype, flex: bool) -> Shared:
    """Make the positions and masks of one forward pass; fill in `where.columns`.

    `flex` allows FlexAttention, which is compiled even where blocks are not.
    """
    t, device = tokens.shape[1], tokens.device
    length = where.length or t
    if where.columns is None:
        where.columns = torch.arange(t, device=device)
    shared, cached = Shared(where), where.cached
    # padding behind a text has a position, too
    if cached is not None and where.position_ids is None:
        where.position_ids = cached.places(t).clamp(max=cached.cache.length - 1)
    if m.position == "rope":
        ids = (where.columns if where.position_ids is None else where.position_ids).view(
            -1, t, 1, 1
        )
        shared.rotation = rotations(
            m, ids, torch.float64 if dtype is torch.float64 else torch.float32
        )
    allows_flex = flex and m.attention_impl != "reference"
    seen = cached.seen if cached is not None else 0
    # one of all keys is none
    window = m.window if m.windowed_layers and (seen or length) > m.window + 1 else 0
    dropped = m.attention_dropout > 0 and where.samples is not None
    # With a window's mask, other layers that drop have one too: another kernel draws other numbers.
    marked = m.position == "alibi" or where.documents is not None or bool(window and dropped)
    make: Callable[[int], Mask]
    if cached is not None and seen:  # is_causal would align cached keys wrongly
        distance, marked = torch.arange(seen, device=device) - cached.places(t)[..., None], True
        make = functools.partial(dense_mask, m, where, distance, dtype)
    elif not (marked or window):
        return shared
    # trained nowhere else
    elif allows_flex and devices.has_kernels(device) and cached is None and not dropped:
        make = functools.partial(block_mask, where.documents, length, device)
        shared.slopes = slopes_of(m, where.heads, device).float() if m.position == "alibi" else None
    else:
        places = torch.arange(length, device=device)
        make = functools.partial(dense_mask, m, where, (places - places[:, None])[None], dtype)
    shared.mask = make(0) if marked else None
    shared.window_mask = make(window) if window else shared.mask
    return shared


def block_mask(
    documents: Tensor | None, t: int, device: torch.device, window: int = 0
) -> BlockMask:
    """Make a mask for FlexAttention, which skips blocks of scores that no query sees.

    Document numbers never decrease along a sample, so a block's first and last suffice; torch's
    create_block_mask would evaluate every score.
    """
    from torch.nn.attention.flex_attention import BlockMask

    def seen(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        near = (i >= j) & (i - j <= window) if window else i >= j
        return near if documents is None else near & (documents[batch, i] == documents[batch, j])

    count = -(-t // FLEX_BLOCK)
    number = torch.arange(count, device=device)
    behind = (number[:, None] - number)[None, None]  # [1, 1, query, key]
    # Blocks of which some query sees some key, and those of which each query sees every key.
    some = behind >= 0
    full = behind > 0
    if window:
        some = some & (FLEX_BLOCK * (behind - 1) < window)
        full = full & (FLEX_BLOCK * (behind + 1) <= window + 1)
    if documents is not None:
        first = documents[:, ::FLEX_BLOCK]
        last = documents[:, (FLEX_BLOCK * (number + 1) - 1).clamp(max=t - 1)]
        some = some & (last[:, None, None, :] >= first[:, None, :, None])
        full = full & (first[:, None, None, :] == last[:, None, :, None])

    def indices(chosen: Tensor) -> tuple[Tensor, Tensor]:
        order = chosen.int().argsort(dim=-1, descending=True, stable=True)
        return chosen.sum(-1, dtype=torch.int32), order.int()

    return BlockMask.from_kv_blocks(
        *indices(some & ~full),
        *indices(full),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=seen,
        seq_lengths=(t, t),
    )


def dense_mask(
    m: Model, where: Positions, distance: Tensor, dtype: torch.dtype, window: int = 0
) -> Tensor:
    """Return a mask [1 or B, 1 or heads, T, S]: bool, or float to be added to the scores.

    `distance` [1 or B, T, S] is the key's place minus the query's, at most 0 if the key is seen.
    """
    distance = distance[:, None]
    seen = (distance <= 0) & (distance >= -window) if window else distance <= 0
    if where.documents is not None:
        seen = seen & (where.documents[:, None, :, None] == where.documents[:, None, None, :])
    if m.position != "alibi":
        return seen
    exact = torch.float64 if dtype is torch.float64 else torch.float32
    slopes = slopes_of(m, where.heads, distance.device).to(exact)
    bias = slopes[:, None, None] * distance
    return bias.masked_fill(~seen, float("-inf"))


def slopes_of(m: Model, heads: range | None, device: torch.device) -> Tensor:
    every = alibi_slopes(m.num_attention_heads or 1, device)
    return every if heads is None else every[heads.start : heads.stop]


@functools.cache  # a copy from the host would wait for the device
def alibi_slopes(heads: int, device: torch.device) -> Tensor:
    """Return ALiBi's slopes (Press et al. 2021): 2^(-8/n), its square, and so on.

    Heads beyond a power of two take every other slope of the next power.
    """
    power = 2 ** math.floor(math.log2(heads))
    first = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    rest = [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(heads - power)]
    with torch.inference_mode(False):  # training may use them too
        return torch.tensor(first + rest, dtype=torch.float64, device=device)
