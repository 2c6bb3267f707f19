"""Start, step and save of one training by several versions of this program, in turns.

usage: python benchmarks/trees.py OLD NEW [NEWER ...] [--turns 8] -- FLAGS OF TRAIN

The trees are checkouts. Each turn runs `meshwright train` of all in new processes, on the same mock
data, in an order drawn anew; a tree that is given twice shows the noise. Start is from the command
to the end of the first step, step the median of a run's later steps, save the median of its saves;
of each, the table has the medians over the turns, and the quartiles of ratios to the first tree.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import describe_machine, new_parser, print_head, print_row

FLAGS = "--mock-data --vocab-size 5000 --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128"
FLAGS += " --micro-batch-size 4 --global-batch-size 8 --train-iters 40 --save-interval 10 --lr 1e-4 --eval-iters 0"
FLAGS += " --log-interval 10 --no-tensorboard"


def measure(tree: Path, flags: list[str]) -> dict[str, float]:
    """Run the training of one tree, and return its milliseconds."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PYTHONPATH": str(tree / "src")}
        command = [sys.executable, "-m", "meshwright", "train", *flags, "--save", f"{folder}/run"]
        began = time.time()
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, cwd=folder)
        rows = [
            json.loads(line)
            for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        ]
    steps = [row for row in rows if row["event"] == "step"]
    saves = [row["seconds"] for row in rows if row["event"] == "save"]
    later = [row["ms"] for row in steps[len(steps) // 3 :]]
    return {
        "start": 1e3 * (steps[0]["time"] - began),
        "step": statistics.median(later),
        "save": 1e3 * statistics.median(saves),
    }


def main(argv: list[str]) -> int:
    parser = new_parser(__doc__)
    parser.add_argument("trees", type=Path, nargs="+", metavar="TREE")
    parser.add_argument("--turns", type=int, default=8, help="runs of each (default: 8)")
    own, _, flags = " ".join(argv).partition(" -- ")
    given = parser.parse_args(own.split())
    words = [*FLAGS.split(), *flags.split()]
    for tree in given.trees:
        measure(tree.resolve(), words)  # caches are filled
    print(describe_machine("torch"))
    turns = []
    for turn in range(given.turns):
        numbers = random.sample(range(len(given.trees)), len(given.trees))
        by_number = {number: measure(given.trees[number].resolve(), words) for number in numbers}
        turns.append([by_number[number] for number in range(len(given.trees))])
        print(f"turn {turn + 1}: {turns[-1]}", flush=True)
    for name in ("start", "step", "save"):
        print()
        print_head(name, "ms", "ratio to the first, median of turns", "quartiles")
        for number, tree in enumerate(given.trees):
            milliseconds = statistics.median(turn[number][name] for turn in turns)
            low, middle, high = statistics.quantiles(
                [turn[number][name] / turn[0][name] for turn in turns], n=4
            )
            print_row(
                tree.name, f"{milliseconds:,.1f}", f"{middle:.3f}", f"{low:.3f} to {high:.3f}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
