"""Other programs on a row's model, each in a process of its own that ends after its time."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from meshwright.apps.bench.rows import BenchRow
from meshwright.apps.bench.runs import BenchPlan, find_reason
from meshwright.runtime.ranks.orphans import LAUNCHER_PID

# The packages that each program needs, by the names of their modules.
PACKAGES: dict[str, tuple[str, ...]] = {
    "plain-compiled": (),
    "transformers": ("transformers",),
    "transformers-compiled": ("transformers",),
    "megatron-core": ("megatron.core", "einops"),
}
PEER_STEPS = 20  # of the fastest micro-batch


def compare_with_peers(
    row: BenchRow, plan: BenchPlan, ours: dict[str, Any], say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return the figures of each program, with the ratio of our speed to its, the fastest first."""
    out = []
    for name in plan.peers:
        # On a CPU, compiling takes minutes, and megatron-core is not compared.
        if name != "transformers" and "--device cpu" in row.flags:
            continue
        if not (row.plain_batch if name == "plain-compiled" else row.peers):
            continue
        say(name)
        peer = run_peer(name, row, plan)
        if not peer["failed"]:
            peer["ratio"] = ours["tokens_per_second"] / peer["tokens_per_second"]
        out.append(peer)
    return sorted(out, key=lambda peer: -peer.get("tokens_per_second", 0))


def run_peer(name: str, row: BenchRow, plan: BenchPlan) -> dict[str, Any]:
    if missing := [package for package in PACKAGES[name] if not is_installed(package)]:
        names = " ".join(package.replace(".", "-") for package in missing)
        return {"name": name, "failed": f"not measured: pip install {names}"}
    folder = plan.folder(row) / name
    folder.mkdir(parents=True)
    results = folder / "found.jsonl"
    console = folder / "console.txt"
    steps = min(plan.steps_of(row), PEER_STEPS)
    words = ["--vocab-size", str(row.vocabulary), *row.flags.split()]
    micros = (row.plain_batch,) if name == "plain-compiled" else row.peers
    request = {"program": name, "flags": words, "micros": micros, "steps": steps}
    command = [
        sys.executable,
        "-m",
        "meshwright.apps.bench.programs",
        json.dumps(request),
        str(results),
    ]
    with console.open("w") as file:
        # It ends with the bench, even if that is killed.
        environment = os.environ | {LAUNCHER_PID: str(os.getpid())}
        run = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        try:
            run.wait(plan.peer_seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # Also after a timeout: what it has written by then counts.
            run.kill()
            run.wait()
    return read_result(name, results, console, plan.peer_seconds)


def read_result(name: str, results: Path, console: Path, seconds: float) -> dict[str, Any]:
    """Return the last figures, or the fastest trial's if time or memory ended before them."""
    entries: list[dict[str, Any]] = []
    with contextlib.suppress(OSError, ValueError):  # the last line may be cut off
        for line in results.read_text().splitlines():
            entries.append(json.loads(line))
    tried = [e for e in entries if e["event"] == "tried"]
    # Of entries that ran: the longer run, if time was enough for it, or the fastest trial.
    ran = [e for e in entries if e["tokens_per_second"]]
    done = [e for e in ran if e["event"] == "done"]
    best = done or sorted(ran, key=lambda e: -e["tokens_per_second"])
    if best:
        speeds = {e["micro"]: e["tokens_per_second"] for e in tried}
        figures = {key: value for key, value in best[0].items() if key != "event"}
        return {"name": name, "failed": None, "tried": speeds} | figures
    if tried:
        sizes = ", ".join(str(e["micro"]) for e in tried)
        reason = f"micro-batches {sizes} do not fit"
    else:
        reason = find_reason(console) or f"no step in {seconds:g} s (--peer-seconds)"
    return {"name": name, "failed": reason}


def is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False
