"""What lasts longer than a start: every wait has the run's time-out, not that of the start."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers import free_port
from meshwright.base.errors import HANG
from meshwright.parallel import layout as layouts
from meshwright.parallel.layout import Layout
from meshwright.runtime.launch import members
from meshwright.runtime.ranks import connect, gloo, watchdog
from meshwright.runtime.ranks.heartbeat import Heartbeat
from meshwright.runtime.ranks.lost import explain_lost_rank, leave_ranks
from meshwright.runtime.ranks.world import World
from on_ranks import FORK

START = 1.0  # seconds
ACT = 3.0  # seconds that rank 0 does something else, while the others wait for it


class Made:
    """The groups that a start makes, on one rank of two, and their time-outs."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.timeouts: dict[str, timedelta] = {}
        self.store = dist.HashStore()
        patch.setattr(
            connect, "_meet_on_store", lambda world, until: (self.store, time.monotonic() + START)
        )
        patch.setattr(connect, "_meet_again", lambda *_: None)
        patch.setattr(connect, "require_own_devices", lambda *_: None)
        patch.setattr(
            gloo, "make_group", lambda store, rank, size, timeout: self.note("tree", timeout)
        )
        patch.setattr(
            dist, "ProcessGroupGloo", lambda store, rank, size, timeout: self.note("probe", timeout)
        )
        patch.setattr(
            dist, "init_process_group", lambda backend, timeout, **_: self.note(backend, timeout)
        )
        patch.setattr(torch.accelerator, "set_device_index", lambda device: None)

    def note(self, name: str, timeout: timedelta) -> None:
        self.timeouts[name] = timeout


@pytest.mark.parametrize("backend", ["gloo", "nccl", "cpu:gloo,cuda:nccl"])
@pytest.mark.parametrize("is_watched", [False, True])
@pytest.mark.fault("F18")
def test_every_group_is_made_with_the_time_out_of_the_run(
    backend: str, is_watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo's messages between two ranks keep what their group was made with."""
    made, device = Made(monkeypatch), torch.device("cpu" if backend == "gloo" else "cuda:0")
    team = connect.join_ranks(World(0, 2, 0, 1, "a", 1), backend, 10, device, START, is_watched)
    timeout = timedelta(days=1) if is_watched else timedelta(minutes=10)
    named = {"nccl": "cuda:nccl"}.get(backend, backend)
    probe = {"probe": timeout} if "gloo" in backend else {}
    assert made.timeouts == {"tree": timeout, named: timeout} | probe
    assert team.timeout == timeout and made.store.timeout == timeout


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_the_groups_of_a_layout_have_it_too(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, timedelta]] = []

    def make(
        size: int,
        rank: int,
        ranks: list[int],
        backend: str,
        store: Any,
        name: str,
        timeout: timedelta,
    ) -> Any:
        asked.append((backend, timeout))
        return len(asked), None

    monkeypatch.setattr(dist.distributed_c10d, "_new_process_group_helper", make)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: None)
    monkeypatch.setattr(dist.distributed_c10d, "_world", SimpleNamespace(pg_group_ranks={}))
    monkeypatch.setattr(
        dist, "get_backend_config", lambda: "cpu:gloo" if backend == "gloo" else "cuda:nccl"
    )
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(layouts, "_connected", {})
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD="the world"))
    layouts.connect(Layout(pp=2, shard=2, tp=2, rank=0), timedelta(days=1))
    assert len(asked) > 5 and {timeout for _, timeout in asked} == {timedelta(days=1)}
    assert {name for name, _ in asked} == {gloo.register() if backend == "gloo" else "nccl"}


# On two ranks


def join(rank: int, port: int, minutes: float) -> Any:
    connect.CONNECT_SECONDS = START
    world = World(rank, 2, rank, 2, "127.0.0.1", port)
    team = connect.join_ranks(world, "gloo", minutes, seconds=20)
    return team, layouts.connect(Layout(pp=2, rank=rank), team.timeout)


def wait_in_every_way(rank: int, port: int, log: Path, minutes: float) -> None:
    """Have rank 1 wait in every way for rank 0; write how each of its waits ended."""
    team, layout = join(rank, port, minutes)
    clone, copy = team.clone(team.timeout), team.store.clone()
    begun = threading.Barrier(8 if rank else 1)
    x = [torch.zeros(4) for _ in range(3)]

    def act() -> str:
        if rank == 0:
            time.sleep(ACT)
        return "done"

    def send_or_receive(tensor: torch.Tensor, group: Any) -> None:
        if rank:
            dist.recv(tensor, group=group, src=0)
        else:
            dist.send(tensor, group=group, dst=1)

    waits = {  # each on a group of its own, whose calls have an order
        "an action of rank 0": lambda: team.run_on_rank_0(act),
        "an exchange": lambda: clone.gather(rank),
        "a collective": lambda: dist.all_reduce(x[0]),
        "a barrier": lambda: dist.barrier(group=layout.groups["backward"]),
        "a message": lambda: send_or_receive(x[1], layout.groups["embedding"]),
        "a pipeline's message": lambda: send_or_receive(x[2], layout.groups["forward"]),
        "the store": lambda: copy.get("late") if rank else copy.set("late", "x"),
    }

    def wait_in(name: str) -> str:
        if rank:
            begun.wait()
        try:
            waits[name]()
        except RuntimeError as error:
            lost = explain_lost_rank(error, minutes)
            return (
                f"{name}: lost" if lost is not None and lost.status == HANG else f"{name}: {error}"
            )
        return f"{name}: done"

    if rank == 0:
        lines = [wait_in(name) for name in waits]  # the first one takes its time
    else:
        with ThreadPoolExecutor(len(waits)) as pool:
            found = pool.map(wait_in, waits)
            begun.wait()
            lines = list(found)
    log.write_text("\n".join(lines))
    if minutes > 1:
        leave_ranks()
    os._exit(0)


def ends_of(minutes: float, folder: Path) -> list[str]:
    """Return how the waits of rank 1 ended."""
    port, logs = free_port(), [folder / "0", folder / "1"]
    ranks = [
        FORK.Process(target=wait_in_every_way, args=(rank, port, logs[rank], minutes))
        for rank in range(2)
    ]
    try:
        for process in ranks:
            process.start()
        ranks[1].join(100)
        return logs[1].read_text().splitlines()
    finally:
        for process in ranks:
            process.kill()


@pytest.mark.fault("F18")
def test_ranks_wait_longer_than_a_start_may_take(tmp_path: Path) -> None:
    """Rank 0 acts for longer than the ranks had to connect."""
    ends = ends_of(10, tmp_path)
    assert len(ends) == 7 and all(end.endswith(": done") for end in ends), ends


@pytest.mark.fault("F17")
def test_ranks_wait_no_longer_than_the_time_out_says(tmp_path: Path) -> None:
    ends = ends_of(ACT / 2 / 60, tmp_path)
    assert len(ends) == 7 and all(end.endswith(": lost") for end in ends), ends


# A store that does not answer for a moment


class Hiccups:
    """A store whose first answers to each key of some are errors."""

    def __init__(self, keys: list[str]) -> None:
        self.store, self.keys = dist.HashStore(), keys

    def set(self, key: str, value: str) -> None:
        if key in self.keys:
            self.keys.remove(key)
            raise RuntimeError("the store does not answer")
        self.store.set(key, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


@pytest.mark.fault("F17")
def test_a_rank_that_could_not_say_who_it_is_says_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 looks up who posted: a name that never came ended its thread."""
    monkeypatch.setattr(watchdog, "SIGN_SECONDS", 0.01)
    store: Any = Hiccups(["who/0", "who/0", "sign/0"])
    store.store.set("who/1", json.dumps({"host": "b"}))
    store.store.set("post/1", json.dumps([3, 5.0, 1.0]))
    watching = watchdog.Watchdog(World(0, 2), store, 10, Heartbeat())
    try:
        watching.post((3, 4.0, 0.0))
        until = time.monotonic() + 20
        while watching.board is None and time.monotonic() < until:
            time.sleep(0.005)
        assert watching.take_board() == [(socket.gethostname(), 3, 4.0, 0.0), ("b", 3, 5.0, 1.0)]
    finally:
        watching.stop()


@pytest.mark.fault("F5")
def test_a_machine_goes_on_beating_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without beats the others would take it for lost."""
    meeting = object.__new__(members.ElasticMeeting)
    meeting.store = store = Hiccups(["machine/1"])  # type: ignore[assignment]
    meeting.plan, meeting.record = SimpleNamespace(node=1, address="a"), {"beat": 0, "id": 1}  # type: ignore[assignment]
    turns = iter([False, False, False, True])
    meeting.ended = SimpleNamespace(wait=lambda seconds: next(turns))  # type: ignore[assignment]
    meeting.lock, meeting.is_replaced = threading.Lock(), False
    meeting.beat()
    assert store.check(["machine/1"]) and json.loads(store.get("machine/1"))["beat"] == 3
    assert not meeting.is_replaced
