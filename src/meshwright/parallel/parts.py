"""The table of shard.py applied to one layout: which part of each parameter a rank holds."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.parallel import shard
from meshwright.parallel.layout import Layout


class Parts:
    """Questions about this rank's parameters.

    `vocab` is the true vocabulary size: rows beyond it in wte and lm_head stay 0 and are not saved.
    `sequence` is sequence parallelism. `tied`: the last pipeline stage uses the first one's token
    table as its head. Ranks that differ only in the dimensions `replicated` hold the same values.
    """

    def __init__(self, layout: Layout, vocab: int, sequence: bool, tied: bool, replicated: tuple[str, ...]) -> None:
        self.layout, self.vocab, self.sequence, self.tied = layout, vocab, sequence, tied
        self.replicated = replicated

    def is_cut(self, name: str) -> bool:
        return self.layout.tp > 1 and shard.rule(name).cut is not None

    def is_partial(self, name: str) -> bool:
        """Whether the gradient must be summed over the tensor ranks."""
        rule = shard.rule(name)
        if self.layout.tp == 1 or rule.cut is not None:
            return False
        return rule.partial == "always" or (rule.partial == "sequence" and self.sequence)

    def is_counted(self, name: str) -> bool:
        """Whether this rank's values count in norms and are saved; the others are copies."""
        at = self.layout.at
        if self.tied and name == "wte.weight" and at("pp"):
            return False
        return not (at("tp") and not self.is_cut(name)) and not at(*self.replicated)

    def full_shape(self, name: str, shape: torch.Size) -> tuple[int, ...]:
        """Return the shape of the full tensor, given that of a tensor rank's part."""
        rule, out = shard.rule(name), list(shape)
        if rule.cut is not None:
            out[rule.cut] *= self.layout.tp
        return tuple(out)

    def cut(self, name: str, full: Tensor) -> Tensor:
        """Return this tensor rank's part."""
        rule = shard.rule(name)
        return full if rule.cut is None else full.chunk(self.layout.tp, rule.cut)[self.layout.at("tp")]

    def saved(self, name: str, shape: torch.Size) -> tuple[list[int], list[int], list[int]]:
        """Return the full tensor's shape, and the offsets and the shape of this rank's part.

        All are as saved in a checkpoint: without rows beyond the true vocabulary.
        """
        rule, full, part = shard.rule(name), list(self.full_shape(name, shape)), list(shape)
        place = [0] * len(full)
        if rule.cut is not None:
            place[rule.cut] = self.layout.at("tp") * shape[rule.cut]
        if rule.rows:
            full[0], part[0] = self.vocab, min(max(self.vocab - place[0], 0), shape[0])
        return full, place, part
