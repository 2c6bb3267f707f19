"""Tokens per second of `meshwright train` on one GPU with CUDA graphs and without, for small
micro-batches of the 345M model.

usage: python benchmarks/gpu_graphs.py [--micro 1 2 4 8] [--flags "--attention-dropout 0"]

Each figure is one run of the command in a process of its own; speed is the median of the last two
thirds of its steps. The losses of both runs must be equal, bit for bit. A run that fails shows the
last line of its log, and the next begins.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODEL = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024"
RUN = "--lr 1.5e-4 --mock-data --vocab-size 50257 --bf16 --eval-iters 0 --device cuda --no-tensorboard"


class Measured:
    """The rows of one run, or why there are none."""

    def __init__(self, folder: Path, micro: int, accumulated: int, how: str, given: argparse.Namespace) -> None:
        size = f"--micro-batch-size {micro} --global-batch-size {micro * accumulated} --train-iters {given.steps}"
        flags = f"{MODEL} {RUN} {size} --cuda-graphs {how} {given.flags} --run-dir {folder}"
        done = subprocess.run(
            [sys.executable, "-m", "meshwright", "train", *flags.split()], capture_output=True, text=True, check=False
        )
        lines = (done.stdout + done.stderr).splitlines()
        self.said = next((line.strip(" >") for line in reversed(lines) if "CUDA graphs:" in line), "no line on graphs")
        self.rows = []
        if done.returncode:
            self.said = next((line for line in reversed(lines) if line.strip()), "nothing in its log")
        else:
            rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
            self.rows = [row for row in rows if row["event"] == "step"]

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows]

    @property
    def speed(self) -> float:
        ms = statistics.median(row["ms"] for row in self.rows[len(self.rows) // 3 :])
        return float(self.rows[-1]["batch"] * 1024 / ms * 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--accumulated", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--flags", default="", help="more flags for every run")
    parser.add_argument("--steps", type=int, default=30)
    given = parser.parse_args()
    print(f"345M, {given.accumulated} micro-batch(es) a step, flags: {given.flags or 'none'}", flush=True)
    print(
        f"{'micro':>5}  {'off tok/s':>10}  {'on tok/s':>10}  {'on ms':>8}  losses  seconds  the log of `on`", flush=True
    )
    for micro in given.micro:
        begun = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            runs = [Measured(Path(folder) / how, micro, given.accumulated, how, given) for how in ("off", "on")]
        speeds = [f"{run.speed:10,.0f}" if run.rows else f"{'failed':>10}" for run in runs]
        same = "equal" if runs[0].rows and runs[0].losses == runs[1].losses else "DIFFER"
        ms = f"{runs[1].rows[-1]['ms']:8.2f}" if runs[1].rows else " " * 8
        seconds = time.perf_counter() - begun
        print(f"{micro:5}  {'  '.join(speeds)}  {ms}  {same:6}  {seconds:7.0f}  {runs[1].said}", flush=True)
        if not runs[0].rows:
            print(f"       off: {runs[0].said}", flush=True)


if __name__ == "__main__":
    main()
