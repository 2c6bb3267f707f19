"""One row of a bench: a run of `meshwright train` in a process of its own, and its figures."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.apps.bench.rows import RECIPE, WARMUP, BenchRow
from meshwright.base.runs.rows import read_new_rows, read_rows
from meshwright.data import tokenizers
from meshwright.runtime.ranks.orphans import LAUNCHER_PID

TRACED_STEPS = 3  # steps that --profile adds to the end of a run
GRACE_SECONDS = 20  # seconds that a stopped run has to end
GPT2_IDS = "50257"
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


@dataclass(frozen=True)
class BenchPlan:
    """The settings that hold for all rows of a bench."""

    out: Path
    data: str | None = None  # prefix of token files; None: random tokens
    steps: int | None = None  # of each row; None: its own number
    seconds: float = 300  # the most for a row
    has_profile: bool = False
    extra: tuple[str, ...] = ()  # flags of train
    peers: tuple[str, ...] = ()  # other programs that train the rows' models too
    peer_seconds: float = 180  # the most for one of them and a row

    def folder(self, row: BenchRow) -> Path:
        return self.out / re.sub(r"[^\w.-]+", "-", row.name)

    def steps_of(self, row: BenchRow) -> int:
        return self.steps or row.steps

    def command(self, row: BenchRow) -> list[str]:
        """Return the command without the interpreter: [launch ...] train ..."""
        steps = self.steps_of(row)
        words = [*row.flags.split(), *self.data_flags(row)]

        # Steps alone are measured: no validation, and a line of the log for every fifth.
        total = steps
        if self.has_profile:
            total += TRACED_STEPS
        words += ["--train-iters", str(total), "--eval-iters", "0", "--log-interval", "5"]
        if total <= WARMUP and RECIPE in row.flags:  # the decay must be longer than the warm-up
            words += ["--lr-decay-iters", str(WARMUP + 1)]
        if self.has_profile:
            words += ["--profile", "--profile-step-start", str(steps + 1)]
            words += ["--profile-step-end", str(steps + 1 + TRACED_STEPS)]
        words += ["--log-format", "megatron", "--run-dir", str(self.folder(row)), *self.extra]
        if row.gpus == 1:
            return ["train", *words]
        return ["launch", "--nproc-per-node", str(row.gpus), "train", *words]

    def data_flags(self, row: BenchRow) -> list[str]:
        """Return the flags of the data, and of the vocabulary if nothing else names one."""
        words = " ".join([row.flags, *self.extra])
        if self.data is None:
            flags = ["--mock-data"]
            vocabulary = str(row.vocabulary)
            is_named = "--vocab-size" in words
        else:
            flags = ["--data-path", self.data]
            vocabulary = GPT2_IDS
            has_own = tokenizers.find_of_data([self.data])
            is_named = bool(has_own or re.search("--(tokenizer|vocab)", words))
        return flags if is_named else [*flags, "--vocab-size", vocabulary]

    def environment(self, row: BenchRow) -> dict[str, str]:
        fresh = {name: str(self.out / "cache" / name) for name in CACHES} if row.is_fresh else {}
        return os.environ | fresh | {LAUNCHER_PID: str(os.getpid())}  # they end with us


def measure_row(
    row: BenchRow, plan: BenchPlan, on_step: Callable[[int], None] = lambda done: None
) -> dict[str, Any]:
    """Run a row, and return its figures or the reason why there are none.

    `on_step` is called with the number of steps done so far.
    """
    folder = plan.folder(row)
    folder.mkdir(parents=True)
    first, status, began = run_to_end(row, plan, on_step)
    logged = read_rows(folder)
    # These are known of every row, also of one that failed.
    result: dict[str, Any] = {
        "name": row.name,
        "command": shlex.join(["meshwright", *plan.command(row)]),
        "gpus": row.gpus,
        "beside": row.beside or None,
        "seconds": round(time.time() - began, 2),
        "status": status,
    }

    # A run that was stopped for its time counts, if it came to three steps.
    done = [r for r in logged if r["event"] == "step"][: plan.steps_of(row)]
    is_stopped = status in (-signal.SIGTERM, 128 + signal.SIGTERM, -signal.SIGKILL)
    if len(done) < 3 or not (status == 0 or is_stopped):
        reason = f"stopped after {plan.seconds:g} s (--seconds)"
        if not is_stopped:
            reason = find_reason(folder / "console.txt")
        return result | {"failed": reason or f"ended with status {status} after {len(done)} steps"}

    counted = done[len(done) // 3 :]  # without the warm-up
    result["failed"] = None
    result["steps"] = len(done)
    for name in ("tokens_per_second", "ms", "mfu"):
        values = [step[name] for step in counted]
        result[name] = None if values[-1] is None else statistics.median(values)
    start = next(r for r in logged if r["event"] == "start")
    # On a CPU no memory is counted.
    peaks = [step["memory"] for step in done if step["memory"] is not None]
    profile = folder / "profile" / "summary.json"
    result |= {
        "peak_bytes": max(peaks) if peaks else None,
        "first_step_seconds": None if first is None else round(first - began, 2),
        "first_loss": done[0]["loss"],
        "last_loss": done[-1]["loss"],
        "startup": find_startup(start, done[0], began, first),
    }
    for name in ("parameters", "block", "dtype", "device", "torch", "version"):
        result[name] = start.get(name)
    result["profile"] = json.loads(profile.read_text()) if profile.exists() else None
    return result


def run_to_end(
    row: BenchRow, plan: BenchPlan, on_step: Callable[[int], None]
) -> tuple[float | None, int, float]:
    """Run the command; return the time of its first step, its status and the time of its start."""
    folder = plan.folder(row)
    command = plan.command(row)
    first = None
    began = time.time()
    steps = 0
    end = 0
    with open(folder / "console.txt", "w") as console:
        words = [sys.executable, "-m", "meshwright", *command]
        run = subprocess.Popen(
            words, stdout=console, stderr=subprocess.STDOUT, env=plan.environment(row)
        )
        try:
            while run.poll() is None:
                new, end = read_new_rows(folder, end)
                # The first step has ended when the run's log has it, but for some hundredths of a
                # second.
                steps += sum(r["event"] == "step" for r in new)
                if steps and first is None:
                    first = time.time()
                on_step(steps)
                # The run is asked to end, which writes its last lines, and killed if it does not.
                if time.time() - began > plan.seconds:
                    run.terminate()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        run.wait(GRACE_SECONDS)
                    break
                # Look often until the first step, whose time counts, then seldom: a look disturbs.
                time.sleep(0.02 if first is None else 0.2)
        finally:
            if run.poll() is None:
                run.kill()
            run.wait()
    return first, run.returncode, began


def find_startup(
    start: dict[str, Any], step: dict[str, Any], began: float, first: float | None
) -> dict[str, float]:
    """Return the seconds of each phase from the command to the end of the first step."""
    phases = {name: round(seconds, 2) for name, seconds in (start.get("startup") or {}).items()}
    if first is None:
        return phases
    phases["first step"] = round(step["ms"] / 1e3, 2)
    # What no phase counts: the interpreter's start, and what lies between phases.
    return phases | {"the rest": round(max(first - began - sum(phases.values()), 0), 2)}


def find_reason(console: Path) -> str:
    """Return the error that a run printed last, in one line."""
    try:
        text = console.read_text(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    at = max(len(lines) - 1, 0)
    # The last line that names an error, or else the last line at all, with what follows it.
    for number, line in enumerate(lines):
        if re.search(r"\berror: |Error: ", line):
            at = number
    reason = " ".join(lines[at : at + 4])
    return re.sub(r"^meshwright \w+: error: ", "", reason)[:300]
