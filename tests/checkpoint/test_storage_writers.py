"""A second writer at an address: no step's last copy goes, and nothing counts that is not there."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers import error_of
from meshwright.base.errors import BAD_DATA, IO, LOCKED
from meshwright.base.storage import addresses, store
from meshwright.checkpoint import lease, manifests, mirror, publish, steps, upload
from s3 import Bucket, serving_bucket

pytest.importorskip("obstore")
pytestmark = pytest.mark.fault("F38")
RUN = "runs/a"
FIRST = f"{RUN}/iter_0000001"
TAKEN = json.dumps({"id": "b", "process": "b", "beat": "1", "released": False}).encode()


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Bucket]:
    monkeypatch.setattr(lease, "DURATION", 0.1)
    monkeypatch.setattr(lease, "BEAT", 0.01)
    with serving_bucket(monkeypatch) as served:
        yield served


@pytest.fixture
def root(bucket: Bucket, tmp_path: Path) -> Path:
    return on_machine(tmp_path / "a")


def on_machine(cache: Path) -> Path:
    """Return the folder that stands for the run on a machine with this cache."""
    return Path(addresses.localize(f"s3://bucket/{RUN}", str(cache)))


def save(root: Path, step: int, content: bytes = b"") -> None:
    content = content or bytes([step]) * 100
    publish.write_step(
        root,
        step,
        {name: lambda write: write(content) for name in ("index.json", "rank.safetensors")},
    )


def send(root: Path) -> None:
    store.forget()
    uploader = upload.Uploader(root, [])
    uploader.send()
    uploader.close()


def content_there(bucket: Bucket, step: int) -> set[bytes]:
    """Return what the files of a step hold in storage; they are as its manifest says."""
    key = f"{RUN}/iter_{step:07d}"
    files = json.loads(bucket.objects[f"{key}/manifest.json"])["files"]
    for name, file in files.items():
        assert manifests.sha256([bucket.objects[f"{key}/{name}"]]) == file["sha256"]
    return {bucket.objects[f"{key}/{name}"] for name in files}


def is_whole_here(root: Path, step: int) -> bool:
    return (steps.step_folder(root, step) / "rank.safetensors").exists()


def test_steps_that_were_never_uploaded_are_kept_and_named(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with mirror.leased(root):
        save(root, 1)
        send(root)
        save(root, 2)
        save(root, 3, b"of the first")
    other = on_machine(tmp_path / "b")
    with mirror.leased(other):
        save(other, 3)
        send(other)
    with mirror.leased(root):
        assert steps.list_steps(root) == [3, 1] and not is_whole_here(root, 3)
    for step in (2, 3):
        assert manifests.verify_step(root / f"replaced-1/iter_{step:07d}", full=True)
    error = capsys.readouterr().err
    assert (
        "does not have iter_0000003, iter_0000002 as this machine does" in error
        and "kept as replaced-1" in error
    )


def test_steps_that_another_run_has_removed_leave_nothing(
    root: Path, tmp_path: Path, bucket: Bucket
) -> None:
    with mirror.leased(root):
        save(root, 1)
        save(root, 2)
        send(root)
    with mirror.leased(other := on_machine(tmp_path / "b")):
        upload.Uploader(other, []).remove([1])
        shutil.rmtree(steps.step_folder(other, 1))
        upload.Uploader(other, []).remove([1])
    mirror.refresh(root)
    assert steps.list_steps(root) == [2] and not (root / "replaced-1").exists()


@pytest.mark.parametrize(
    "what", ["files are there", "one file is there", "saved anew", "never sent"]
)
def test_only_steps_that_were_removed_from_storage_are_removed_here(
    root: Path, tmp_path: Path, bucket: Bucket, what: str
) -> None:
    with mirror.leased(root):
        save(root, 1)
        if what != "never sent":
            send(root)
        if what == "saved anew":
            shutil.rmtree(steps.step_folder(root, 1))
            save(root, 1, b"other bytes")
    stay = {
        "files are there": ("index.json", "rank.safetensors"),
        "one file is there": ("rank.safetensors",),
    }
    with mirror.leased(on_machine(tmp_path / "b")):
        for key in [key for key in bucket.objects if key.startswith(FIRST)]:
            if not key.endswith(stay.get(what, ())):
                del bucket.objects[key]
    mirror.refresh(root)
    assert (root / "replaced-1/iter_0000001/rank.safetensors").exists()


def test_an_old_folder_does_not_overwrite_steps_where_the_owner_was_removed(
    root: Path, tmp_path: Path, bucket: Bucket
) -> None:
    with mirror.leased(root):
        save(root, 1)
        send(root)
        save(root, 3)
    remove_manifest(bucket)
    other = on_machine(tmp_path / "b")
    with mirror.leased(other):
        for step in (1, 2):
            save(other, step, b"of the second")
        send(other)
    del bucket.objects[f"{RUN}/{lease.OWNER}"]
    with mirror.leased(root):
        assert steps.list_steps(root) == [3, 2, 1] and not is_whole_here(root, 1)
        send(root)
    assert content_there(bucket, 1) == {b"of the second"} and content_there(bucket, 3) == {
        b"\3" * 100
    }
    assert (root / "replaced-1/iter_0000001/rank.safetensors").exists()


def test_a_manifest_is_kept_as_long_as_storage_has_the_files(
    root: Path, tmp_path: Path, bucket: Bucket
) -> None:
    with mirror.leased(root):
        save(root, 1)
        save(root, 2)
        send(root)
    with mirror.leased(on_machine(tmp_path / "b")):
        remove_manifest(bucket)
    mirror.refresh(root)
    assert (
        steps.list_steps(root) == [2] and (root / "replaced-1/iter_0000001/manifest.json").exists()
    )


def remove_manifest(bucket: Bucket) -> None:
    del bucket.objects[f"{FIRST}/manifest.json"]


def remove_file(bucket: Bucket) -> None:
    del bucket.objects[f"{FIRST}/rank.safetensors"]


def replace_file(bucket: Bucket) -> None:
    bucket.objects[f"{FIRST}/rank.safetensors"] = bytes(100)


def change_tag(bucket: Bucket) -> None:
    bucket.salts[f"{FIRST}/rank.safetensors"] = b"another"


@pytest.mark.parametrize("is_list_stale", [False, True])
@pytest.mark.parametrize("harm", [remove_manifest, remove_file, replace_file, change_tag])
def test_storage_is_asked_before_a_step_goes_here(
    root: Path, bucket: Bucket, harm: Callable[[Bucket], None], is_list_stale: bool
) -> None:
    with mirror.leased(root):
        save(root, 1)
        send(root)
        assert is_whole_here(root, 1)
        if is_list_stale:
            before = dict(bucket.objects)
            bucket.faults = lambda method, key: setattr(bucket, "listed", bucket.objects | before)
        harm(bucket)
        save(root, 2)
        send(root)
    assert content_there(bucket, 1) == {b"\1" * 100} and content_there(bucket, 2) == {b"\2" * 100}
    assert not is_whole_here(root, 1) and is_whole_here(root, 2)
    assert bucket.objects[f"{RUN}/latest_checkpointed_iteration.txt"] == b"2"


def test_a_step_that_cannot_be_sent_again_is_not_removed_here(root: Path, bucket: Bucket) -> None:
    with mirror.leased(root):
        save(root, 1)
        send(root)
        remove_manifest(bucket)
        save(root, 2)
        bucket.faults = lambda method, key: 403 if method == "PUT" and "iter_" in key else None
        assert "may not do this" in error_of(lambda: send(root), IO)
        assert is_whole_here(root, 1) and is_whole_here(root, 2)


def test_the_tracker_follows_a_step_whose_upload_was_killed(
    root: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(point: str) -> None:
        assert point != "after_manifest"

    with mirror.leased(root):
        save(root, 1)
        with monkeypatch.context() as patch, pytest.raises(AssertionError):
            patch.setattr(publish, "crash_point", kill)
            send(root)
        send(root)
    assert bucket.objects[f"{RUN}/latest_checkpointed_iteration.txt"] == b"1"


def test_a_file_that_is_replaced_before_the_manifest_does_not_count(
    root: Path, bucket: Bucket
) -> None:
    def replace(method: str, key: str) -> None:
        if key == "" and f"{FIRST}/rank.safetensors" in bucket.objects:
            replace_file(bucket)

    with mirror.leased(root):
        save(root, 1)
        bucket.faults = replace
        assert "rank.safetensors is not there, or not as it was sent" in error_of(
            lambda: send(root), IO
        )
        assert f"{FIRST}/manifest.json" not in bucket.objects
        bucket.faults = lambda method, key: None
        send(root)
    assert content_there(bucket, 1) == {b"\1" * 100}


def test_a_manifest_that_another_run_writes_meanwhile_is_not_overwritten(
    root: Path, bucket: Bucket
) -> None:
    def write(method: str, key: str) -> None:
        if method == "PUT" and key == f"{FIRST}/manifest.json":
            bucket.objects[key] = b"of another run"

    with mirror.leased(root):
        save(root, 1)
        bucket.faults = write
        assert "was written by another run meanwhile" in error_of(lambda: send(root), IO)
    assert bucket.objects[f"{FIRST}/manifest.json"] == b"of another run"


def test_a_step_loses_its_manifest_first_though_the_list_lacks_it(
    root: Path, bucket: Bucket
) -> None:
    with mirror.leased(root):
        save(root, 1)
        send(root)
        bucket.listed = {key: data for key, data in bucket.objects.items() if "manifest" not in key}
        shutil.rmtree(steps.step_folder(root, 1))
        upload.Uploader(root, []).remove([1])
    assert not [key for key in bucket.objects if "iter_" in key]


def test_each_look_at_a_step_asks_storage_anew(root: Path, bucket: Bucket) -> None:
    with mirror.leased(root):
        save(root, 1)
        save(root, 2)
        send(root)
        folder = steps.step_folder(root, 1)
        assert manifests.verify_step(folder)
        remove_file(bucket)
        assert "rank.safetensors" in error_of(lambda: manifests.verify_step(folder), BAD_DATA)


def test_a_copy_of_the_folder_is_not_the_writer_with_its_id(
    root: Path, tmp_path: Path, bucket: Bucket
) -> None:
    with mirror.leased(root):
        save(root, 1)
        send(root)
        (root / "metrics.jsonl").write_text("row 1\n")
    other = on_machine(tmp_path / "copied")
    shutil.copytree(root, other)
    with mirror.leased(root):
        assert "is in use by process" in error_of(lambda: lease.Lease(other), LOCKED)
        save(root, 2)
        send(root)
        (root / "metrics.jsonl").write_text("row 1\nrow 2\n")
    with mirror.leased(other):
        assert steps.list_steps(other) == [2, 1]
        assert (other / "metrics.jsonl").read_text() == "row 1\nrow 2\n"
    assert bucket.objects[f"{RUN}/metrics.jsonl"] == b"row 1\nrow 2\n"


def test_a_folder_without_locks_is_not_taken_over_from_a_process_at_work(root: Path) -> None:
    def take() -> None:
        with mirror.leased(root, is_locked=False):
            pass

    with mirror.leased(root):
        assert "is in use by process" in error_of(take, LOCKED)
        assert lease.confirm(root)
    take()


def test_a_process_goes_by_its_own_name_and_not_by_the_folders(root: Path, bucket: Bucket) -> None:
    """Another process may have the same folder, where the file system has no locks."""
    with mirror.leased(root):
        others = json.loads((root / lease.OWNER).read_text()) | {"start": "another"}
        (root / lease.OWNER).write_text(json.dumps(others))
        bucket.objects[f"{RUN}/{lease.OWNER}"] = json.dumps(
            others | {"beat": "1", "released": False}
        ).encode()
        assert "was taken over" in error_of(lambda: lease.confirm(root), LOCKED)


def test_a_kill_while_a_lease_begins_does_not_set_steps_aside(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mirror.leased(root):
        save(root, 1)
        send(root)
        save(root, 2)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(lease.Lease, "record", lambda self: 1 / 0)
        with mirror.leased(root):
            pass
    with mirror.leased(root):
        assert steps.list_steps(root) == [2, 1]


def test_a_run_that_was_taken_over_leaves_the_tracker_alone(root: Path, bucket: Bucket) -> None:
    with mirror.leased(root):
        save(root, 1)
        send(root)
        bucket.objects[f"{RUN}/{lease.OWNER}"] = TAKEN
        bucket.objects[f"{RUN}/latest_checkpointed_iteration.txt"] = b"2"
        assert "was taken over" in error_of(lambda: send(root), LOCKED)
    assert bucket.objects[f"{RUN}/latest_checkpointed_iteration.txt"] == b"2"


def test_files_beside_steps_are_not_sent_after_a_takeover(root: Path, bucket: Bucket) -> None:
    def take_over(method: str, key: str) -> None:
        if method == "PUT" and key.endswith("a.txt"):
            bucket.objects[f"{RUN}/{lease.OWNER}"] = TAKEN

    with mirror.leased(root):
        bucket.faults = take_over
        for name in ("a.txt", "b.txt"):
            (root / name).write_text(name)
        assert "was taken over by b" in error_of(lambda: mirror.send_files(root), LOCKED)
    assert f"{RUN}/b.txt" not in bucket.objects


@pytest.mark.parametrize("shown", ["nothing", "step 1"])
def test_a_list_that_is_out_of_date_does_not_start_a_run_over(
    root: Path, tmp_path: Path, bucket: Bucket, shown: str
) -> None:
    with mirror.leased(root):
        save(root, 1)
        send(root)
        bucket.listed = dict(bucket.objects) if shown == "step 1" else {}
        save(root, 2)
        bucket.faults = lambda method, key: setattr(bucket, "listed", None)
        send(root)
    bucket.faults = lambda method, key: None
    bucket.listed = (
        {k: v for k, v in bucket.objects.items() if "0000001" in k} if shown == "step 1" else {}
    )
    message = error_of(lambda: mirror.refresh(on_machine(tmp_path / "b")), IO)
    assert "lacks iter_0000002/manifest.json, which is there: the list is out of date" in message


def test_a_run_that_goes_on_meanwhile_is_looked_at_again(
    root: Path, tmp_path: Path, bucket: Bucket
) -> None:
    with mirror.leased(root):
        (root / "metrics.jsonl").write_text("row 1\n")
    rows = iter([b"row 1\nrow 2\n", b"row 1\nrow 2\nrow 3\n"])

    def go_on(method: str, key: str) -> None:
        if key.endswith("metrics.jsonl"):
            bucket.objects[key] = next(rows, bucket.objects[key])

    bucket.faults = go_on
    other = on_machine(tmp_path / "b")
    mirror.refresh(other)
    assert (other / "metrics.jsonl").read_bytes() == bucket.objects[f"{RUN}/metrics.jsonl"]
    assert next(rows, None) is None


def test_files_of_a_folder_that_has_written_since_are_copied_anew(
    root: Path, tmp_path: Path, bucket: Bucket
) -> None:
    other = on_machine(tmp_path / "b")
    with mirror.leased(other):
        (other / "metrics.jsonl").write_text("row 1\n")
    mirror.refresh(root)
    with mirror.leased(root):
        (root / "metrics.jsonl").write_text("row 2\n")
    with mirror.leased(other):
        (other / "metrics.jsonl").write_text("row 1\n")
    mirror.refresh(root)
    assert (root / "metrics.jsonl").read_text() == "row 1\n"
