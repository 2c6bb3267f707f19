"""A save in the background has the bytes of one that waits, and its failure is known in a step."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from helpers import TINY_FLAGS, captured_output, open_step, read_rows
from layouts import Connected, parse, trained
from meshwright.__main__ import main
from meshwright.apps.report.page import write_report
from meshwright.base import console
from meshwright.base.errors import IO, UserError
from meshwright.checkpoint import native, publish, steps
from meshwright.checkpoint.background import Background
from meshwright.config import flags
from meshwright.config.schema import TrainConfig
from meshwright.parallel.layout import Layout
from meshwright.runtime.ranks.team import Team
from meshwright.training.state.saver import Saver
from on_ranks import run_ranks

pytestmark = pytest.mark.whole

CPU = torch.device("cpu")


def train(folder: Path, *more: str) -> int:
    flags = [*TINY_FLAGS, "--save", str(folder), "--save-interval", "1", "--seed", "3"]
    return main(["train", *flags, *more])


def files(folder: Path) -> dict[str, bytes]:
    paths = [*folder.glob("*.safetensors"), folder / native.INDEX]
    return {path.name: path.read_bytes() for path in paths}


@pytest.mark.flag("async_save")
@pytest.mark.fault("F15")
def test_a_save_holds_the_numbers_of_its_own_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights change while a slow thread writes the copy; successive saves differ."""
    assert train(tmp_path / "waits", "--no-async-save") == 0
    real = publish.write_file

    def slow(path: Path, produce: publish.Produce) -> object:
        if (
            threading.current_thread() is not threading.main_thread()
            and path.suffix == ".safetensors"
        ):
            threading.Event().wait(0.05)
        return real(path, produce)

    monkeypatch.setattr(publish, "write_file", slow)
    assert train(tmp_path / "continues", "--async-save") == 0
    seen = set()
    for step in range(1, 7):
        one, two = (
            files(steps.step_folder(tmp_path / name, step)) for name in ("waits", "continues")
        )
        assert one == two, step
        seen.add(one["rank_00000.safetensors"])
    assert len(seen) == 6


def test_one_save_is_in_flight_and_reported_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, said = list[str](), list[tuple[str, bool]]()
    folder = steps.step_folder(tmp_path, 6)
    real_save, real_say = native.save_step, console.say

    def recorded(*args: object, **more: object) -> None:
        assert threading.current_thread() is not threading.main_thread()
        events.append("begin")
        threading.Event().wait(0.02)
        real_save(*args, **more)  # type: ignore[arg-type]
        events.append("end")

    def say(line: str = "", **kind: bool) -> None:
        if "checkpoint at iteration       6" in line:
            said.append((line.split()[0], folder.exists()))
        real_say(line, **kind)

    monkeypatch.setattr(native, "save_step", recorded)
    monkeypatch.setattr("meshwright.base.console.say", say)
    monkeypatch.setattr("meshwright.training.state.saver.say", say)
    assert train(tmp_path, "--async-save") == 0
    assert events == ["begin", "end"] * 6 and steps.latest(tmp_path)[0] == 6
    # The last step is reported after its save, and again at the end of the run.
    reported = [("saving", True), ("successfully", True)]
    assert said == [("saving", False), ("successfully", True), *reported]


def failing(*at: int) -> object:
    """Return a publish.write_file whose safetensors files of these numbers meet a full disk."""
    real, count = publish.write_file, itertools.count(1)

    def write(path: Path, produce: publish.Produce) -> object:
        if path.suffix == ".safetensors" and next(count) in at:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return real(path, produce)

    return write


@pytest.mark.fault("F14")
def test_a_failure_is_reported_within_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second save fails; the run ends with its message, and the first checkpoint stays."""
    monkeypatch.setattr(publish, "write_file", failing(2))
    assert train(tmp_path, "--async-save", "--train-iters", "40") == IO
    err = capsys.readouterr().err
    assert "No space left on device" in err and "iter_0000001, is intact" in err
    # The failed save began after step 2; the run meets the failure before the save of step 3.
    assert max(row["iteration"] for row in read_rows(tmp_path)) <= 3
    assert steps.latest(tmp_path)[0] == 1 and not list(tmp_path.glob("*.tmp"))


@pytest.mark.flag("save_error")
@pytest.mark.fault("F6")
def test_going_on_after_a_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --save-error warn: the log, the page and the rows say which steps are missing."""
    monkeypatch.setattr(publish, "write_file", failing(2, 3))
    flags = ("--async-save", "--save-error", "warn", "--train-iters", "5")
    assert train(tmp_path, *flags) == 0
    out = capsys.readouterr().out
    assert out.count("WARNING: No space left on device") == 2 and "bytes are free" in out
    assert "saving failed at iterations 2, 3; the last state is saved" in out
    assert [row["iteration"] for row in read_rows(tmp_path, "save-failed")] == [2, 3]
    assert sorted(steps.list_steps(tmp_path)) == [1, 4, 5] and not list(tmp_path.glob("*.tmp"))
    page = write_report(tmp_path).read_text()
    assert "<b>Saving failed</b> at steps 2, 3; the run went on" in page


@pytest.mark.fault("F6")
def test_the_last_save_must_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step 3 is saved after its interval, and again at the end of the run."""
    monkeypatch.setattr(publish, "write_file", failing(2, 3, 4))
    assert train(tmp_path, "--no-async-save", "--save-error", "warn", "--train-iters", "3") == IO
    assert "while saving iteration 3" in capsys.readouterr().err and steps.latest(tmp_path)[0] == 1
    assert read_rows(tmp_path, "end")[-1]["status"] == IO


@pytest.mark.fault("F6")
def test_rows_wait_while_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half a row is written before the disk is full; the rest of it and others follow later."""
    real, sizes = os.write, itertools.chain([None, 9, 0, 0], itertools.repeat(None))

    def write(fd: int, data: bytes) -> int:
        if not os.readlink(f"/proc/self/fd/{fd}").endswith("metrics.jsonl"):
            return real(fd, data)
        if (size := next(sizes)) == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, bytes(data)[:size])

    monkeypatch.setattr(os, "write", write)
    assert train(tmp_path, "--save-error", "warn") == 0
    monkeypatch.undo()
    assert [row["iteration"] for row in read_rows(tmp_path)] == [*range(1, 7)]
    assert capsys.readouterr().out.count("its rows wait in memory") == 1


def on_ranks(folder: Path) -> None:
    """Save every step on two ranks, then raise a failure of rank 1 on both."""
    rank = dist.get_rank()
    console.set_stream(None)
    connected = Connected()

    @contextlib.contextmanager
    def save_after(name, trainer, step):  # type: ignore[no-untyped-def]
        yield
        trainer.state.save()

    for name in ("no-async-save", "async-save"):
        line = f"--world-size 2 --zero-stage 1 --num-layers 1 --save {folder / name} --save-interval 1 --{name}"
        trainer = trained(parse(line), 2, save_after, connect=connected)
        trainer.state.saver.wait()
    dist.barrier()
    for step in (1, 2):
        one, two = (
            files(steps.step_folder(folder / name, step))
            for name in ("no-async-save", "async-save")
        )
        assert one == two and len(one) == 3
    if rank == 1:
        publish.write_file = failing(1)  # type: ignore[assignment]
    trainer.progress.iteration += 1
    trainer.state.save()
    with pytest.raises(UserError, match="No space left on device") as caught:
        trainer.state.saver.wait()
    assert caught.value.status == IO and caught.value.everywhere
    saver = trainer.state.saver
    c = dataclasses.replace(saver.config.checkpoint, save_error="warn")
    saver.config, saver.kept = dataclasses.replace(saver.config, checkpoint=c), None
    if rank == 1:
        publish.write_file = failing(1)  # type: ignore[assignment]
    for kept in (None, 3):
        trainer.state.save()
        saver.wait()
        assert saver.lost == [3] and saver.kept == kept
    saver.require_saved(3)
    saver.close()


@pytest.mark.fault("F14")
def test_ranks_save_together_and_share_a_failure(tmp_path: Path) -> None:
    run_ranks(on_ranks, 2, tmp_path)
    assert open_step(tmp_path / "async-save", 2).state["iteration"] == 2


@pytest.mark.fault("F15")
def test_a_save_has_the_state_of_its_step(tmp_path: Path) -> None:
    """The list of skipped samples grows while the step before is still being written."""
    config = flags.parse_settings(
        TrainConfig, [*TINY_FLAGS, "--save", str(tmp_path), "--async-save"], "test"
    ).config
    saver, go = Saver(config, Layout(), Team(), CPU), threading.Event()
    real = saver.write
    saver.write = lambda *args: (go.wait(10), real(*args))  # type: ignore[method-assign, assignment, return-value]
    state: dict[str, list[int]] = {"skips": []}
    saver.save(1, {"a": native.undivided(torch.ones(3))}, state, {}, None)
    state["skips"].append(7)
    go.set()
    saver.wait()
    open_step(tmp_path, 1)
    assert json.loads((tmp_path / "iter_0000001/state.json").read_text()) == {"skips": []}
    saver.close()


@pytest.mark.fault("F14")
def test_a_failure_is_reported_when_something_else_ends_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    background = Background(Team(), CPU)

    def fails(named: native.TensorBoxes, team: Team) -> None:
        raise UserError("no room", IO)

    background.begin({"a": native.undivided(torch.ones(3))}, fails)
    background.close()
    assert "the save in flight failed: no room" in capsys.readouterr().err


def test_without_the_memory_training_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.base.host.free_host_memory", lambda: 1000)
    with captured_output() as (said, _):
        assert train(tmp_path, "--async-save") == 0
    assert any("training waits" in line for line in said) and steps.latest(tmp_path)[0] == 6


def test_a_failure_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step that is complete is not lost, although the tracker could not be written."""

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error", "tracker")

    monkeypatch.setattr(publish, "write_tracker", fail)
    assert train(tmp_path, "--no-async-save", "--save-error", "warn", "--train-iters", "2") == 0
    assert "WARNING: Input/output error at tracker" in capsys.readouterr().out
    assert sorted(steps.list_steps(tmp_path)) == [1, 2] and not read_rows(tmp_path, "save-failed")
