"""`meshwright launch` and torch's launchers: exit statuses, signals, retries, machines, flags."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from documents import environment
from helpers import free_port, is_alive
from meshwright.base.errors import BAD_DATA, DONE, HANG, UNAVAILABLE, UserError
from meshwright.base.host import cores
from meshwright.cli import launch as launch_command
from meshwright.config import flags
from meshwright.config.schema import Parallel
from meshwright.runtime.launch import agent, launcher
from meshwright.runtime.launch.launcher import LaunchPlan
from meshwright.runtime.ranks.world import World, find_world

SCRIPT = str(Path(__file__).parents[1] / "ranks" / "one_rank.py")
LAUNCH = ["python", "-m", "meshwright", "launch"]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables of a launcher that these tests may run under."""
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)


def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in environment().items() if name != "OMP_NUM_THREADS"}
    return subprocess.run(words, capture_output=True, text=True, env=kept | environ, timeout=50)


def begin(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )


# Real launchers


@pytest.mark.whole
def test_our_launcher() -> None:
    done = run(*LAUNCH, "--nproc-per-node", "3", "--", SCRIPT)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["launcher"] == "meshwright launch" and [r[:3] for r in report["ranks"]] == [
        [n, n, 3] for n in range(3)
    ]
    assert re.fullmatch(
        r"meshwright launch: OMP_NUM_THREADS=\d+ for each of 3 ranks here, .*\n", done.stderr
    )


@pytest.mark.whole
@pytest.mark.parametrize(
    "act, status, words",
    [
        (
            "65",
            BAD_DATA,
            "rank 1 ended with status 65 (bad data or checkpoint); the others were stopped",
        ),
        pytest.param("kill", 137, "rank 1 was killed by SIGKILL", marks=pytest.mark.long),
        pytest.param("leave", HANG, "(another rank did not answer)", marks=pytest.mark.long),
        pytest.param("raise", 1, "status 1 (an unexpected error)", marks=pytest.mark.long),
    ],
)
@pytest.mark.fault("F19")
def test_exit_status(act: str, status: int, words: str) -> None:
    """The launcher has the status of the rank that failed, not of those that lost it."""
    done = run(*LAUNCH, "--nproc_per_node=2", SCRIPT, act, OMP_NUM_THREADS="1")
    assert done.returncode == status, done.stderr
    lines = done.stderr.splitlines()
    assert words in lines[-1] and lines[-1].startswith("meshwright launch: ")
    assert (
        done.stderr.count("Traceback")
        == done.stderr.count("ValueError: a mistake")
        == (act == "raise")
    )
    lines = lines if act != "raise" else [line for line in lines if not line.startswith("[rank1]")]
    assert (
        all(line.startswith("words: another rank ended") for line in lines[:-1]) and len(lines) <= 2
    )


@pytest.mark.long
def test_ranks_that_wait_on_a_device_end_soon_after_a_failure(tmp_path: Path) -> None:
    """They cannot save alone; torch would wait for 30 seconds."""
    impatient = tmp_path / "impatient.py"
    lines = [
        "import sys",
        "from meshwright.__main__ import main",
        "from meshwright.runtime.launch import agent",
    ]
    impatient.write_text(
        "\n".join([*lines, "agent.HOPELESS_SECONDS = 1", "sys.exit(main(sys.argv[1:]))"])
    )
    done = run(
        "python",
        str(impatient),
        "launch",
        "--nproc_per_node=2",
        SCRIPT,
        "deaf",
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 1 and "rank 1 ended with status 1" in done.stderr
    (failed_at,) = re.findall(r"^failed at (\S+)$", done.stdout, re.M)
    assert 1 < time.monotonic() - float(failed_at) < 25


@pytest.mark.long
def test_retries() -> None:
    done = run(*LAUNCH, "--nproc-per-node=2", "--max-restarts=2", SCRIPT, "once")
    assert done.returncode == DONE and len(done.stdout.splitlines()) == 2, done.stderr
    assert (
        "rank 1 ended with status 1 (an unexpected error); starting again (1 of at most 2)"
        in done.stderr
    )
    done = run(*LAUNCH, "--nproc-per-node=2", "--max-restarts=2", SCRIPT, "65")
    assert done.returncode == BAD_DATA and "starting again" not in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
@pytest.mark.fault("F16")
def test_signals_are_passed_on(number: signal.Signals) -> None:
    with begin(*LAUNCH, "--nproc-per-node=2", SCRIPT, "slow") as process:
        pids = _ready(process, 2)
        process.send_signal(number)
        time.sleep(0.2)
        process.send_signal(number)  # as a script and its whole process group send it
        out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert err == ""  # no table, no trace
    assert sorted(out.split("\n")) == ["", f"rank 0 got {number}", f"rank 1 got {number}"]
    assert not any(is_alive(pid) for pid in pids)


@pytest.mark.long
@pytest.mark.fault("F1")
def test_ranks_die_with_their_launcher() -> None:
    # no forks
    with begin(sys.executable, *LAUNCH[1:], "--nproc-per-node=2", SCRIPT, "slow") as process:
        pids = _ready(process, 2)
        assert all(is_alive(pid) for pid in pids)
        process.kill()
        process.communicate(timeout=30)
    until = time.monotonic() + 5
    while any(is_alive(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(is_alive(pid) for pid in pids)


def _ready(process: subprocess.Popen[str], ranks: int) -> list[int]:
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(ranks + 1)]
    pids = [json.loads(line)["ranks"] for line in lines if line.startswith("{")]
    assert len(pids) == 1 and lines.count("ready\n") == ranks, lines
    return [rank[3] for rank in pids[0]]


# Several machines: two launchers on this one


def machines(*words: str, count: int = 2, extra: tuple[str, ...] = ()) -> list[Any]:
    port = free_port()
    alike = (
        f"--nnodes {count} --master-addr 127.0.0.1 --master-port {port} --nproc-per-node 1".split()
        + [*extra]
    )
    started = [begin(*LAUNCH, *alike, "--node-rank", str(n), *words) for n in range(count)]
    texts = [process.communicate(timeout=50) for process in started]
    return [(process.returncode, *both) for process, both in zip(started, texts, strict=True)]


@pytest.mark.long
def test_two_machines() -> None:
    (status_0, out, err_0), (status_1, _, err_1) = machines(SCRIPT)
    assert (status_0, status_1) == (DONE, DONE), err_0 + err_1
    assert [r[:3] for r in json.loads(out)["ranks"]] == [[0, 0, 1], [1, 0, 1]] and not err_0 + err_1


@pytest.mark.long
def test_one_machine_fails() -> None:
    """Each machine reports what it saw; both restart if they may."""
    (status_0, _, err_0), (status_1, _, err_1) = machines(
        SCRIPT, "1", extra=("--max-restarts", "1")
    )
    assert (status_0, status_1) == (HANG, 1), err_0 + err_1
    assert err_1.count("starting again") == 1 == err_0.count("starting again")
    assert "frame #" not in err_0 + err_1


@pytest.mark.long
def test_a_missing_machine_is_named() -> None:
    port = free_port()
    words = ["--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port}", "--wait=2", SCRIPT]
    done = run(*LAUNCH, "--node-rank=0", *words)
    assert done.returncode == HANG
    assert "1 of 2 machines came within" in done.stderr and "missing: machine 1" in done.stderr
    done = run(*LAUNCH, "--node-rank=1", *words)
    assert (
        done.returncode == UNAVAILABLE
        and f"machine 0 at 127.0.0.1:{port} could not be reached" in done.stderr
    )
    assert done.stderr.count("\n") == 1


def test_the_port_of_the_machine_is_in_use() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} of this machine .* is in use") as caught:
            agent.launch_ranks(LaunchPlan(2, port=port), ["-c", ""])
    assert caught.value.status == UNAVAILABLE


# Flags


def plan(*words: str) -> LaunchPlan:
    words = ("--nproc-per-node=1", *words, "train")
    return launcher.make_plan(
        flags.parse_settings(launcher.LaunchConfig, words, "meshwright launch").config
    )


def test_plans() -> None:
    assert plan("--nproc-per-node=4") == LaunchPlan(4)
    assert plan("--nproc_per_node", "4", "--max-restarts=3") == LaunchPlan(4, restarts=3)
    assert plan("--nproc-per-node=cpu").processes == cores()
    two = plan("--nnodes=2", "--node-rank=1", "--master-addr=a", "--master-port=5")
    assert two == LaunchPlan(1, 2, 1, "a", 5)
    assert plan("--node-ips", "198.51.100.1, 127.0.0.1") == LaunchPlan(
        1, 2, 1, "198.51.100.1", 29500
    )
    assert plan("--node-ips=198.51.100.1,198.51.100.2", "--node-rank=0").address == "198.51.100.1"


def test_what_can_be_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").touch()
    assert launcher.build_program(["train", "--lr", "1"]) == [
        "-u",
        "-m",
        "meshwright",
        "train",
        "--lr",
        "1",
    ]
    assert launcher.build_program(["mine.py", "--x"]) == ["-u", "mine.py", "--x"]
    for words, message in (
        (["their.py"], "there is no script their.py"),
        (["inspect"], "inspect is neither one of train"),
        (["--nprocs"], "launch has no flag --nprocs"),
    ):
        with pytest.raises(UserError, match=message):
            launcher.build_program(words)
    with pytest.raises(UserError, match="nothing to start"):
        launch_command.main(["--nproc-per-node=2"])


@pytest.mark.fault("F19")
def test_the_cause_of_several_failures() -> None:
    def of(**failed: int) -> str:
        return "ab"[agent.find_cause({"ab".index(n): code for n, code in failed.items()})[0]]

    assert of(a=75, b=65) == "b" and of(a=1, b=70) == "b" and of(a=75, b=-9) == "b"  # a only lost b
    assert of(a=75, b=143) == "b" and of(a=-15, b=1) == "b" and of(a=-6, b=1) == "b"
    assert of(a=75) == of(a=75, b=75) == "a"
    assert [agent.patience(code) for code in (65, 1, -9, 75)] == [0, 0, 0, 3] and agent.patience(
        143
    ) == 30
    assert (
        of(a=75, b=138) == "b"
        and agent.patience(138) == 30
        and agent.find_cause({0: 138})[1] not in agent.RETRIED
    )
    assert agent.describe_end(138) == "ended with status 138 (stopped by a signal)"
    assert agent.describe_end(-40) == "was killed by signal 40" and agent.exit_status(-6) == 75


# OneFlow's flags, with which `train` launches itself


@pytest.mark.flag("num_gpus_per_node num_nodes node_ips")
def test_oneflow_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Parallel()

    def asks(**changes: Any) -> list[str] | None:
        parallel = dataclasses.replace(alone, **changes)
        return launch_command.launch_flags_of(parallel, find_world(os.environ))

    assert asks() is None and asks(node_ips="") is None and asks(node_ips="10.0.0.1") is None
    assert asks(num_gpus_per_node=4) == "--nproc-per-node 4 --nnodes 1".split()
    two = asks(num_gpus_per_node=4, num_nodes=2, node_ips="10.0.0.1, 10.0.0.2")
    assert two == "--nproc-per-node 4 --nnodes 2 --node-ips 10.0.0.1,10.0.0.2".split()
    assert (
        asks(num_nodes=2, node_ips="a,b,c")
        == "--nproc-per-node 1 --nnodes 2 --node-ips a,b".split()
    )
    assert asks(node_ips="a,b") is None  # OneFlow takes the first of them, too
    for wrong in (dict(num_nodes=2), dict(num_nodes=3, node_ips="a,b")):
        with pytest.raises(UserError, match=r"--node-ips names \d addresses, --num-nodes is \d"):
            asks(**wrong)

    started: list[tuple[LaunchPlan, list[str]]] = []
    monkeypatch.setattr(
        agent, "launch_ranks", lambda plan, program: started.append((plan, program)) or 7
    )
    assert launch_command.relaunch(alone, World(), ["train", "--lr=1"]) is None and not started
    assert (
        launch_command.relaunch(
            dataclasses.replace(alone, num_gpus_per_node=2), World(), ["train", "--lr=1"]
        )
        == 7
    )
    assert started == [(LaunchPlan(2), ["-u", "-m", "meshwright", "train", "--lr=1"])]

    for name, value in dict(
        RANK="0", WORLD_SIZE="4", LOCAL_RANK="0", MASTER_ADDR="a", MASTER_PORT="1"
    ).items():
        monkeypatch.setenv(name, value)
    assert asks() is None and asks(num_gpus_per_node=4) is None  # a rank already
    with pytest.raises(
        UserError, match="--num-gpus-per-node 8 x --num-nodes 1 are 8 ranks, but .* started 4"
    ):
        asks(num_gpus_per_node=8)
