"""Training on two machines, joined by a cable that can be cut."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from machines import ADDRESSES, ip, machines

from documents import ROOT, end, environment
from helpers import TINY_FLAGS, read_losses
from meshwright.__main__ import main
from meshwright.base.errors import HANG

__all__ = ["machines"]  # a fixture
pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]

MINUTES = 0.2  # on a busy machine a rank may wait for seconds
LAUNCH = "-m meshwright launch --nproc-per-node 2"
TORCHRUN = f"-m torch.distributed.run --nproc_per_node 2 --nnodes 2 --master_addr {ADDRESSES[0]}"


@contextlib.contextmanager
def started(
    machines: tuple[str, str], commands: list[str], folder: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run Python with these arguments on each machine, into log-0 and log-1; kill what is left."""
    processes = []
    try:
        for n, (machine, command) in enumerate(zip(machines, commands, strict=True)):
            words = ["ip", "netns", "exec", machine, sys.executable, *command.split()]
            with (folder / f"log-{n}").open("w") as log:
                process = subprocess.Popen(
                    words,
                    cwd=folder,
                    stdout=log,
                    stderr=log,
                    env=environment(),
                    start_new_session=True,
                )
                processes.append(process)
        yield processes
    finally:
        end(processes)


def training(folder: Path, **more: object) -> str:
    """Return the flags of a TP2 x DP2 training in float64."""
    flags = {"tensor-model-parallel-size": 2, "params-dtype": "float64", "run-dir": folder / "run"}
    return " ".join(
        [*TINY_FLAGS, *(f"--{k.replace('_', '-')}={v}" for k, v in (flags | more).items())]
    )


def as_one_process(folder: Path, flags: str) -> list[float]:
    alone = ["--tensor-model-parallel-size=1", f"--run-dir={folder / 'alone'}"]
    assert main(["train", *flags.split(), *alone]) == 0
    return read_losses(folder / "alone")


def read_logs(folder: Path) -> list[str]:
    return [(folder / f"log-{n}").read_text() for n in range(2)]


@pytest.mark.parametrize(
    ("commands", "status"),
    [
        (
            [
                f"{LAUNCH} --nnodes 2 --node-rank {n} --master-addr {ADDRESSES[0]} train"
                for n in range(2)
            ],
            HANG,
        ),
        # torchrun's, for all
        ([f"{TORCHRUN} --node_rank {n} {ROOT / 'pretrain_gpt.py'}" for n in range(2)], 1),
    ],
    ids=["--node-rank", "torchrun"],
)
@pytest.mark.fault("F17")
def test_a_cut_cable_ends_both_machines(
    machines: tuple[str, str], tmp_path: Path, commands: list[str], status: int
) -> None:
    """They report it soon after the time-out; until then the losses equal those of one process."""
    steps = 10
    flags = training(tmp_path, train_iters=5000, distributed_timeout_minutes=MINUTES)
    with started(machines, [f"{command} {flags}" for command in commands], tmp_path) as processes:
        while f" iteration {steps:>8}/" not in read_logs(tmp_path)[0]:
            assert [p.poll() for p in processes] == [None, None], read_logs(tmp_path)
            time.sleep(0.1)
        ip(f"-n {machines[0]} link set cable-a down")
        cut = time.monotonic()
        assert [p.wait() for p in processes] == [status] * 2, read_logs(tmp_path)
        took = time.monotonic() - cut
    for log in read_logs(tmp_path):
        assert f"(--distributed-timeout-minutes {MINUTES})" in log
        assert "Traceback" not in log or status == 1  # torchrun's own
    assert took < MINUTES * 60 + 30  # leaving takes up to 10 s, and the launchers some more
    alone = as_one_process(tmp_path, f"{flags} --exit-interval={steps}")
    assert read_losses(tmp_path / "run")[:steps] == pytest.approx(alone, rel=1e-9)
