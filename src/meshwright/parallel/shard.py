"""THE table: how tensor parallelism cuts each parameter.

Read by the parallelizer, the parameter stores and the checkpoints.

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
from typing import Literal, NamedTuple


class Rule(NamedTuple):
    cut: int | None
    partial: Literal["always", "sequence", "never"] = "sequence"
    rows: bool = False


TABLE = {
    r"(wte|lm_head)\.weight": Rule(-2, rows=True),
    r"wpe\.weight": Rule(None),
    r"ln_(emb|f)\.(weight|bias)": Rule(None),
    r"h\.\d+\.ln_[12]\.(weight|bias)": Rule(None),
    r"h\.\d+\.attn\.qkv\.weight": Rule(-2),  # rows [group, its queries then k then v, head_dim]: cut between groups
    r"h\.\d+\.attn\.qkv\.bias": Rule(-1),
    r"h\.\d+\.attn\.ln_[qk]\.(weight|bias)": Rule(None, "always"),
    r"h\.\d+\.attn\.proj\.weight": Rule(-1),
    r"h\.\d+\.mlp\.fc\.weight": Rule(-2),  # [F, H], or a gate's [2, F, H]
    r"h\.\d+\.mlp\.fc\.bias": Rule(-1),
    r"h\.\d+\.mlp\.proj\.weight": Rule(-1),
    r"h\.\d+\.(attn|mlp)\.proj\.bias": Rule(None),
}


def rule(name: str) -> Rule:
    return next((r for pattern, r in TABLE.items() if re.fullmatch(pattern, name)), Rule(None, "never"))


def unit(name: str) -> str:
    """Return a parameter's unit of communication: its layer, or a part outside the layers."""
    head = name.split(".")
    return ".".join(head[:2]) if head[0] == "h" else head[0]


Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


def boxes(shape: tuple[int, ...], begin: int, end: int) -> list[Box]:
    """Return elements [begin, end) of a tensor in row order as boxes (of a matrix, at most 3)."""
    if begin >= end:
        return []
    if not shape:
        return [((), ())]
    inner = math.prod(shape[1:])
    complete, last = -(-begin // inner), end // inner  # rows `complete` to `last` - 1 are complete

    def of_row(row: int, low: int, high: int) -> list[Box]:
        return [((row, *offset), (1, *size)) for offset, size in boxes(shape[1:], low, high)]

    if complete > last:
        return of_row(last, begin % inner, end % inner)
    out = of_row(complete - 1, begin % inner, inner) if begin % inner else []
    if complete < last:
        out.append(((complete, *[0] * len(shape[1:])), (last - complete, *shape[1:])))
    return out + of_row(last, 0, end % inner)
