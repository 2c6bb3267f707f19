"""Start, step and save of one training by two versions of this program, in turns.

usage: python benchmarks/two_trees.py OLD NEW [--pairs 8] -- FLAGS OF TRAIN

OLD and NEW are checkouts. Each turn runs `meshwright train` of both in new processes, on the same
mock data, and the order alternates. Start is from the command to the end of the first step, step
the median of a run's later steps, save the median of its saves; of each, the table has the medians
over the turns and the quartiles of the pairs' ratios.
"""

from __future__ import annotations

import json
import os
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
        rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
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
    parser.add_argument("trees", type=Path, nargs=2, metavar="TREE")
    parser.add_argument("--pairs", type=int, default=8, help="turns of both (default: 8)")
    own, _, flags = " ".join(argv).partition(" -- ")
    given = parser.parse_args(own.split())
    old, new = (tree.resolve() for tree in given.trees)
    words = [*FLAGS.split(), *flags.split()]
    measure(old, words), measure(new, words)  # caches are filled
    print(describe_machine("torch"))
    pairs = []
    for turn in range(given.pairs):
        both = {tree: measure(tree, words) for tree in ((old, new) if turn % 2 else (new, old))}
        pairs.append((both[old], both[new]))
        print(f"turn {turn + 1}: {pairs[-1]}", flush=True)
    print_head("", "old, ms", "new, ms", "new / old, median of pairs", "quartiles")
    for name in ("start", "step", "save"):
        ratios = [after[name] / before[name] for before, after in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4)
        times = (f"{statistics.median(run[name] for run in side):,.1f}" for side in zip(*pairs, strict=True))
        print_row(name, *times, f"{middle:.3f}", f"{low:.3f} to {high:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
