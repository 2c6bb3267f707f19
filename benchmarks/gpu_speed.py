"""Tokens per second, memory and time to the first step of `meshwright train` on one GPU, in a
table.

usage: python benchmarks/gpu_speed.py OUTPUT_FOLDER [DATA_PREFIX] [--only NAME ...]

Each row is one run of the product's own command in a process of its own, with the real loader and
the log on. Speed is the median of the last two thirds of the steps; time to the first step is from
the start of the command to the end of that step, without (cold) and with (warm) the compiler's
cache on disk. Without DATA_PREFIX the tokens are random.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

A = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024"
B = "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 1024"
C = "--num-layers 32 --hidden-size 2560 --num-attention-heads 32 --seq-length 2048"
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
LLAMA = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --num-query-groups 4"


def of(size: int) -> str:
    return f"--micro-batch-size {size} --global-batch-size {size}"


ROWS = {
    "345M cold": (f"{A} {of(32)} {NO_DROPOUT}", 60),
    "345M": (f"{A} {of(32)} {NO_DROPOUT}", 60),
    "345M dropout 0.1": (f"{A} {of(32)}", 60),
    "345M not compiled": (f"{A} {of(32)} {NO_DROPOUT} --compile off", 40),
    "1.3B": (f"{B} {of(16)} {NO_DROPOUT}", 40),
    "2.7B": (f"{C} {of(8)} {NO_DROPOUT}", 24),
    "345M document masks": (
        f"{A} {of(32)} {NO_DROPOUT} --reset-attention-mask --reset-position-ids --eod-mask-loss",
        40,
    ),
    "345M RoPE SwiGLU RMSNorm GQA": (f"{A} {of(32)} {NO_DROPOUT} {LLAMA}", 40),
    "345M Muon": (f"{A} {of(32)} {NO_DROPOUT} --optimizer muon", 40),
    "345M full recompute": (f"{A} {of(32)} {NO_DROPOUT} --checkpoint-activations", 30),
    "345M selective recompute": (f"{A} {of(32)} {NO_DROPOUT} --recompute-activations", 30),
    "345M fp16": (f"{A} {of(32)} {NO_DROPOUT} --fp16 --initial-loss-scale 65536", 40),
    "345M offloaded optimizer": (f"{A} {of(32)} {NO_DROPOUT} --cpu-optimizer", 12),
    "345M micro-batch auto of 256": (f"{A} --micro-batch-size auto --global-batch-size 256 {NO_DROPOUT}", 8),
    "345M micro-batch 1": (f"{A} {of(1)} {NO_DROPOUT}", 60),
    "345M deterministic": (f"{A} {of(32)} {NO_DROPOUT} --deterministic-mode", 30),
}


def measure(name: str, out: Path, data: list[str], cache: str) -> str:
    flags, steps = ROWS[name]
    folder = out / name.replace(" ", "-")
    command = [
        *(
            sys.executable,
            "-m",
            "meshwright",
            "train",
            *flags.split(),
            *data,
            *([] if "--fp16" in flags else ["--bf16"]),
            "--lr",
            "1.5e-4",
            "--run-dir",
        ),
        *(str(folder), "--train-iters", str(steps), "--lr-decay-style", "cosine", "--lr-warmup-iters", "5"),
        *("--weight-decay", "0.1", "--eval-iters", "0", "--log-interval", "5"),
    ]
    folder.mkdir(parents=True)
    rows, first, start = folder / "metrics.jsonl", None, time.perf_counter()
    with open(folder / "log.txt", "w") as log:
        log.write(" ".join(command[1:]) + "\n")
        log.flush()
        run = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache})
        while run.poll() is None and first is None:
            if rows.exists() and '"event": "step"' in rows.read_text():
                first = time.perf_counter() - start
            time.sleep(0.05)
        run.wait()
    found = [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
    done = [r for r in found if r["event"] == "step"]
    if run.returncode or not done:
        tail = (folder / "log.txt").read_text().splitlines()[-1:]
        return f"{name:32} FAILED with status {run.returncode}: {' '.join(tail)[:150]}"
    kept = done[len(done) // 3 :]
    speed = statistics.median(r["tokens_per_second"] for r in kept)
    return (
        f"{name:32} {speed:12,.0f} {statistics.median(r['ms'] for r in kept):10.1f} {100 * kept[-1]['mfu']:6.1f} "
        f"{max(r['memory'] for r in done) / 2**30:8.1f} {first or 0:10.1f} {done[0]['loss']:8.4f} "
        f"{done[-1]['loss']:8.4f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("data", nargs="?", help="prefix of .bin/.idx made with GPT-2's vocabulary")
    parser.add_argument("--vocab", nargs=2, metavar="FILE", help="vocab.json and merges.txt, for the document masks")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS))
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    data = ["--data-path", given.data] if given.data else ["--mock-data"]
    data += (
        ["--vocab-file", given.vocab[0], "--merge-file", given.vocab[1]] if given.vocab else ["--vocab-size", "50257"]
    )
    import torch

    with open(given.output / "table.txt", "a") as table, tempfile.TemporaryDirectory() as cache:
        for line in (
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}",
            f"{'':32} {'tokens/s':>12} {'ms a step':>10} {'MFU %':>6} {'GiB':>8} {'first step':>10} "
            f"{'loss':>8} {'at last':>8}",
        ):
            print(line, file=table)
            print(line)
        for name in given.only:
            line = measure(name, given.output, data, cache)
            print(line, file=table, flush=True)
            print(line, flush=True)


if __name__ == "__main__":
    main()
