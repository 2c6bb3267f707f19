"""A run in object storage that is killed goes on with the same losses, on a new disk too."""

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.harness import FORK
from helpers import TINY_FLAGS
from meshwright.__main__ import main
from meshwright.checkpoint import lease, manifests
from s3 import Bucket, serving_bucket

pytestmark = [pytest.mark.whole, pytest.mark.timeout(1800)]
STEPS = 12
WORDS = f"--train-iters {STEPS} --save-interval 1 --keep-last 3 --hidden-dropout .1 --async-save --eval-iters 0".split()


def train(run: str, cache: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment, XDG_CACHE_HOME=str(cache))
    lease.BEAT, lease.DURATION = 0.1, 0.4
    sys.stdout = sys.stderr = open(cache.with_suffix(".log"), "a")
    given = [
        word for word in TINY_FLAGS if "--train-iters" not in word and "--eval-iters" not in word
    ]
    sys.exit(main(["train", *given, *WORDS, "--save", run, "--load", run]))


def losses_of(text: str) -> dict[int, float]:
    rows = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    return {row["iteration"]: row["loss"] for row in rows if row["event"] == "step"}


def wrong_steps(bucket: Bucket) -> list[str]:
    """Return the files of steps with a manifest that are not as it says."""
    wrong = []
    for key, raw in dict(bucket.objects).items():
        if not key.endswith("/manifest.json"):
            continue
        for name, file in json.loads(raw)["files"].items():
            data = bucket.objects.get(key.replace("manifest.json", name), b"")
            parts = [data[i : i + manifests.CHUNK] for i in range(0, len(data), manifests.CHUNK)]
            if "".join(hashlib.sha256(part).hexdigest() for part in parts) != file["sha256"]:
                wrong.append(key)
    return wrong


@pytest.mark.long
@pytest.mark.fault("F36")
def test_kills(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, figures: Callable[..., None]
) -> None:
    rng, done, runs = random.Random(0), 0, 0
    kills = int(os.environ.get("KILLS", 200))
    with serving_bucket(monkeypatch) as bucket:
        environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        clean = tmp_path / "clean"
        process = FORK.Process(target=train, args=(str(clean), tmp_path / "cache", environment))
        process.start()
        process.join()
        expected = losses_of((clean / "metrics.jsonl").read_text())
        assert len(expected) == STEPS
        while done < kills:
            runs += 1
            run = f"s3://bucket/run{runs}"
            while True:
                began = len(bucket.log)
                bucket.faults = lambda method, key: (
                    rng.choice([503, "cut"]) if rng.random() < 0.03 else None
                )
                process = FORK.Process(target=train, args=(run, tmp_path / "cache", environment))
                process.start()
                until = began + rng.randrange(1, 120) if done < kills else sys.maxsize
                while process.is_alive() and len(bucket.log) < until:
                    time.sleep(0.001)
                is_killed = process.is_alive()
                process.kill()
                process.join()
                assert not wrong_steps(bucket)
                if not is_killed and process.exitcode == 0:
                    break
                assert is_killed, (tmp_path / "cache.log").read_text()[-3000:]
                done += 1
                if rng.random() < 0.5:
                    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
            assert losses_of(bucket.objects[f"run{runs}/metrics.jsonl"].decode()) == expected
            print(f"{done} kills, {runs} runs, {len(bucket.log)} requests", flush=True)
    figures(kills=done, differing=f"0/{runs * STEPS}")
    print(f"{done} kills in {runs} runs: no loss differs, no incomplete step is complete")


@pytest.mark.long
def test_ranks_wait_for_an_upload_that_takes_longer_than_their_timeout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    given = [word for word in TINY_FLAGS if "--train-iters" not in word]
    words = "--train-iters 2 --lr-decay-iters 2 --save-interval 1 --distributed-timeout-minutes 0.04".split()
    command = [
        sys.executable,
        "-m",
        "meshwright",
        "launch",
        "--nproc-per-node=2",
        "train",
        *given,
        *words,
    ]
    with serving_bucket(monkeypatch) as bucket:
        bucket.faults = lambda method, key: (
            time.sleep(6) if method == "PUT" and "rank_00000" in key else None
        )
        done = subprocess.run([*command, "--save=s3://bucket/run"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (
        "waiting for the upload" in done.stdout
        and "run/iter_0000002/manifest.json" in bucket.objects
    )
