"""Which of a rank's parameters are cut, which count, and where they lie in the whole: shard.py's table, for one layout."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.parallel import shard
from meshwright.parallel.layout import Layout


class Parts:
    """`vocab` is the true vocabulary: rows beyond it in wte and lm_head stay 0 and are not saved. `same`: dimensions whose
    ranks hold the same numbers. `tied`: the last pipeline stage has the first one's token table as its head."""

    def __init__(self, layout: Layout, vocab: int, sequence: bool, tied: bool, same: tuple[str, ...]) -> None:
        self.layout, self.vocab, self.sequence, self.tied, self.same = layout, vocab, sequence, tied, same

    def is_cut(self, name: str) -> bool:
        return self.layout.tp > 1 and shard.rule(name).cut is not None

    def is_partial(self, name: str) -> bool:
        """Whether the tensor ranks' gradients are to be summed."""
        rule = shard.rule(name)
        if self.layout.tp == 1 or rule.cut is not None:
            return False
        return rule.partial == "always" or (rule.partial == "sequence" and self.sequence)

    def is_counted(self, name: str) -> bool:
        """Whether this rank's numbers of a parameter are those that count, the others being copies."""
        at = self.layout.at
        if self.tied and name == "wte.weight" and at("pp"):
            return False
        return not (at("tp") and not self.is_cut(name)) and not at(*self.same)

    def whole_shape(self, name: str, shape: torch.Size) -> tuple[int, ...]:
        """Of the tensor of which the tensor ranks have parts of this shape."""
        rule, out = shard.rule(name), list(shape)
        if rule.cut is not None:
            out[rule.cut] *= self.layout.tp
        return tuple(out)

    def cut(self, name: str, whole: Tensor) -> Tensor:
        rule = shard.rule(name)
        return whole if rule.cut is None else whole.chunk(self.layout.tp, rule.cut)[self.layout.at("tp")]

    def saved(self, name: str, shape: torch.Size) -> tuple[list[int], list[int], list[int]]:
        """For a checkpoint: the whole tensor's shape, where in it this rank's part of this shape begins, and the part's shape,
        both without rows beyond the true vocabulary, which are nobody's."""
        rule, whole, part = shard.rule(name), list(self.whole_shape(name, shape)), list(shape)
        place = [0] * len(whole)
        if rule.cut is not None:
            place[rule.cut] = self.layout.at("tp") * shape[rule.cut]
        if rule.rows:
            whole[0], part[0] = self.vocab, min(max(self.vocab - place[0], 0), shape[0])
        return whole, place, part
