"""Keys and values of the texts that generation continues."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CACHE_MULTIPLE = 64  # places of a cache are a multiple of this


class Cache:
    """Keys and values of texts of up to `length` tokens, one in each slot.

    The buffers, [slots, room, groups, head_dim] per layer, are allocated when a layer first needs
    them, and never move. A slot's last place takes what belongs to no text, such as padding.
    """

    def __init__(self, slots: int, length: int) -> None:
        self.slots = slots
        self.length = length
        self.room = (length // CACHE_MULTIPLE + 1) * CACHE_MULTIPLE
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
class ContinuedTexts:
    """The texts that the rows of a forward pass continue; they may have different lengths."""

    cache: Cache
    slots: Tensor  # [B] of the rows
    used: Tensor  # [B] tokens of each text before this pass
    # how many places of the cache attention reads, enough for each row; 0: the texts begin here
    seen: int
    # [B] place in this pass of each row's last token, whose logits `last_only` asks for
    ends: Tensor | None = None
    at: Tensor | None = None  # [B T] the tokens' places in the flat cache, for all layers

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add a layer's new keys and values, and return all that attention reads."""
        keys, values = self.cache.of_layer(layer, k)
        slots = self.slots
        if self.at is None:
            # Padding may lie beyond the text's room; it goes to the last place, which no text has.
            room = self.cache.room
            places = self.places(k.shape[1]).clamp(max=room - 1)
            places = places + room * slots[:, None]
            self.at = places.flatten()
        keys.flatten(0, 1)[self.at] = k.flatten(0, 1)
        values.flatten(0, 1)[self.at] = v.flatten(0, 1)
        # Texts that begin here have no other keys than these, which need no copy out of the cache.
        seen = self.seen
        if not seen:
            return k, v
        return keys[slots, :seen], values[slots, :seen]

    def places(self, t: int) -> Tensor:
        """Return the places [B, T] in their texts of a pass's tokens."""
        return self.used[:, None] + torch.arange(t, device=self.used.device)
