"""Small values between all ranks: who receives which, and how much of it, in how many messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from meshwright.base.errors import BAD_DATA, UserError
from meshwright.checkpoint.manifests import DamagedCheckpoint
from meshwright.runtime.ranks import team as teams
from meshwright.runtime.ranks.compare import require_equal
from meshwright.runtime.ranks.team import ALONE, Team, tree_of
from team_threads import on_threads

TEXT = "x" * 1000


@pytest.mark.parametrize("size", [1, 2, 16, 17, 64, 257])
def test_the_groups_of_all_ranks_are_one_tree(size: int) -> None:
    trees = [tree_of(rank, size) for rank in range(size)]
    for rank, groups in enumerate(trees):
        assert all(rank == ranks[0] for ranks in groups[:-1])
        assert all(ranks in trees[other] for ranks in groups for other in ranks)
    parents = {
        rank: groups[-1][0] for rank, groups in enumerate(trees) if groups and groups[-1][0] != rank
    }
    assert sorted(parents) == list(range(1, size))
    assert max(sum(len(ranks) - 1 for ranks in groups) for groups in trees) <= 15 * max(
        map(len, trees)
    )


@pytest.mark.parametrize("size", [3, 40])
def test_values_of_all_ranks(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teams, "BRANCHES", 3)

    def act(team: Team) -> Any:
        whole = torch.full((2,), team.rank)
        team.sum(whole)
        own = torch.tensor([7 + team.rank])
        team.broadcast(own)
        return (
            team.gather([team.rank, "é"]),
            team.total(10**12 + team.rank),
            team.run_on_rank_0(lambda: {"of": team.rank}),
            team.run_on_all(lambda: team.rank),
            team.collect(lambda: "x" * team.rank),
            team.deal(lambda: [[rank] * rank for rank in range(size)]),
            team.merge(str(team.rank), ",".join),
            [*whole.tolist(), *own.tolist()],
        )

    for rank, got in enumerate(on_threads(size, act)[0]):
        assert got[0] == [[n, "é"] for n in range(size)]
        assert got[1] == size * 10**12 + sum(range(size))
        assert got[2:4] == ({"of": 0}, rank)
        assert got[4:6] == ([] if rank else ["x" * n for n in range(size)], [rank] * rank)
        assert got[6] == ",".join(map(str, range(size))) and got[7] == [sum(range(size))] * 2 + [7]


SETTINGS = {f"flag {n}": "x" * 40 for n in range(200)}  # 10 KB of text


@pytest.mark.parametrize(
    "name, most, act",
    [
        ("require_equal", 300, lambda team: require_equal(team, SETTINGS)),
        ("run_on_all", 300, lambda team: team.run_on_all(lambda: team.rank)),
        ("run_on_rank_0", 1500, lambda team: team.run_on_rank_0(lambda: TEXT)),
        ("total", 300, lambda team: team.total(team.rank)),
        ("wait", 300, lambda team: team.wait()),
    ],
)
def test_what_a_rank_receives_does_not_grow(
    name: str, most: int, act: Callable[[Team], Any]
) -> None:
    """A rank at a leaf gets one answer; rank 0 and the heads of groups one message per member."""
    for size in (8, 64):
        results, received = on_threads(size, act)
        assert not [result for result in results if isinstance(result, Exception)]
        leaves = [sum(sizes) for rank, sizes in enumerate(received) if rank % 16]
        assert max(leaves) <= most and max(len(sizes) for sizes in received) <= 2 * (15 + 3), (
            size,
            name,
        )
        assert sum(map(len, received)) <= 4 * size and sum(map(sum, received)) <= 2 * most * size


def test_settings_that_differ_are_named_without_sending_all_of_them() -> None:
    def act(team: Team) -> None:
        own = (
            {"seed": 1, "host": f"node{team.rank}"}
            if team.rank == 40
            else {"seed": 1 + (team.rank == 3)}
        )
        require_equal(team, SETTINGS | own)

    results, received = on_threads(64, act)
    assert {str(error).partition("\n")[2] for error in results} == {
        "  seed: 1 on ranks 0-2, 4-63, 2 on rank 3\n  host: nothing on ranks 0-39, 41-63, node40 on rank 40"
    }
    # the hashes of all names
    assert max(sum(sizes) for rank, sizes in enumerate(received) if rank % 16) < 20_000

    def all_differ(team: Team) -> None:
        require_equal(team, {"host": f"node{team.rank}"})

    [text] = {str(error) for error in on_threads(64, all_differ)[0]}
    assert "node19 on rank 19, 44 more values" in text and "node20" not in text


def test_clones_are_numbered_within_their_team(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may have been in another team, with other ranks, before."""
    monkeypatch.setattr(teams, "connect_tree", lambda store, *_: store.set("connected", ""))
    stores = [torch.distributed.HashStore() for _ in range(2)]
    for store in stores:
        team = Team(0, 2, store=store)
        team.clone(team.timeout).clone(team.timeout)
        assert store.check(["clone 0/connected"]) and store.check(["clone 1/connected"])


def test_an_error_of_one_rank_is_raised_by_all() -> None:
    def act(who: int, team: Team) -> Any:
        if team.rank == who:
            raise DamagedCheckpoint("it is damaged")
        return [1, 2, 3]

    for name, who in (("collect", 2), ("deal", 0), ("run_on_rank_0", 0), ("run_on_all", 1)):
        results, _ = on_threads(
            3, lambda team, name=name, who=who: getattr(team, name)(lambda: act(who, team))
        )
        for error in results:
            assert isinstance(error, DamagedCheckpoint) and str(error) == "it is damaged"
            assert error.everywhere and error.status == BAD_DATA
    results, _ = on_threads(3, lambda team: team.deal(lambda: {}["wrong"]))
    assert [type(error) for error in results] == [KeyError, UserError, UserError]
    assert "wrong" in str(results[1])


def test_one_process_sends_nothing() -> None:
    assert ALONE.collect(lambda: 1) == [1] and ALONE.deal(lambda: [2]) == 2 and ALONE.total(3) == 3
    assert ALONE.merge([4], lambda lists: lists[0]) == [4] and ALONE.run_on_all(lambda: 5) == 5
