"""Measure what --eval-tasks costs a training at its default interval, in shares of its steps.

    python benchmarks/eval_cost.py --fraction 0.01 -- --preset tiny --micro-batch-size 8
    python benchmarks/eval_cost.py -- --preset gpt2-345m --micro-batch-size 32 --bf16

The files have as many tokens as LAMBADA's test set (5,153 passages of 82) and WikiText-103's
(287,000), or a fraction of them, of random words. One training reports its default interval;
another scores every few steps. The first scores warm up. The cost is the time of the others, and
what the steps after them took longer than the median step, which is the restart of a pipeline that
runs ahead. Flags after `--` are those of `meshwright train`.
"""

from __future__ import annotations

import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import new_parser

from meshwright.base.runs.rows import read_new_rows

EXAMPLES, LETTERS, CORPUS = 5153, 82, 287_000  # bytes are tokens here


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument(
        "--fraction", type=float, default=1.0, help="of the real files' sizes (default: 1)"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=10,
        help="steps between scores in the measured run (default: 10)",
    )
    parser.add_argument(
        "--scores", type=int, default=4, help="times that all tasks are scored (default: 4)"
    )
    parser.add_argument("flags", nargs="*", help="flags of train, after --")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spec = write_files(folder, given.fraction)
        common = [
            "--mock-data",
            "--tokenizer=byte",
            "--pad-vocab-size-to=50304",
            "--eval-iters=0",
            "--no-tensorboard",
        ]
        common += ["--lr=1e-4", f"--eval-tasks={spec}", *given.flags]
        train(folder / "default", [*common, "--train-iters=1"])
        log = (folder / "default/log.txt").read_text()
        found = re.search(r"--eval-tasks: .* every ([\d,]+) steps", log)
        assert found is not None
        interval = int(found[1].replace(",", ""))
        many = [
            f"--train-iters={given.steps * given.scores}",
            f"--eval-tasks-interval={given.steps}",
        ]
        train(folder / "measured", [*common, *many])
        rows, _ = read_new_rows(folder / "measured")
    report(rows, given.steps, interval)


def write_files(folder: Path, fraction: float) -> str:
    """Write the two files and return the value of --eval-tasks."""
    rng = random.Random(0)

    def words(letters: int) -> str:
        text = ""
        while len(text) < letters:
            text += "".join(rng.choices("etaoinshrdlu", k=rng.randrange(2, 8))) + " "
        return text[:letters].strip()

    lines = [json.dumps({"text": words(LETTERS)}) for _ in range(round(EXAMPLES * fraction))]
    (folder / "lambada.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "wiki.test.tokens").write_text(words(round(CORPUS * fraction)))
    return f"lambada={folder}/lambada.jsonl,wikitext={folder}/wiki.test.tokens"


def train(folder: Path, flags: list[str]) -> None:
    words = [sys.executable, "-m", "meshwright", "train", "--run-dir", str(folder), *flags]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def report(rows: list[dict[str, Any]], steps: int, interval: int) -> None:
    start = next(row for row in rows if row["event"] == "start")
    ms = {
        row["iteration"]: row["ms"]
        for row in rows
        if row["event"] == "step" and row["iteration"] > steps
    }
    after = {i: x for i, x in ms.items() if i % steps == 1}
    step = statistics.median(x for i, x in ms.items() if i not in after)
    late = statistics.median(after.values()) - step
    print(
        f"{start['device']}, {start['parameters']:,} parameters, {start['block']}, torch {start['torch']}"
    )
    print(
        f"step: median {step:,.1f} ms of {len(ms) - len(after)}; the step after scores: {late:+,.1f} ms"
    )
    total = max(late, 0.0)
    for name in ("lambada", "wikitext"):
        seconds = [
            row["seconds"] for row in rows if row["event"] == "scores" and row["task"] == name
        ][1:]
        total += 1e3 * statistics.mean(seconds)
        print(f"{name}: {statistics.mean(seconds):.3f} s, mean of {len(seconds)}")
    print(
        f"default interval {interval:,} steps: {total / (interval * step):.2%} of the time of the steps"
    )


if __name__ == "__main__":
    main()
