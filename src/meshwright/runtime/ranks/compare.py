"""Check that all ranks were started alike."""

from __future__ import annotations

import hashlib
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
    hashes: dict[str, str] = team.merge(
        {name: _hash(value) for name, value in own.items()}, _common_hashes
    )
    names = [name for name, common in hashes.items() if common == DIFFERS]
    rank = [[team.rank, team.rank]]
    texts = {name: _as_text(own[name]) if name in own else "nothing" for name in names[:LISTED]}
    holders: Holders = team.merge(
        {name: {text: rank} for name, text in texts.items()}, _join_holders
    )
    differing = []
    for name, values in holders.items():
        each = [
            f"{value} on rank{'s' * (spans != [2 * spans[0][:1]])} {_format(spans)}"
            for value, spans in values.items()
        ]
        more = [f"{len(each) - LISTED} more values"] if len(each) > LISTED else []
        differing.append(f"{name}: {', '.join(each[:LISTED] + more)}")
    differing += [f"and {len(names) - LISTED} more"] if len(names) > LISTED else []
    head = (
        "the ranks were started differently; give all of them the same command, files and versions:"
    )
    raise UserError("\n  ".join([head, *differing]), everywhere=True)


DIFFERS = ""  # in the place of a hash


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _distinct(hashes: list[list[str]]) -> list[str]:
    """Return up to two different hashes of those that some ranks have."""
    return list(dict.fromkeys(value for some in hashes for value in some))[:2]


def _common_hashes(tables: list[dict[str, str]]) -> dict[str, str]:
    """Return the hash of each value that some ranks have in common."""
    names = dict.fromkeys(name for table in tables for name in table)
    found = {name: {table.get(name, DIFFERS) for table in tables} for name in names}
    return {name: hashes.pop() if len(hashes) == 1 else DIFFERS for name, hashes in found.items()}


def _join_holders(tables: list[Holders]) -> Holders:
    joined: Holders = {name: {} for table in tables for name in table}
    for table in tables:
        for name, values in table.items():
            for value, spans in values.items():
                joined[name][value] = _join_spans(joined[name].get(value, []), spans)
    return joined


def _as_text(value: Any) -> str:
    return (
        "none"
        if value is None
        else value
        if isinstance(value, str) and value
        else json.dumps(value, sort_keys=True)
    )


def _join_spans(before: Spans, after: Spans) -> Spans:
    """Return the spans of two ascending lists, the second of higher numbers."""
    if before and after and before[-1][1] + 1 == after[0][0]:
        return [*before[:-1], [before[-1][0], after[0][1]], *after[1:]]
    return before + after


def _format(spans: Spans) -> str:
    named = ", ".join(
        str(first) if first == last else f"{first}-{last}" for first, last in spans[:SPANS]
    )
    more = sum(last - first + 1 for first, last in spans[SPANS:])
    return named + f" and {more:,} more" * bool(more)


def format_ranks(numbers: list[int]) -> str:
    """Return [0, 1, 2, 5] as "0-2, 5"; of many, the first ones and the number of the others."""
    spans: Spans = []
    for n in numbers:
        if spans and n == spans[-1][-1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return _format(spans)
