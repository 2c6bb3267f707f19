"""The runs below some folders, and what the page says of each."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.report.compare import differing, style_of
from meshwright.report.page import command_line
from meshwright.runs import goodput
from meshwright.runs.follow import Follower
from meshwright.runs.history import PATIENCE, Attempt, Sample, final_loss
from meshwright.watch.curves import scale_of

LOOK, SEARCH = 0.5, 5.0  # seconds between looks at the files, and between searches for new ones
DEPTH = 3  # folders below a given one
RECENT = 100  # steps whose speed says how long the rest takes


class Watcher:
    """All runs, followed by one thread; `version` counts what it has read."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots, self.version = list(roots), 0
        self.runs: dict[Path, Follower] = {}  # in the order in which they were found: their numbers
        self.names: dict[Path, str] = {}
        self.stopping = threading.Event()
        self.is_over: Callable[[], bool] = self.stopping.is_set  # whether streams of events must end
        self.searched = -math.inf

    def start(self) -> None:
        self.search()
        threading.Thread(target=self.follow, daemon=True).start()

    def follow(self) -> None:
        while not self.stopping.wait(LOOK):
            self.look()

    def look(self) -> None:
        if time.monotonic() - self.searched > SEARCH:
            self.search()
        for run in list(self.runs.values()):
            if self.stopping.is_set():
                return
            try:
                run.look(self.publish)
            except (OSError, BrokenExecutor) as error:  # a disk that fails, a process killed for memory: try again
                run.seen = ()
                if str(error) != run.problem:
                    run.problem = str(error)
                    self.publish()

    def publish(self) -> None:
        self.version += 1

    def search(self) -> None:
        """Find runs that are new; a folder without any is a run that begins later."""
        self.searched = time.monotonic()
        found = {root: list(find(root)) or [root] for root in self.roots}
        folders = dict.fromkeys(folder for each in found.values() for folder in each)
        runs = {folder: self.runs.get(folder) or Follower(folder) for folder in [*self.runs, *folders]}
        if runs.keys() == self.runs.keys():
            return
        gone = [root for root in self.roots if root in runs and root not in folders and not runs[root].seen]
        self.runs = {folder: run for folder, run in runs.items() if folder not in gone}
        names = {f: str(f.relative_to(root)) if f != root else f.resolve().name for root in found for f in found[root]}
        again = {name for name in names.values() if list(names.values()).count(name) > 1}
        self.names |= {f: str(f) if name in again else name for f, name in names.items()}
        self.publish()

    def named(self, folder: str) -> Follower:
        """Return the run of a folder; raise KeyError if it is none of ours."""
        return self.runs[Path(folder)]

    def state(self) -> dict[str, Any]:
        """Return what the page says of all runs, without curves."""
        runs = [describe(run, self.names[folder], time.time()) for folder, run in list(self.runs.items())]
        for number, run in enumerate(runs):
            style = style_of(number)
            run |= {"colour": style.colour, "dash": [] if style.line == "-" else list(style.line[1])}
        flat = [flatten(run) for run in list(self.runs.values())]
        out = {"version": self.version, "runs": runs}
        return {**out, "different": differing(flat) if len(flat) > 1 else {}}


def find(root: Path) -> Iterator[Path]:
    """Yield the folders with a metrics.jsonl: this one, or those below it."""
    for place, folders, files in os.walk(root):
        if "metrics.jsonl" in files:
            yield Path(place)
            folders.clear()
        depth = len(Path(place).relative_to(root).parts)
        skipped = depth >= DEPTH
        folders[:] = [] if skipped else sorted(f for f in folders if not f.startswith((".", "iter_")))


def flatten(run: Follower) -> dict[str, Any]:
    return {name: value for group in run.settings.values() for name, value in group.items()}


def describe(run: Follower, name: str, now: float) -> dict[str, Any]:
    """Return the figures of one run; numbers that are not finite are null."""
    with run.lock:
        out: dict[str, Any] = {"name": name, "folder": str(run.folder), "problem": run.problem}
        out |= {"damage": run.damage, "read": run.offset / run.size if run.size else 1.0}
        attempts = run.record.attempts
        out["attempts"] = [describe_attempt(a) for a in attempts]
        out["state"] = state_of(run, now)
        out["slow"] = list(attempts[-1].slow.values()) if attempts and attempts[-1].end is None else []
        out["updated"], out["steps"] = run.updated, run.count
        out["unit"] = "tokens" if run.setting("seq_length") else "samples"
        out["samples"] = sorted({i for i, _ in run.record.samples})
        out["seconds"] = sum(a.seconds for a in attempts)
        start = attempts[-1].start if attempts else {}
        facts = "parameters train_iters device dtype torch version tokens_per_step".split()
        out |= {key: start.get(key) for key in facts}
        best = min(run.record.validations(), key=lambda v: (v.name == "test", nan_last(v.loss)), default=None)
        if best is not None and best.name != "test":
            out["best"] = [best.loss, best.iteration]
            out["validation"] = [v.loss for v in run.record.validations() if v.name != "test"][-1]
        if run.count:
            out |= figures(run)
            is_applied, ms = run.column("skipped") == 0, run.column("ms")
            found = goodput.measure(attempts, float(ms[is_applied].sum()) / 1e3, float(ms[~is_applied].sum()) / 1e3)
            out |= {"goodput": found.share, "recovery": found.mean_recovery} if found else {}
    clean: dict[str, Any] = nulls(out)
    return clean


def figures(run: Follower) -> dict[str, Any]:
    """Return the figures of the last steps."""
    last = int(run.column("iteration")[-1])
    interval = run.setting("log_interval")
    wanted = max(1, last // 50, interval if isinstance(interval, int) else 1)
    losses = run.column("loss")[-2 * wanted :][run.column("skipped")[-2 * wanted :] == 0]
    mean, count = final_loss(losses.tolist(), last, interval)
    recent = float(np.median(run.column("ms")[-RECENT:]))
    peaks = run.column("memory")
    known = bool(np.isfinite(peaks).any())
    out: dict[str, Any] = {"step": last, "loss": mean, "loss_steps": count, "ms": recent}
    out |= {"amount": int(run.column("consumed_samples")[-1]) * scale_of(run)}
    out |= {name: float(run.column(name)[-1]) for name in ("lr", "grad_norm")}
    out["tokens_per_second"] = float(np.median(run.column("tokens_per_second")[-RECENT:]))
    out["mfu"] = float(np.median(run.column("mfu")[-RECENT:]))
    out["memory"] = float(np.nanmax(peaks)) if known else None
    out["skipped"] = int(run.column("skipped").sum())
    total = run.record.attempts[-1].start.get("train_iters") if run.record.attempts else None
    if isinstance(total, int) and total > last:
        out["left"] = (total - last) * recent / 1e3
    return out


def state_of(run: Follower, now: float) -> str:
    """Return a key of the page's words."""
    attempts = run.record.attempts
    if not run.seen:
        return "waiting"
    if not attempts:
        return "reading" if run.offset < run.size else "empty"
    if attempts[-1].end is None:
        return "running" if now - run.updated < PATIENCE else "silent"
    return "ended" if attempts[-1].end.get("status") == 0 else "failed"


def describe_attempt(a: Attempt) -> dict[str, Any]:
    end = a.end or {}
    out = {"number": a.number, "time": a.start.get("time"), "began": a.began, "last": a.last}
    return {**out, "command": command_line(a.start.get("command")), "end": end.get("reason"), "at": end.get("time")}


def describe_samples(run: Follower, iteration: int) -> list[dict[str, Any]]:
    with run.lock:
        found: list[Sample] = [s for (i, _), s in sorted(run.record.samples.items()) if i == iteration]
    return [{"number": s.number, "prompt": s.prompt, "text": s.text} for s in found]


def nan_last(x: float) -> float:
    return math.inf if math.isnan(x) else x


def nulls(value: Any) -> Any:
    """Replace numbers that JSON lacks by null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: nulls(v) for k, v in value.items()}
    return [nulls(v) for v in value] if isinstance(value, list) else value
