"""Ranks end soon after a launcher that was killed, and outlive a shell that was left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import TINY_FLAGS, free_port, is_alive
from meshwright.runtime.ranks import orphans

# Starts the program in argv[2:] with the variables in argv[1], as launchers do. The thread that
# forks ends at once, as Open MPI's do.
LAUNCHER = """
import json, os, subprocess, sys, threading, time
start = lambda: subprocess.Popen(sys.argv[2:], env=os.environ | json.loads(sys.argv[1]))
thread = threading.Thread(target=start)
thread.start()
thread.join()
time.sleep(100)
"""
RANK = """
import os, sys, time
from meshwright.runtime.ranks.orphans import die_with_launcher
die_with_launcher()
os.write(1, f"{os.getpid()}\\n".encode())
time.sleep(100)
"""
PYTHON = [sys.executable, "-c"]
VARIABLES = {
    "torchrun": '{"TORCHELASTIC_RUN_ID": "none", "RANK": "0"}',
    "mpirun": '{"OMPI_COMM_WORLD_RANK": "0"}',
    "mpich": '{"PMI_RANK": "0"}',
    "srun": '{"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}',
}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in orphans.LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def started() -> Iterator[list[int]]:
    """Processes to kill in the end."""
    pids: list[int] = []
    yield pids
    for pid in filter(is_alive, pids):
        os.kill(pid, signal.SIGKILL)


def outlives(rank: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while is_alive(rank) and time.monotonic() < until:
        time.sleep(0.01)
    return is_alive(rank)


def kill_launcher(launcher: subprocess.Popen[str], rank: int) -> None:
    """Kill a launcher, with which its rank ends."""
    launcher.kill()
    assert not outlives(rank, 5)
    launcher.communicate()


def start(started: list[int], *words: str) -> tuple[subprocess.Popen[str], int]:
    """Start a launcher; return it and its rank, which has printed its number."""
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    started.append(process.pid)
    assert process.stdout is not None
    line = process.stdout.readline()
    started.append(int(line))
    return process, int(line)


@pytest.mark.parametrize(
    "name",
    ["torchrun", "srun", *(pytest.param(n, marks=pytest.mark.long) for n in ("mpirun", "mpich"))],
)
@pytest.mark.fault("F1")
def test_ranks_end_with_a_killed_launcher(name: str, started: list[int]) -> None:
    """Even though the thread that started them has ended."""
    launcher, rank = start(started, *PYTHON, LAUNCHER, VARIABLES[name], *PYTHON, RANK)
    if name != "torchrun":  # whose main thread starts ranks
        assert outlives(rank, 0.1)
    kill_launcher(launcher, rank)


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "LOCAL_RANK": "0",
    "RANK": "0",
}


@pytest.mark.fault("F1")
def test_a_rank_that_begins_after_torchrun_ended(started: list[int]) -> None:
    """It was started just before torchrun was killed."""
    late = "import os, time\nos.write(1, f'{os.getpid()}\\n'.encode())\nparent = os.getppid()\n"
    late += "while os.getppid() == parent:\n    time.sleep(0.01)\n" + RANK
    launcher, rank = start(started, *PYTHON, LAUNCHER, json.dumps(TORCHRUN), *PYTHON, late)
    assert outlives(rank, 0.1)
    kill_launcher(launcher, rank)


@pytest.mark.parametrize(
    ("ancestors", "without", "lost"),
    [
        (["init"], "", True),  # the first process, which takes in orphans
        (["systemd", "init"], "", True),  # a user's
        (["bash", "init"], "bash", True),  # a script between, which lives on
        (["python3"], "", False),  # torchrun is the first process of a container
        (["torchrun", "init"], "", False),
        (["bash", "init"], "", False),  # its variables were set by hand
        (["init"], "LOCAL_RANK", False),
    ],
)
def test_who_has_lost_torchrun(
    ancestors: list[str], without: str, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`without`: a program that has torchrun's variables, or one that is not set."""
    pids = [1, 7, 8][: len(ancestors)][::-1]
    known = dict(zip(pids, ancestors, strict=True))
    environ = {name: value for name, value in TORCHRUN.items() if name != without}

    def look_at(pid: int) -> tuple[str, int, dict[str, str]]:
        return known[pid], pids[pids.index(pid) + 1], environ if known[pid] == without else {}

    monkeypatch.setattr(os, "getppid", lambda: pids[0])
    monkeypatch.setattr(orphans, "inspect_process", look_at)
    monkeypatch.setattr(
        orphans, "read_proc", lambda pid, file: f"/usr/bin/{known[pid]}\0-m\0x".encode()
    )
    assert orphans._has_lost_torchrun(environ) is lost


@pytest.mark.fault("F1")
def test_programs_between(started: list[int]) -> None:
    """A shell between the launcher and its rank stays when the launcher is killed."""
    shell = ["bash", "-c", '"$@"; exit 3', "bash", *PYTHON, RANK]
    launcher, rank = start(started, *PYTHON, LAUNCHER, VARIABLES["mpirun"], *shell)
    assert outlives(rank, 0.1)
    kill_launcher(launcher, rank)


@pytest.mark.parametrize("killed", ["deepspeed", pytest.param("launch.py", marks=pytest.mark.long)])
@pytest.mark.fault("F1")
def test_both_programs_of_deepspeed(killed: str, started: list[int], tmp_path: Path) -> None:
    """`deepspeed` starts deepspeed/launcher/launch.py, which starts the ranks."""
    for name in ("deepspeed", "launch.py"):
        (tmp_path / name).write_text(LAUNCHER)
    inner = [sys.executable, str(tmp_path / "launch.py"), '{"CROSS_RANK": "0"}', *PYTHON, RANK]
    outer, rank = start(started, sys.executable, str(tmp_path / "deepspeed"), "{}", *inner)
    launch = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
    started.append(launch)
    assert outlives(rank, 0.1)
    os.kill(outer.pid if killed == "deepspeed" else launch, signal.SIGKILL)
    assert not outlives(rank, 5)
    outer.kill()
    os.kill(launch, signal.SIGKILL)
    outer.communicate()


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("RANK=0 WORLD_SIZE=1 nohup {} 2>&1 &", marks=pytest.mark.long),
        pytest.param("RANK=0 WORLD_SIZE=1 setsid {} &", marks=pytest.mark.long),
        "export OMPI_COMM_WORLD_RANK=0 TORCHELASTIC_RUN_ID=none; {} &",
    ],
)
def test_a_shell_is_no_launcher(script: str, started: list[int]) -> None:
    """A run goes on after the shell that started it, also with variables set by hand."""
    shell, rank = start(
        started, "bash", "-c", script.replace("{}", '"$@"') + " read", "bash", *PYTHON, RANK
    )
    assert shell.stdin is not None and shell.stdout is not None
    with shell.stdin, shell.stdout:
        shell.stdin.close()
        assert shell.wait() == 1 and outlives(rank, 0.2)
    os.kill(rank, signal.SIGKILL)


def test_without_pidfd(started: list[int]) -> None:
    """An old kernel, or a sandbox, has none."""
    rank = (
        "import os, meshwright.runtime.ranks.orphans as o; del os.pidfd_open; o.POLL_SECONDS = 0.05\n"
        + RANK
    )
    launcher, pid = start(started, *PYTHON, LAUNCHER, VARIABLES["mpirun"], *PYTHON, rank)
    assert outlives(pid, 0.2)
    kill_launcher(launcher, pid)


@pytest.mark.long
@pytest.mark.parametrize("module", ["torch.distributed.run", "meshwright"])
@pytest.mark.fault("F1")
def test_training_under_real_launchers(module: str, tmp_path: Path, started: list[int]) -> None:
    """Ranks that train end within 5 seconds after SIGKILL of torchrun or of our launcher."""
    first = ["launch", "--nproc-per-node=2"]
    if module != "meshwright":
        first = ["--nproc-per-node=2", f"--master_port={free_port()}", "-m", "meshwright"]
    flags = [*TINY_FLAGS, "--train-iters=1000000", f"--run-dir={tmp_path}"]
    words = [sys.executable, "-W", "ignore", "-m", module, *first]
    with open(tmp_path / "err", "w") as err:
        launcher = subprocess.Popen(
            [*words, "train", *flags], stdout=subprocess.PIPE, stderr=err, text=True
        )
    started.append(launcher.pid)
    assert launcher.stdout is not None
    for line in launcher.stdout:
        if "iteration        5/" in line:
            break
    ranks = [
        int(n)
        for n in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    ]
    started.extend(ranks)
    assert len(ranks) == 2 and all(map(is_alive, ranks)), (tmp_path / "err").read_text()
    began = time.monotonic()
    launcher.kill()
    assert not any(outlives(rank, 5) for rank in ranks)
    assert time.monotonic() - began < 5
    launcher.communicate()
