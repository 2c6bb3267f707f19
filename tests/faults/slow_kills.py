"""Kill runs whose disk and storage take seconds to minutes; no step that was saved may be lost.

Runs on a local disk and in object storage are killed at random, while they start, train or save;
half of those in storage go on with an empty disk, and take over the lease. A launch that ends by
itself, or that goes on from an older step than the newest complete one, has lost steps.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from faults.harness import LAUNCHERS, LAYOUTS, Case, Harm, Run, write_data
from faults.slow import KINDS, Slow
from meshwright.base.storage.addresses import localize
from s3 import Bucket, serving_bucket

STEPS, KILLS = 12, 5  # of each run


class SlowRun(Run):
    """A run on a local disk, or in object storage, with a local copy."""

    def __init__(self, case: Case, data: Path, folder: Path, bucket: Bucket | None = None) -> None:
        super().__init__(case, data, folder)
        self.bucket, self.lost, self.ends = bucket, 0, list[str]()
        self.cache = folder / "cache"
        if bucket is not None:
            address = f"s3://bucket/{folder.name}"
            self.argv = case.argv(data, address)  # type: ignore[arg-type]
            self.path = Path(localize(address, str(self.cache / "meshwright")))

    def newest(self) -> int:
        """Return the newest complete step, 0 if there is none."""
        local = [path.parent.name for path in self.path.glob("iter_*[0-9]/manifest.json")]
        prefix, names = (
            f"{self.folder.name}/iter_",
            list(self.bucket.objects) if self.bucket else [],
        )
        there = [
            name.split("/")[1]
            for name in names
            if name.startswith(prefix) and name.endswith("/manifest.json")
        ]
        return max((int(name.removeprefix("iter_")) for name in local + there), default=0)

    def launch_slowly(self, rng: random.Random, kills: bool) -> int:
        """Launch once, and count what this launch has lost."""
        kinds = KINDS if self.bucket is not None else ("disk", "data")
        slow = Slow(
            rng.choice(kinds),
            rng.uniform(45, 300),
            rng.random() < 0.3,
            self.folder / "clock",
            rng.randrange(99),
        )
        names = [name for name in os.environ if name.startswith("AWS_")]
        environ = {name: os.environ[name] for name in names} | {"XDG_CACHE_HOME": str(self.cache)}
        harm = Harm(slow=slow, environ=environ)
        if kills:
            after = rng.uniform(0, 3) if rng.random() < 0.4 else rng.uniform(0, 1)
            harm = Harm(after, rng.randint(0, 5), rng.random(), slow=slow, environ=environ)
        newest, before, began = self.newest(), self.totals.kills, time.time()
        status = self.launch(rng.choice(LAUNCHERS), harm)
        for start in self.starts(began):
            if start < newest:
                self.lost += newest - start
                self.ends.append(f"went on from step {start} with step {newest} saved, {slow}")
        if status and self.totals.kills == before:
            self.lost += 1
            self.ends.append(f"status {status}, {slow}: {self.log()}")
        if self.bucket is not None and status and rng.random() < 0.5:
            shutil.rmtree(self.cache, ignore_errors=True)
        return status

    def starts(self, began: float) -> list[int]:
        """Return the steps that launches went on from since a time; earlier rows may be there."""
        rows = self.rows() if (self.path / "metrics.jsonl").exists() else []
        return [row["iteration"] for row in rows if row["event"] == "start" and row["time"] > began]


def kill_one(
    number: int, kills: int, seed: int, folder: Path, bucket: Bucket
) -> tuple[SlowRun, int]:
    """Kill a run so often, let it end, and compare its losses; return it and its differing ones."""
    rng, layouts = random.Random(f"{seed}/{number}"), list(LAYOUTS)
    case, data = (
        Case(layouts[number % len(layouts)], steps=STEPS),
        write_data(folder / f"data{number}"),
    )
    clean = Run(case, data, folder / f"clean{number}")
    clean.finish()
    run = SlowRun(case, data, folder / f"run{number}", bucket if number % 2 else None)
    run.clean = clean.losses()
    status = 1
    while status and run.totals.kills < kills and not run.ends:
        status = run.launch_slowly(rng, kills=True)
    if status and not run.ends:
        run.launch_slowly(rng, kills=False)
    return run, 0 if run.ends else run.check().differing


def kill_slow_runs(kills: int, jobs: int, seed: int, folder: Path) -> dict[str, int]:
    """Make so many kills; return the figures."""
    kept = {"kills": 0, "runs": 0, "launches": 0, "lost": 0, "differing": 0}
    with (
        pytest.MonkeyPatch.context() as patch,
        serving_bucket(patch) as bucket,
        ThreadPoolExecutor(jobs) as pool,
    ):
        number = 0
        while kept["kills"] < kills and not kept["lost"]:
            each = min(KILLS, kills - kept["kills"])
            work = [
                pool.submit(kill_one, number + n, each, seed, folder, bucket) for n in range(jobs)
            ]
            number += jobs
            for run, differing in (one.result() for one in work):
                kept["kills"] += run.totals.kills
                kept["launches"] += run.totals.launches
                kept["lost"] += run.lost
                kept["differing"] += differing
                kept["runs"] += 1
                print(*run.ends, sep="\n", end="\n" * bool(run.ends))
            print(f"{kept['kills']} of {kills} kills", flush=True)
    return kept
