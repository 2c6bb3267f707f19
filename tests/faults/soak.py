"""Kill runs again and again, several at a time, and print one line: `make faults-soak`.

    PYTHONPATH=src:tests python -m faults.soak --kills 500 --jobs 12 --seconds 400 --json FILE

Every step of every run is compared with an undisturbed run, bit for bit. What ranks take in files
and memory is compared over the launches of a run; the disk is measured after each launch. Layouts,
precisions and launchers alternate; --programs is the share of launches by programs, not forks. The
status is 0 if all kills were made and nothing differs, grows or is left.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import platform
import random
import statistics
import tempfile
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

from faults import summary
from faults.harness import LAUNCHERS, LAYOUTS, PRECISIONS, Case, Run, Totals, draw_harm, write_data

MOST_STEPS = 3  # checkpoints in a folder: the two that are kept, and one that is being written
FD_SLOPE, RSS_SLOPE = 0.05, 200.0  # descriptors and kB per launch


def slope(values: list[float], kinds: list[str]) -> list[float]:
    """Return the slope over the launches, if there are enough.

    Ranks inherit more open files from torchrun than from our launcher, so that launches are
    compared with others of their kind: both coordinates count from their mean.
    """
    if len(values) < 5:
        return []
    numbers: dict[str, list[int]] = {
        kind: [n for n, k in enumerate(kinds) if k == kind] for kind in kinds
    }
    middle = {
        kind: (statistics.mean(rows), statistics.mean(values[n] for n in rows))
        for kind, rows in numbers.items()
    }
    points = [(n - middle[kind][0], values[n] - middle[kind][1]) for n, kind in enumerate(kinds)]
    spread = sum(x * x for x, _ in points)
    return [sum(x * y for x, y in points) / spread] if spread else []


def worker(number: int, given: argparse.Namespace, folder: Path, until: float) -> Totals:
    """Kill runs until this worker's share of the kills is made, or time is up."""
    share, rng = Totals(), random.Random(f"{given.seed}/{number}")
    wanted = given.kills * (number + 1) // given.jobs - given.kills * number // given.jobs
    data = write_data(folder / f"data{number}")
    cases = [
        Case(layout, precision, given.steps)
        for layout, precision in itertools.product(LAYOUTS, PRECISIONS)
    ]
    for turn in itertools.count(number):
        if share.kills >= wanted or time.time() > until:
            return share
        run = Run(cases[turn % len(cases)], data, folder / f"{number}-{turn}")
        try:
            clean = Run(run.case, data, run.folder.with_name(f"{run.folder.name}-clean"))
            clean.finish()
            run.clean = clean.losses()
            soak(run, share, rng, wanted, given.programs, until)
        except Exception:
            share.add(run.totals)
            share.failures.append(f"{run.case}: {traceback.format_exc()}")
            return share
    return share


_kills: Any = None  # of all workers, a number in shared memory


def share_count(count: Any) -> None:
    global _kills
    _kills = count


def soak(
    run: Run, share: Totals, rng: random.Random, wanted: int, programs: float, until: float
) -> None:
    """Kill one run until it ends, or has to."""
    status = 1
    while status and share.kills + run.totals.kills < wanted and time.time() < until:
        before = run.totals.kills
        real = rng.random() < programs
        harm = draw_harm(rng, 30, 6 if real else 2)
        status = run.launch(rng.choice(LAUNCHERS), harm, real)
        with _kills.get_lock():
            _kills.value += run.totals.kills - before
        kept = [path for path in run.path.glob("iter_*") if path.is_dir()]
        share.steps_kept = max(share.steps_kept, len(kept))
        size = sum(file.stat().st_size for path in kept for file in path.iterdir())
        share.disk_mb = max(share.disk_mb, size / 1e6)
    if status:
        run.finish(rng.choice(LAUNCHERS))
    share.add(run.check())
    for rank in (0, 1):
        path = run.folder / f"resources-{rank}"
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        kinds = [kind for kind, _, _ in lines]
        share.fds += slope([float(fds) for _, fds, _ in lines], kinds)
        share.rss_kb += slope([int(memory) / 1024 for _, _, memory in lines], kinds)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--jobs", type=int, default=max(len(os.sched_getaffinity(0)) * 3 // 4, 1))
    parser.add_argument(
        "--seconds", type=float, default=400, help="begin no further launch after these"
    )
    parser.add_argument("--steps", type=int, default=300, help="steps of each run")
    parser.add_argument("--programs", type=float, default=0.1, help="share of launches by programs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args()
    began, total, context = time.time(), Totals(), multiprocessing.get_context("spawn")
    kills = context.Value("l", 0)
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(given.jobs, context, share_count, (kills,)) as pool,
    ):
        work = [
            pool.submit(worker, n, given, Path(folder), began + given.seconds)
            for n in range(given.jobs)
        ]
        while wait(work, timeout=30).not_done:
            print(f"{time.time() - began:5.0f} s: {kills.value} of {given.kills} kills", flush=True)
        for share in work:
            total.add(share.result())
    return conclude(given, total, time.time() - began)


def conclude(given: argparse.Namespace, total: Totals, seconds: float) -> int:
    """Print the line, write the file, and judge."""
    import torch

    fds, rss = (statistics.mean(slopes) if slopes else 0.0 for slopes in (total.fds, total.rss_kb))
    more = {"runs": total.runs, "checkpoints_max": total.steps_kept, "disk_mb": [total.disk_mb]}
    more |= {"fd_slope": [fds], "rss_kb_slope": [rss], "seconds": round(seconds)}
    for failure in total.failures:
        print(failure)
    figures = total.figures() | more
    print(summary.write_figures([figures]))
    if given.json:
        machine = {"cores": len(os.sched_getaffinity(0)), "torch": torch.__version__}
        machine["python"] = platform.python_version()
        record = {"settings": vars(given) | {"json": str(given.json)}, **machine, **figures}
        given.json.write_text(json.dumps(record, indent=1))
    good = (
        total.kills >= given.kills and total.differing == total.orphans == 0 and not total.failures
    )
    return (
        0 if good and total.steps_kept <= MOST_STEPS and fds < FD_SLOPE and rss < RSS_SLOPE else 1
    )


if __name__ == "__main__":
    raise SystemExit(main())
