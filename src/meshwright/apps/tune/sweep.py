"""Run a sweep: ordinary trainings, several at a time, in folders that a later start takes up.

A run ends early by asynchronous successive halving: at given fractions of its steps it is compared
with all runs that came so far, at that step, and ends unless its loss is in the best share of them.
With a share of one half that is a median rule. The loss is that of the last validation up to the
step, or without validations the mean of the training loss before it.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from meshwright.apps.tune.points import OWN, Point, name_of_point, require_flags, words_of
from meshwright.base import device as devices
from meshwright.base import host
from meshwright.base.errors import (
    DONE,
    MEANINGS,
    NON_FINITE,
    SIGINT,
    SIGTERM,
    UNEXPECTED,
    UserError,
)
from meshwright.base.files import own_file, replacing, require_unlinked
from meshwright.base.python310 import NEW_GROUP
from meshwright.base.runs.history import final_steps
from meshwright.base.runs.sweeps import RECORD, read_record
from meshwright.checkpoint.owner import lock_folder
from meshwright.config import flags
from meshwright.config.fields import spelling
from meshwright.config.problem import SettingsError
from meshwright.config.schema import TrainConfig
from meshwright.runtime.ranks.orphans import LAUNCHER_PID

if TYPE_CHECKING:
    from meshwright.base.runs.follow import RunTail

POLL_SECONDS = 0.5
# The flags of train that a sweep gives each run.
OWN_FLAGS = (*map(spelling, OWN), "--dry-run", "--print-config")
MOST_STEPS = 1 << 53  # the most that a float states exactly; a strange log may say more
MOST_LISTED = 10  # refused runs that are named
# States that a later start of the sweep leaves as they are.
FINAL_STATES = ("done", "stopped", "diverged")


@dataclass(frozen=True)
class SweepPlan:
    """What all runs of a sweep have in common, and how it ends some of them."""

    folder: Path
    train_flags: tuple[str, ...] = ()
    ranks: int = 1  # of each run
    checkpoints: bool = True
    stop_at: tuple[float, ...] = ()  # fractions of the steps
    share: float = 0.5  # of the runs that go on at each of them

    def flags_of(self, name: str, point: Mapping[str, str]) -> list[str]:
        """Return the flags of train of a run; its folder wins over a file and the environment."""
        folder = self.folder / name
        if self.checkpoints:
            saves = [f"--save={folder}", f"--load={folder}"]
            if not any(word.startswith("--keep-last") for word in self.train_flags):
                saves.append("--keep-last=1")
        else:  # a run that was interrupted begins anew
            saves = ["--save=none", "--load=none", "--save-overwrite"]
        return [*self.train_flags, *words_of(point), f"--run-dir={folder}", *saves]

    def command(self, name: str, point: Mapping[str, str]) -> list[str]:
        """Return the words after `meshwright` that start or continue a run."""
        launch = ["launch", f"--nproc-per-node={self.ranks}"] if self.ranks > 1 else []
        return [*launch, "train", *self.flags_of(name, point)]

    def read_settings(self, name: str, point: Mapping[str, str]) -> TrainConfig:
        """Return the checked settings of a run; raise UserError for what train would refuse."""
        # The flags alone are checked, without the architecture of a checkpoint.
        words = [*self.flags_of(name, point), "--load=none"]
        if self.ranks > 1:
            words.append(f"--world-size={self.ranks}")
        return flags.parse_settings(TrainConfig, words, "meshwright train").config


@dataclass
class SweepRun:
    """A run of a sweep: its point, what became of it, and its figures."""

    name: str
    point: Point
    state: str = "waiting"  # running, interrupted, failed, or one of FINAL_STATES
    note: str = ""
    rungs: dict[int, float] = field(default_factory=dict)  # step -> loss, where it was compared
    tail: RunTail | None = field(default=None, repr=False)

    def read(self, folder: Path) -> RunTail:
        """Return the rows of the run, with what is new."""
        from meshwright.base.runs.follow import RunTail

        self.tail = self.tail or RunTail(folder / self.name)
        self.tail.read_new(lambda: None)
        return self.tail


@dataclass
class Child:
    """A run that goes on, and the devices that it has."""

    process: subprocess.Popen[bytes]
    slot: int
    is_stopped: bool = False  # by the rule of early stopping


class Sweep:
    """The runs of a folder; `start` makes a run's process from the words after `meshwright`."""

    def __init__(
        self,
        plan: SweepPlan,
        runs: dict[str, SweepRun],
        words: list[str],
        progress: TextIO | None = None,
    ) -> None:
        """`progress` gets a line for each start and end; standard output by default."""
        self.progress = progress
        self.plan = plan
        self.runs = runs
        self.words = words
        self.children: dict[str, Child] = {}
        self.program = [sys.executable, "-u", "-m", "meshwright"]

    def run(self, slots: list[dict[str, str]]) -> int:
        """Start all runs that are not finished, one in each slot; return the exit status.

        A slot is the environment of its runs, by which they see their devices.
        """
        with lock_folder(self.plan.folder, "choose another folder"):
            waiting = []
            for run in self.runs.values():  # what an earlier start left
                if run.state not in FINAL_STATES:
                    run.state = "waiting"
                    waiting.append(run)
                # Finished runs too are what later ones are compared with.
                self.note_rungs(run)
            with host.handled([signal.SIGTERM], end_sweep):
                try:
                    self.work(waiting, slots)
                finally:
                    self.end_children()
                    self.write()
        has_failed = any(run.state == "failed" for run in self.runs.values())
        return UNEXPECTED if has_failed else DONE

    def work(self, waiting: list[SweepRun], slots: list[dict[str, str]]) -> None:
        free = list(range(len(slots)))
        while waiting or self.children:
            while waiting and free:
                self.start(waiting.pop(0), free.pop(0), slots)
            time.sleep(POLL_SECONDS)
            for name, child in list(self.children.items()):
                run = self.runs[name]
                self.note_rungs(run)
                if child.process.poll() is not None:
                    self.finish(name)
                    free.append(child.slot)
                elif not child.is_stopped and (reason := self.reason_to_stop(run)):
                    run.note = reason
                    child.is_stopped = True
                    child.process.send_signal(signal.SIGTERM)

    def start(self, run: SweepRun, slot: int, slots: list[dict[str, str]]) -> None:
        log = self.plan.folder / f"{run.name}.log"
        # A link in the sweep's folder would lead the run elsewhere.
        require_unlinked(self.plan.folder / run.name)
        with open(log, "ab", opener=own_file) as output:
            process = subprocess.Popen(
                [*self.program, *self.plan.command(run.name, run.point)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **slots[slot], LAUNCHER_PID: str(os.getpid())},
                **NEW_GROUP,  # Ctrl-C reaches this process alone, which tells them
            )
        run.state, run.note = "running", ""
        self.children[run.name] = Child(process, slot)
        self.write()
        self.say(run, "started")

    def finish(self, name: str) -> None:
        run = self.runs[name]
        child = self.children.pop(name)
        run.read(self.plan.folder)
        # A signal that ended the process counts as a shell has it: 128 and its number.
        status = child.process.returncode
        status = 128 - status if status < 0 else status
        if status == DONE:
            run.state, run.note = "done", ""
        elif child.is_stopped and status == SIGTERM:
            run.state = "stopped"
        elif status in (SIGINT, SIGTERM):
            run.state = "interrupted"
            run.note = "it goes on when the sweep is started again"
        elif status == NON_FINITE:
            run.state = "diverged"
            run.note = MEANINGS[status]
        else:
            why = MEANINGS.get(status, f"exit status {status}")
            run.state = "failed"
            run.note = f"{why}; see {self.plan.folder / name}.log"
        self.write()
        self.say(run, run.state)

    def say(self, run: SweepRun, event: str) -> None:
        now = time.strftime("%H:%M:%S")
        line = f"{now} {event:<11} {run.name}"
        if event != "started" and run.tail:
            loss = last_loss(run.tail)
            if loss is not None:
                line += f"   loss {loss:.4f}"
        if run.note:
            line += f"   ({run.note})"
        ended = sum(each.state in FINAL_STATES for each in self.runs.values())
        print(f"{line}   {ended} of {len(self.runs)} ended", file=self.progress)

    def note_rungs(self, run: SweepRun) -> None:
        """Record the losses of a run at the steps where it is compared, once it has left them.

        A validation after a step is logged later than the step, which may be much later.
        """
        tail = run.read(self.plan.folder)
        if not tail.record.attempts or not tail.count:
            return
        attempt = tail.record.attempts[-1]
        total = attempt.start.get("train_iters")
        if not isinstance(total, int) or total > MOST_STEPS:
            return
        last = tail.column("iteration")[-1]
        # The last step's own validation is there once the run has ended.
        has_ended = attempt.end is not None
        for fraction in self.plan.stop_at:
            step = max(1, round(fraction * total))
            if (last > step or (last == step and has_ended)) and step not in run.rungs:
                run.rungs[step] = loss_at(tail, step)

    def reason_to_stop(self, run: SweepRun) -> str:
        """Return why a run must end now, or an empty text."""
        for step, loss in run.rungs.items():
            # All runs that came to this step, whether they go on or not.
            losses = []
            for each in self.runs.values():
                if step in each.rungs:
                    losses.append(each.rungs[step])
            losses.sort()
            best = math.ceil(self.plan.share * len(losses) - 1e-9)  # 0.07 x 100 is above 7
            if not loss <= losses[best - 1]:  # also if it is not a number
                return f"{loss:.4f} at step {step:,}: not among the best {best} of {len(losses)}"
        return ""

    def end_children(self) -> None:
        """Ask all runs to save and end, and wait for them."""
        for child in self.children.values():
            child.process.send_signal(signal.SIGINT)
        for name, child in list(self.children.items()):
            child.process.wait()
            self.finish(name)

    def write(self) -> None:
        runs = {}
        for run in self.runs.values():
            runs[run.name] = {"point": run.point, "state": run.state, "note": run.note}
        record = {"words": self.words, "train_flags": self.plan.train_flags, "runs": runs}
        with replacing(self.plan.folder / RECORD) as file:
            file.write(json.dumps(record, indent=1).encode())


def end_sweep(number: int, frame: object) -> None:
    """End as after Ctrl-C, but with the exit status of SIGTERM."""
    raise SystemExit(SIGTERM)


def loss_at(tail: RunTail, step: int) -> float:
    """Return the loss by which a run is compared at a step; infinity if it is not a number."""
    checks = [loss for i, loss in tail.record.mean_validations() if i <= step]
    if checks:
        last = checks[-1]
        return last if math.isfinite(last) else math.inf

    # Without validations the mean over some steps, as a run's final training loss is one.
    steps = tail.column("iteration")
    first = step - max(10, final_steps(step, 1))  # of the steps whose mean is taken, less one
    is_taken = tail.column("skipped") == 0
    is_counted = is_taken & (steps <= step) & (steps > first)
    recent = tail.column("loss")[is_counted]
    return float(recent.mean()) if len(recent) else math.inf


def last_loss(tail: RunTail) -> float | None:
    """Return the last validation loss, or the mean training loss at the end."""
    if checks := tail.record.mean_validations():
        return checks[-1][1]
    return tail.final_loss()[0] if tail.count else None


def read_runs_of_sweep(folder: Path) -> dict[str, SweepRun]:
    """Return the runs of a folder as its record and their own folders show them."""
    runs = {}
    for name, each in read_record(folder).get("runs", {}).items():
        run = SweepRun(name, each["point"], each["state"], each["note"])
        require_flags(run.point, str(folder / RECORD))
        run.read(folder)
        runs[name] = run
    return runs


def join_runs(folder: Path, points: list[Point], train_flags: list[str]) -> dict[str, SweepRun]:
    """Return the runs of an earlier start and the new ones; refuse other flags of train.

    An earlier start that trained nothing binds no later one.
    """
    runs = read_runs_of_sweep(folder)
    # Runs of other flags cannot be compared; those that never began may be forgotten.
    if runs and (earlier := read_record(folder)["train_flags"]) != train_flags:
        for run in runs.values():
            if run.state in FINAL_STATES or (run.tail and run.tail.count):
                raise UserError(
                    f"{folder} holds a sweep of `train {' '.join(earlier)}`; choose another folder"
                )
        runs = {}
    for point in points:
        name = name_of_point(point)
        # A run of an earlier start keeps what became of it.
        runs.setdefault(name, SweepRun(name, point))
    return runs


def require_runs(plan: SweepPlan, runs: Iterable[SweepRun]) -> None:
    """Raise UserError with what train would refuse in the settings and the files of these runs."""
    from meshwright.training.before.resolve import bring_files, find_vocabulary, run_folder_of

    wrong = list[UserError]()
    seen = set[str]()
    for run in runs:
        try:
            config = plan.read_settings(run.name, run.point)
            # Most runs of a sweep read the same files, which are looked at once.
            if (named := repr((config.data, config.tokenizer))) not in seen:
                seen.add(named)
                bring_files(config)
                find_vocabulary(config, run_folder_of(config))
        except UserError as error:
            wrong.append(UserError(f"{run.name}: {error}", error.status))
    if not wrong:
        return
    lines = [str(error) for error in wrong[:MOST_LISTED]]
    if len(wrong) > MOST_LISTED:
        lines.append(f"and {len(wrong) - MOST_LISTED:,} more runs")
    if len(lines) > 1:
        lines.insert(0, "")
    raise UserError("\n  ".join(lines), wrong[0].status)


def find_slots(jobs: int | None, ranks: int, device: str) -> list[dict[str, str]]:
    """Return the environment of each of the jobs: its devices, and its share of the cores.

    Without a number there are as many jobs as devices for them; on a CPU one.
    """
    kind, _, index = device.partition(":")
    count = 0 if kind == "cpu" or index else devices.count_accelerators()
    parts = count // ranks
    if count and not parts:
        raise SettingsError(f"{{devices_per_run={ranks}}}: this machine has {count}")
    jobs = jobs or max(parts, 1)
    threads = {}
    # So many processes would each take all cores.
    if "OMP_NUM_THREADS" not in os.environ:
        threads["OMP_NUM_THREADS"] = str(max(1, host.cores() // (jobs * ranks)))
    variable = devices.hiding_variable() if count else None
    if variable is None:
        return [threads] * jobs

    # Each job sees `ranks` devices, of those that this process sees; jobs beyond share them.
    visible = os.environ.get(variable) or ",".join(map(str, range(count)))
    names = visible.split(",")[:count]
    slots = []
    for i in range(jobs):
        first = i % parts * ranks
        slots.append({**threads, variable: ",".join(names[first : first + ranks])})
    return slots
