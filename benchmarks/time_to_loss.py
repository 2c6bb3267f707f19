"""Compare number formats by the loss they reach: several seeds each, then the time to a loss.

    python benchmarks/time_to_loss.py OUT --make-data DATA [--megabytes 200]
    python benchmarks/time_to_loss.py OUT --data DATA --gpus 2 --steps 1500 --batch 32

The first command collects source code of the installed packages, learns a vocabulary and writes
token files, all without a network. The second trains a GPT of 124 million parameters in each format
with each seed, one run on a GPU at a time. It writes table.txt and loss.svg into OUT after each
run, so that a run cut short leaves the others' figures; runs that are complete are not repeated.

The loss of a run is the mean of its last tenth of steps. Formats with the same seed read the same
samples from the same initial weights, so the difference of a pair is free of both. The time to a
loss is that of the steps alone, from metrics.jsonl, with the median in place of the first 20, which
compile; the curve is the mean of the seeds, smoothed over a twentieth of the steps.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from common import new_parser

from meshwright.base.runs.rows import read_new_rows

FORMATS = {
    "bf16": ["--bf16"],
    "e4m3": ["--bf16", "--fp8-format", "e4m3"],
    "hybrid": ["--bf16", "--fp8-format", "hybrid"],
    "fp32": [],
    "compiled": ["--bf16", "--fused-kernels", "off"],
    # float32, torch's operations
    "plain": ["--fused-kernels", "off", "--compile", "off", "--cuda-graphs", "off"],
}
MODEL = """--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --hidden-dropout 0
    --attention-dropout 0 --lr 6e-4 --min-lr 6e-5 --lr-decay-style cosine --weight-decay 0.1 --adam-beta2 0.95
    --eval-iters 0 --split 100,0,0 --log-interval 100 --no-tensorboard --num-workers 2"""
SUFFIXES = (".py", ".pyi", ".h", ".hpp", ".cuh", ".md", ".rst")
SAMPLED = 20_000_000  # bytes from which the vocabulary is learnt
UNSTEADY = 20  # first steps
TOLERANCES = (0.0, 0.005, 0.01)  # nats above the first format's final loss


# Data


def sources(limit: int) -> Iterator[str]:
    """Yield the text of installed source files, each content once, in the order of the paths."""
    seen, have = set(), 0
    folders = {sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")}
    folders |= {path for path in sys.path if path.endswith("-packages")}
    paths = sorted(
        {
            Path(top, name)
            for folder in folders
            for top, _, names in os.walk(folder)
            for name in names
        }
    )
    for path in paths:
        if path.suffix not in SUFFIXES:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        digest = hashlib.sha256(text.encode()).digest()
        if len(text) < 200 or digest in seen:
            continue
        seen.add(digest)
        have += len(text)
        yield text
        if have >= limit:
            return


def make_data(folder: Path, megabytes: int, vocabulary: int) -> None:
    """Write text.jsonl, a vocabulary learnt from a sample of it, and token files."""
    folder.mkdir(parents=True, exist_ok=True)
    began, share = time.perf_counter(), min(1.0, SAMPLED / (megabytes * 1e6))
    count = size = 0
    with open(folder / "text.jsonl", "w") as text, open(folder / "sample.jsonl", "w") as sample:
        for document in sources(megabytes * 1_000_000):
            line = json.dumps({"text": document}) + "\n"
            text.write(line)
            if int((count + 1) * share) > int(count * share):
                sample.write(line)
            count, size = count + 1, size + len(document)
    print(
        f"{count:,} files, {size / 1e6:,.0f} MB, in {time.perf_counter() - began:.0f} s", flush=True
    )
    words = str(folder / "vocabulary")
    learn = [
        "train-tokenizer",
        "--input",
        str(folder / "sample.jsonl"),
        "--vocab-size",
        str(vocabulary),
    ]
    learn += ["--output", words]
    write = [
        "preprocess",
        "--input",
        str(folder / "text.jsonl"),
        "--output-prefix",
        str(folder / "source"),
    ]
    for command in (
        learn,
        [*write, "--tokenizer", words, "--append-eod", "--log-interval", "100000"],
    ):
        subprocess.run([sys.executable, "-m", "meshwright", *command], check=True)
        print(f"{command[0]} done after {time.perf_counter() - began:.0f} s", flush=True)


# Runs


def command_of(given: argparse.Namespace, kind: str, seed: int, folder: Path) -> list[str]:
    steps = given.steps
    flags = [
        *MODEL.split(),
        *FORMATS[kind],
        "--train-iters",
        steps,
        "--lr-decay-iters",
        steps,
        "--seed",
        seed,
    ]
    flags += ["--lr-warmup-iters", max(1, steps // 15), "--micro-batch-size", given.batch]
    flags += [
        "--global-batch-size",
        given.batch,
        "--data-path",
        given.data / "source_text_document",
    ]
    flags += ["--tokenizer", given.data / "vocabulary", "--run-dir", folder]
    return [
        sys.executable,
        "-m",
        "meshwright",
        "train",
        *map(str, flags),
        *shlex.split(given.flags),
    ]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_new_rows(folder)[0] if row["event"] == "step"]


def train_all(given: argparse.Namespace) -> None:
    """Train each seed in each format in turn, as many at a time as there are GPUs."""
    free: SimpleQueue[int] = SimpleQueue()
    for number in range(given.gpus):
        free.put(number)
    began, longest = time.monotonic(), 0.0

    def one(kind: str, seed: int) -> None:
        nonlocal longest
        folder = given.out / f"{kind}-{seed}"
        if len(rows_of(folder)) >= given.steps:
            return
        gpu, start = free.get(), time.monotonic()
        try:
            if start + longest - began > given.seconds:
                print(
                    f"{kind}, seed {seed}: not started, as {given.seconds} s would not be enough",
                    flush=True,
                )
                return
            shutil.rmtree(folder, ignore_errors=True)  # of a run cut short
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / "output.txt", "w") as output:
                visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
                environ = os.environ | {
                    "CUDA_VISIBLE_DEVICES": visible[gpu] if visible[0] else str(gpu)
                }
                command = command_of(given, kind, seed, folder)
                print(shlex.join(command), file=output, flush=True)
                status = subprocess.call(
                    command, stdout=output, stderr=subprocess.STDOUT, env=environ
                )
            took = time.monotonic() - start
            longest = max(longest, took)
            print(
                f"{kind}, seed {seed}, on GPU {gpu}: {took:.0f} s, exit status {status}", flush=True
            )
            if status:
                print((folder / "output.txt").read_text()[-2000:], flush=True)
        finally:
            free.put(gpu)
        report(given)

    with ThreadPoolExecutor(given.gpus) as threads:
        waiting = [
            threads.submit(one, kind, seed) for seed in given.seeds for kind in given.formats
        ]
        for each in waiting:
            each.result()


# Figures


def smooth(losses: list[float], width: int) -> list[float]:
    """Return the mean of the last `width` steps at each step from the width-th on."""
    sums, out = 0.0, []
    for i, loss in enumerate(losses):
        sums += loss - (losses[i - width] if i >= width else 0.0)
        if i >= width - 1:
            out.append(sums / width)
    return out


def times(rows: list[dict[str, Any]]) -> list[float]:
    """Return the seconds of training up to each step."""
    each = [row["ms"] / 1e3 for row in rows]
    typical, now, out = statistics.median(each), 0.0, []
    for i, seconds in enumerate(each):
        now += typical if i < UNSTEADY else seconds
        out.append(now)
    return out


def reached(curve: list[float], target: float, width: int) -> int | None:
    """Return the first step whose smoothed loss is at most the target."""
    return next((i + width for i, loss in enumerate(curve) if loss <= target), None)


def report(given: argparse.Namespace) -> None:
    """Print the table of the complete runs, and write it with the picture."""
    runs = {k: {s: rows_of(given.out / f"{k}-{s}") for s in given.seeds} for k in given.formats}
    runs = {
        k: {s: rows for s, rows in seeds.items() if len(rows) == given.steps}
        for k, seeds in runs.items()
    }
    runs = {kind: seeds for kind, seeds in runs.items() if seeds}
    tail, width, base = max(1, given.steps // 10), max(1, given.steps // 20), given.formats[0]
    ends = {
        k: {s: statistics.mean(r["loss"] for r in x[-tail:]) for s, x in v.items()}
        for k, v in runs.items()
    }
    lines = [f"{given.steps} steps of {given.batch} samples; loss: mean of the last {tail} steps"]
    lines.append(
        f"{'format':8} {'seeds':12} {'loss':>8} {'spread':>8} {'ms/step':>8} {'tokens/s':>10}   of each seed"
    )
    spreads = {kind: max(each.values()) - min(each.values()) for kind, each in ends.items()}
    for kind, each in ends.items():
        ms = statistics.median(
            r["ms"] for rows in runs[kind].values() for r in rows[UNSTEADY:] or rows
        )
        speed = statistics.median(
            r["tokens_per_second"] for rows in runs[kind].values() for r in rows[UNSTEADY:] or rows
        )
        numbers = " ".join(f"{x:.4f}" for x in each.values())
        lines.append(
            f"{kind:8} {','.join(map(str, each)):12} {statistics.mean(each.values()):8.4f} {spreads[kind]:8.4f} "
            f"{ms:8.2f} {speed:10,.0f}   {numbers}"
        )
    for kind in ends.keys() - {base} if base in ends else ():
        pairs = [ends[kind][s] - ends[base][s] for s in ends[kind].keys() & ends[base].keys()]
        if pairs:
            lines.append(
                f"{kind} - {base}: {statistics.mean(pairs):+.4f} nats, pairs of one seed from {min(pairs):+.4f} to "
                f"{max(pairs):+.4f}; the spread of {base}'s seeds is {spreads[base]:.4f}"
            )
    curves = {}
    for kind, seeds in runs.items():
        steps = zip(*([row["loss"] for row in rows] for rows in seeds.values()), strict=True)
        curves[kind] = smooth([statistics.mean(losses) for losses in steps], width)
    lines += time_lines(runs, curves, base, width)
    text = "\n".join(lines)
    print(f"\n{text}\n", flush=True)
    (given.out / "table.txt").write_text(text + "\n")
    if curves:
        draw(given.out / "loss.svg", curves, width)


def time_lines(runs: Any, curves: dict[str, list[float]], base: str, width: int) -> list[str]:
    """Say when each format's mean curve reaches the first format's final loss."""
    if base not in curves:
        return []
    lines = []
    for tolerance in TOLERANCES:
        target = curves[base][-1] + tolerance
        words, seconds = [], {}
        for kind, curve in curves.items():
            step = reached(curve, target, width)
            if step is None:
                words.append(f"{kind} never (it ends {curve[-1] - target:.4f} above)")
                continue
            seconds[kind] = statistics.mean(times(rows)[step - 1] for rows in runs[kind].values())
            gain = f", {seconds[base] / seconds[kind]:.3f} times as fast" if kind != base else ""
            words.append(f"{kind} at step {step} after {seconds[kind]:.1f} s{gain}")
        lines.append(
            f"to {base}'s final smoothed loss {f'+ {tolerance} ' * (tolerance > 0)}= {target:.4f}: {'; '.join(words)}"
        )
    return lines


def draw(path: Path, curves: dict[str, list[float]], width: int) -> None:
    """Write a picture of the smoothed curves."""
    from meshwright.apps.pages.plot import new_axes, svg_of

    figure, axes = new_axes((7, 4))
    for kind, curve in curves.items():
        axes.plot(range(width, width + len(curve)), curve, label=kind, lw=1)
    axes.set_ylabel("loss")
    axes.legend()
    path.write_text(svg_of(figure, "loss"))


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--make-data", type=Path, metavar="DATA", help="write the data, and train nothing"
    )
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--data", type=Path, help="what --make-data wrote")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument(
        "--batch", type=int, default=32, help="samples of a step, in one micro-batch"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--formats",
        nargs="+",
        choices=FORMATS,
        default=["bf16", "e4m3"],
        help="the first is the base",
    )
    parser.add_argument("--flags", default="", help="more flags of the training, in one word")
    parser.add_argument(
        "--seconds", type=float, default=520, help="start no run that would end after them"
    )
    given = parser.parse_args()
    if given.make_data:
        make_data(given.make_data, given.megabytes, given.vocabulary)
        return
    if not given.data:
        parser.error("--data is needed; --make-data writes it")
    given.out.mkdir(parents=True, exist_ok=True)
    train_all(given)
    report(given)


if __name__ == "__main__":
    main()
