"""The ranks of each group, and that a rank makes only the groups that it belongs to."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.parallel.layout import DIMENSIONS, GROUPS, LANES, Layout, connect
from meshwright.parallel.shard import Sharding


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 1), (3, 1, 2, 1, 2), (2, 2, 3, 2, 1), (2, 1, 2, 2, 2)]
)
def test_members_differ_in_their_dimensions_only(shape: tuple[int, ...]) -> None:
    layouts = [Layout(*shape, rank) for rank in range(Layout(*shape).world)]
    for number in range(len(DIMENSIONS) + 1):
        for names in itertools.combinations(DIMENSIONS, number):
            groups: dict[tuple[int, ...], list[int]] = {}
            for layout in layouts:
                elsewhere = tuple(layout.at(name) for name in DIMENSIONS if name not in names)
                groups.setdefault(elsewhere, []).append(layout.rank)
            assert layouts[0].members(*names) == list(groups.values())
            for layout in layouts:
                assert layout.peers(*names) == next(
                    group for group in groups.values() if layout.rank in group
                )


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[int]]]:
    """The ranks of each group that is made."""
    made, make = list[list[int]](), c10d._new_process_group_helper

    def note(size: int, rank: int, ranks: list[int], *values: Any, **settings: Any) -> Any:
        made.append(ranks)
        return make(size, rank, ranks, *values, **settings)

    dist.init_process_group("fake", store=FakeStore(), rank=21, world_size=4096)
    monkeypatch.setattr(c10d, "_new_process_group_helper", note)
    yield made
    dist.destroy_process_group()


def test_a_rank_makes_only_its_own_groups(made: list[list[int]]) -> None:
    began = time.thread_time()
    layout = connect(Layout(pp=4, replicas=2, shard=64, cp=2, tp=4, rank=21), timedelta(seconds=9))
    # it was above 0.8 seconds when all ranks made all groups
    assert time.thread_time() - began < 0.2
    expected = {name: layout.peers(*dimensions) for name, dimensions in GROUPS.items()}
    expected |= {"embedding": [21, 21 + 3 * 1024]} | dict.fromkeys(LANES, layout.peers("pp"))
    assert {
        name: dist.get_process_group_ranks(group) for name, group in layout.groups.items()
    } == expected
    assert made == list(expected.values())


def test_groups_of_the_same_ranks_have_names_of_their_own(made: list[list[int]]) -> None:
    layouts = [connect(Layout(pp=2, shard=2048, rank=21)) for _ in range(2)]
    names = [group.group_name for layout in layouts for group in layout.groups.values()]
    assert len(set(names)) == len(names)


def test_the_names_of_groups_do_not_depend_on_worlds_before(made: list[list[int]]) -> None:
    layout = Layout(pp=2, shard=2048, rank=21)
    first = [group.group_name for group in connect(layout).groups.values()]
    connect(layout)
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=21, world_size=4096)
    assert [group.group_name for group in connect(layout).groups.values()] == first


def test_a_rank_may_hold_no_row_of_the_vocabulary() -> None:
    """257 ids, padded to 512, on four tensor ranks: the third saves one row, the last none."""
    parts = [
        Sharding(Layout(tp=4, rank=rank), 257).saved_part("wte.weight", torch.Size((128, 8)))
        for rank in range(4)
    ]
    assert [full for full, _, _ in parts] == [[257, 8]] * 4
    assert [(offsets, part) for _, offsets, part in parts] == [
        ([0, 0], [128, 8]),
        ([128, 0], [128, 8]),
        ([256, 0], [1, 8]),
        ([384, 0], [0, 8]),
    ]
