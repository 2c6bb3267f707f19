"""Runs in object storage: complete steps or none, whatever the network or a kill does."""

import json
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import TINY_FLAGS, error_of, read_losses
from meshwright.__main__ import main
from meshwright.base.errors import IO, LOCKED, USAGE, UserError
from meshwright.base.storage import addresses, copies, store
from meshwright.checkpoint import lease, manifests, mirror, publish, steps, upload
from meshwright.data.files.indexed import content_sample
from meshwright.data.files.writer import Writer
from meshwright.runtime.ranks.heartbeat import heartbeat
from s3 import Bucket, serving_bucket

obstore_urls = pytest.importorskip("obstore.store")
RUN = "s3://bucket/runs/a"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Bucket]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    mirror.fetch.cache_clear()
    with serving_bucket(monkeypatch) as served:
        yield served
    mirror.fetch.cache_clear()


def train(*words: object, steps: int = 6, run: str = RUN) -> int:
    store.forget()
    mirror.fetch.cache_clear()  # each run is a process of its own
    given = [word for word in TINY_FLAGS if "--train-iters" not in word]
    more = f"--train-iters {steps} --lr-decay-iters 6 --save-interval 2 --save {run} --load {run}".split()
    return main(["train", *given, *more, *map(str, words)])


def local(run: str = RUN) -> Path:
    return Path(addresses.localize(run))


def lose_disk() -> None:
    shutil.rmtree(addresses.default_root())


def test_resume_from_storage_alone(
    bucket: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(steps=6, run=str(tmp_path / "plain")) == 0
    assert train(steps=4) == 0
    there = {key for key in bucket.objects if "iter_" in key}
    assert {f"runs/a/iter_{n:07d}/manifest.json" for n in (2, 4)} <= there
    assert 'save = "s3://bucket/runs/a"' in bucket.objects["runs/a/config.toml"].decode()
    assert "/cache/" not in capsys.readouterr().out
    assert not list(steps.step_folder(local(), 2).glob("rank_*"))  # storage has it
    lose_disk()
    assert train(steps=6) == 0
    assert "resuming at step 4" in capsys.readouterr().out
    assert read_losses(local()) == read_losses(tmp_path / "plain")
    assert json.loads(bucket.objects["runs/a/.owner.json"])["released"]


def test_steps_are_removed_from_storage_too(bucket: Bucket) -> None:
    """At each request, a step with a manifest has all its files."""
    lacking = list[str]()

    def look(method: str, key: str) -> None:
        for name in [name for name in bucket.objects if name.endswith("/manifest.json")]:
            wanted = (
                name.replace("manifest.json", file)
                for file in json.loads(bucket.objects[name])["files"]
            )
            lacking.extend(set(wanted) - set(bucket.objects))

    bucket.faults = look
    assert train("--keep-last=1", "--async-save") == 0
    assert not lacking
    assert {key.split("/")[2] for key in bucket.objects if "iter_" in key} == {"iter_0000006"}
    assert bucket.objects["runs/a/latest_checkpointed_iteration.txt"] == b"6"


def faulty(bucket: Bucket, every: int, fault: int | str) -> None:
    """Let every n-th request meet a fault."""
    bucket.faults = lambda method, key: fault if len(bucket.log) % every == 0 else None


@pytest.mark.fault("F37")
def test_requests_that_fail_are_repeated(bucket: Bucket) -> None:
    faulty(bucket, 3, 503)
    assert train(steps=2) == 0
    lose_disk()
    faulty(bucket, 4, "cut")
    assert train(steps=4) == 0
    assert steps.latest(local()) == (4, [])


@pytest.mark.fault("F37")
def test_an_object_that_changes_while_it_is_read_is_read_again(bucket: Bucket) -> None:
    bucket.objects["a/b"] = b"0123456789"

    def cut_and_change(method: str, key: str) -> str | None:
        if len(bucket.log) == 2:
            bucket.objects["a/b"] = b"abcdefghij"
        return "cut" if len(bucket.log) == 1 else None

    bucket.faults = cut_and_change
    assert (store.store_of("s3://bucket").get("a/b") or [b""])[0] == b"abcdefghij"


def test_a_large_object_is_not_read_at_once(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.objects["a/b"] = b"0123456789"
    monkeypatch.setattr(store, "SMALL", 9)
    assert "10 bytes, above the limit of 9" in error_of(
        lambda: store.store_of("s3://bucket").get("a/b"), IO
    )


@pytest.mark.fault("F37")
def test_changed_bytes_are_read_again_and_refused_if_they_stay(bucket: Bucket) -> None:
    assert train(steps=2) == 0
    lose_disk()
    wrong = iter(["flip"])
    bucket.faults = lambda method, key: (
        next(wrong, None) if method == "GET" and "rank_" in key else None
    )
    assert train(steps=4) == 0
    bucket.faults = lambda method, key: "flip" if method == "GET" and "rank_" in key else None
    lose_disk()
    store.forget()
    mirror.refresh(local())
    folder = steps.step_folder(local(), 4)
    assert manifests.verify_step(folder)
    assert "SHA-256 differs" in error_of(lambda: manifests.verify_step(folder, full=True))
    bucket.objects["runs/a/iter_0000004/rank_00000.safetensors"] += b"x"
    store.forget()
    assert "but the manifest says" in error_of(lambda: manifests.verify_step(folder))


@pytest.mark.fault("F37")
def test_storage_that_refuses_ends_the_run_with_its_step_kept(
    bucket: Bucket, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket.faults = lambda method, key: 403 if method == "PUT" and "rank_" in key else None
    assert train(steps=4) == IO
    error = capsys.readouterr().err
    assert "the credentials may not do this" in error and "the next start here sends it" in error
    assert not [key for key in bucket.objects if key.endswith("manifest.json")]
    bucket.faults = lambda method, key: None
    assert train(steps=6) == 0
    assert "runs/a/iter_0000002/manifest.json" in bucket.objects


def test_a_run_that_waits_for_its_upload_gives_signs_of_life(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks wait in a collective meanwhile, for as long as rank 0 makes progress."""
    sender, ticks = upload.Uploader(local(), []), heartbeat.ticks
    monkeypatch.setattr(sender, "send", lambda: time.sleep(0.2))
    sender.begin(1, [])
    sender.end()
    sender.close()
    assert heartbeat.ticks > ticks + 3


class Killed(Exception):
    """Stands for SIGKILL."""


def write_step(root: Path, step: int) -> None:
    content = bytes([step]) * 1000
    produce: publish.Produce = lambda write: write(content)  # noqa: E731
    publish.write_step(root, step, {"rank_00000.safetensors": produce, "state.json": produce})


@pytest.mark.parametrize(
    ("point", "sent_again"), [("before_file", 2), ("before_manifest", 0), ("after_manifest", 0)]
)
@pytest.mark.fault("F36")
def test_an_upload_that_was_killed_goes_on(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, point: str, sent_again: int
) -> None:
    def kill(name: str) -> None:
        if name == point:
            raise Killed

    with mirror.leased(local()):
        write_step(local(), 1)
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(publish, "crash_point", kill)
            upload.Uploader(local(), []).send_step(1)
        assert ("runs/a/iter_0000001/manifest.json" in bucket.objects) == (
            point == "after_manifest"
        )
        bucket.log.clear()
        upload.Uploader(local(), []).send_step(1)
    assert (
        len([1 for method, key in bucket.log if method == "PUT" and re.search("rank_|state", key)])
        == sent_again
    )
    lose_disk()
    mirror.refresh(local())
    assert steps.latest(local())[0] == 1
    assert manifests.verify_step(steps.step_folder(local(), 1), full=True)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], Path]:
    """Return a function that goes on on another machine, whose folder for the run it returns."""

    def move() -> Path:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
        return local()

    monkeypatch.setattr(lease, "BEAT", 0.05)
    monkeypatch.setattr(lease, "DURATION", 0.5)
    return move


@pytest.mark.fault("F38")
def test_a_second_writer_is_refused_with_the_name_of_the_first(
    bucket: Bucket, elsewhere: Callable[[], Path]
) -> None:
    with mirror.leased(local()):
        other = elsewhere()
        error = error_of(lambda: lease.Lease(other), LOCKED)
        assert "s3://bucket/runs/a is in use by process" in error
    with mirror.leased(other):  # it was released
        assert lease.read_owner(*store.locate(other))


@pytest.mark.fault("F38")
def test_a_writer_without_a_sign_of_life_is_replaced_and_stops(
    bucket: Bucket, elsewhere: Callable[[], Path]
) -> None:
    first = local()
    lease.Lease(first).record()  # and never renew it
    write_step(first, 1)
    uploader = upload.Uploader(first, [])
    uploader.send_step(1)
    write_step(first, 2)  # and is not sent
    other = elsewhere()
    with mirror.leased(other):
        assert steps.latest(other)[0] == 1
        write_step(other, 3)
        upload.Uploader(other, []).send_step(3)
        (first / "metrics.jsonl").write_text("of the first")
        write_step(first, 3)
        before = dict(bucket.objects)
        for act in (
            uploader.send,
            uploader.send_files,
            lambda: uploader.remove([9]),
            lambda: uploader.send_step(3),
        ):
            assert "taken over" in error_of(act, LOCKED)
        assert {**bucket.objects, "runs/a/.owner.json": b""} == {
            **before,
            "runs/a/.owner.json": b"",
        }
    with mirror.leased(first):  # what was never in storage does not count
        assert steps.list_steps(first) == [3, 1]


@pytest.mark.fault("F38")
def test_a_writer_that_is_replaced_leaves_the_address_alone_at_its_end(
    bucket: Bucket, elsewhere: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = local()
    with mirror.leased(first):
        # as if it were stopped
        monkeypatch.setattr(lease.Lease, "renew", lambda self, released=False: None)
        (first / "metrics.jsonl").write_text("of the first")
        lease.Lease(elsewhere()).record()
    assert "runs/a/metrics.jsonl" not in bucket.objects


@pytest.mark.fault("F38")
def test_an_answer_that_is_lost_does_not_end_a_lease(bucket: Bucket) -> None:
    with mirror.leased(local()):
        pass
    held = lease.Lease(local())
    held.put({"e_tag": held.tag})  # whose answer is lost
    held.renew()
    assert held.tag == lease.read_owner(*store.locate(local()))["tag"]  # type: ignore[index]


def test_steps_stay_if_someone_removes_the_owner(bucket: Bucket) -> None:
    with mirror.leased(local()):
        write_step(local(), 1)
    del bucket.objects["runs/a/.owner.json"]
    bucket.objects["runs/a/log.txt"] = b""
    mirror.refresh(local())
    assert steps.list_steps(local()) == [1]


def test_a_log_in_storage_is_sent_after_each_save(bucket: Bucket, tmp_path: Path) -> None:
    sent: list[bytes] = []
    bucket.faults = lambda method, key: (
        sent.append(bucket.objects.get(key, b"")) if key.endswith("metrics.jsonl") else None
    )
    assert (
        train("--run-dir=s3://bucket/log", "--keep-last=1", run=str(tmp_path / "run"), steps=4) == 0
    )
    assert b'"iteration": 2' in sent[-1] and not [key for key in bucket.objects if "iter_" in key]


def test_files_that_vanish_meanwhile_do_not_end_an_upload(bucket: Bucket) -> None:
    ended = threading.Event()

    def come_and_go() -> None:
        while not ended.is_set():
            folder = Path(tempfile.mkdtemp(dir=local()))
            (folder / "file").write_bytes(b"")
            shutil.rmtree(folder)

    with mirror.leased(local()):
        other = threading.Thread(target=come_and_go)
        other.start()
        try:
            for _ in range(60):
                mirror.send_files(local())
        finally:
            ended.set()
            other.join()


def write_tokens(folder: Path, bucket: Bucket) -> None:
    with Writer(str(folder / "text_document"), np.uint16) as writer:
        for seed in range(20):
            writer.add(np.random.default_rng(seed).integers(0, 64, 100_000))
            writer.end_document()
    for ending in ("bin", "idx"):
        bucket.objects[f"data/text_document.{ending}"] = (
            folder / f"text_document.{ending}"
        ).read_bytes()


def test_token_files_are_read_block_by_block(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "BLOCK", 16384)
    write_tokens(tmp_path, bucket)
    given = [word for word in TINY_FLAGS if word != "--mock-data"]
    for place, prefix in (
        ("a", str(tmp_path / "text_document")),
        ("b", "s3://bucket/data/text_document"),
    ):
        copies.sparse_copy.cache_clear()
        words = ["--data-path", prefix, "--run-dir", str(tmp_path / place), "--split", "90,10,0"]
        faulty(bucket, 5, 503)
        assert main(["train", *given, *words]) == 0
    assert read_losses(tmp_path / "a") == read_losses(tmp_path / "b")
    marks = (
        copies.map_of(local("s3://bucket/data") / "text_document.bin")
        .read_bytes()
        .partition(b"\n")[2]
    )
    present = [any(marks[at : at + copies.MARK]) for at in range(0, len(marks), copies.MARK)]
    assert 0 < sum(present) < len(present) / 2
    copies.sparse_copy.cache_clear()


def test_all_bytes_of_token_files_arrive(bucket: Bucket, tmp_path: Path) -> None:
    write_tokens(tmp_path, bucket)
    prefix = str(local("s3://bucket/data") / "text_document")
    copies.prepare_tokens(prefix)
    size = (tmp_path / "text_document.bin").stat().st_size
    assert size % copies.BLOCK  # the last block is not full
    copies.need(f"{prefix}.bin", [(size - 3, size), (0, size)])
    assert Path(f"{prefix}.bin").read_bytes() == (tmp_path / "text_document.bin").read_bytes()
    copies.sparse_copy.cache_clear()


def test_a_run_continues_on_data_in_storage_from_another_folder(
    bucket: Bucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The local folders of two machines differ; the settings of a run name addresses alone."""
    write_tokens(tmp_path, bucket)
    monkeypatch.setitem(
        globals(), "TINY_FLAGS", [word for word in TINY_FLAGS if word != "--mock-data"]
    )
    words = ["--data-path", "s3://bucket/data/text_document", "--split=90,10,0", "--eval-iters=0"]
    assert train(*words, steps=2) == 0
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    copies.sparse_copy.cache_clear()
    capsys.readouterr()
    assert train(*words, steps=4) == 0
    out = capsys.readouterr().out
    assert "resuming at step 2" in out and "data_path is" not in out and "have changed" not in out
    assert not [
        key
        for key, data in bucket.objects.items()
        if key.startswith("runs/") and b"meshwright-storage" in data
    ]
    copies.sparse_copy.cache_clear()


def test_a_dry_run_finds_what_is_in_storage(
    bucket: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tokens(tmp_path, bucket)
    assert train(steps=2) == 0
    given = [word for word in TINY_FLAGS if word != "--mock-data"]
    words = [
        "--data-path",
        "s3://bucket/data/text_document",
        "--split=90,10,0",
        "--save",
        RUN,
        "--load",
        RUN,
    ]
    lose_disk()
    mirror.fetch.cache_clear()
    store.forget()
    capsys.readouterr()
    assert main(["train", *given, *words, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "data s3://bucket/data/text_document: 20 documents" in out
    assert f"it would continue from step 2 in {RUN}" in out
    copies.sparse_copy.cache_clear()


def test_token_files_that_were_replaced_are_copied_anew(bucket: Bucket, tmp_path: Path) -> None:
    write_tokens(tmp_path, bucket)
    prefix = str(local("s3://bucket/data") / "text_document")
    copies.prepare_tokens(prefix)
    before = content_sample(prefix)
    assert before == content_sample(tmp_path / "text_document")
    bucket.objects["data/text_document.bin"] = bytes(len(bucket.objects["data/text_document.bin"]))
    copies.sparse_copy.cache_clear()
    copies.prepare_tokens(prefix)
    assert content_sample(prefix) != before
    copies.sparse_copy.cache_clear()


@pytest.mark.parametrize("flag", ["--save-overwrite", "--ckpt-format=torch"])
def test_settings_that_storage_cannot_serve_are_refused(
    bucket: Bucket, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    assert train(flag) == USAGE
    assert f"{RUN}" in capsys.readouterr().err and not bucket.objects


@pytest.mark.flag("local_dir")
def test_local_copies_are_where_the_flag_says(bucket: Bucket, tmp_path: Path) -> None:
    assert train(f"--local-dir={tmp_path}/here", steps=2) == 0
    assert (tmp_path / "here/meshwright-storage/s3/bucket/runs/a/iter_0000002/index.json").exists()
    assert not Path(addresses.default_root()).exists()


@pytest.mark.parametrize(
    ("scheme", "variable"), [("s3", "AWS_ACCESS_KEY_ID"), ("gs", "GOOGLE_APPLICATION_CREDENTIALS")]
)
def test_missing_credentials_are_said_before_anything_is_asked(
    scheme: str, variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in store.CREDENTIALS[scheme][0]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))

    def is_silent(address: tuple[str, int], timeout: float) -> None:
        raise TimeoutError

    monkeypatch.setattr(store.socket, "create_connection", is_silent)
    monkeypatch.setattr(obstore_urls, "from_url", None)
    with pytest.raises(UserError, match=f"no credentials are given, .*; set {variable}") as refused:
        store.open_bucket(f"{scheme}://bucket")
    assert refused.value.status == IO
    monkeypatch.undo()
    objects = object.__new__(store.BucketObjects)
    objects.bucket = f"{scheme}://bucket"

    def ask_role() -> None:
        raise PermissionError(
            f"PUT http://{store.CREDENTIALS[scheme][1]}/latest/api/token: 403 Forbidden"
        )

    with pytest.raises(UserError, match=f"gives none.; set {variable}"):
        objects.ask("x", ask_role)


def test_a_run_is_kept_in_googles_storage(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    account |= {"gcs_base_url": bucket.url, "disable_oauth": True}
    (tmp_path / "key.json").write_text(json.dumps(account))
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "key.json"))
    opened = obstore_urls.from_url

    def over_http(url: str, **settings: Any) -> Any:
        settings["client_options"]["allow_http"] = True
        return opened(url, **settings)

    monkeypatch.setattr(obstore_urls, "from_url", over_http)
    run = "gs://bucket/runs/g"
    assert train(steps=4, run=run) == 0
    lose_disk()
    assert train(steps=6, run=run) == 0
    assert steps.latest(local(run))[0] == 6
    assert json.loads(bucket.objects["runs/g/.owner.json"])["released"]
