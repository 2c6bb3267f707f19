"""THE table: how tensor parallelism cuts each parameter, and its application to one layout.

Read by the parallelizer, the parameter stores and the checkpoints. Imports no torch.

    cut      the dimension that is cut into `tp` equal parts, counted from the end; None: not cut
    partial  for parameters that are not cut: when a rank's gradient is partial and must be summed
             over the tensor ranks. "always": each rank uses it for its own heads; "sequence": with
             sequence parallelism each rank uses it for its own tokens (otherwise every rank
             computes the full gradient)
    rows     the first dimension is the vocabulary: padded, and saved at its true size

Parameters with other names, such as those of a user's own model, cannot be cut.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from meshwright.config.matrices import MATRICES

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from meshwright.parallel.layout import Layout


class CutRule(NamedTuple):
    cut: int | None
    partial: Literal["always", "sequence", "never"] = "sequence"
    rows: bool = False


CUTS = {
    r"(wte|lm_head)\.weight": CutRule(-2, rows=True),
    r"wpe\.weight": CutRule(None),
    r"ln_(emb|f)\.(weight|bias)": CutRule(None),
    r"h\.\d+\.ln_[12]\.(weight|bias)": CutRule(None),
    r"h\.\d+\.attn\.ln_[qk]\.(weight|bias)": CutRule(None, "always"),
}
# Of a first matrix the outputs are cut: rows [group, its queries then k then v, head_dim] of
# attn.qkv between groups, [F, H] or a gate's [2, F, H] of mlp.fc. Of a second one the inputs are.
for _name, _matrix in MATRICES.items():
    _part = r"h\.\d+\." + re.escape(_name)
    _is_first = _matrix.pair == "first"
    CUTS[rf"{_part}\.weight"] = CutRule(-2 if _is_first else -1)
    CUTS[rf"{_part}\.bias"] = CutRule(-1 if _is_first else None)


def rule(name: str) -> CutRule:
    for pattern, known in CUTS.items():
        if re.fullmatch(pattern, name):
            return known
    return CutRule(None, "never")


def is_partial(name: str, tp: int, sequence: bool) -> bool:
    """Whether the gradient of a parameter must be summed over the tensor ranks."""
    cut, partial, _ = rule(name)
    if tp == 1 or cut is not None:
        return False
    return partial == "always" or (partial == "sequence" and sequence)


def unit(name: str) -> str:
    """Return a parameter's unit of communication: its layer, or a part outside the layers."""
    head = name.split(".")
    return ".".join(head[:2]) if head[0] == "h" else head[0]


def bucket(name: str, tp: int, sequence: bool) -> str:
    """Return the bucket of a parameter in flat buffers: its unit, or "partial".

    "partial" is summed over the tensor ranks too, once a step, after the last micro-batch.
    """
    return "partial" if is_partial(name, tp, sequence) else unit(name)


ALIGN = 128  # elements at whose multiples a parameter starts in a flat buffer


def aligned(size: int, parts: int = 1) -> int:
    """Return the elements of a flat buffer for so many, which can be divided by `parts`."""
    return -(-size // (ALIGN * parts)) * ALIGN * parts


def rows(shape: Sequence[int], ranks: int, position: int = 0) -> tuple[int, int, int]:
    """Return a rank's rows with ZeRO 3: the dimension that is cut, the first row, their number.

    It is the first dimension, or the second of a gate's [2, F, H] if more than two ranks divide F.
    """
    dimension = 0
    if len(shape) > 1 and shape[0] < ranks and shape[1] % ranks == 0:
        dimension = 1
    # Rounded up, so that the last ranks may have fewer rows, or none.
    size = shape[dimension]
    each = -(-size // ranks)
    first = min(position * each, size)
    return dimension, first, min(each, size - first)


@dataclass(frozen=True)
class Sharding:
    """Which part of each parameter a rank holds.

    `vocab` is the true vocabulary size: rows beyond it in wte and lm_head stay 0 and are not saved.
    `sequence` is sequence parallelism. `tied`: the last pipeline stage uses the first one's token
    table as its head. Ranks that differ only in the dimensions `replicated` hold the same values.
    """

    layout: Layout
    vocab: int
    sequence: bool = False
    tied: bool = False
    replicated: tuple[str, ...] = ()

    def is_sharded(self, name: str) -> bool:
        return self.layout.tp > 1 and rule(name).cut is not None

    def is_counted(self, name: str) -> bool:
        """Whether this rank's values count in norms and are saved; the others are copies."""
        at = self.layout.at
        # The last stage's copy of the token table.
        if self.tied and name == "wte.weight" and at("pp"):
            return False
        # What is not cut is whole on every tensor rank; the first one's counts.
        if at("tp") and not self.is_sharded(name):
            return False
        return not at(*self.replicated)

    def full_shape(self, name: str, shape: torch.Size) -> tuple[int, ...]:
        """Return the shape of the full tensor, given that of a tensor rank's part."""
        full = list(shape)
        cut = rule(name).cut
        if cut is not None:
            full[cut] *= self.layout.tp
        return tuple(full)

    def cut(self, name: str, full: Tensor) -> Tensor:
        """Return this tensor rank's part."""
        cut = rule(name).cut
        return full if cut is None else full.chunk(self.layout.tp, cut)[self.layout.at("tp")]

    def offsets(self, name: str, shape: torch.Size, tensor: int) -> list[int]:
        """Return where a tensor rank's part of this shape begins."""
        out = [0] * len(shape)
        cut = rule(name).cut
        if cut is not None:
            out[cut] = tensor * shape[cut]
        return out

    def saved_part(self, name: str, shape: torch.Size) -> tuple[list[int], list[int], list[int]]:
        """Return the full tensor's shape, and the offsets and the shape of this rank's part.

        All are as saved in a checkpoint: without rows beyond the true vocabulary.
        """
        full = list(self.full_shape(name, shape))
        offsets = self.offsets(name, shape, self.layout.at("tp"))
        part = list(shape)
        if rule(name).rows:
            # The last tensor ranks may have padding alone.
            full[0] = self.vocab
            part[0] = min(max(self.vocab - offsets[0], 0), shape[0])
        return full, offsets, part


Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


def boxes(shape: tuple[int, ...], begin: int, end: int) -> list[Box]:
    """Return elements [begin, end) of a tensor in row order as boxes (of a matrix, at most 3)."""
    if begin >= end:
        return []
    if not shape:
        return [((), ())]
    # Rows `complete` to `last` - 1 are complete.
    inner = math.prod(shape[1:])
    complete = -(-begin // inner)
    last = end // inner

    def of_row(row: int, low: int, high: int) -> list[Box]:
        return [((row, *offset), (1, *size)) for offset, size in boxes(shape[1:], low, high)]

    # All within one row.
    if complete > last:
        return of_row(last, begin % inner, end % inner)
    # The end of a row, complete rows as one box, and the beginning of a row: any may be missing.
    out = []
    if begin % inner:
        out += of_row(complete - 1, begin % inner, inner)
    if complete < last:
        offsets = (complete, *[0] * len(shape[1:]))
        out.append((offsets, (last - complete, *shape[1:])))
    return out + of_row(last, 0, end % inner)
