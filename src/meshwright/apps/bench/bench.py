"""A bench: rows one after the other, each shown as soon as it is done, and kept in files."""

from __future__ import annotations

import functools
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshwright.apps.bench import table
from meshwright.apps.bench.rows import BenchRow
from meshwright.apps.bench.runs import BenchPlan, measure_row
from meshwright.base import device as devices
from meshwright.base import host
from meshwright.base.files import replacing
from meshwright.base.progress import duration, new_bar
from meshwright.base.version import installed_version, our_version


class Bench:
    """A run of rows. table.txt and results.json are up to date after each; bench.png comes last."""

    def __init__(self, plan: BenchPlan, command: str, gpus: int) -> None:
        self.plan = plan
        self.gpus = gpus
        self.results: list[dict[str, Any]] = []
        self.lines: list[str] = []
        # What a reader of the results must know to compare them.
        accelerators = devices.list_accelerators()
        device = f"CPU, {host.cores()} cores"
        if accelerators:
            device = devices.device_name(accelerators[0])
        self.about = {
            "command": command,
            "time": time.strftime("%Y-%m-%d %H:%M:%S"),
            "version": our_version(),
            "commit": find_commit(),
            "torch": installed_version("torch"),
            "triton": installed_version("triton"),
            "python": platform.python_version(),
            "host": platform.node(),
            "gpus": len(accelerators),
            "device": device,
        }

    def run(self, rows: list[BenchRow]) -> int:
        """Measure the rows; return the number of those that failed."""
        began = time.perf_counter()
        self.plan.out.mkdir(parents=True, exist_ok=True)

        # What is measured, then a line for each row as soon as it has ended.
        about = self.about
        ours = f"{about['device']}, meshwright {about['version']}"
        commit = f", commit {about['commit']}" if about["commit"] else ""
        self.show(f"{ours}{commit}, torch {about['torch']}")
        self.show(table.head())
        for number, row in enumerate(rows, 1):
            title = f"{number} of {len(rows)}: {row.name}"
            self.add(self.measure(row, title))
        self.show(*table.startup_lines(self.results))

        # The sum of it all, and the picture.
        failed = sum(bool(r["failed"]) for r in self.results)
        took = duration(time.perf_counter() - began)
        self.show(f"\n{len(rows)} rows, {failed} failed, in {took}")
        title = f"{ours}, torch {about['torch']}"
        table.draw_bars(self.results, title, self.plan.out / "bench.png")
        print(f"tables, logs and picture: {self.plan.out}")
        return failed

    def measure(self, row: BenchRow, title: str) -> dict[str, Any]:
        # Without any GPU, a row on several ranks runs on the CPU; with some, they may be too few.
        if row.gpus > self.gpus > 0:
            need = f"needs {row.gpus} GPUs, this machine has {self.gpus}; --gpus and --rows choose others"
            return {
                "name": row.name,
                "gpus": row.gpus,
                "beside": row.beside,
                "failed": need,
                "startup": {},
            }
        with step_bar(title, self.plan.steps_of(row)) as update:
            result = measure_row(row, self.plan, lambda done: update(completed=done))
            # Other programs are run right after ours, on a device in the same state.
            if self.plan.peers and (row.peers or row.plain_batch) and not result["failed"]:
                from meshwright.apps.bench.peers import compare_with_peers

                def say(text: str) -> None:
                    update(description=f"{title}: {text}")

                result["peers"] = compare_with_peers(row, self.plan, result, say)
        return result

    def add(self, result: dict[str, Any]) -> None:
        table.add_ratio(result, self.results)
        self.results.append(result)
        self.show(*table.lines_of(result))

    def show(self, *lines: str) -> None:
        """Write the files, then print: the reader of our output may be gone."""
        self.lines += lines
        self.write()
        for line in lines:
            print(line, flush=True)

    def write(self) -> None:
        text = "\n".join(self.lines)
        results = json.dumps(self.about | {"rows": self.results}, indent=1)
        for name, content in (
            ("table.txt", text),
            ("results.json", results),
        ):
            with replacing(self.plan.out / name) as file:
                file.write(f"{content}\n".encode())


@contextmanager
def step_bar(title: str, steps: int) -> Iterator[Callable[..., None]]:
    """Show a bar of steps while a row runs, if there is a terminal; yield what changes it."""
    if not sys.stderr.isatty():
        yield lambda **changes: None
        return
    bar, task = new_bar("{task.description}", "bar", "count", "left", total=steps)
    bar.update(task, description=title)
    with bar:
        yield functools.partial(bar.update, task)


def find_commit() -> str | None:
    """Return the commit of this code, with a + if files were changed, or None outside of git."""
    folder = Path(__file__).parents[4]
    if not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "describe", "--always"]
    command += ["--exclude=*", "--abbrev=10", "--dirty=+"]  # the hash, whatever tags there are
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
