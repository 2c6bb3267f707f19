"""Runs whose number of ranks changes, compared with one process: samples in order, and losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from documents import environment
from helpers import TINY_FLAGS, read_rows

RECORDER = Path(__file__).parent / "recorder" / "pretrain_gpt.py"


def make_flags(folder: Path) -> list[str]:
    """Return the flags of a training in float64 that ends when the file `end` appears."""
    return [
        *(
            f
            for f in TINY_FLAGS
            if not f.startswith(("--train-iters", "--eval", "--global", "--micro"))
        ),
        *"--global-batch-size=12 --micro-batch-size=1 --train-iters=100000 --eval-iters=0".split(),
        *f"--params-dtype=float64 --kill-switch-path={folder / 'end'}".split(),
        *f"--save={folder / 'run'} --load={folder / 'run'} --save-interval=10".split(),
    ]


def start(
    folder: Path, log: str, argv: list[str], samples: str = "samples"
) -> subprocess.Popen[bytes]:
    """Start Python; what its ranks read is written into the folder `samples`."""
    (folder / samples).mkdir(exist_ok=True)
    # of `helpers` and `documents`
    paths = [str(Path(__file__).parents[2] / name) for name in ("", "compat")]
    more = {
        "OMP_NUM_THREADS": "1",
        "SAMPLES": str(folder / samples),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    with (folder / log).open("a") as file:
        return subprocess.Popen(
            [sys.executable, *argv],
            stdout=file,
            stderr=file,
            env=environment() | more,
            start_new_session=True,
        )


def last_step(folder: Path) -> int:
    return max((row["iteration"] for row in read_rows(folder / "run")), default=0)


def read_order(folder: Path) -> dict[int, tuple[int, list[list[int]]]]:
    """Return the ranks, samples and tokens of each step, from the last attempt that took it."""
    steps: dict[int, list[dict[str, Any]]] = {}
    for path in folder.iterdir():
        for row in map(json.loads, path.read_text().splitlines()):
            steps.setdefault(row["step"], []).append(row)
    order = {}
    for step, rows in steps.items():
        last = max(rows, key=lambda row: row["time"])
        ours = [row for row in rows if row["attempt"] == last["attempt"]]
        order[step] = (last["ranks"], sorted(one for row in ours for one in row["samples"]))
    return order


def compare_with_one_process(folder: Path, flags: list[str], name: str) -> list[int]:
    """Compare order and losses with those of one process; return the numbers of ranks in turn."""
    # the last attempt's
    ours = {row["iteration"]: row["loss"] for row in read_rows(folder / "run")}
    steps, one = len(ours), folder / "one"
    alone = f"--save={one} --load={one} --exit-interval={steps} --save-interval=100000".split()
    words = [str(RECORDER), *flags, *alone, f"--kill-switch-path={one}/end"]
    with start(folder, "log-alone", words, "alone") as process:
        assert process.wait() == 0, (folder / "log-alone").read_text()
    theirs = {row["iteration"]: row["loss"] for row in read_rows(one)}
    largest = max(abs(ours[n] - theirs[n]) for n in theirs)
    order, wanted = read_order(folder / "samples"), read_order(folder / "alone")
    differing = sum(order[n][1] != wanted[n][1] for n in wanted)
    ranks = [order[n][0] for n in sorted(wanted)]
    changes = [n for i, n in enumerate(ranks) if i == 0 or n != ranks[i - 1]]
    figures = f"differing_orders={differing}/{steps} largest_loss_difference={largest:.1e}"
    print(f"elastic {name}: workers {' -> '.join(map(str, changes))} steps={steps} {figures}")
    assert ours.keys() == theirs.keys() == wanted.keys() and differing == 0 and largest <= 1e-9
    return changes
