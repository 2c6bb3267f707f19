"""Elastic launches: what fits a command, what machine 0 decides, a run on 4, 3 and 4 machines."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import elastic_runs
import pytest
from torch.distributed import HashStore

from helpers import TINY_FLAGS, free_port
from meshwright.base.errors import BAD_DATA, HANG, SIGTERM, UserError
from meshwright.runtime.launch import members
from meshwright.runtime.launch.elastic import Shape, choose_shape, describe_choice, find_shapes
from meshwright.runtime.launch.launcher import LaunchPlan

TRAIN = ["train", *TINY_FLAGS, "--save=run", "--load=run"]
ONES = ("--global-batch-size=12", "--micro-batch-size=1")


def shapes(*more: str, least: int = 1, most: int = 4) -> list[Shape]:
    return find_shapes([*TRAIN, *more], least, most)


# What fits


def test_the_global_batch_decides_what_fits() -> None:
    found = shapes(*ONES)
    sizes = [(s.ranks, s.dp, s.micro, s.number) for s in found]
    assert sizes == [(4, 4, 1, 3), (3, 3, 1, 4), (2, 2, 1, 6), (1, 1, 1, 12)]
    assert (
        found[0].describe() == ": data-parallel size 4, 3 micro-batches of 1 each"
        and not found[0].flags
    )
    smaller = shapes("--global-batch-size=12", "--micro-batch-size=3", least=2)
    flags = [(s.ranks, s.number, s.flags) for s in smaller]
    assert flags == [(4, 1, []), (3, 2, ["--micro-batch-size=2"]), (2, 2, [])]
    assert (
        smaller[1]
        .describe()
        .endswith("2 micro-batches of 2 each, so that the global batch divides")
    )
    # 3 ranks have no equal share
    assert [s.ranks for s in shapes("--global-batch-size=8")] == [4, 2, 1]
    auto = shapes("--global-batch-size=12", "--micro-batch-size=auto")[0]
    assert auto.number is None and auto.describe() == ": data-parallel size 4"


def test_the_model_keeps_its_layout() -> None:
    layout = [
        "--tensor-model-parallel-size=2",
        "--pipeline-model-parallel-size=2",
        "--global-batch-size=12",
    ]
    found = shapes(*layout, most=12)
    assert [(s.ranks, s.dp, s.group) for s in found] == [(12, 3, 2), (8, 2, 2), (4, 1, 2)]
    # The mean over micro-batches depends on their size, so it stays.
    means = ["--global-batch-size=12", "--micro-batch-size=3", "--loss-mean=microbatch"]
    assert [s.ranks for s in shapes(*means)] == [4, 2, 1]
    assert find_shapes(["other.py"], 2, 3) == [Shape(3), Shape(2)]


@pytest.mark.parametrize(
    "command, message",
    [
        (
            ["train", *TINY_FLAGS],
            "--min-ranks and --max-ranks need --save FOLDER and --load FOLDER, the same",
        ),
        ([*TRAIN, "--world-size=4"], "--world-size contradicts --min-ranks"),
        (
            [f for f in TRAIN if "global" not in f],
            "--min-ranks and --max-ranks need --global-batch-size",
        ),
        (
            [*TRAIN, "--global-batch-size=5"],
            "--min-ranks 2 to --max-ranks 4: nothing fits the command: --global-batch",
        ),
        (
            [*TRAIN, "--tensor-model-parallel-size=8"],
            "no multiple of 8, the ranks of one replica, is among them",
        ),
        (["generate"], "are for train and for scripts, not for generate"),
    ],
)
def test_commands_that_cannot_be_elastic(command: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_shapes(command, 2, 4)


@pytest.mark.parametrize("run, is_read", [("absent", False), ("s3://bucket/run", True)])
def test_a_run_in_storage_completes_the_command(run: str, is_read: bool) -> None:
    loads = []

    def complete(parsed: Any) -> Any:
        loads.append(parsed.config.checkpoint.load)
        return parsed.config

    find_shapes(["train", *TINY_FLAGS, f"--save={run}", f"--load={run}", *ONES], 1, 4, complete)
    assert bool(loads) == is_read


def test_the_largest_number_that_is_there() -> None:
    sizes = [Shape(8, 2, 4), Shape(4, 2, 2)]
    # machine 2 is a spare
    assert choose_shape(sizes, {0: 4, 1: 4, 2: 4}) == (sizes[0], {0: 4, 1: 4})
    assert choose_shape(sizes, {0: 4, 2: 4}) == (sizes[0], {0: 4, 2: 4})
    assert choose_shape(sizes, {0: 4, 2: 3}) == (sizes[1], {0: 4})
    assert choose_shape(sizes, {0: 3, 2: 3}) == (sizes[1], {0: 2, 2: 2})  # no pair on two machines
    assert choose_shape(sizes, {1: 4, 2: 4}) is choose_shape(sizes, {0: 2}) is None
    text = describe_choice(sizes[1], {0: 4}, {0: 4, 2: 3}, 8)
    assert text == "4 of 8 ranks: data-parallel size 2; 3 more do not fit the command and stay idle"


# What machine 0 decides, with a clock and records of our own


class Table:
    """Machine 0's coordinator, and the records of the machines."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nodes: int = 4, restarts: int = 0) -> None:
        self.now, self.rows = 0.0, dict[int, dict[str, Any]]()
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        sizes = tuple(shapes(*ONES, least=2))
        plan = LaunchPlan(
            1, nodes, wait=30, least_ranks=2, most_ranks=nodes, shapes=sizes, restarts=restarts
        )
        self.store = HashStore()
        self.coordinator = members.Coordinator(plan, self.store, 30)

    def come(self, *nodes: int) -> None:
        for n in nodes:
            row = {
                "ranks": 1,
                "state": "free",
                "beat": 0,
                "failed": {},
                "why": "ended",
                "number": 0,
            }
            self.rows[n] = row | {"id": self.rows.get(n, {"id": 0})["id"] + 1}

    def beat(self, seconds: float = 1.0) -> None:
        self.now += seconds
        for n, row in self.rows.items():
            row["beat"] += 1
            self.store.set(f"machine/{n}", json.dumps(row))

    def decide(self) -> dict[str, Any]:
        self.beat()
        self.coordinator.decide()
        return self.coordinator.decision

    def follow(self) -> None:
        """Start the ranks of all machines that have a part."""
        for n in self.coordinator.assignments:
            self.rows[n] |= {
                "state": "running",
                "number": self.coordinator.decision["number"],
                "failed": {},
            }
        self.beat()

    def watch(self) -> bool:
        """Return whether the ranks are asked to stop; then they do."""
        self.beat()
        self.coordinator.watch()
        if self.coordinator.decision["stop"]:
            for row in self.rows.values():
                row["state"] = "free" if row["state"] == "running" else row["state"]
        return bool(self.coordinator.decision["stop"])


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    table = Table(monkeypatch)
    table.come(0, 1, 2, 3)
    assert table.decide()["line"] == "4 of 4 ranks: data-parallel size 4, 3 micro-batches of 1 each"
    table.follow()
    assert not table.watch()
    return table


@pytest.mark.fault("F5")
def test_a_machine_is_lost_and_comes_back(table: Table) -> None:
    del table.rows[2]
    assert not table.watch()
    table.beat(members.SILENT_SECONDS)
    assert table.watch() and not table.coordinator.decision["orderly"]
    line = "machine 2 was lost; going on with 3 of 4 ranks: data-parallel size 3, 4 micro-batches of 1 each"
    assert table.decide()["line"] == line
    assert table.coordinator.assignments == {0: [1, 0, 1], 1: [1, 1, 1], 3: [1, 2, 1]}
    table.follow()
    table.rows[2] = {"id": 1}
    table.come(2)
    assert not table.watch()  # it may not be the only one
    table.beat(members.SETTLE_SECONDS)
    assert table.watch() and table.coordinator.decision["orderly"]  # all save
    line = "machine 2 joins; going on with 4 of 4 ranks: data-parallel size 4, 3 micro-batches of 1 each"
    assert table.decide()["line"] == line and table.coordinator.decision["restarts"] == 0


def test_a_machine_that_starts_anew_at_once(table: Table) -> None:
    table.come(2)
    assert table.watch()
    assert table.decide()["line"].startswith(
        "machine 2 was lost, machine 2 joins; going on with 4 of 4 ranks"
    )


def test_a_machine_that_is_stopped_leaves_in_order(table: Table) -> None:
    """Its ranks save with all others, whose ends are no failures then; one that finished stays."""
    table.rows[3]["state"] = "finished"
    assert not table.watch()
    table.rows[3] |= {"state": "gone", "why": "was stopped by SIGTERM"}
    assert table.watch() and table.coordinator.decision["orderly"]
    table.rows[1]["failed"] = {"1": SIGTERM}
    assert table.decide()["line"].startswith(
        "machine 3 was stopped by SIGTERM; going on with 3 of 4 ranks"
    )


def test_a_spare_takes_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(monkeypatch, 5)
    table.come(0, 1, 2, 3, 4)
    assert sorted(table.decide()["assignments"]) == ["0", "1", "2", "3"]
    table.follow()
    table.beat(10)
    assert not table.watch()
    del table.rows[1]
    table.beat(members.SILENT_SECONDS)
    assert table.watch()
    assert (
        "machine 1 was lost, machine 4 joins; going on with 4 of 5 ranks" in table.decide()["line"]
    )


def test_failures_count_and_losses_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(monkeypatch, restarts=1)
    table.come(0, 1, 2, 3)
    table.decide()
    for expected in (
        "rank 2 was killed by SIGSEGV, restart 1 of at most 1; going on with 4 of 4 ranks",
        None,
    ):
        table.follow()
        table.rows[2]["failed"] = {"2": -signal.SIGSEGV}
        table.rows[1]["failed"] = {"1": HANG}  # it only lost rank 2
        assert table.watch()
        if expected:
            assert table.decide()["line"].startswith(expected)
    over = table.decide()["over"]
    assert over == {"status": 139, "line": "rank 2 was killed by SIGSEGV; the others were stopped"}


def test_bad_data_ends_all_machines(table: Table) -> None:
    table.rows[2]["failed"] = {"2": BAD_DATA}
    assert table.watch()
    assert table.decide()["over"]["status"] == BAD_DATA


def test_too_few_machines_are_waited_for(table: Table) -> None:
    for n in (1, 2, 3):
        del table.rows[n]
    table.beat(members.SILENT_SECONDS)
    assert table.watch() and "over" not in table.decide()
    table.beat(28)
    assert "over" not in table.decide()
    table.beat(3)
    over = table.decide()["over"]
    assert over["status"] == HANG
    assert over["line"].endswith(
        "1 ranks are there and --min-ranks is 2, and no more came within 30 s"
    )


def test_a_device_that_no_longer_answers(table: Table) -> None:
    table.rows[2] |= {"failed": {"2": 1}, "ranks": 0}
    assert table.watch()
    line = table.decide()["line"]
    assert line.startswith("on machine 2 only 0 devices answer; going on with 3 of 4 ranks")
    assert table.coordinator.decision["restarts"] == 0


# A run


class Machines:
    """Launchers on this machine, each of which stands for one machine with one rank."""

    def __init__(self, folder: Path, flags: list[str]) -> None:
        self.folder, self.flags, self.port = folder, flags, free_port()
        self.running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, *nodes: int) -> None:
        for n in nodes:
            place = f"--nnodes 4 --node-rank {n} --master-addr 127.0.0.1 --master-port {self.port}".split()
            launch = [
                "-m",
                "meshwright",
                "launch",
                "--nproc-per-node=1",
                "--min-ranks=2",
                "--wait=120",
                *place,
            ]
            argv = [*launch, str(elastic_runs.RECORDER), *self.flags]
            self.running[n] = elastic_runs.start(self.folder, f"log-{n}", argv)

    def kill(self, node: int) -> None:
        os.killpg(self.running[node].pid, signal.SIGKILL)
        self.running[node].wait()

    def log(self) -> str:
        return (self.folder / "log-0").read_text()

    def wait(self, ready: Callable[[], bool], seconds: float = 240) -> None:
        until = time.monotonic() + seconds
        while not ready():
            assert self.running[0].poll() is None and time.monotonic() < until, self.log()[-5000:]
            time.sleep(0.1)


@contextlib.contextmanager
def four_machines(folder: Path, flags: list[str]) -> Iterator[Machines]:
    machines = Machines(folder, flags)
    try:
        machines.start(0, 1, 2, 3)
        yield machines
    finally:
        for n in machines.running:
            with contextlib.suppress(ProcessLookupError):
                machines.kill(n)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.fault("F5")
def test_4_to_3_to_4_machines(tmp_path: Path) -> None:
    """A machine is killed, the others go on; it comes back, and all go on with it."""
    flags = elastic_runs.make_flags(tmp_path)

    def train_on(machines: Machines) -> None:
        before = elastic_runs.last_step(tmp_path)
        machines.wait(lambda: elastic_runs.last_step(tmp_path) > before + 15)

    with four_machines(tmp_path, flags) as machines:
        train_on(machines)
        machines.kill(2)
        machines.wait(lambda: "machine 2 was lost; going on with 3 of 4 ranks" in machines.log())
        train_on(machines)
        machines.start(2)
        machines.wait(lambda: "machine 2 joins; going on with 4 of 4 ranks" in machines.log())
        train_on(machines)
        (tmp_path / "end").touch()
        assert [machines.running[n].wait(60) for n in range(4)] == [0, 0, 0, 0], machines.log()[
            -5000:
        ]
    assert elastic_runs.compare_with_one_process(tmp_path, flags, "launch") == [4, 3, 4]
