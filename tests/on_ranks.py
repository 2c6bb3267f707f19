"""Run a test body on several gloo ranks of this machine, in a fraction of a second.

A fork server that has imported torch makes each rank by a fork: tens of milliseconds instead of the
seconds of a fresh interpreter. No rank inherits threads from the test process, whose plain fork
could hang.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from helpers import free_port
from meshwright.runtime.ranks.team import Team

# torch._dynamo too, which the first torch.manual_seed() of a process imports, in seconds; and what
# every rank would import for itself in 0.2 seconds.
PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "pytest", "meshwright.training.run"]
FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(PRELOAD)


def run_ranks(body: Callable[..., None], world: int, *args: Any) -> None:
    """Call body(*args) on `world` gloo ranks; raise the error of any of them with its traceback."""
    with tempfile.TemporaryDirectory() as folder:  # a file store: no port to collide on
        store = os.path.join(folder, "store")
        mp.start_processes(_rank, (body, world, store, args), world, start_method="forkserver")


TEAMS: WeakKeyDictionary[dist.ProcessGroup, Team] = WeakKeyDictionary()


def make_team() -> Team:
    """Return the team of all ranks of this world, the same each time: it numbers its clones."""
    world = dist.group.WORLD
    assert world is not None
    if world not in TEAMS:
        store = dist.distributed_c10d._get_default_store()
        TEAMS[world] = Team(dist.get_rank(), dist.get_world_size(), store=store)
    return TEAMS[world]


def _rank(
    rank: int, body: Callable[..., None], world: int, store: str, args: tuple[Any, ...]
) -> None:
    faulthandler.enable()  # a rank that dies prints its stack
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    dist.barrier()  # every rank is connected before any body can fail
    try:
        body(*args)
    finally:
        dist.destroy_process_group()


def train_on_two_gpus(flags: list[str]) -> str:
    """Run `meshwright train` by torchrun on two GPUs; return what it printed."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "meshwright"]
    words = [sys.executable, "-m", *launcher, "train", *flags]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def environments(world: int) -> list[dict[str, str]]:
    """Return what a launcher tells each rank, all of them on this machine."""
    place = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": free_port()}
    shared = {name: str(n) for name, n in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    shared["OMP_NUM_THREADS"] = "1"
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


def run_programs(
    script: Path, argv: list[list[str]], environ: list[dict[str, str]], folder: Path
) -> tuple[list[int], list[str]]:
    """Run `python script argv` in a process for each argv and environment, as a launcher does.

    Return the exit statuses and the outputs. Reports are not drawn.
    """
    with tempfile.TemporaryDirectory() as logs:
        files = [Path(logs, str(n)) for n in range(len(argv))]
        started = [
            FORK.Process(target=_program, args=(script, *one))
            for one in zip(argv, environ, [folder] * len(argv), files, strict=True)
        ]
        return _finished(started), [f.read_text(errors="replace") for f in files]


def _finished(processes: list[Any]) -> list[int]:
    """Start processes and return their exit statuses; kill those that an error leaves running."""
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
    return [-1 if p.exitcode is None else p.exitcode for p in processes]


def _program(
    script: Path, argv: list[str], environ: dict[str, str], folder: Path, log: Path
) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environ)
    os.chdir(folder)
    sys.argv = [str(script), *argv]
    import meshwright.training.run

    meshwright.training.run.write_report = lambda folder: None
    runpy.run_path(str(script), run_name="__main__")


def train_on_ranks(
    world: int, flags: list[str], folder: Path, prepare: Callable[[int], None]
) -> list[int]:
    """Run `meshwright train` on ranks that first call `prepare`; return the exit statuses.

    Rank N prints into the file log-N of the folder.
    """
    port = free_port()
    started = [
        FORK.Process(target=_train, args=(r, world, port, flags, folder, prepare))
        for r in range(world)
    ]
    return _finished(started)


def _train(
    rank: int, world: int, port: int, flags: list[str], folder: Path, prepare: Callable[[int], None]
) -> None:
    with (folder / f"log-{rank}").open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    place = {"RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port} | {
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": world,
    }
    os.environ.update({name: str(n) for name, n in place.items()} | {"MASTER_ADDR": "127.0.0.1"})
    torch.set_num_threads(1)
    import meshwright.training.run
    from meshwright.__main__ import main

    meshwright.training.run.write_report = lambda folder: None
    prepare(rank)
    sys.exit(main(["train", *flags]))
