"""Check that all ranks were started alike."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from meshwright.errors import UserError
from meshwright.ranks.team import Team

LISTED = 20  # differing values that an error lists


def require_equal(team: Team, own: dict[str, Any]) -> None:
    """Raise UserError on every rank if these named values differ; it lists who has which."""
    if team.size == 1:
        return
    digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()
    if len(set(team.gather(digest))) == 1:
        return
    everyone: list[dict[str, Any]] = team.gather(own)
    names = list(dict.fromkeys(name for values in everyone for name in values))
    differing = []
    for name in names:
        holders: dict[str, list[int]] = {}
        for rank, values in enumerate(everyone):
            holders.setdefault(_as_text(values[name]) if name in values else "nothing", []).append(rank)
        if len(holders) > 1:
            each = [f"{value} on rank{'s' * (len(r) > 1)} {format_ranks(r)}" for value, r in holders.items()]
            differing.append(f"{name}: {', '.join(each)}")
    if not differing:
        return
    more = [f"and {len(differing) - LISTED} more"] if len(differing) > LISTED else []
    head = "the ranks were started differently; give all of them the same command, files and versions:"
    raise UserError("\n  ".join([head, *differing[:LISTED], *more]), everywhere=True)


def _as_text(value: Any) -> str:
    return "none" if value is None else value if isinstance(value, str) and value else json.dumps(value, sort_keys=True)


def format_ranks(numbers: list[int]) -> str:
    """Return [0, 1, 2, 5] as "0-2, 5"."""
    spans: list[list[int]] = []
    for n in numbers:
        if spans and n == spans[-1][-1] + 1:
            spans[-1][1:] = [n]
        else:
            spans.append([n])
    return ", ".join("-".join(map(str, span)) for span in spans)
