"""Check that all ranks were started alike."""

from __future__ import annotations

import hashlib
import itertools
import json
from typing import Any

from meshwright.base.errors import UserError
from meshwright.runtime.ranks.team import Team

LISTED = 20  # differing values that an error lists
SPANS = 24  # of ranks that a line names

Spans = list[list[int]]  # first and last number of neighbours
Holders = dict[str, dict[str, Spans]]  # name of a value -> value as text -> the ranks that have it


def require_equal(team: Team, own: dict[str, Any]) -> None:
    """Raise UserError on every rank if these named values differ; it lists who has which.

    The ranks exchange one hash; if it differs, a hash of each value, and then what differs.
    """
    if team.size == 1 or len(team.merge([_hash(own)], _distinct)) == 1:
        return
    # Which values differ.
    own_hashes = {name: _hash(value) for name, value in own.items()}
    hashes: dict[str, str] = team.merge(own_hashes, _common_hashes)
    names = [name for name, common in hashes.items() if common == DIFFERS]
    # Who has which of them.
    own_holders: Holders = {}
    for name in names[:LISTED]:
        text = _as_text(own[name]) if name in own else "nothing"
        own_holders[name] = {text: [[team.rank, team.rank]]}
    holders: Holders = team.merge(own_holders, _join_holders)
    lines = [
        "the ranks were started differently; give all of them the same command, files and versions:"
    ]

    # Each value that differs gets a line.
    for name, values in holders.items():
        each = []
        for value, spans in values.items():
            first, last = spans[0]
            noun = "ranks"
            if len(spans) == 1 and first == last:
                noun = "rank"
            each.append(f"{value} on {noun} {_format(spans)}")
        if len(each) > LISTED:
            each[LISTED:] = [f"{len(each) - LISTED} more values"]
        lines.append(f"{name}: {', '.join(each)}")
    if len(names) > LISTED:
        lines.append(f"and {len(names) - LISTED} more")
    raise UserError("\n  ".join(lines), everywhere=True)


DIFFERS = ""  # in the place of a hash


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _distinct(hashes: list[list[str]]) -> list[str]:
    """Return up to two different hashes of those that some ranks have."""
    different = dict.fromkeys(itertools.chain(*hashes))
    return list(different)[:2]


def _common_hashes(tables: list[dict[str, str]]) -> dict[str, str]:
    """Return the hash of each value that some ranks have in common."""
    common = {}
    for name in dict.fromkeys(itertools.chain(*tables)):
        # A rank that lacks the value differs from those that have it.
        found = {table.get(name, DIFFERS) for table in tables}
        common[name] = found.pop() if len(found) == 1 else DIFFERS
    return common


def _join_holders(tables: list[Holders]) -> Holders:
    joined: Holders = {name: {} for table in tables for name in table}
    for table in tables:
        for name, values in table.items():
            for value, spans in values.items():
                joined[name][value] = _join_spans(joined[name].get(value, []), spans)
    return joined


def _as_text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, str) and value:
        return value
    return json.dumps(value, sort_keys=True)


def _join_spans(before: Spans, after: Spans) -> Spans:
    """Return the spans of two ascending lists, the second of higher numbers."""
    if not before or not after:
        return before + after
    last = before[-1]
    following = after[0]
    # Neighbours in number become one span, so lists stay short in a large run.
    if last[1] + 1 != following[0]:
        return before + after
    return [*before[:-1], [last[0], following[1]], *after[1:]]


def _format(spans: Spans) -> str:
    named = []
    for first, last in spans[:SPANS]:
        named.append(str(first) if first == last else f"{first}-{last}")
    text = ", ".join(named)
    more = sum(last - first + 1 for first, last in spans[SPANS:])
    if more:
        text += f" and {more:,} more"
    return text


def format_ranks(numbers: list[int]) -> str:
    """Return [0, 1, 2, 5] as "0-2, 5"; of many, the first ones and the number of the others."""
    spans: Spans = []
    for n in numbers:
        if spans and n == spans[-1][-1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return _format(spans)
