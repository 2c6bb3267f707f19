"""THE table: how tensor parallelism cuts each parameter, for the parallelizer, the parameter store and the checkpoints.

    cut      the dimension that is cut into `tp` equal parts, from the end; None: every rank holds all of it
    partial  of what is not cut: on which ranks the gradient is a part only, to be summed over the tensor ranks.
             "always": each rank uses it for its own heads; "sequence": under sequence parallelism each rank uses it for
             its own tokens; without, every rank computes the whole gradient
    rows     the first dimension is the vocabulary: padded, and saved at its true size

Parameters of other names, a user's own, are not known here: they cannot be cut.
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
    """The parameters that a step's communication treats together: a layer, or a part outside of the layers."""
    head = name.split(".")
    return ".".join(head[:2]) if head[0] == "h" else head[0]


Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


def boxes(shape: tuple[int, ...], begin: int, end: int) -> list[Box]:
    """The elements [begin, end) of a tensor in row order, as boxes: of a matrix at most three."""
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

    def of_row(row: int, low: int, high: int) -> None:
        out.extend(((row, *o), (1, *n)) for o, n in boxes(shape[1:], low, high))

    low, high = begin - first * inner, end - last * inner
    if first == last:
        if (low, high) == (0, inner):
            return [((first, *(0 for _ in shape[1:])), (1, *shape[1:]))]
        of_row(first, low, high)
        return out
    if low:
        of_row(first, low, inner)
        first += 1
    whole = last + (high == inner) - first
    if whole > 0:
        out.append(((first, *(0 for _ in shape[1:])), (whole, *shape[1:])))
    if high != inner:
        of_row(last, 0, high)
    return out
