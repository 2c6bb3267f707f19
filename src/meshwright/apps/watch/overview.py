"""Find the runs below some folders, follow them, and describe each for the page."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.apps.pages.runs import differing, shell_line
from meshwright.apps.pages.styles import COLOURS, RUN_LINES
from meshwright.base.records import json_ready
from meshwright.base.runs.follow import RunTail
from meshwright.base.runs.history import PATIENCE, Attempt
from meshwright.base.runs.rows import METRICS

# Seconds between readings of the files, and between searches for new ones.
FOLLOW_SECONDS, SEARCH_SECONDS = 0.5, 5.0
SEARCH_DEPTH = 3  # folders below a given one
RECENT_STEPS = 100  # steps whose speed says how long the rest takes
# What a run writes of itself when it starts, and the page shows.
FACTS = (
    "parameters",
    "train_iters",
    "device",
    "dtype",
    "torch",
    "version",
    "tokens_per_step",
)


class Watcher:
    """All runs, followed by one thread; `version` counts what it has read."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = list(roots)
        self.version = 0
        self.runs: dict[Path, RunTail] = {}  # in the order in which they were found: their numbers
        self.names: dict[Path, str] = {}
        self.stopping = threading.Event()
        # Says whether streams of events must end; the server puts its own test here.
        self.is_over: Callable[[], bool] = self.stopping.is_set
        self.searched = -math.inf

    def start(self) -> None:
        self.search()
        threading.Thread(target=self.follow, daemon=True).start()

    def follow(self) -> None:
        while not self.stopping.wait(FOLLOW_SECONDS):
            self.update()

    def update(self) -> None:
        """Read what the runs have written, and now and then search for new ones."""
        if time.monotonic() - self.searched > SEARCH_SECONDS:
            self.search()
        for run in list(self.runs.values()):
            if self.stopping.is_set():
                return
            try:
                run.read_new(self.publish)
            except (OSError, BrokenExecutor) as error:
                # A disk failed, or a reading process was killed for memory: try again.
                run.file_state = ()
                if str(error) != run.problem:
                    run.problem = str(error)
                    self.publish()

    def publish(self) -> None:
        self.version += 1

    def search(self) -> None:
        """Find runs that are new; a folder without any is a run that begins later."""
        self.searched = time.monotonic()
        roots = {folder: root for root in self.roots for folder in find_runs(root) or [root]}
        found = [*self.runs, *(folder for folder in roots if folder not in self.runs)]
        if len(found) == len(self.runs):
            return

        # A root that had no run was followed itself, until runs were found below it.
        runs = {}
        for folder in found:
            run = self.runs.get(folder) or RunTail(folder)
            is_replaced = folder in self.roots and folder not in roots and not run.file_state
            if not is_replaced:
                runs[folder] = run

        # Names are relative to the roots, unless two runs would have the same.
        names = {}
        for folder, root in roots.items():
            names[folder] = (
                folder.resolve().name if folder == root else str(folder.relative_to(root))
            )
        counts = Counter(names.values())
        for folder, name in names.items():
            self.names[folder] = name if counts[name] == 1 else str(folder)
        self.runs = runs  # last: the page's thread looks their names up
        self.publish()

    def run_in(self, folder: str) -> RunTail:
        """Return the run of a folder; raise KeyError for a folder that is not watched."""
        return self.runs[Path(folder)]

    def state(self) -> dict[str, Any]:
        """Return what the page says of all runs, without curves."""
        followed = list(self.runs.items())  # another thread adds to them
        runs = []
        for number, (folder, run) in enumerate(followed):
            described = describe_run(run, self.names[folder], time.time())
            described["colour"] = COLOURS[number % len(COLOURS)]
            described["dash"] = dash_of(number)
            runs.append(described)
        different = {}
        if len(followed) > 1:
            different = differing([run.settings for _, run in followed])
        return {"version": self.version, "runs": runs, "different": different}


def dash_of(number: int) -> list[float]:
    """Return the dashes of a run's lines: solid, until all colours are used."""
    line, _ = RUN_LINES[number // len(COLOURS) % len(RUN_LINES)]
    return [] if line == "-" else list(line[1])


def find_runs(root: Path) -> list[Path]:
    """Return the folders with a metrics.jsonl: this one, or those below it."""
    found = []
    for name, folders, files in os.walk(root):
        depth = len(Path(name).relative_to(root).parts)
        if METRICS in files:
            found.append(Path(name))
        # The walk goes on with the folders left in this list: not below a run, nor in checkpoints.
        if METRICS in files or depth >= SEARCH_DEPTH:
            folders.clear()
        folders[:] = sorted(f for f in folders if not f.startswith((".", "iter_")))
    return found


def describe_run(run: RunTail, name: str, now: float) -> dict[str, Any]:
    """Return the figures of one run; numbers that are not finite are null."""
    with run.lock:
        record = run.record
        attempts = record.attempts
        start: dict[str, Any] = {}
        slow: list[Any] = []
        if attempts:
            start = attempts[-1].start
            # Slow ranks matter while the attempt goes on.
            slow = list(attempts[-1].slow.values()) if attempts[-1].end is None else []
        out: dict[str, Any] = {
            "name": name,
            "folder": str(run.folder),
            "problem": run.problem,
            "damage": run.damage,
            "read": run.offset / run.size if run.size else 1.0,
            "attempts": [describe_attempt(a) for a in attempts],
            "state": state_of(run, now),
            "slow": slow,
            "updated": run.updated,
            "steps": run.count,
            "samples": sorted({i for i, _ in record.samples}),
            "seconds": sum(a.seconds for a in attempts),
        }
        out |= {fact: start.get(fact) for fact in FACTS}
        if means := record.mean_validations():
            best = record.best_validation()
            out["best"] = best and list(best[::-1])
            out["validation"] = means[-1][1]
        if run.count:
            out |= recent_figures(run)
            if goodput := run.goodput():
                out["goodput"] = goodput.share
                out["recovery"] = goodput.mean_recovery
    clean: dict[str, Any] = json_ready(out, lambda x: None)
    return clean


def recent_figures(run: RunTail) -> dict[str, Any]:
    last = int(run.column("iteration")[-1])
    loss, count = run.final_loss()
    peaks = run.column("memory")
    tokens = run.tokens_read()
    amounts = run.column("consumed_samples") if tokens is None else tokens
    # The last figures, and medians of recent steps for those that vary.
    out: dict[str, Any] = {
        "step": last,
        "loss": loss,
        "loss_steps": count,
        "unit": "samples" if tokens is None else "tokens",
        "amount": int(amounts[-1]),
        "memory": float(np.nanmax(peaks)) if np.isfinite(peaks).any() else None,
        "skipped": int(run.column("skipped").sum()),
    }
    for name in ("lr", "grad_norm"):
        out[name] = float(run.column(name)[-1])
    for name in ("ms", "tokens_per_second", "mfu"):
        # Of the last steps, so that what was slow at the start is forgotten.
        out[name] = float(np.median(run.column(name)[-RECENT_STEPS:]))
    if run.record.attempts:
        total = run.record.attempts[-1].start.get("train_iters")
        if isinstance(total, int) and total > last:
            out["left"] = (total - last) * out["ms"] / 1e3
    return out


def state_of(run: RunTail, now: float) -> str:
    """Return a key of the page's words."""
    attempts = run.record.attempts
    if not run.file_state:
        return "waiting"
    if not attempts:
        return "reading" if run.offset < run.size else "empty"
    if attempts[-1].end is None:
        return "running" if now - run.updated < PATIENCE else "silent"
    return "ended" if attempts[-1].end.get("status") == 0 else "failed"


def describe_attempt(a: Attempt) -> dict[str, Any]:
    end = a.end or {}
    return {
        "number": a.number,
        "time": a.start.get("time"),
        "began": a.began,
        "last": a.last,
        "command": shell_line(a.start.get("command")),
        "end": end.get("reason"),
        "at": end.get("time"),
    }


def describe_samples(run: RunTail, iteration: int) -> list[dict[str, Any]]:
    with run.lock:
        samples = sorted(run.record.samples.items())
    return [
        {"number": sample.number, "prompt": sample.prompt, "text": sample.text}
        for (step, _), sample in samples
        if step == iteration
    ]
