"""Small values between all ranks: who receives which, and how much of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.checkpoint.manifests import DamagedCheckpoint
from meshwright.errors import BAD_DATA, UserError
from meshwright.ranks.team import ALONE, Team
from on_ranks import run_ranks

TEXT = "x" * 1000


def count_received(act: Any) -> int:
    """Return the bytes that this rank takes in during a call."""
    received = []
    originals = {name: getattr(dist, name) for name in ("all_gather", "gather", "broadcast", "scatter")}

    def counting(name: str) -> Any:
        def call(first: Any, *rest: Any, **more: Any) -> Any:
            into = first if name in ("all_gather", "scatter", "broadcast") else (rest[0] or [])
            received.append(sum(x.numel() for x in ([into] if isinstance(into, torch.Tensor) else into)))
            return originals[name](first, *rest, **more)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in originals:
            patch.setattr(dist, name, counting(name))
        act()
    return sum(received)


def exchange() -> None:
    team = Team(dist.get_rank(), dist.get_world_size())
    assert team.gather([team.rank, "é"]) == [[rank, "é"] for rank in range(3)]
    assert team.total(10**12 + team.rank) == 3 * 10**12 + 3
    assert team.run_on_lead(lambda: {"of": team.rank}) == {"of": 0}
    assert team.collect(lambda: "x" * team.rank) == (["", "x", "xx"] if team.is_lead else [])
    assert team.deal(lambda: [[rank] * rank for rank in range(team.size)]) == [team.rank] * team.rank
    # Rank 0 takes in what all send; another rank what it is sent.
    limits = {"collect": (3000, 100), "deal": (1100, 1100), "run_on_lead": (1100, 1100)}
    calls = {"collect": lambda: TEXT, "deal": lambda: [TEXT] * 3, "run_on_lead": lambda: TEXT}
    for name, act in calls.items():
        received = count_received(lambda name=name, act=act: getattr(team, name)(act))
        assert received <= limits[name][team.rank > 0] + 100, (name, received)


def test_only_the_lead_receives_what_grows_with_the_ranks() -> None:
    run_ranks(exchange, 3)


def fail() -> None:
    team = Team(dist.get_rank(), dist.get_world_size())

    def act(who: int) -> Any:
        if team.rank == who:
            raise DamagedCheckpoint("it is damaged")
        return [1, 2, 3]

    for call, who in ((team.collect, 2), (team.deal, 0), (team.run_on_lead, 0), (team.run_on_all, 1)):
        with pytest.raises(DamagedCheckpoint, match="it is damaged") as caught:
            call(lambda who=who: act(who))
        assert caught.value.everywhere and caught.value.status == BAD_DATA
    with pytest.raises(KeyError if team.is_lead else UserError, match="wrong"):
        team.deal(lambda: {}["wrong"])


def test_an_error_of_one_rank_is_raised_by_all() -> None:
    run_ranks(fail, 3)


def test_one_process_sends_nothing() -> None:
    assert ALONE.collect(lambda: 1) == [1] and ALONE.deal(lambda: [2]) == 2 and ALONE.total(3) == 3
