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
    inner = 1
    for n in shape[1:]:
        inner *= n
    first, last = begin // inner, (end - 1) // inner
    if len(shape) == 1:
        return [((begin,), (end - begin,))]
    out: list[Box] = []

    def add_row(row: int, low: int, high: int) -> None:
        out.extend(((row, *o), (1, *n)) for o, n in boxes(shape[1:], low, high))

    low, high = begin - first * inner, end - last * inner
    if first == last:
        if (low, high) == (0, inner):
            return [((first, *(0 for _ in shape[1:])), (1, *shape[1:]))]
        add_row(first, low, high)
        return out
    if low:
        add_row(first, low, inner)
        first += 1
    rows = last + (high == inner) - first  # complete ones
    if rows > 0:
        out.append(((first, *(0 for _ in shape[1:])), (rows, *shape[1:])))
    if high != inner:
        add_row(last, 0, high)
    return out
