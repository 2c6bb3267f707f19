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

    from meshwright.model.recompute import AttentionResults

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
    # For a rank that does a part of the work: the residual stream's rows, if attention has others
    stream: StreamPositions | None = None
    length: int | None = None  # how many tokens attention sees, if `columns` are some of them
    heads: range | None = None  # numbers of this rank's heads; None: all of them
    cached: ContinuedTexts | None = None  # generation: the texts that the rows continue


@dataclass
class StreamPositions:
    """Sample and place of each row of the residual stream, [1, N]; position, if not the place."""

    samples: Tensor | None
    columns: Tensor
    position_ids: Tensor | None


# None is causal; a tensor is bool, or with ALiBi float, to be added to the scores.
Mask: TypeAlias = "Tensor | BlockMask | None"


@dataclass
class Shared:
    """Tensors that the layers of one forward pass share, made by `share`."""

    where: Positions
    rotation: tuple[Tensor, Tensor] | None = None  # cosines and sines [1 or B, T, 1, rotating / 2]
    mask: Mask = None
    window_mask: Mask = None  # of layers with a window
    slopes: Tensor | None = None  # [heads] of ALiBi, if the kernel adds it
    kept: AttentionResults | None = None  # of layers that are recomputed, while they run


def share(m: Model, where: Positions, tokens: Tensor, dtype: torch.dtype, flex: bool) -> Shared:
    """Make the rotations and masks of one forward pass; fill in columns and ids of `where`.

    `flex` allows FlexAttention, which is compiled even where blocks are not.
    """
    t = tokens.shape[1]
    device = tokens.device
    length = where.length or t
    cached = where.cached
    exact = torch.float64 if dtype is torch.float64 else torch.float32
    shared = Shared(where)

    if where.columns is None:
        where.columns = torch.arange(t, device=device)
    # Padding behind a cached text has a position, too: the last that there is.
    if cached is not None and where.position_ids is None:
        where.position_ids = cached.places(t).clamp(max=cached.cache.length - 1)
    if m.position == "rope":
        ids = where.columns if where.position_ids is None else where.position_ids
        shared.rotation = rotations(m, ids.view(-1, t, 1, 1), exact)

    # A window over all keys is no window.
    seen = cached.seen if cached is not None else 0
    window = m.window if m.windowed_layers and (seen or length) > m.window + 1 else 0
    # With dropout, a mask for windows means a mask for the other layers too: without one they would
    # use another kernel, which draws more or fewer numbers.
    dropped = m.attention_dropout > 0 and where.samples is not None
    needs_mask = m.position == "alibi" or where.documents is not None or bool(window and dropped)

    # FlexAttention has no dropout, and generation uses other kernels.
    allows_flex = flex and m.attention_impl != "reference" and cached is None and not dropped
    make: Callable[[int], Mask]
    if cached is not None and seen:
        # Without a mask, is_causal would let the first new token see the first cached one alone.
        needs_mask = True
        distance = torch.arange(seen, device=device) - cached.places(t)[..., None]
        make = functools.partial(dense_mask, m, where, distance, exact)
    elif not (needs_mask or window):
        return shared
    elif allows_flex and devices.has_kernels(device):
        make = functools.partial(block_mask, where.documents, length, device)
        if m.position == "alibi":
            shared.slopes = slopes_of(m, where.heads, device).float()
    else:
        places = torch.arange(length, device=device)
        distance = (places - places[:, None])[None]
        make = functools.partial(dense_mask, m, where, distance, exact)
    shared.mask = make(0) if needs_mask else None
    shared.window_mask = make(window) if window else shared.mask
    return shared


def block_mask(documents: Tensor | None, t: int, device: torch.device, window: int) -> BlockMask:
    """Make a mask for FlexAttention, which skips blocks of scores that no query sees.

    Document numbers never decrease along a sample, so a block's first and last suffice; torch's
    create_block_mask would evaluate every score.
    """
    from torch.nn.attention.flex_attention import BlockMask

    def seen(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        near = (i >= j) & (i - j <= window) if window else i >= j
        return near if documents is None else near & (documents[batch, i] == documents[batch, j])

    # Blocks of which some query sees some key, and those of which each query sees every key.
    count = -(-t // FLEX_BLOCK)
    number = torch.arange(count, device=device)
    behind = (number[:, None] - number)[None, None]  # [1, 1, query, key]
    some = behind >= 0
    full = behind > 0
    if window:
        # A query and a key of blocks that lie n apart are (n - 1) blocks + 1 apart at least, and
        # (n + 1) blocks - 1 at most.
        some = some & (FLEX_BLOCK * (behind - 1) < window)
        full = full & (FLEX_BLOCK * (behind + 1) <= window + 1)
    if documents is not None:
        # Some query sees some key unless the keys' last document ends before the queries' first.
        first = documents[:, ::FLEX_BLOCK]
        last = documents[:, (FLEX_BLOCK * (number + 1) - 1).clamp(max=t - 1)]
        some = some & (last[:, None, None, :] >= first[:, None, :, None])
        full = full & (first[:, None, None, :] == last[:, None, :, None])

    # For each block of queries: how many blocks of keys it has, and their numbers before others'.
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
    m: Model, where: Positions, distance: Tensor, exact: torch.dtype, window: int
) -> Tensor:
    """Return a mask [1 or B, 1 or heads, T, S]: bool, or `exact` to be added to the scores.

    `distance` [1 or B, T, S] is the key's place minus the query's, at most 0 if the key is seen.
    """
    distance = distance[:, None]
    seen = (distance <= 0) & (distance >= -window) if window else distance <= 0
    if where.documents is not None:
        seen = seen & (where.documents[:, None, :, None] == where.documents[:, None, None, :])
    if m.position != "alibi":
        return seen
    slopes = slopes_of(m, where.heads, distance.device).to(exact)
    bias = slopes[:, None, None] * distance
    return bias.masked_fill(~seen, float("-inf"))


def slopes_of(m: Model, heads: range | None, device: torch.device) -> Tensor:
    every = alibi_slopes(m.num_attention_heads or 1, device)
    return every if heads is None else every[heads.start : heads.stop]


# Kept, because a copy from the host would wait for the device in every step.
@functools.cache
def alibi_slopes(heads: int, device: torch.device) -> Tensor:
    """Return ALiBi's slopes (Press et al. 2021): 2^(-8/n), its square, and so on.

    Heads beyond a power of two take every other slope of the next power.
    """
    power = 2 ** math.floor(math.log2(heads))
    every_other = range(1, 2 * (heads - power), 2)
    exponents = [8.0 * n / power for n in range(1, power + 1)]
    exponents += [4.0 * n / power for n in every_other]
    slopes = [2.0**-exponent for exponent in exponents]
    # Sampling may ask first; a tensor made in inference mode could not be used in training.
    with torch.inference_mode(False):
        return torch.tensor(slopes, dtype=torch.float64, device=device)
