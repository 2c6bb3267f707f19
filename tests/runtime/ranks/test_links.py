"""The links between ranks: what is measured, and which link is called slow."""

import torch

from meshwright.apps.doctor import facts as doctor
from meshwright.runtime.ranks import links
from meshwright.runtime.ranks.links import Link
from on_ranks import make_team, run_ranks


def three_ranks() -> None:

    team = make_team()
    links.LARGE_ON_CPU = 1 << 16
    measured = links.measure_links(team, torch.device("cpu"))
    assert [(link.a, link.b) for link in measured] == [(0, 1), (0, 2), (1, 2)]
    links.ALL_PAIRS = 2  # as of many ranks, several pairs at once
    again = links.measure_links(team, torch.device("cpu"))
    assert [(link.a, link.b) for link in again] == [(0, 1), (0, 2), (1, 2)]
    assert all(0 < link.latency < 10 and link.bandwidth > 0 for link in measured)


def test_each_pair_is_measured() -> None:
    run_ranks(three_ranks, 3)


def test_the_slow_link_is_named() -> None:
    """A machine with a bad cable: all links of its rank are slow, and the table says which rank."""
    every = [Link(a, b, 5e-5, 1e9 if 3 in (a, b) else 1e10) for a, b in links.pairs_of(6)]
    facts = list(doctor.describe_links(every, ["left"] * 3 + ["right"] * 3, "cuda"))
    slow = facts[-1]
    assert slow.level == "problem" and slow.values["slow"] == [
        [a, b] for a, b in links.pairs_of(6) if 3 in (a, b)
    ]
    assert "between ranks 0 (left) and 3 (right): 50 µs, 1.00 GB/s" in slow.text
    assert slow.text.endswith(
        "and 2 more; most links: 50 µs, 10.00 GB/s; rank 3 is in 5 of 5 slow links"
    )
    assert facts[1].text.startswith("to 1: 50 µs, 10.00 GB/s; to 2: ")
    late = [Link(0, 1, 5e-5, 1e9), Link(0, 2, 1e-3, 1e9), Link(1, 2, 6e-5, 1e9)]
    assert (
        links.slow_links(late) == [late[1]]
        and not links.slow_links(late[::2])
        and not links.slow_links(late[:2])
    )


def test_of_many_ranks_some_pairs_are_measured() -> None:
    assert len(links.pairs_of(32)) == 32 * 31 // 2
    assert {b - a for a, b in links.pairs_of(64)} == {1, 2, 4, 8, 16, 32}
    assert len(links.pairs_of(1 << 13)) == 13 * (1 << 13) - (1 << 13) + 1
    assert links.rounds_of(3) == [[(0, 1)], [(0, 2)], [(1, 2)]]
    for size in (64, 100, 256):
        rounds = links.rounds_of(size)
        assert (
            sorted(pair for pairs in rounds for pair in pairs) == links.pairs_of(size)
            and len(rounds) <= 16
        )
        assert all(
            len({rank for pair in pairs for rank in pair}) == 2 * len(pairs) for pairs in rounds
        )
