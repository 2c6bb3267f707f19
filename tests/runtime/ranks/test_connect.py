"""Ranks meet under every launcher's variables; what prevents it is reported soon."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from helpers import free_port
from meshwright.base.errors import HANG, UNAVAILABLE, USAGE, UserError
from meshwright.config.problem import KEYWORDS, in_words
from meshwright.runtime.ranks import connect, interfaces
from meshwright.runtime.ranks.compare import require_equal
from meshwright.runtime.ranks.lost import explain_lost_rank, leave_ranks
from meshwright.runtime.ranks.team import Team
from meshwright.runtime.ranks.world import (
    OR_UNSET,
    World,
    find_world,
    first_host,
    number_of,
    require_world_size,
    tasks_per_node,
)
from on_ranks import FORK, make_team, run_programs, run_ranks

SCRIPT = Path(__file__).with_name("one_rank.py")


def started(environ: list[dict[str, str]], folder: Path, *argv: str) -> tuple[list[int], list[str]]:
    return run_programs(SCRIPT, [list(argv)] * len(environ), environ, folder)


# The variables that each launcher sets for rank 3 of 4, on two machines of two or one of four.
TORCH = dict(
    RANK="3",
    WORLD_SIZE="4",
    LOCAL_RANK="1",
    LOCAL_WORLD_SIZE="2",
    MASTER_ADDR="m",
    MASTER_PORT="29500",
)
SLURM = dict(
    SLURM_PROCID="3",
    SLURM_NTASKS="4",
    SLURM_LOCALID="1",
    SLURM_NODEID="1",
    SLURM_TASKS_PER_NODE="2(x2)",
)
SLURM |= dict(SLURM_NODELIST="node[07-08]", SLURM_JOB_ID="77", SLURM_STEP_ID="0")
UNEVEN = dict(
    SLURM_PROCID="2", SLURM_LOCALID="0", SLURM_TASKS_PER_NODE="2,1(x2)", MASTER_PORT="1234"
)
BY_HAND = dict(SLURM_PROCID="1", SLURM_NTASKS="2", MASTER_ADDR="localhost", MASTER_PORT="1234")
OMPI = {
    f"OMPI_COMM_WORLD_{n}": v
    for n, v in (("RANK", "3"), ("SIZE", "4"), ("LOCAL_RANK", "3"), ("LOCAL_SIZE", "4"))
}
DEEPSPEED = dict(
    RANK="3", WORLD_SIZE="4", LOCAL_RANK="1", LOCAL_SIZE="2", CROSS_RANK="1", CROSS_SIZE="2"
)
DEEPSPEED |= dict(MASTER_ADDR="m", MASTER_PORT="29500")
HYDRA = dict(PMI_RANK="3", PMI_SIZE="4", MPI_LOCALRANKID="3", MPI_LOCALNRANKS="4")


@pytest.mark.parametrize(
    "environ, expected",
    [
        ({}, World()),
        (TORCH | {"TORCHELASTIC_RUN_ID": "none"}, World(3, 4, 1, 2, "m", 29500, "torchrun")),
        (
            TORCH | {"TORCHELASTIC_RUN_ID": "meshwright-1"},
            World(3, 4, 1, 2, "m", 29500, "meshwright launch"),
        ),
        (TORCH, World(3, 4, 1, 2, "m", 29500, "RANK and WORLD_SIZE")),
        (DEEPSPEED, World(3, 4, 1, 2, "m", 29500, "deepspeed")),
        (SLURM | {"MASTER_PORT": "1234"}, World(3, 4, 1, 2, "node07", 1234, "srun")),
        (SLURM | UNEVEN, World(2, 4, 0, 1, "node07", 1234, "srun")),
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, World()),
        ({n: v for n, v in SLURM.items() if n != "SLURM_PROCID"}, World()),  # in salloc's shell
        (
            {n: v for n, v in SLURM.items() if n != "SLURM_STEP_ID"} | {"ENVIRONMENT": "BATCH"},
            World(),
        ),
        # set by hand, without the number of ranks on this node
        (BY_HAND, World(1, 2, 1, 2, "localhost", 1234, "srun")),
        (BY_HAND | {"SLURM_LOCALID": "1"}, World(1, 2, 1, 2, "localhost", 1234, "srun")),
        (BY_HAND | {"MASTER_ADDR": "m", "SLURM_NNODES": "1"}, World(1, 2, 1, 2, "m", 1234, "srun")),
        (
            BY_HAND | {"MASTER_ADDR": "m", "SLURM_NTASKS_PER_NODE": "2"},
            World(1, 2, 1, 2, "m", 1234, "srun"),
        ),
        (BY_HAND | {"MASTER_ADDR": "m"}, World(1, 2, 0, 1, "m", 1234, "srun")),
        (
            {n: v for n, v in TORCH.items() if n != "LOCAL_WORLD_SIZE"},
            World(3, 4, 1, 2, "m", 29500, "RANK and WORLD_SIZE"),
        ),
        (OMPI | {"MASTER_PORT": "1234"}, World(3, 4, 3, 4, "127.0.0.1", 1234, "OpenMPI")),
        (HYDRA | {"MASTER_PORT": "1234"}, World(3, 4, 3, 4, "127.0.0.1", 1234, "MPI")),
    ],
)
def test_every_launcher(environ: dict[str, str], expected: World) -> None:
    assert find_world(environ) == expected


@pytest.mark.parametrize(
    ("words", "number"),
    [
        ("--lr 1 --local_rank=3 --seed 2", 3),
        ("--local-rank 3", 3),
        ("--local-rank 3 --local_rank 4", 4),
        ("--local-rank=None", None),
        ("--prompt --local-rank", None),
        ("--my-local-rank=3", None),
    ],
)
def test_a_launchers_number_is_read_before_the_flags(words: str, number: int | None) -> None:
    assert number_of(words.split(), "--local-rank") == number
    assert number_of(["--prompt", "see --local-rank 3 there"], "--local-rank") is None


def test_local_rank_flag() -> None:
    """A flag gives it if the environment does not."""
    without = {n: v for n, v in TORCH.items() if n != "LOCAL_RANK"}
    assert find_world(TORCH, 0).local_rank == 1 and find_world(without, 1).local_rank == 1
    one_node = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    assert (find_world(one_node).local_rank, find_world(one_node).local_size) == (3, 4)


def test_each_job_has_its_port() -> None:
    """All ranks of a job step compute the same port; other jobs and steps have others."""
    jobs = [SLURM, SLURM | {"SLURM_JOB_ID": "78"}, SLURM | {"SLURM_STEP_ID": "1"}]
    assert len({find_world(j).port for j in jobs}) == 3
    assert (
        find_world(SLURM).port
        == find_world(SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).port
    )
    assert 20000 <= (find_world(OMPI | {"PMIX_NAMESPACE": "host.7"}).port or 0) < 30000


def test_ranks_of_mpi_in_scripts_compute_one_port(tmp_path: Path) -> None:
    """Each rank of `mpiexec bash script` has a parent of its own, the script's shell."""
    find = "import os; from meshwright.runtime.ranks.world import find_world as f; print(f(os.environ).port)"
    script = tmp_path / "script.sh"
    script.write_text(f"{sys.executable} -c '{find}'\ntrue\n")
    ports = {
        subprocess.run(
            ["bash", script],
            env=os.environ | {"PMI_RANK": f"{rank}", "PMI_SIZE": "2"},
            capture_output=True,
            check=True,
        ).stdout
        for rank in range(2)
    }
    assert len(ports) == 1 and ports != {b"None\n"}


def test_first_host() -> None:
    nodes = "node07 node[01-03,07] a,b node[01,07],gpu5 rack[1-2]n[3,5].cluster gpu5,node[01-02]"
    assert [
        first_host(n) for n in nodes.split()
    ] == "node07 node01 a node01 rack1n3.cluster gpu5".split()


def test_tasks_per_node() -> None:
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1] and tasks_per_node("8") == [8]


@pytest.mark.parametrize(
    "environ, words",
    [
        (
            {"RANK": "1"},
            "RANK=1 is set and WORLD_SIZE is not; set both or, for one process, `unset RANK WORLD_SIZE`",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            "MASTER_ADDR and MASTER_PORT are not; set them to where rank 0 listens or, for one process, `unset RANK",
        ),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 is set and RANK is not"),
        (TORCH | {"RANK": "4"}, "RANK=4 does not fit WORLD_SIZE=4: ranks count from 0 to 3"),
        (TORCH | {"RANK": "one"}, "RANK='one' in the environment is not a whole number"),
        (TORCH | {"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port"),
        (TORCH | {"LOCAL_RANK": "2"}, "local rank 2 does not fit 2 ranks"),
        (TORCH | {"LOCAL_WORLD_SIZE": "8"}, "8 ranks on this node, but WORLD_SIZE=4"),
        (
            OMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
            "set MASTER_ADDR",
        ),
        ({"PMI_RANK": "0"}, "PMI_SIZE is not"),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"},
            "set MASTER_ADDR to rank 0's node, which is localhost if all are on this machine",
        ),
        (SLURM | {"SLURM_TASKS_PER_NODE": "2(x0)"}, "x0 is not a number of nodes"),
    ],
)
def test_contradictory_variables(environ: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        find_world(environ)


@pytest.mark.flag("world_size")
def test_world_size_flag() -> None:
    require_world_size(World(size=4), None)
    require_world_size(World(size=4), 4)
    with pytest.raises(UserError, match="--world-size 8, but started as 4, by torchrun; start 8"):
        require_world_size(World(size=4, launcher="torchrun"), 8)
    with pytest.raises(UserError, match="--world-size 2, but started as one process"):
        require_world_size(World(), 2)
    with (
        pytest.raises(UserError, match="^world_size=2, but .* or change world_size to 1"),
        in_words(KEYWORDS),
    ):
        require_world_size(World(), 2)


# Processes with each launcher's variables


def variables(launcher: str, rank: int, size: int, port: int) -> dict[str, str]:
    if launcher == "deepspeed":
        more = dict(LOCAL_SIZE=f"{size}", CROSS_RANK="0", CROSS_SIZE="1")
        return {
            n: v
            for n, v in torch_variables(port, rank, size, **more).items()
            if n != "LOCAL_WORLD_SIZE"
        }
    return dict(PMI_RANK=f"{rank}", PMI_SIZE=f"{size}")  # MPI: the port follows from the parent


@pytest.mark.parametrize("launcher, size", [("deepspeed", 2), ("MPI", 2)])
def test_started_by(launcher: str, size: int, tmp_path: Path) -> None:
    port = free_port()
    flag = ["--local_rank=0"] if launcher == "deepspeed" else []
    statuses, texts = started(
        [variables(launcher, r, size, port) for r in range(size)], tmp_path, *flag
    )
    assert statuses == [0] * size, texts
    report = json.loads(texts[0])
    assert report["launcher"] == launcher
    assert [r[:3] for r in report["ranks"]] == [[r, r, size] for r in range(size)]


def test_ranks_that_guess_how_many_share_their_node(tmp_path: Path) -> None:
    """Rank 0 takes itself to be alone on its node, and rank 1 takes two to be there."""
    port = free_port()
    given = [torch_variables(port, r, 2, LOCAL_WORLD_SIZE=f"{r + 1}") for r in range(2)]
    statuses, texts = started(given, tmp_path)
    assert statuses == [0, 0], texts


@pytest.mark.parametrize("agent", [False, True])
def test_a_second_run_in_the_same_processes(agent: bool, tmp_path: Path) -> None:
    """The first run's keys are still on the store of rank 0, or of torchrun's agent (this one)."""
    port, more = free_port(), {}
    if agent:
        store = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
        more = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "none"}
    statuses, texts = started(
        [torch_variables(port, r, 2, **more) for r in range(2)], tmp_path, "again"
    )
    assert statuses == [0, 0], texts
    # of rank 1, which asked for each run's name
    assert not agent or store.add("meshwright/names/words", 0) == 2


def torch_variables(port: int, rank: int, size: int, **more: str) -> dict[str, str]:
    names = dict(
        RANK=rank, WORLD_SIZE=size, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=size, MASTER_PORT=port
    )
    return {n: f"{v}" for n, v in names.items()} | {"MASTER_ADDR": "127.0.0.1"} | more


def stop_in(name: str) -> None:
    """Have this process stop, as by SIGSTOP, when connect.py first calls a function."""
    real = getattr(connect, name)

    def stop_and_call(*args: Any, **named: Any) -> Any:
        # Sent to the process, another thread may take it, and this one goes on for a while.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        return real(*args, **named)

    setattr(connect, name, stop_and_call)


def join_and_print(rank: int, port: int, stops_in: str, log: Path) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    connect.CONNECT_SECONDS, connect.ANSWER_SECONDS = 3.0, 2
    if stops_in:
        stop_in(stops_in)
    try:
        connect.join_ranks(
            World(rank, 2, rank, 2, "127.0.0.1", port), "gloo", 10, seconds=5, is_watched=True
        )
    except UserError as error:
        print(f"words: {error}", file=sys.stderr, flush=True)
        os._exit(error.status)
    os._exit(0)


MOMENTS = {
    "_await_verdict": "missing: rank {}.",
    "_meet_again": "connected within .*; missing: rank {}. It came, and then stopped or ended",
}


@pytest.mark.fault("F17")
def test_a_rank_that_stops_at_any_moment_of_the_start_is_named(tmp_path: Path) -> None:
    """Torch alone waits for half an hour, or for ever if rank 0 serves the store."""
    cases = [(moment, victim) for moment in MOMENTS for victim in (0, 1)]
    began, started = time.monotonic(), {}
    for moment, victim in cases:
        port = free_port()
        for rank in range(2):
            more = rank, port, moment * (rank == victim), tmp_path / f"{moment}-{victim}-{rank}"
            started[moment, victim, rank] = FORK.Process(target=join_and_print, args=more)
            started[moment, victim, rank].start()
    try:
        for (moment, victim, rank), process in started.items():
            if rank != victim:
                process.join(max(began + 60 - time.monotonic(), 0))
                text = (tmp_path / f"{moment}-{victim}-{rank}").read_text()
                assert process.exitcode in (HANG, UNAVAILABLE) and text.count("\n") == 1, (
                    moment,
                    victim,
                    text,
                )
                wanted = MOMENTS[moment].format(victim) if victim else "rank 0.* is stopped"
                assert re.match(f"words: .*{wanted}", text), (moment, victim, text)
    finally:
        for process in started.values():
            process.kill()


@pytest.mark.flag("start_timeout_seconds")
@pytest.mark.fault("F17")
def test_the_wait_for_missing_ranks_is_a_flag(tmp_path: Path) -> None:
    flags = "--mock-data --tokenizer-type NullTokenizer --vocab-size 64 --num-layers 1 --hidden-size 8 --lr 1 "
    flags += "--num-attention-heads 1 --seq-length 8 --micro-batch-size 1 --train-iters 1 --start-timeout-seconds 1"
    environ = torch_variables(free_port(), 0, 2)
    [status], [text] = run_programs(
        Path(__file__).parents[3] / "pretrain_gpt.py", [flags.split()], [environ], tmp_path
    )
    assert status == HANG and re.search(r"1 of 2 ranks came within [0-4] s; missing: rank 1", text)


def test_rank_0_cannot_be_reached(tmp_path: Path) -> None:
    port, began = free_port(), time.monotonic()
    absent = torch_variables(port, 1, 2, MASTER_ADDR="nowhere.invalid")
    statuses, texts = started([torch_variables(port, 1, 2), absent], tmp_path, "--seconds=1")
    assert statuses == [UNAVAILABLE] * 2 and time.monotonic() - began < 25
    assert re.search(
        rf"rank 0 at 127\.0\.0\.1:{port} could not be reached within \d+ s: Connection refused",
        texts[0],
    )
    assert "the name nowhere.invalid has no address" in texts[1]
    assert all(text.count("\n") == 1 for text in texts)


@pytest.mark.long  # it waits for torch, and test_launch.py shows the same of machines
def test_the_port_is_in_use(tmp_path: Path) -> None:
    """Rank 0 cannot open it; rank 1 finds a program there that accepts and sends nothing."""
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        environ = [torch_variables(port, r, 2) for r in range(2)]
        statuses, texts = started(environ, tmp_path, "--seconds=1")
    assert statuses == [UNAVAILABLE] * 2
    assert f"port {port} of this machine" in texts[0] and "is in use" in texts[0]
    assert f"127.0.0.1:{port} answers, but not as rank 0 of this run" in texts[1]
    assert all(text.count("\n") == 1 for text in texts)


def test_the_number_of_ranks_differs(tmp_path: Path) -> None:
    port = free_port()
    statuses, texts = started(
        [torch_variables(port, 0, 2), torch_variables(port, 2, 4)], tmp_path, "--seconds=20"
    )
    assert statuses == [USAGE] * 2
    differs = "rank (2 was started as one of 4 ranks, others as one of 2|0 .* 2 ranks, others as one of 4)"
    assert re.search(differs, texts[0])


# The interface that 127.0.0.1 belongs to here is eth1.
ADDRESSES = {"eth0": ["10.0.0.5"], "eth1": ["10.0.1.5", "127.0.0.1"], "eth1:0": ["10.0.2.5"]}


@pytest.mark.parametrize(
    ("gloo", "nccl", "words"),
    [
        (None, None, "eth1"),  # by its second address
        ("eth1:0", "^eth0", "eth1:0"),
        (
            "eth0,eth7",
            None,
            "GLOO_SOCKET_IFNAME=eth0,eth7: eth7 names no network interface of this",
        ),
        (None, "=eth", "NCCL_SOCKET_IFNAME==eth names no network interface of this machine"),
        (None, "ib", "NCCL_SOCKET_IFNAME=ib names no network interface of this machine, which has"),
    ],
)
def test_interfaces(
    gloo: str | None, nccl: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interfaces, "list_addresses", lambda: ADDRESSES)
    for name, value in (("GLOO", gloo), ("NCCL", nccl)):
        monkeypatch.setenv(f"{name}_SOCKET_IFNAME", value or "")  # so that it is set back
    try:
        interfaces.choose_interface("127.0.0.1", 1, "cpu:gloo,cuda:nccl")
        said = os.environ["GLOO_SOCKET_IFNAME"]
    except UserError as error:
        said = str(error)
    assert said.startswith(words)


def test_an_interface_of_another_network_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "list_addresses", lambda: ADDRESSES)
    for gloo, nccl, words in (
        ("eth0", "eth1", "GLOO_SOCKET_IFNAME=eth0 stands for 10.0.0.5 and NCCL_SOCKET_IFNAME=eth1"),
        (
            "eth1",
            "",
            "GLOO_SOCKET_IFNAME=eth1 stands for 10.0.1.5, but the way to rank 0 begins at",
        ),
        ("", "", "open all ports between the nodes, and see whether they reach each other by 127"),
    ):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", gloo)
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", nccl)
        said = interfaces.describe_interfaces("127.0.0.1", 1, "cpu:gloo,cuda:nccl")
        assert said.startswith(words)


def test_two_processes_with_one_rank(tmp_path: Path) -> None:
    port = free_port()
    statuses, texts = started(
        [torch_variables(port, r, 3) for r in (0, 1, 1)], tmp_path, "--seconds=20"
    )
    assert statuses == [UNAVAILABLE] * 3
    assert all("two processes came as rank 1 of 3" in text for text in texts)


# Comparing


def _compare_different_values() -> None:
    rank, team = dist.get_rank(), make_team()
    require_equal(team, {"a": 1, "b": [1, None]})
    own = {
        "seed": 1,
        "global_batch_size": 512 if rank < 2 else 1024,
        "torch": "2.13" if rank else "2.11",
    }
    own |= {"extra": None} if rank == 2 else {}
    with pytest.raises(UserError) as caught:
        require_equal(team, own)
    assert caught.value.status == USAGE and str(caught.value).split("\n  ")[1:] == [
        "global_batch_size: 512 on ranks 0-1, 1024 on ranks 2-3",
        "torch: 2.11 on rank 0, 2.13 on ranks 1-3",
        "extra: nothing on ranks 0-1, 3, none on rank 2",
    ]
    with pytest.raises(UserError, match=r"f19: .*\n  and 30 more$"):
        require_equal(team, {f"f{n}": rank for n in range(50)})


def test_different_values_are_listed_by_rank() -> None:
    run_ranks(_compare_different_values, 4)
    require_equal(Team(), {"a": 1})


# Losing a rank

SOURCES = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "


@pytest.mark.parametrize(
    "error, gone",
    [
        (
            RuntimeError(
                SOURCES + "Connection closed by peer [10.0.0.2]:1. This is typically caused by"
            ),
            True,
        ),
        (RuntimeError(SOURCES + "Timed out waiting 3000ms for recv operation to complete"), True),
        (dist.DistStoreError("wait timeout after 1000ms, keys: /x"), True),
        (dist.DistNetworkError("Connection reset by peer"), True),
        (
            dist.DistBackendError(
                "NCCL error ... ncclRemoteError: A call failed possibly due to a network error"
            ),
            True,
        ),
        (
            dist.DistBackendError(
                "ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on one"
            ),
            False,
        ),
        (
            RuntimeError(
                "[enforce fail at gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes."
            ),
            False,
        ),
        (RuntimeError("download timed out"), False),
    ],
)
@pytest.mark.fault("F19")
def test_which_errors_mean_a_lost_rank(error: BaseException, gone: bool) -> None:
    lost = explain_lost_rank(error, 10)
    assert (lost is not None) == gone
    if lost is not None:
        assert (
            lost.status == HANG
            and "--distributed-timeout-minutes" in str(lost)
            and "/pytorch/" not in str(lost)
        )


def test_leave_without_having_joined() -> None:
    leave_ranks()
    assert connect.join_ranks(World(), "gloo", 1) == Team()


def test_a_long_wait_says_for_whom(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(connect, "SILENCE", 0)
    port, until = free_port(), time.monotonic() + 0.5
    with pytest.raises(UserError, match="could not be reached"):
        connect.connect_store("127.0.0.1", port, False, until, "machine 0")
    assert (
        capfd.readouterr().err.count(f"waiting for machine 0 at 127.0.0.1:{port}, up to 0 s more: ")
        == 1
    )
    with pytest.raises(UserError, match="missing: machine 1"):
        connect.meet_all(dist.HashStore(), 0, 2, until, "machine")
    assert capfd.readouterr().err == "waiting for machine 1, up to 0 s more\n"
    with pytest.raises(UserError, match="missing: rank 1.*`unset RANK WORLD_SIZE`"):
        connect.meet_all(dist.HashStore(), 0, 2, until, advice=OR_UNSET)
    assert "up to 0 s more; start it or, for one process, `unset RANK" in capfd.readouterr().err
