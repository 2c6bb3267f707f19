"""Runs that are killed and started again, until they end with the losses of an undisturbed run.

Launchers, ours and torchrun, and their ranks are real processes, killed by SIGKILL. Both are forks:
the launcher of a server that has imported torch, a rank of its launcher, which would else start a
program. So a launch takes a fraction of a second. With `programs` they are programs after all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from faults.slow import Slow
from meshwright.data.files.writer import Writer
from on_ranks import PRELOAD

FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(
    [*PRELOAD, "meshwright.runtime.launch.agent", "torch.distributed.run", "faults.harness"]
)

LAUNCHERS = ("meshwright", "torchrun")
STARTED_BY = "FAULTS_LAUNCHER"  # variable of a forked rank
LAYOUTS = {
    "dp2": "",
    "tp2": "--tensor-model-parallel-size 2",
    "pp2": "--pipeline-model-parallel-size 2",
    "zero3": "--zero-stage 3",
}
# The scale of fp16 doubles every 4 clean steps and overflows now and then.
PRECISIONS = {
    "fp32": "",
    "fp16": "--fp16 --initial-loss-scale 65536 --loss-scale-window 4 --hysteresis 2",
}
FLAGS = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2
 --global-batch-size 8 --lr 1e-2 --lr-warmup-fraction .2 --hidden-dropout .1 --attention-dropout .1 --eval-interval 10
 --eval-iters 1 --log-interval 10 --vocab-size 64 --device cpu --save-interval 3 --keep-last 2 --split 80,10,10
 --num-workers 0 --no-tensorboard"""
GRACE = 5.0  # seconds in which every process of a killed run must be gone
TOO_LONG = 300.0  # seconds


@dataclasses.dataclass(frozen=True)
class Case:
    layout: str = "dp2"
    precision: str = "fp32"
    steps: int = 30
    more: str = ""

    def argv(self, data: Path, run: Path) -> list[str]:
        words = f"{FLAGS} {LAYOUTS[self.layout]} {PRECISIONS[self.precision]} --train-iters {self.steps} {self.more}"
        return [
            "train",
            *words.split(),
            "--data-path",
            str(data),
            "--save",
            str(run),
            "--load",
            str(run),
        ]


@dataclasses.dataclass(frozen=True)
class Harm:
    """What is done to a launch."""

    after: float | None = None  # seconds, until one of its processes is killed
    rows: int = 0  # of metrics that are waited for before these seconds
    victim: float = 0.0  # which of them, from 0 to 1: the launcher, then the ranks
    # of the save protocol, where one rank kills itself, in the first launch that gets there
    point: str = ""
    rank: int = 0
    forget: str = ""  # what this launch does not restore
    slow: Slow | None = None  # what takes long
    environ: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Totals:
    kills: int = 0
    launcher_kills: int = 0
    launches: int = 0
    runs: int = 0
    losses: int = 0
    differing: int = 0
    recomputed: int = 0
    orphans: int = 0
    mttr: list[float] = dataclasses.field(default_factory=list)
    # Of a soak: slopes per launch, and the most that a folder held.
    fds: list[float] = dataclasses.field(default_factory=list)
    rss_kb: list[float] = dataclasses.field(default_factory=list)
    steps_kept: int = 0
    disk_mb: float = 0.0
    failures: list[str] = dataclasses.field(default_factory=list)

    def add(self, other: Totals) -> None:
        for field in dataclasses.fields(self):
            own, others = getattr(self, field.name), getattr(other, field.name)
            setattr(
                self,
                field.name,
                max(own, others) if field.name in ("steps_kept", "disk_mb") else own + others,
            )

    def figures(self) -> dict[str, Any]:
        plain = {
            name: getattr(self, name)
            for name in ("kills", "launcher_kills", "launches", "recomputed", "orphans")
        }
        return plain | {"differing": f"{self.differing}/{self.losses}", "mttr": self.mttr}


def write_data(prefix: Path) -> Path:
    rng = np.random.RandomState(0)
    with Writer(prefix, np.uint16) as writer:
        for _ in range(60):
            writer.add(rng.randint(0, 64, rng.randint(5, 60)))
            writer.end_document()
    return prefix


# Processes


class Forked:
    """A rank, made by a fork of its launcher: what torch's agent uses of subprocess.Popen."""

    def __init__(self, argv: list[str], environ: dict[str, str], harm: Harm, folder: Path) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            _rank(argv, environ, harm, folder)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = time.monotonic() + (timeout or TOO_LONG)
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("rank", until)
            time.sleep(0.005)
        return code


def _launcher(name: str, argv: list[str], harm: Harm, folder: Path) -> None:
    """Be a launcher of two ranks, in a process of its own."""
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= harm.environ | {"OMP_NUM_THREADS": "1"}
    import torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler as handlers
    import torch.distributed.run

    from meshwright.runtime.launch import agent
    from meshwright.runtime.launch.launcher import LaunchPlan

    def popen(self: object, words: tuple[str, ...], environ: dict[str, str]) -> Forked:
        return Forked(
            list(words[words.index("meshwright") + 1 :]), environ | {STARTED_BY: name}, harm, folder
        )

    handlers.SubprocessHandler._popen = popen  # type: ignore[method-assign,assignment]
    status = 1
    try:
        if name == "meshwright":
            status = agent.launch_ranks(LaunchPlan(2), ["-u", "-m", "meshwright", *argv])
        else:
            words = [
                "--standalone",
                "--nproc-per-node=2",
                "--monitor-interval=0.05",
                "-m",
                "meshwright",
            ]
            torch.distributed.run.main([*words, *argv])
            status = 0
    finally:
        os._exit(status)


def _rank(argv: list[str], environ: dict[str, str], harm: Harm, folder: Path) -> None:
    """Be a rank, as a program started anew would be."""
    status = 1
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        logging.disable(logging.NOTSET)
        os.environ.clear()
        os.environ.update(environ)
        _prepare(harm, folder)
        from meshwright.__main__ import main

        status = main(argv)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(status)


def _prepare(harm: Harm, folder: Path) -> None:
    """Leave out what takes time and does not matter; arm the kill, or forget something."""
    import torch

    from meshwright.checkpoint import publish
    from meshwright.training import loop, run
    from meshwright.training.state import folder as run_folder

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    run.write_report = lambda folder: None
    run_folder.LivePage.draw = lambda page: None  # type: ignore[method-assign,assignment]
    os.fsync = lambda fd: os.fstat(fd) and None  # type: ignore[assignment]  nobody cuts the power
    real, calls = loop.train_step, []

    def step(*args: Any) -> Any:
        calls.append(1)
        # what a process takes in its third step must not grow with the launches
        if len(calls) == 3:
            memory = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf(
                "SC_PAGE_SIZE"
            )
            with open(folder / f"resources-{rank}", "a") as file:
                file.write(
                    f"{os.environ[STARTED_BY]} {len(os.listdir('/proc/self/fd'))} {memory}\n"
                )
        return real(*args)

    loop.train_step = step

    def reached(name: str) -> None:
        seen = folder / f"seen-{name}"
        if name and name == harm.point and rank == harm.rank and not seen.exists():
            seen.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    publish.crash_point = reached
    if harm.forget:
        FORGET[harm.forget]()
    if harm.slow is not None:
        harm.slow.begin(rank)


# What a launch may be made to forget


def _forget_data() -> None:
    """Begin with the first sample again."""
    from meshwright.data.feed import Feed

    real = Feed.next
    Feed.next = lambda feed, consumed: real(feed, 0)  # type: ignore[method-assign]


def _forget_random_numbers() -> None:
    """Begin with random numbers of another state."""
    from meshwright.training.micro_step import Network

    real = Network.where
    Network.where = lambda net, batch, seed: real(net, batch, None if seed is None else seed + 1)  # type: ignore[method-assign]


def _forget_moments() -> None:
    from meshwright.checkpoint import loading

    real = loading.load_checkpoint

    def weights_alone(path: Any, want: Any, **more: Any) -> Any:
        def weights(source: Any) -> Any:
            return {name: entry for name, entry in want(source).items() if "/" not in name}

        return real(path, weights, **more | {"options": more["options"]._replace(optimizer=False)})

    loading.load_checkpoint = weights_alone  # type: ignore[assignment]


FORGET = {
    "data": _forget_data,
    "random numbers": _forget_random_numbers,
    "moments": _forget_moments,
}


# Launches


def processes(folder: Path) -> list[int]:
    """Return the live processes that print into the log of a run, the launcher first.

    torch renames processes, and forks have the variables of their server.
    """
    found, log = [], str(folder / "log")
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if log in (os.readlink(path / "fd/1"), os.readlink(path / "fd/2")):
                state = (path / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX":
                    found.append(int(path.name))
    return sorted(found)


class Launch:
    """One launch of two ranks, by forks or, with `programs`, by programs."""

    def __init__(
        self,
        launcher: str,
        argv: list[str],
        folder: Path,
        harm: Harm | None = None,
        programs: bool = False,
    ) -> None:
        self.folder, self.programs = folder.resolve(), programs
        harm = harm or Harm()
        if programs:
            name = (
                ["meshwright", "launch"]
                if launcher == "meshwright"
                else ["torch.distributed.run", "--standalone"]
            )
            words = [sys.executable, "-m", *name, "--nproc-per-node=2", "-m", "meshwright", *argv]
            if launcher == "meshwright":
                words = [word for n, word in enumerate(words) if n not in (5, 6)]
            with open(folder / "log", "a") as log:
                environ = os.environ | {"OMP_NUM_THREADS": "1"}
                self.program = subprocess.Popen(words, env=environ, stdout=log, stderr=log)
        else:
            self.fork = FORK.Process(target=_launcher, args=(launcher, argv, harm, folder))
            self.fork.start()
        self.pid = self.program.pid if programs else self.fork.pid or 0

    def end(self, seconds: float) -> int | None:
        """Wait for the launcher; return its exit code, or None if it goes on."""
        if not self.programs:
            self.fork.join(seconds)
            return self.fork.exitcode
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.program.wait(seconds)
        return None

    def kill(self, victim: float) -> int | None:
        """Kill one process; return the number of the victim, 0 for the launcher."""
        ranks = [pid for pid in processes(self.folder) if pid != self.pid]
        number = min(int(victim * (1 + len(ranks))), len(ranks))
        with contextlib.suppress(ProcessLookupError):
            os.kill(ranks[number - 1] if number else self.pid, signal.SIGKILL)
            return number
        return None

    def orphans(self) -> int:
        """Return how many processes are left after the grace, and end them."""
        until = time.monotonic() + GRACE
        while (left := processes(self.folder)) and time.monotonic() < until:
            time.sleep(0.02)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(left)


class Run:
    """A run in a folder of its own, launched until it ends; `totals` counts what happens to it."""

    def __init__(
        self, case: Case, data: Path, folder: Path, clean: list[tuple[Any, ...]] | None = None
    ) -> None:
        self.case, self.folder, self.clean, self.totals = case, folder, clean, Totals()
        folder.mkdir(parents=True)
        self.path = folder / "run"
        self.argv = case.argv(data, self.path)
        self.killed_at: list[float] = []  # and not yet recovered from

    def launch(
        self, launcher: str = "meshwright", harm: Harm | None = None, programs: bool = False
    ) -> int:
        harm = harm or Harm()
        launch = Launch(launcher, self.argv, self.folder, harm, programs)
        self.totals.launches += 1
        status, rows, until = None, self.count_rows() + harm.rows, time.monotonic() + TOO_LONG
        while status is None and self.count_rows() < rows and time.monotonic() < until:
            status = launch.end(0.01)
        if status is None:
            status = launch.end(TOO_LONG if harm.after is None else harm.after)
        victim = launch.kill(harm.victim) if status is None and harm.after is not None else None
        if victim is not None:
            self.killed_at.append(time.time())
        if status is None:
            status = launch.end(TOO_LONG)
        self.totals.orphans += launch.orphans()
        assert status is not None, f"the launcher goes on: {self.log()}"
        if harm.point:
            assert status != 0 and (self.folder / f"seen-{harm.point}").exists(), self.log()
            self.killed_at.append(time.time())
        if status and (victim is not None or harm.point):
            self.totals.kills += 1
            self.totals.launcher_kills += victim == 0
        elif status == 0 and victim is not None:  # it had finished: nothing was lost
            self.killed_at.pop()
        return status

    def finish(
        self, launcher: str = "meshwright", harm: Harm | None = None, programs: bool = False
    ) -> None:
        status = self.launch(launcher, harm, programs)
        assert status == 0, self.log()

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-3000:]

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]

    def count_rows(self) -> int:
        file = self.path / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def losses(self) -> list[tuple[Any, ...]]:
        """Return iteration, loss, norm, rate and scale of every step that was taken, in order."""
        kept = ("iteration", "loss", "grad_norm", "lr", "loss_scale", "skipped", "consumed_samples")
        return [tuple(map(row.get, kept)) for row in self.rows() if row["event"] == "step"]

    def check(self) -> Totals:
        """Compare every step, also those computed again, with the undisturbed run."""
        assert self.clean is not None
        want, taken = {one[0]: one for one in self.clean}, self.losses()
        t = self.totals
        t.runs, t.losses, t.recomputed = 1, len(taken), len(taken) - len({one[0] for one in taken})
        missing = want.keys() - {one[0] for one in taken}
        t.differing = sum(repr(want.get(one[0])) != repr(one) for one in taken) + len(missing)
        starts = [row["time"] for row in self.rows() if row["event"] == "start"]
        for moment in self.killed_at:
            t.mttr += [start - moment for start in starts if start > moment][:1]
        left = [path.name for path in self.path.glob("*.tmp")]
        steps = sorted(path.name for path in self.path.glob("iter_*"))
        assert not left and len(steps) <= 2, (left, steps)
        return t


def draw_harm(rng: random.Random, rows: int, seconds: float) -> Harm:
    """Return a kill within some seconds of the launch, or of some rows of metrics."""
    if rng.random() < 1 / 3:
        return Harm(after=rng.uniform(0, seconds), victim=rng.random())
    return Harm(after=rng.uniform(0, 0.1), rows=rng.randint(1, rows), victim=rng.random())


def kill_at_random(
    run: Run, rng: random.Random, kills: int, seconds: float, launcher: str, programs: bool
) -> Totals:
    """Kill a run `kills` times, while it starts or after some steps, and finish it."""
    status = 1
    while status and run.totals.kills < kills:
        harm = draw_harm(rng, run.case.steps // (kills + 1), seconds / 2)
        status = run.launch(launcher, harm, programs)
    if status:
        run.finish(launcher, programs=programs)
    return run.check()
