"""Compare a run that saves to a local folder with one that saves to s3://, interleaved."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from s3 import serving_bucket

ROUNDS = int(sys.argv[1])
WORDS = (
    "--mock-data --device cpu --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 "
    "--max-position-embeddings 128 --vocab-size 4096 --micro-batch-size 2 --global-batch-size 2 --lr 1e-3 "
    "--train-iters 60 --save-interval 20 --eval-iters 0 --log-interval 20 --async-save"
).split()


def measure(save: str, cache: Path) -> dict[str, float]:
    began = time.time()
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "meshwright", "train", *WORDS, "--save", save, "--load", save]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    total = time.time() - began
    assert done.returncode == 0, done.stderr
    folder = (
        cache / "meshwright/meshwright-storage/s3/bucket" / save.rpartition("/")[2]
        if "://" in save
        else Path(save)
    )
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["event"] == "step"]
    saves = [row["seconds"] for row in rows if row["event"] == "save"]
    return {
        "start s": next(row["ready"] for row in rows if row["event"] == "start"),
        "step ms": statistics.median(row["ms"] for row in steps),
        "steps s": steps[-1]["time"] - steps[0]["time"],
        "wait of a save s": statistics.median(saves) if saves else float("nan"),
        "end s": began + total - steps[-1]["time"],
        "total s": total,
    }


def main() -> None:
    results: dict[str, list[dict[str, float]]] = {"local": [], "s3": []}
    with pytest.MonkeyPatch.context() as patch, serving_bucket(patch) as bucket:
        for number in range(ROUNDS + 1):  # the first is not counted
            for kind in ("local", "s3") if number % 2 else ("s3", "local"):
                folder = Path(tempfile.mkdtemp())
                bucket.objects.clear()
                out = measure(
                    str(folder / "run") if kind == "local" else f"s3://bucket/run{number}",
                    folder / "cache",
                )
                print(
                    number, kind, json.dumps({k: round(v, 3) for k, v in out.items()}), flush=True
                )
                if number:
                    results[kind].append(out)
                shutil.rmtree(folder)
    for name in results["local"][0]:
        local, remote = ([out[name] for out in results[kind]] for kind in ("local", "s3"))
        print(
            f"{name}: local median {statistics.median(local):.3f} ({min(local):.3f} to {max(local):.3f}), "
            f"s3 median {statistics.median(remote):.3f} ({min(remote):.3f} to {max(remote):.3f})"
        )


if __name__ == "__main__":
    main()
