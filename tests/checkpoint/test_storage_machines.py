"""Machines without a shared folder: each sends its ranks' files, rank 0 the manifest after them."""

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.test_storage_kill import wrong_steps
from helpers import TINY_FLAGS, error_of, free_port, read_losses
from meshwright.__main__ import main
from meshwright.base.errors import IO, LOCKED
from meshwright.base.storage import addresses
from meshwright.checkpoint import lease, manifests, mirror, publish, steps, upload
from meshwright.runtime.ranks.team import Team
from on_ranks import run_programs
from s3 import Bucket, serving_bucket

pytest.importorskip("obstore")
RUN = "s3://bucket/runs/a"
SCRIPT = Path(__file__).parents[2] / "pretrain_gpt.py"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with serving_bucket(monkeypatch) as served:
        yield served


def train(folder: Path, run: str, count: int) -> str:
    """Train on two ranks, each with a cache of its own; return what they print."""
    given = [
        word for word in TINY_FLAGS if "--train-iters" not in word and "batch-size" not in word
    ]
    words = f"--micro-batch-size 2 --global-batch-size 4 --train-iters {count} --lr-decay-iters 6 --save-interval 2"
    words += f" --zero-stage 1 --async-save --keep-last 2 --save {run} --load {run} --start-timeout-seconds 60"
    shared = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    # this test's server
    shared |= {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    places = [
        {
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "XDG_CACHE_HOME": f"{folder}/machine{rank}",
        }
        for rank in range(2)
    ]
    status, outputs = run_programs(
        SCRIPT, [[*given, *words.split()]] * 2, [shared | each for each in places], folder
    )
    assert status == [0, 0], "\n".join(outputs)
    return "\n".join(outputs)


def test_a_run_goes_on_without_a_shared_folder(bucket: Bucket, tmp_path: Path) -> None:
    words = ["--train-iters=6", f"--run-dir={tmp_path / 'plain'}"]
    assert main(["train", *TINY_FLAGS, *words]) == 0
    train(tmp_path, RUN, 4)
    assert not wrong_steps(bucket)
    kept = [key for key in bucket.objects if "iter_" in key]
    assert {
        f"runs/a/iter_{n:07d}/rank_{rank:05d}.safetensors" for n in (2, 4) for rank in (0, 1)
    } <= set(kept)
    assert not [key for key in kept if upload.RECEIPT in key]
    here = [local(tmp_path / f"machine{rank}") / "iter_0000004" for rank in range(2)]
    files = [{path.name for path in folder.glob("*.safetensors")} for folder in here]
    assert files == [{"rank_00000.safetensors"}, {"rank_00001.safetensors"}]
    shutil.rmtree(tmp_path / "machine0")
    assert "resuming at step 4" in train(tmp_path, RUN, 6)
    assert not wrong_steps(bucket)
    losses = read_losses(local(tmp_path / "machine0"))
    assert losses == pytest.approx(read_losses(tmp_path / "plain"), rel=1e-5)
    for rank in range(2):
        assert steps.list_steps(local(tmp_path / f"machine{rank}")) == [6, 4]


def local(cache: Path) -> Path:
    return Path(addresses.localize(RUN, str(cache / "meshwright")))


def uploaders(folder: Path, step: int) -> list[upload.Uploader]:
    """Write a step of two machines, and return what sends each one's part."""
    out, users = [], (0, 1)
    roots = [local(folder / f"machine{rank}") for rank in range(2)]
    for rank, root in enumerate(roots):
        for name in (0, 1):
            (root / f"iter_{step:07d}.tmp").mkdir(parents=True, exist_ok=True)
            (root / f"iter_{step:07d}.tmp" / f"rank_{name:05d}.safetensors").write_bytes(
                bytes([step, name]) * 100
            )
        content = {
            f"rank_{n:05d}.safetensors": manifests.File(
                200, manifests.sha256([bytes([step, n]) * 100])
            )
            for n in (0, 1)
        }
        (root / f"iter_{step:07d}.tmp" / f"rank_{1 - rank:05d}.safetensors").unlink()
        publish.add_manifest(root, step, content)
        publish.give_name(root, step)
        out.append(upload.Uploader(root, [], Team(rank, 2), users))
        out[-1].saved = step
    return out


def test_the_manifest_waits_for_the_files_of_other_machines(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "LOOK", 0.01)
    key = "runs/a/iter_0000001"
    with mirror.leased(local(tmp_path / "machine0")):
        first, second = uploaders(tmp_path, 1)
        bucket.objects[f"{key}/{upload.RECEIPT}1"] = b"of an earlier start"
        bucket.objects[f"{key}/rank_00001.safetensors"] = bytes(200)
        sending = threading.Thread(target=first.send_step, args=(1,))
        sending.start()
        until = time.monotonic() + 10
        while f"{key}/rank_00000.safetensors" not in bucket.objects and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.1)
        assert f"{key}/manifest.json" not in bucket.objects
        second.send_step(1)
        sending.join()
    assert sorted(name.rpartition("/")[2] for name in bucket.objects if "iter_" in name) == [
        "manifest.json",
        "rank_00000.safetensors",
        "rank_00001.safetensors",
    ]
    assert not wrong_steps(bucket)


def test_a_machine_that_sends_nothing_ends_the_wait(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "LOOK", 0.01)
    monkeypatch.setattr(upload, "PATIENCE", 0.05)
    with mirror.leased(local(tmp_path / "machine0")):
        first, second = uploaders(tmp_path, 1)
        assert "another machine has not sent its files of step 1" in error_of(
            lambda: first.send_step(1), IO
        )
        assert "runs/a/iter_0000001/manifest.json" not in bucket.objects
        second.confirm()
        owner = json.loads(bucket.objects[f"runs/a/{lease.OWNER}"])
        bucket.objects[f"runs/a/{lease.OWNER}"] = json.dumps(owner | {"start": "another"}).encode()
        assert "was taken over by another run" in error_of(second.confirm, LOCKED)
