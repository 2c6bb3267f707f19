"""Compare recipes by what a model has learnt after equal tokens, and the tokens that each needs.

    python benchmarks/learning.py OUT --data PREFIX --tokenizer FOLDER RUN [RUN ...]

A RUN is ARM, or ARM@TOKENS, ARM@TOKENS@SIZE or ARM@TOKENS@SIZE@SEED, where ARM is one of the arms
below, followed by any number of `,flag=value` that override its flags, such as
`tuned,lr=1e-3,global-batch-size=32@20e6@124M`. Runs are trained one after the other, or as many at
a time as --jobs says; a run that is finished in OUT is not repeated. The table, written after each
run, has the loss and the bits per byte of held-out text at the end, the tokens read, and the time
of the steps alone, with their median in place of the first ones, which compile.

The arm `recipe` is `train --recipe modern` at one of the sizes, and `without-PART` the same without
one of its parts; `each` stands for `recipe` and all of these, as in `each@40e6@124M`.

Tokens to a loss are those of a whole run whose rate has decayed to its end: a point in the middle
of a longer run, where the rate is still high, says too little about it.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from common import new_parser

from meshwright.base.runs.rows import read_new_rows
from meshwright.config.flags import parse_settings
from meshwright.config.schema import TrainConfig

SIZES = {  # layers, hidden size, heads, length
    "1M": (4, 128, 2, 256),
    "3M": (6, 192, 3, 256),
    "10M": (6, 384, 6, 256),
    "124M": (12, 768, 12, 1024),
    "345M": (24, 1024, 16, 1024),
}
DOCUMENTS = """--optimizer adam --lr 1.5e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-fraction 0.01
    --weight-decay 0.01 --clip-grad 1 --global-batch-size 64"""
DECAYED = "--min-lr 0 --lr-decay-style linear --lr-warmup-fraction 0.02 --hidden-dropout 0 --attention-dropout 0"
NETWORK = """--position-embedding-type rope --normalization RMSNorm --disable-bias-linear --qk-layernorm --squared-relu
    --untie-embeddings-and-output-weights"""
ARMS = {
    "documents": DOCUMENTS,
    "tuned": f"{DECAYED} --optimizer adam --lr 1.2e-3 --adam-beta2 0.95 --weight-decay 0.1 --global-batch-size 32",
    "network": f"{DECAYED} {NETWORK} --optimizer adam --lr 1.2e-3 --adam-beta2 0.95 --weight-decay 0.1 "
    "--global-batch-size 32",
    "muon": f"{DECAYED} --optimizer muon --lr 2e-3 --adam-beta2 0.95 --weight-decay 0.1 --global-batch-size 32",
    "modern": f"{DECAYED} {NETWORK} --optimizer muon --lr 2e-3 --adam-beta2 0.95 --weight-decay 0.1 "
    "--global-batch-size 32",
}
# What leaves one part of the recipe out, or takes the other choice; HEADS are those of the size.
PARTS = {
    "muon": "--optimizer adam",
    "split-qkv": "--muon-split-qkv off",
    "rope": "--position-embedding-type learned_absolute",
    "rmsnorm": "--normalization LayerNorm",
    "qk-norm": "--no-qk-layernorm",
    "plain-products": "--add-bias-linear",
    "swiglu": "--squared-relu",
    "own-head": "--no-untie-embeddings-and-output-weights",
    "one-table": "--untie-embeddings-and-output-weights",
    "zero-init": "--no-zero-init-projections",
    "wide-heads": "--num-attention-heads HEADS",
    "own-rates": "--embedding-lr none --vector-lr none",
    "falling-decay": "--weight-decay-incr-style constant",
    "cautious-decay": "--no-cautious-weight-decay",
}
ARMS |= {"recipe": "--recipe modern", "gpt2": "--recipe gpt2"}
ARMS |= {f"without-{part}": f"--recipe modern {flags}" for part, flags in PARTS.items()}
UNSTEADY = 20  # first steps


class Run(NamedTuple):
    """One training: an arm with overridden flags, tokens, a size and a seed."""

    name: str
    flags: list[str]
    tokens: int
    size: str
    seed: int

    @property
    def folder(self) -> str:
        name = f"{self.name}-{self.size}-{self.tokens / 1e6:g}M-seed{self.seed}"
        return re.sub(r"[^A-Za-z0-9._-]+", "_", name)


def parse_run(words: str, tokens: float, size: str, seed: int) -> Run:
    name, *rest = words.split("@")
    arm, *overrides = name.split(",")
    flags = shlex.split(ARMS[arm])
    for pair in overrides:
        flag, _, value = pair.partition("=")
        flags += [f"--{flag}", *([value] if value else [])]
    given = [*rest, *[""] * 3]
    return Run(name, flags, int(float(given[0] or tokens)), given[1] or size, int(given[2] or seed))


def runs_of(words: str) -> list[str]:
    """Return the runs that a word names: `each` stands for the recipe and it without each part."""
    name, at, rest = words.partition("@")
    arm, comma, overrides = name.partition(",")
    arms = ["recipe", *(f"without-{part}" for part in PARTS)] if arm == "each" else [arm]
    return [f"{each}{comma}{overrides}{at}{rest}" for each in arms]


def command_of(run: Run, given: argparse.Namespace) -> list[str]:
    layers, hidden, heads, length = SIZES[run.size]
    own = [str(heads) if word == "HEADS" else word for word in run.flags]
    flags = ["--num-layers", layers, "--hidden-size", hidden, "--seq-length", length]
    if "--recipe" in own:  # which chooses heads and, for these tokens, a batch
        flags += ["--train-tokens", run.tokens]
        batch = parse_settings(
            TrainConfig, [*map(str, flags), *own], "train", check=False
        ).config.global_batch
    else:
        batch = int(own[len(own) - 1 - own[::-1].index("--global-batch-size") + 1])
        flags += [
            "--num-attention-heads",
            heads,
            "--train-iters",
            max(1, run.tokens // (batch * length)),
        ]
    steps = max(1, run.tokens // (batch * length))
    flags += ["--micro-batch-size", min(batch, given.most), "--seed", run.seed]
    flags += ["--split", "98,2,0", "--eval-interval", max(1, steps // given.points)]
    flags += [
        "--eval-iters",
        max(1, int(given.held_out) // (batch * length)),
        "--log-interval",
        50,
        "--no-tensorboard",
    ]
    flags += ["--data-path", given.data, "--tokenizer", given.tokenizer, *shlex.split(given.flags)]
    # Decay over the whole run; the arm's own flags come last.
    return [sys.executable, "-m", "meshwright", "train", *map(str, flags), *own]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return read_new_rows(folder)[0] if folder.is_dir() else []


def has_ended(folder: Path) -> bool:
    return any(row["event"] == "end" for row in rows_of(folder))


def train(run: Run, given: argparse.Namespace, deadline: float, gpu: str | None) -> None:
    folder = given.out / run.folder
    if has_ended(folder) or time.monotonic() > deadline:
        return
    shutil.rmtree(folder, ignore_errors=True)  # a run cut short
    folder.mkdir(parents=True)
    command = [*command_of(run, given), "--run-dir", str(folder)]
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})
    with open(folder / "output.txt", "w") as output:
        print(shlex.join(command), file=output, flush=True)
        try:
            left = deadline + given.grace - time.monotonic()
            status = subprocess.call(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=left
            )
        except subprocess.TimeoutExpired:
            status = 124
    if status:
        print(
            f"FAILED {run.folder} ({status}): {(folder / 'output.txt').read_text()[-800:]}",
            flush=True,
        )


def figures(run: Run, out: Path) -> dict[str, Any] | None:
    """Return the figures of a finished run."""
    rows = rows_of(out / run.folder)
    steps = [row for row in rows if row["event"] == "step"]
    scores = [row for row in rows if row["event"] == "validation"]
    if not scores or not any(row["event"] == "end" for row in rows):
        return None
    typical = statistics.median(row["ms"] for row in steps)
    seconds = (
        sum(
            min(row["ms"], 20 * typical) if i >= UNSTEADY else typical
            for i, row in enumerate(steps)
        )
        / 1e3
    )
    curve = [(row["iteration"], row["loss"]) for row in scores]
    return {
        "run": run.name,
        "size": run.size,
        "seed": run.seed,
        "tokens": run.tokens,
        "steps": len(steps),
        "loss": curve[-1][1],
        "seconds": round(seconds, 2),
        "ms": round(typical, 2),
        "curve": curve,
    }


def report(runs: list[Run], out: Path) -> None:
    found = [row for row in (figures(run, out) for run in runs) if row]
    found.sort(key=lambda row: (row["size"], row["tokens"], row["loss"]))
    lines = [
        f"{'size':5} {'tokens':>8} {'steps':>6} {'loss':>8} {'seconds':>8} {'ms/step':>8}  seed run"
    ]
    for row in found:
        lines.append(
            f"{row['size']:5} {row['tokens'] / 1e6:7.1f}M {row['steps']:6} {row['loss']:8.4f} {row['seconds']:8.1f} "
            f"{row['ms']:8.2f}  {row['seed']:4} {row['run']}"
        )
    (out / "table.txt").write_text("\n".join(lines) + "\n")
    (out / "figures.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--data", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--tokens", type=float, default=20e6, help="of runs that name none")
    parser.add_argument("--size", default="124M", choices=SIZES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument(
        "--gpus",
        type=lambda text: text.split(","),
        default=[None],
        help="GPUs that runs take in turn, as 0,1",
    )
    parser.add_argument("--most", type=int, default=32, help="most samples of a micro-batch")
    parser.add_argument("--points", type=int, default=4, help="validations of a run")
    parser.add_argument("--held-out", type=float, default=1e6, help="tokens of a validation")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no run after these")
    parser.add_argument(
        "--grace", type=float, default=60, help="seconds after which runs still going are ended"
    )
    parser.add_argument("--flags", default="", help="more flags of train for all runs")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    words = [each for word in given.runs for each in runs_of(word)]
    runs = [parse_run(each, given.tokens, given.size, given.seed) for each in words]
    deadline = time.monotonic() + given.seconds
    free: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    for job in range(given.jobs):
        free.put(given.gpus[job % len(given.gpus)])

    def each(run: Run) -> None:
        began, gpu = time.monotonic(), free.get()
        train(run, given, deadline, gpu)
        free.put(gpu)
        done = figures(run, given.out)
        loss = f"{done['loss']:.4f}" if done else "none"
        print(f"{run.folder}: loss {loss}, {time.monotonic() - began:.0f} s", flush=True)
        report(runs, given.out)

    with ThreadPoolExecutor(given.jobs) as threads:
        list(threads.map(each, runs))
    print((given.out / "table.txt").read_text())


if __name__ == "__main__":
    main()
