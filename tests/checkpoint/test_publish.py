"""The commit protocol leaves a complete step or none, wherever it is killed, damaged or starved."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers import captured_output, error_of, flip_bit
from meshwright.base.errors import IO, LOCKED, UserError
from meshwright.checkpoint import formats, manifests, owner, publish, steps
from meshwright.compat.formats import table

POINTS = """
    begin after_mkdir written_unsynced shard_done manifest_unsynced before_rename after_rename before_tracker
    after_tracker
""".split()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "CHUNK", 64)  # so that small files have many


def content(step: int) -> dict[str, publish.Produce]:
    data = random.Random(step).randbytes(1000)

    def produce(write: publish.Write) -> None:
        for i in range(0, len(data), 150):  # not aligned with chunks
            write(data[i : i + 150])

    return {
        "rank_00000.safetensors": produce,
        "state.json": lambda write: write(json.dumps({"step": step}).encode()),
    }


def write_step(root: Path, step: int, seed: int | None = None) -> None:
    publish.write_step(root, step, content(step if seed is None else seed), bytes_needed=1010)


def publish_if_not_there(root: Path, step: int) -> None:
    """Continue after the newest step, as a run does that was killed."""
    if steps.latest(root)[0] != step or "rank" in damaged(steps.step_folder(root, step)):
        write_step(root, step)


def damaged(folder: Path) -> str:
    try:
        manifests.verify_step(folder, full=True)
    except manifests.DamagedCheckpoint as damage:
        return str(damage)
    return ""


def in_child(body: Callable[[], object]) -> int:
    """Run in a forked process; return its wait status."""
    with warnings.catch_warnings():
        # a fork beside threads: the child uses none of them
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            body()
        except UserError as error:
            os._exit(error.status)
        except BaseException:
            os._exit(99)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def killed_at(point: str, occurrence: int, body: Callable[[], object]) -> bool:
    """Return whether SIGKILL struck when the child reached `point` for the given time."""
    seen = []

    def reached(name: str) -> None:
        seen.append(name)
        if name == point and seen.count(point) == occurrence:
            os.kill(os.getpid(), signal.SIGKILL)

    def child() -> None:
        publish.crash_point = reached
        body()

    status = in_child(child)
    assert status in (0, signal.SIGKILL)
    return status == signal.SIGKILL


CASES = [(point, case) for point in POINTS for case in ("a further step", "a damaged step again")]
CASES += [("moved_aside", "a damaged step again")]
CASES += [(point, "first step") for point in ("begin", "before_rename", "after_rename")]


@pytest.mark.parametrize(("point", "case"), CASES)
@pytest.mark.fault("F2")
def test_killed_at_every_point(tmp_path: Path, point: str, case: str) -> None:
    if case != "first step":
        write_step(tmp_path, 1)
    if case == "a damaged step again":
        write_step(tmp_path, 2)
        flip_bit(steps.step_folder(tmp_path, 2) / "rank_00000.safetensors", 8 * 700)
    kills = 0
    for occurrence in (1, 2):
        if not killed_at(point, occurrence, lambda: publish_if_not_there(tmp_path, 2)):
            break
        kills += 1
        step, _ = steps.latest(tmp_path)
        assert step in ({None, 2} if case == "first step" else {1, 2})
        if step == 1 or (step == 2 and case != "a damaged step again"):
            manifests.verify_step(steps.step_folder(tmp_path, step), full=True)
        assert len(list(tmp_path.glob("*.tmp"))) <= 2  # the step and the tracker
    assert kills
    publish_if_not_there(tmp_path, 2)
    write_step(tmp_path, 3)
    assert steps.latest(tmp_path) == (3, [])
    for step in steps.list_steps(tmp_path):
        manifests.verify_step(steps.step_folder(tmp_path, step), full=True)
    assert not list(tmp_path.glob("*.tmp"))
    assert (tmp_path / steps.TRACKER).read_bytes() == b"3"


@pytest.mark.fault("F8")
def test_damage_names_file_and_offset(tmp_path: Path) -> None:
    write_step(tmp_path, 1)
    folder = steps.step_folder(tmp_path, 1)
    flip_bit(folder / "rank_00000.safetensors", 8 * 700)
    assert steps.latest(tmp_path) == (1, [])  # manifest and sizes hold
    assert "rank_00000.safetensors: bytes 640 to 704" in error_of(
        lambda: manifests.verify_step(folder, full=True)
    )


def test_only_the_chunks_read_are_hashed(tmp_path: Path) -> None:
    write_step(tmp_path, 1)
    path = steps.step_folder(tmp_path, 1) / "rank_00000.safetensors"
    whole = path.read_bytes()
    flip_bit(path, 8 * 700)  # in bytes 640 to 704
    file = manifests.verify_step(path.parent)[path.name]
    with manifests.VerifiedReader(path, file, range(3)) as reader:
        assert reader.read(10, 640) == whole[10:640]
        assert reader.read(704, 1000) == whole[704:]
        assert reader.read(0, 1) == whole[:1]  # backwards
        error_of(lambda: reader.read(600, 641))


@pytest.mark.parametrize("name", ["rank_00000.safetensors", "state.json", manifests.MANIFEST])
@pytest.mark.parametrize("harm", ["truncated", "empty", "missing", "longer", "link", "folder"])
@pytest.mark.fault("F9")
def test_a_damaged_step_falls_back_to_the_previous_one(
    tmp_path: Path, name: str, harm: str
) -> None:
    write_step(tmp_path, 1)
    write_step(tmp_path, 2)
    path = steps.step_folder(tmp_path, 2) / name
    whole = path.read_bytes()
    path.unlink()
    if harm == "link":
        (tmp_path / "elsewhere").write_bytes(whole)
        path.symlink_to(tmp_path / "elsewhere")
    elif harm == "folder":
        path.mkdir()
    elif harm != "missing":
        path.write_bytes({"truncated": whole[:-1], "empty": b"", "longer": whole + b"\0"}[harm])
    step, notes = steps.latest(tmp_path)
    assert step == 1
    assert len(notes) == 1 and str(path) in notes[0]


@pytest.mark.parametrize("code", [errno.EACCES, errno.EMFILE, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("call", ["open", "preadv"])
@pytest.mark.fault("F7")
def test_a_step_that_cannot_be_opened_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    """No older step is taken instead, and it is not moved aside."""
    write_step(tmp_path, 1)
    write_step(tmp_path, 2)
    real = getattr(os, call)

    def fail(what: object, *rest: object, **more: object) -> object:
        if call == "preadv" or str(what).endswith("iter_0000002/rank_00000.safetensors"):
            raise OSError(code, os.strerror(code))
        return real(what, *rest, **more)

    folder = steps.step_folder(tmp_path, 2)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        message = error_of(lambda: manifests.verify_step(folder, full=True), IO)
        assert os.strerror(code) in message and "iter_0000002/rank_00000.safetensors" in message
        error_of(lambda: write_step(tmp_path, 2), IO)
    assert steps.latest(tmp_path) == (2, []) and not list(tmp_path.glob("*.damaged"))

    def no_rights(path: Path) -> os.stat_result:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "lstat", no_rights)
    assert str(folder / manifests.MANIFEST) in error_of(lambda: steps.latest(tmp_path), IO)
    assert prune(tmp_path, 2) == []


def prune(root: Path, newest: int) -> list[int]:
    """Remove the steps before `newest` as --keep-last 1 does, and return them."""
    damaged = publish.damaged_steps(root, newest)
    removed = publish.steps_to_remove(root, newest, 1, None, None, damaged)
    publish.remove_steps(root, removed)
    return removed


@pytest.mark.fault("F11")
def test_damage_of_all_steps_is_no_fresh_start(tmp_path: Path) -> None:
    for step in (1, 2):
        write_step(tmp_path, step)
        (steps.step_folder(tmp_path, step) / "state.json").unlink()
    message = error_of(lambda: steps.latest(tmp_path))
    assert "iter_0000001" in message and "iter_0000002" in message


@pytest.mark.fault("F9")
@pytest.mark.promise("Files outside of the folder are never opened")
def test_a_manifest_cannot_name_files_outside_its_folder(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x" * 10)
    (tmp_path / "iter_0000001").mkdir()
    entry = publish.write_file(tmp_path / "other", lambda write: write(b"x" * 10))
    for name in ("../secret", str(tmp_path / "secret"), "..", "a/b", ".hidden", ""):
        (tmp_path / "iter_0000001" / manifests.MANIFEST).write_bytes(
            manifests.encode_manifest({name: entry})
        )
        assert "plain name" in error_of(lambda: manifests.verify_step(tmp_path / "iter_0000001"))


@pytest.mark.fault("F9")
def test_a_hostile_manifest_is_damaged(tmp_path: Path) -> None:
    entries = [
        '{"size": 1e999, "sha256": ""}',
        f'{{"size": {"9" * 5000}, "sha256": ""}}',
        '{"size": -1, "sha256": 5}',
    ]
    bodies = ["NaN", "[1]", *(f'{{"a": {entry}}}' for entry in entries)]
    texts = ["[" * 100_000, '"\xff"', "null", '{"format": "meshwright checkpoint 9"}']
    for raw in texts + [f'{{"files": {body}}}' for body in bodies]:
        (tmp_path / manifests.MANIFEST).write_bytes(raw.encode("latin-1"))
        error_of(lambda: manifests.verify_step(tmp_path))


@pytest.mark.fault("F9")
@pytest.mark.promise("What a file says about sizes is checked before memory is taken")
def test_a_huge_manifest_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / manifests.MANIFEST, "wb") as file:
        file.truncate(1 << 40)  # a hole
    assert "above the limit of" in error_of(lambda: manifests.verify_step(tmp_path))


def test_a_complete_step_is_never_overwritten(tmp_path: Path) -> None:
    write_step(tmp_path, 1)
    folder = steps.step_folder(tmp_path, 1)
    written = folder.stat().st_ino
    message = error_of(lambda: write_step(tmp_path, 1, seed=2), LOCKED)
    assert (
        "iter_0000001" in message
        and "--save-overwrite" in message
        and folder.stat().st_ino == written
    )
    manifests.verify_step(folder, full=True)


def test_a_step_above_the_one_just_saved_is_neither_counted_nor_removed(tmp_path: Path) -> None:
    """The manifest of 15 holds, its bytes do not: the run fell back to 10 and went on to 12."""
    for step in (5, 10, 12, 15):
        write_step(tmp_path, step)
    flip_bit(steps.step_folder(tmp_path, 15) / "rank_00000.safetensors", 8 * 700)
    assert prune(tmp_path, 12) == [10, 5]
    assert steps.list_steps(tmp_path) == [15, 12]
    assert prune(tmp_path, 15) == [12]  # once 15 is written anew


def test_a_damaged_step_is_kept_aside_and_written_anew(tmp_path: Path) -> None:
    write_step(tmp_path, 1)
    flip_bit(steps.step_folder(tmp_path, 1) / "rank_00000.safetensors", 0)
    with captured_output() as (said, _):
        write_step(tmp_path, 1)
    assert len(said) == 1 and "iter_0000001.damaged" in said[0]
    manifests.verify_step(steps.step_folder(tmp_path, 1), full=True)
    assert (tmp_path / "iter_0000001.damaged").is_dir()


@pytest.mark.fault("F12")
def test_order_is_by_step_and_leftovers_are_cleared(tmp_path: Path) -> None:
    for step in (9_999_999, 10_000_000, 5):
        write_step(tmp_path, step)
    os.utime(steps.step_folder(tmp_path, 10_000_000), (0, 0))
    assert steps.latest(tmp_path) == (10_000_000, [])
    assert steps.latest(tmp_path, below=10_000_000) == (9_999_999, [])
    error_of(lambda: steps.latest(tmp_path, below=5))
    (tmp_path / "iter_0000006.tmp").mkdir()
    (tmp_path / "iter_0000007.tmp").symlink_to(tmp_path)
    write_step(tmp_path, 6)
    assert not list(tmp_path.glob("*.tmp"))
    assert steps.latest(tmp_path) == (10_000_000, [])


@pytest.mark.fault("F12")
def test_an_unfinished_step_is_no_checkpoint(tmp_path: Path) -> None:
    assert steps.latest(tmp_path / "none") == (None, [])
    (tmp_path / "iter_0000006.tmp").mkdir()
    step, notes = steps.latest(tmp_path)
    assert step is None and "never finished" in notes[0]


@pytest.mark.parametrize("text", ["", "garbage", "-3", "12x", "\0" * 50, "1" * 100])
@pytest.mark.fault("F10")
def test_a_tracker_without_a_number_is_ignored_or_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / steps.TRACKER).write_text(text)
    assert "not an iteration" in error_of(lambda: steps.find_step(tmp_path))
    write_step(tmp_path, 1)
    (tmp_path / steps.TRACKER).write_text(text)
    step, notes = steps.latest(tmp_path)
    assert step == 1 and "ignored" in notes[0]


@pytest.mark.fault("F10")
def test_a_tracker_ahead_of_us_is_refused(tmp_path: Path) -> None:
    (tmp_path / steps.TRACKER).write_text("500")
    assert "500" in error_of(lambda: steps.find_step(tmp_path))
    write_step(tmp_path, 4)
    assert (tmp_path / steps.TRACKER).read_text() == "4"
    (tmp_path / steps.TRACKER).write_text("500\n")
    message = error_of(lambda: steps.latest(tmp_path))
    assert "500" in message and "newest is iteration 4" in message
    (tmp_path / steps.TRACKER).write_text("3")  # killed before the tracker
    assert steps.latest(tmp_path) == (4, [])


def test_checkpoints_of_other_programs_are_found_and_kept(tmp_path: Path) -> None:
    """They are found by tracker or path, never overwritten, never ignored for an older step of
    ours."""
    megatron = tmp_path / "a/iter_0000500"
    (megatron / "mp_rank_00").mkdir(parents=True)
    (megatron / "mp_rank_00/model_optim_rng.pt").touch()
    assert "give the path of the one itself" in error_of(lambda: steps.find_step(tmp_path / "a"))
    place = steps.StepLocation(table.MEGATRON, megatron, 500, tmp_path / "a")
    for path in (megatron, megatron / "mp_rank_00", megatron / "mp_rank_00/model_optim_rng.pt"):
        assert steps.find_step(path) == (place, [])
    (tmp_path / "a" / steps.TRACKER).write_text("500")
    assert steps.find_step(tmp_path / "a") == (place, []) and not place.ours
    error_of(lambda: write_step(tmp_path / "a", 500), LOCKED)
    write_step(tmp_path / "a", 400)
    assert steps.latest(tmp_path / "a") == (400, [])
    (tmp_path / "a" / steps.TRACKER).write_text("500")
    message = error_of(lambda: steps.find_step(tmp_path / "a"))
    assert "500 of Megatron" in message and "400" in message and str(megatron) in message
    for name in (".metadata", "common.pt", "__0_0.distcp"):  # Megatron-Core's torch_dist, not whole
        step = tmp_path / name.strip(".") / "iter_0000500"
        step.mkdir(parents=True)
        (step / name).touch()
        assert "a Megatron checkpoint" in error_of(lambda: write_step(step.parent, 500), LOCKED)  # noqa: B023
        assert step.is_dir() and not steps.list_steps(step.parent)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / steps.TRACKER).write_text("release")
    assert "no checkpoint in" in error_of(lambda: steps.find_step(tmp_path / "b"))
    (tmp_path / "b/release/mp_rank_00").mkdir(parents=True)
    assert steps.find_step(tmp_path / "b")[0] == (
        table.MEGATRON,
        tmp_path / "b/release",
        0,
        tmp_path / "b",
    )
    (tmp_path / "c/global_step500").mkdir(parents=True)
    (tmp_path / "c/global_step500/layer_01-model_00-model_states.pt").touch()
    (tmp_path / "c/latest").write_text("global_step500")
    assert steps.find_step(tmp_path / "c")[0] == (
        table.DEEPSPEED,
        tmp_path / "c/global_step500",
        500,
        tmp_path / "c",
    )
    write_step(tmp_path / "c", 400)
    message = error_of(lambda: steps.find_step(tmp_path / "c"))
    assert "500 of DeepSpeed" in message and "400" in message
    for text in ("../x", "a/b", "", "..", "global_step7"):
        (tmp_path / "d").mkdir(exist_ok=True)
        (tmp_path / "d/latest").write_text(text)
        error_of(lambda: steps.find_step(tmp_path / "d"))
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "hf").mkdir(exist_ok=True)
        (tmp_path / "hf" / name).touch()
    assert steps.find_step(tmp_path / "hf")[0] == (
        formats.HUGGING_FACE,
        tmp_path / "hf",
        0,
        tmp_path / "hf",
    )


@pytest.mark.fault("F13")
def test_a_second_writer_learns_who_has_the_folder(tmp_path: Path) -> None:
    def second() -> None:
        with owner.lock_folder(tmp_path):
            pass

    with owner.lock_folder(tmp_path):
        begin = time.monotonic()
        assert (
            os.waitstatus_to_exitcode(in_child(second)) == LOCKED and time.monotonic() - begin < 2
        )
        assert f"process {os.getpid()} on {os.uname().nodename}" in error_of(second, LOCKED)
    assert in_child(second) == 0

    def dies() -> None:
        with owner.lock_folder(tmp_path):
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(dies) == signal.SIGKILL
    second()


@pytest.mark.fault("F6")
def test_a_write_that_fails_half_way_leaves_the_previous_step(tmp_path: Path) -> None:
    """With a file size limit: real partial writes, as on a full disk."""
    write_step(tmp_path, 1)

    def save() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
        write_step(tmp_path, 2)

    assert os.waitstatus_to_exitcode(in_child(save)) == IO
    assert not list(tmp_path.glob("iter_*.tmp"))
    assert steps.latest(tmp_path) == (1, [])
    manifests.verify_step(steps.step_folder(tmp_path, 1), full=True)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES])
@pytest.mark.fault("F7")
def test_failures_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    write_step(tmp_path, 1)

    def fail(fd: int) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        message = error_of(lambda: write_step(tmp_path, 2), IO)
    for part in (
        os.strerror(code),
        str(tmp_path / "iter_0000002.tmp"),
        "1,010 bytes",
        "iter_0000001, is intact",
    ):
        assert part in message
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000001"]


@pytest.mark.fault("F7")
def test_a_folder_is_checked_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish.check_writable(tmp_path / "new", 1000)
    assert not list((tmp_path / "new").iterdir())
    message = error_of(lambda: publish.check_writable(tmp_path, 1 << 60), IO)
    assert f"{1 << 60:,}" in message and f"{2 << 60:,}" in message and str(tmp_path) in message
    (tmp_path / "file").touch()
    assert str(tmp_path / "file") in error_of(
        lambda: publish.check_writable(tmp_path / "file", 0), IO
    )
    error_of(lambda: write_step(tmp_path / "file", 1), IO)
    error_of(lambda: steps.latest(tmp_path / "file"))


def test_checkpoints_are_moved_aside(tmp_path: Path) -> None:
    assert steps.list_checkpoints(tmp_path) == [] and steps.split_path(tmp_path) == (tmp_path, None)
    write_step(tmp_path, 1)
    assert steps.split_path(tmp_path / "iter_0000001") == (tmp_path, 1)
    assert steps.list_checkpoints(tmp_path) == ["iter_0000001", steps.TRACKER]
    aside = owner.move_aside(tmp_path)
    assert steps.list_checkpoints(tmp_path) == [] and steps.latest(tmp_path) == (None, [])
    assert steps.latest(aside) == (1, [])
    write_step(tmp_path, 1, seed=2)
    assert owner.move_aside(tmp_path) != aside


def test_a_lock_under_which_nothing_was_written_leaves_the_folders_as_they_were(
    tmp_path: Path,
) -> None:
    for existing in (tmp_path, tmp_path / "there"):
        existing.mkdir(exist_ok=True)
        before = sorted(tmp_path.rglob("*"))
        with (
            pytest.raises(OSError),
            owner.lock_folder(existing / "a"),
            owner.lock_folder(existing / "a/b/c"),
        ):
            raise OSError
        assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "there/.lock").touch()  # an earlier owner's
    with owner.lock_folder(tmp_path / "there"):
        pass
    assert (tmp_path / "there/.lock").exists()
    with owner.lock_folder(tmp_path / "kept"):
        (tmp_path / "kept/file").touch()
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [".lock", "file"]
