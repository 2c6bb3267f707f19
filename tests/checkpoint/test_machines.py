"""Machines with a disk of their own each: every rank sees the folder of its machine alone."""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import on_ranks
from helpers import (
    TINY_FLAGS,
    blank,
    box_elements,
    captured_output,
    flip_bit,
    hold_equal,
    random_boxes,
    read_losses,
)
from meshwright.__main__ import main
from meshwright.base import console
from meshwright.base.errors import BAD_DATA, HANG, IO, UserError
from meshwright.checkpoint import loading, machines, manifests, native, publish, steps
from meshwright.checkpoint.loading import OpenOptions
from meshwright.checkpoint.native import BoxedTensor, rank_file
from meshwright.config.fields import with_settings
from meshwright.config.schema import TrainConfig
from meshwright.runtime.ranks import remote_files
from meshwright.runtime.ranks.remote_files import FileServer, RemoteFiles
from meshwright.runtime.ranks.team import Team
from meshwright.training.state import folder as run_folder
from on_ranks import make_team, run_ranks, train_on_ranks
from team_threads import on_threads

SHAPES = {"h.0.attn.qkv.weight": (24, 10), "wte.weight": (37, 8), "ln_f.weight": (8,)}
Places = Sequence[int]  # the machine of each rank


def team() -> Team:
    console.set_stream("stdout" if dist.get_rank() == 0 else None)
    return make_team()


def disk(root: Path, machine: int) -> Path:
    return root / f"machine{machine}" / "run"


def part(team: Team, step: int, seed: int = 0) -> dict[str, BoxedTensor]:
    """Return a rank's boxes of tensors that all ranks together hold once, by the step's numbers."""
    out = {}
    for n, (name, shape) in enumerate(SHAPES.items()):
        full = (
            torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
            + 1000 * step
            + n
        )
        cuts = random.Random(f"{seed} {name}")
        boxes = [box for box in random_boxes(shape, cuts) if cuts.randrange(team.size) == team.rank]
        elements = box_elements(full, boxes) if boxes else full.new_empty(0)
        out[name] = BoxedTensor(shape, boxes, elements)
    return out


def save(here: Path, step: int, users: publish.Users) -> None:
    state = {"iteration": step}
    native.save_step(
        here, step, part(team(), step), state, {}, team=team(), folders=publish.Folders(users)
    )


def load(path: Path, seed: int = 0, **options: Any) -> int | None:
    """Load into boxes that are cut anew, and check every number; return the step."""
    wanted = part(team(), 0, seed)
    filled = blank(wanted)
    loaded = loading.load_checkpoint(path, filled, options=OpenOptions(**options), team=team())
    if loaded is None:
        return None
    step = loaded.state["iteration"]
    assert loaded.step == step and hold_equal(part(team(), step, seed), filled)
    return step


def error_of(call: Callable[[], object]) -> str:
    """Return the message of the error, which all ranks raise."""
    with pytest.raises(UserError) as caught:
        call()
    team().wait()
    return str(caught.value)


def on_own_disks(root: Path) -> None:
    manifests.CHUNK = 256
    t = team()
    here = disk(root, t.rank // 2)
    users = publish.find_users(here, t)
    assert users == (0, 0, 2, 2)
    publish.check_writable(here, 1, t, users=users)
    for step in (1, 2):
        save(here, step, users)

    # Each machine has its ranks' files, and the small ones that describe all.
    files = {path.name for path in (here / "iter_0000002").iterdir()}
    ranks = {
        f"rank_{rank:05d}.safetensors" for rank in (0, 1, 2, 3) if users[rank] == users[t.rank]
    }
    assert files == ranks | {"manifest.json", "index.json", "state.json", "config.json"}
    assert (here / steps.TRACKER).read_text() == "2"

    # In the same layout nothing is read from the other machine, but in others much is.
    read = list[str]()
    original = RemoteFiles.read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemoteFiles, "read", lambda self, *a: (read.append(a[1]), original(self, *a)))
        assert load(here) == 2 and not read
        for seed in (1, 2, 3):
            assert load(here, seed, verify="full" if seed == 1 else "read") == 2
        assert any(t.gather(len(read)))

    # Machines that have changed places, and a third one without anything, which is rank 0's.
    swapped = disk(root, 1 - t.rank // 2)
    assert load(swapped) == 2 and load(swapped, 1) == 2
    third = disk(root, (2, 1, 0, 2)[t.rank])
    assert load(third, 2) == 2
    assert t.rank or steps.list_steps(third) == [2, 1]
    # It can tell what the steps are, and where.
    assert t.rank or loading.require_checkpoint(third, OpenOptions("none")).step == 2

    # The mean of two steps; a named step.
    options = OpenOptions(average_last=2, optimizer=False)
    mean = blank(part(t, 0, 5))
    loading.load_checkpoint(here / "iter_0000002", mean, options=options, team=t)
    expected = {n: x._replace(tensor=x.tensor + 1500) for n, x in part(t, 0, 5).items()}
    assert hold_equal(expected, mean)
    assert load(here / "iter_0000001") == 1

    # Steps are removed from all disks or none.
    damaged = t.rank == 2
    if damaged:
        os.truncate(here / "iter_0000001" / "rank_00002.safetensors", 3)
    t.wait()
    assert machines.incomplete_steps(here, 3, t.rank in (0, 2), t) == [1]
    # A folder that is copied from another machine is a disk of its own, with what is saved there.
    copy = disk(root, 3)
    if t.is_rank_0:
        shutil.copytree(here, copy)
    t.wait()
    here = here if t.rank < 2 else copy
    save(here, 4, publish.find_users(here, t))
    assert load(here, 1) == 4
    # Each machine needs room for its own part.
    named = part(t, 4)
    sizes = t.gather(native.bytes_of(named))
    assert native.bytes_of(named, t, users) == max(sum(sizes[:2]), sum(sizes[2:]))


def test_each_machine_keeps_its_part_and_any_layout_reads_all(tmp_path: Path) -> None:
    run_ranks(on_own_disks, 4, tmp_path)


def parts_lost(root: Path) -> None:
    manifests.CHUNK = 256
    t = team()
    here = disk(root, t.rank // 2)
    users = publish.find_users(here, t)
    for step in (1, 2):
        save(here, step, users)
    lost = disk(root, 1) / "iter_0000002" / "rank_00003.safetensors"

    # A byte that differs on the other machine is found by those who read it there.
    if t.is_rank_0:
        flip_bit(lost, 8 * 700)
    t.wait()
    assert load(here, 1) == 1
    if t.is_rank_0:
        flip_bit(lost, 8 * 700)
        lost.rename(root / "lost")
    t.wait()

    # Without the file the step is passed over; who names the step is told whose part is lost.
    assert load(here) == 1
    place = rf"{os.uname().nodename}:{disk(root, 1)}"
    message = error_of(lambda: load(here / "iter_0000002"))
    assert f"the part of {place} (rank_00003.safetensors)" in message

    # A step that is not complete may be written again.
    save(here, 2, users)
    assert load(here, 1) == 2
    assert t.gather((here / "iter_0000002.damaged").exists()) == [True] * 4
    message = error_of(lambda: save(here, 2, users))
    assert "never overwritten" in message

    # Without a machine no step is complete, and no run starts anew.
    away = disk(root, 7 if t.rank > 1 else 0)
    assert place in error_of(lambda: load(away))


def copied(root: Path) -> None:
    manifests.CHUNK = 256
    t = team()
    here = disk(root, t.rank)
    users = publish.find_users(here, t)
    state = {"iteration": 1}
    native.save_step(here, 1, part(t, 1), state, {}, team=t, folders=publish.Folders(users, 2))
    assert len(list((here / "iter_0000001").glob("rank_*"))) == 2

    # Files of Megatron's tree are copied too.
    files: dict[str, publish.Produce] = {f"mp_rank_{t.rank:02}/x.pt": lambda write: write(b"x")}
    publish.write_step(here, 2, files, team=t, folders=publish.Folders(users, 2))
    assert len(list((here / "iter_0000002").glob("mp_rank_*/x.pt"))) == 2
    shutil.rmtree(here / "iter_0000002")

    # One machine is lost with its disk.
    there = disk(root, (0, 1, 2, 4)[t.rank])
    assert load(there, 1) == 1
    # Where a file of this machine or another is damaged, its copy is read.
    own = here / "iter_0000001" / rank_file(t.rank)
    flip_bit(own, 8 * 700)
    t.wait()
    for verify in ("read", "full"):
        assert load(here, 0, verify=verify) == 1 and load(here, 3, verify=verify) == 1
    # So it is where a file is cut off, or a machine cannot read its disk.
    flip_bit(own, 8 * 700)
    if t.rank == 2:
        os.truncate(own, 700)
        FileServer._open = failing(5)  # type: ignore[method-assign]
    t.wait()
    assert load(here, 0) == 1 and load(here, 3) == 1


def failing(number: int) -> Callable[..., Any]:
    def act(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    return act


def disk_fails(root: Path) -> None:
    """Let the disk of one machine fail at different moments: the step is then on no machine."""
    t = team()
    here = disk(root, t.rank)
    users = publish.find_users(here, t)
    save(here, 1, users)
    for owner, name in ((publish, "give_name"), (machines, "copy_file"), (publish, "add_manifest")):
        with pytest.MonkeyPatch.context() as patch:
            if t.rank == 1:
                patch.setattr(owner, name, failing(28))
            folders, state = publish.Folders(users, 2), {"iteration": 2}
            call = functools.partial(native.save_step, here, 2, part(t, 2), state, team=t)
            message = error_of(lambda call=call, f=folders: call(folders=f))  # type: ignore[misc]
        assert "No space left" in message and "iter_0000001, is intact" in message
        assert steps.listing(here) == ["iter_0000001", steps.TRACKER]

    # A step that only one machine has is not counted among the complete ones.
    save(here, 2, users)
    if t.rank == 1:
        shutil.rmtree(here / "iter_0000002")
    assert machines.incomplete_steps(here, 3, True, t) == [2]


def test_a_disk_that_fails_leaves_no_step_on_the_others(tmp_path: Path) -> None:
    run_ranks(disk_fails, 2, tmp_path)


def records(root: Path) -> None:
    """The records that were written last count, though a run has fallen back since."""
    t = team()
    here = disk(root, t.rank)
    publish.find_users(here, t)
    rows = [{"event": "step", "iteration": 8, "time": 1.0}]
    if t.is_rank_0:
        rows += [{"event": "step", "iteration": 7, "time": 2.0}]
    (here / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for there, count in ((here, 2), (disk(root, 1 - t.rank), 2)):
        with machines.joined(there, t) as found:
            assert found is not None
            t.run_on_rank_0(found.bring_records)
        if t.is_rank_0:
            assert (there / "metrics.jsonl").read_text().count("\n") == count


def test_the_last_records_are_kept(tmp_path: Path) -> None:
    run_ranks(records, 2, tmp_path)


def far_memory(root: Path, number: int, elements: int) -> None:
    """Rank 0 reads all tensors from the other machine."""
    t = team()
    here = disk(root, t.rank)
    shape = (elements // 1024, 1024)

    def tensors(owner: int) -> dict[str, BoxedTensor]:
        boxes = [((0, 0), shape)] if t.rank == owner else []
        size = shape if boxes else (0,)
        return {f"w{n}": BoxedTensor(shape, boxes, torch.full(size, n)) for n in range(number)}

    users = publish.find_users(here, t)
    folders, state = publish.Folders(users), {"iteration": 1}
    native.save_step(here, 1, tensors(1), state, team=t, folders=folders)
    wanted = blank(tensors(0))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    loading.load_checkpoint(here, wanted, team=t)
    largest = elements * 8 if t.is_rank_0 else 0
    more = memory("VmHWM") - before
    assert more <= largest + (64 << 20), f"{more / 2**20:.0f} MiB"
    assert hold_equal(tensors(0), wanted)


def memory(name: str) -> int:
    [line] = (x for x in Path("/proc/self/status").read_text().splitlines() if name in x)
    return int(line.split()[1]) << 10


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the memory is read from /proc")
def test_memory_while_all_comes_from_another_machine(tmp_path: Path) -> None:
    run_ranks(far_memory, 2, tmp_path, 75, 1 << 20)


@pytest.mark.flag("save_copies")
def test_copies_on_other_machines_stand_in_for_a_lost_one(tmp_path: Path) -> None:
    run_ranks(copied, 4, tmp_path)


def test_a_lost_part_is_named_and_the_newest_complete_step_taken(tmp_path: Path) -> None:
    run_ranks(parts_lost, 4, tmp_path)


def killed(root: Path, who: int, moment: int) -> None:
    """Save and remove steps, and end a rank when it reaches a point for the nth time."""
    t = team()
    here = disk(root, t.rank // 2)
    users = publish.find_users(here, t)
    save(here, 1, users)
    reached = 0

    def reach(name: str) -> None:
        nonlocal reached
        reached += 1
        if t.rank == who and reached == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    publish.crash_point = reach
    for step in (2, 3, 4):
        save(here, step, users)
        t.run_on_all(lambda: publish.remove_steps(here, [1]) if users[t.rank] == t.rank else None)


def after_a_kill(root: Path) -> None:
    """Find a complete step, save the next one, and find that."""
    here = disk(root, team().rank // 2)
    found = load(here, 1)
    assert found in (1, 2, 3, 4)
    trackers = team().gather((here / steps.TRACKER).read_text())
    assert all(int(text) <= found for text in trackers), (found, trackers)
    save(here, found + 1, publish.find_users(here, team()))
    assert load(here) == found + 1


def kill(root: Path, who: int, moment: int) -> None:
    args = (killed, 4, str(root / "store"), (root, who, moment))
    context = mp.start_processes(on_ranks._rank, args, 4, join=False, start_method="forkserver")
    for process in context.processes:
        process.join(60)
    statuses = [process.exitcode for process in context.processes]
    assert statuses[who] == -signal.SIGKILL and 0 not in statuses, statuses
    run_ranks(after_a_kill, 4, root)


@pytest.mark.fault("F2")
@pytest.mark.parametrize(("who", "moment"), [(0, 7), (2, 6), (3, 4)])
def test_a_machine_is_lost_while_it_saves(tmp_path: Path, who: int, moment: int) -> None:
    kill(tmp_path, who, moment)


# The first rank of a machine reaches nine points in each save, and one where it removes a step.
MOMENTS = [(who, n) for who in range(4) for n in range(1, 13 if who % 2 else 29)]


@pytest.mark.long
@pytest.mark.fault("F2")
@pytest.mark.parametrize(("who", "moment"), MOMENTS)
def test_a_machine_is_lost_at_each_moment(tmp_path: Path, who: int, moment: int) -> None:
    kill(tmp_path, who, moment)


def test_only_files_of_steps_are_served_and_only_to_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "iter_0000001").mkdir()
    (tmp_path / "iter_0000001" / "state.json").write_bytes(b"0123456789")
    (tmp_path / "iter_0000001" / "link").symlink_to("/etc/passwd")
    (tmp_path / "secret").write_bytes(b"secret")
    key = b"k" * 32
    monkeypatch.setattr(remote_files, "PIECE", 3)
    server = FileServer(tmp_path, machines.SERVED, key)
    files = RemoteFiles({0: server.address}, key)
    data = bytearray(4)
    files.read(0, "iter_0000001/state.json", 3, data)
    assert data == b"3456"
    for name in ("secret", "../secret", "iter_0000001/../secret", "iter_0000001/", "/etc/passwd"):
        with pytest.raises(UserError, match="is not served"):
            files.read(0, name, 0, data)
    with pytest.raises(UserError, match="a link out of"):
        files.read(0, "iter_0000001/link", 0, data)
    with pytest.raises(UserError, match="ends before byte 12"):
        files.read(0, "iter_0000001/state.json", 8, data)
    with pytest.raises(UserError) as caught:
        RemoteFiles({0: server.address}, b"x" * 32).read(0, "iter_0000001/state.json", 0, data)
    assert caught.value.status == IO
    server.close()

    # One that accepts and says nothing is not waited for.
    monkeypatch.setattr(remote_files, "PATIENCE", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(UserError) as caught:
        RemoteFiles({0: silent.getsockname()}, key).read(0, "iter_0000001/state.json", 0, data)
    assert caught.value.status == HANG


# Whole runs


def test_an_earlier_run_in_a_shared_run_dir_is_moved_once(tmp_path: Path) -> None:
    """Machines with disks of their own move what --save holds there; rank 0 the rest."""
    for name in ("save", "shared"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.txt").write_text("log")
    folders = {"save": str(tmp_path / "save"), "run_dir": str(tmp_path / "shared")}
    config = with_settings(TrainConfig(), **folders, save_overwrite=True)
    run_folder.prepare(tmp_path / "save", config, None, with_run_dir=False)
    assert (tmp_path / "save" / "replaced-1" / "log.txt").exists()
    assert (tmp_path / "shared" / "log.txt").exists()


SET_HERE = ("--train-iters", "--global-batch", "--micro-batch", "--max-position")
FLAGS = (
    [word for word in TINY_FLAGS if not word.startswith(SET_HERE)]
    + "--micro-batch-size=1 --global-batch-size=8 --num-layers=4 --params-dtype=float64 --save-interval=3".split()
)
OWN = ["--save=run", "--load=run", "--lr-decay-iters=20"]


class Machine:
    """Moves each rank into the folder of its machine; can be sent to other processes."""

    def __init__(self, root: Path, places: Places) -> None:
        self.root = root
        self.places = places

    def __call__(self, rank: int) -> None:
        folder = self.root / f"machine{self.places[rank]}"
        folder.mkdir(exist_ok=True)
        os.chdir(folder)


def train(root: Path, places: Places, *flags: str) -> list[str]:
    """Train with ranks on these machines; return what each prints."""
    statuses = train_on_ranks(len(places), [*FLAGS, *OWN, *flags], root, Machine(root, places))
    logs = [(root / f"log-{rank}").read_text() for rank in range(len(places))]
    assert statuses == [0] * len(places), "\n".join(logs)
    return logs


def goes_on_exactly(root: Path, places: Places, moved: list[Places], layout: str) -> None:
    """Compare the losses of a run that goes on at other places twice with those of a whole one."""
    own, whole = root / "own", root / "whole"
    own.mkdir()
    whole.mkdir()
    flags = layout.split()
    train(whole, [0] * len(places), "--train-iters=9", *flags)
    log = train(own, places, "--train-iters=3", *flags)[0]
    assert f"{len({*places})} machines have disks of their own" in log
    for steps_done, there in zip((3, 6), moved, strict=True):
        log = train(own, there, f"--train-iters={steps_done + 3}", *flags)[0]
        assert f"resuming at step {steps_done}" in log
    # Rank 0 has taken its records along.
    assert read_losses(disk(own, moved[-1][0])) == read_losses(disk(whole, 0))


@pytest.mark.flag("save_on_each_node")
@pytest.mark.parametrize(("choice", "expected"), [("auto", ()), ("no", ()), ("yes", (0, 1))])
def test_the_choice_of_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: str, expected: tuple[int, ...]
) -> None:
    """Ranks share the folder here, and their machines have two names."""
    hosts = threading.local()
    monkeypatch.setattr("socket.gethostname", lambda: hosts.name)
    config = with_settings(
        TrainConfig(), save=str(tmp_path), save_on_each_node=choice, save_copies=3
    )

    def find(team: Team) -> publish.Users:
        hosts.name = f"node{team.rank}"
        return run_folder.find_users(config, team)

    with captured_output() as (out, _):
        found, _ = on_threads(2, find)
    assert found == [expected] * 2
    said = "each part is kept 2 times" if expected else "--save-copies has no effect"
    assert said in "\n".join(out)


@pytest.mark.whole
def test_a_run_goes_on_exactly_on_machines_that_changed_places(tmp_path: Path) -> None:
    goes_on_exactly(tmp_path, [0, 1], [[1, 0], [1, 0]], "--tensor-model-parallel-size=2")


@pytest.mark.whole
def test_a_machine_reads_from_another_what_it_lacks_of_a_step(tmp_path: Path) -> None:
    """It is rank 0's, and takes the architecture from the other too."""
    layout = "--tensor-model-parallel-size=2"
    train(tmp_path, [0, 1], "--train-iters=2", layout, "--untie-embeddings-and-output-weights")
    step = disk(tmp_path, 1) / "iter_0000002"
    (step / "state.json").unlink()
    flip_bit(step / "config.json", 80)
    log = train(tmp_path, [1, 0], "--train-iters=3", layout)[0]
    assert "resuming at step 2" in log
    assert (disk(tmp_path, 1) / "iter_0000003" / "state.json").exists()


@pytest.mark.whole
def test_a_part_of_megatrons_tree_is_no_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its reader takes the files that it finds for all: half of the heads would be a model too."""
    flags = ["--tensor-model-parallel-size=2", "--ckpt-format=torch"]
    train(tmp_path, [0, 1], "--train-iters=1", *flags)
    for machine in (0, 1):
        here, other = str(disk(tmp_path, machine)), disk(tmp_path, 1 - machine)
        capsys.readouterr()
        assert main(["inspect", here]) == 0
        assert f"1 of 2 files are on {socket.gethostname()}:{other}" in capsys.readouterr().out
        assert main(["convert", here, str(tmp_path / "hf"), "--to", "huggingface"]) == BAD_DATA
        collect = f"`meshwright collect {here} --from {socket.gethostname()}:{other}`"
        assert f"bring all parts together with {collect}" in capsys.readouterr().err
    # A start of both says the same at once, on all ranks.
    words = [*FLAGS, *OWN, *flags, "--train-iters=2"]
    statuses = train_on_ranks(2, words, tmp_path, Machine(tmp_path, [1, 0]))
    log = (tmp_path / "log-0").read_text()
    assert statuses == [BAD_DATA] * 2 and "bring them together with `meshwright collect`" in log


@pytest.mark.long
def test_a_machine_joins_that_has_nothing_of_the_run(tmp_path: Path) -> None:
    """It is rank 0's, and takes the architecture from what the others hold."""
    goes_on_exactly(tmp_path, [0, 0, 1, 1], [[2, 0, 1, 1], [2, 0, 1, 2]], "--zero-stage=1")


@pytest.mark.long
def test_one_machine_alone_has_what_is_loaded(tmp_path: Path) -> None:
    """Another run goes on from it, on all machines."""
    train(tmp_path, [0, 0], "--train-iters=3", "--zero-stage=1")
    more = ["--save=other", "--train-iters=3", "--finetune"]
    log = train(tmp_path, [1, 0], *more)[0]
    assert "loading checkpoint from run at iteration 3" in log
    assert not (tmp_path / "machine1" / "run").exists()
    # Without one anywhere, all ranks are refused.
    shutil.rmtree(tmp_path / "machine0" / "run")
    words = [*FLAGS, *OWN, *more, "--save=third"]
    statuses = train_on_ranks(2, words, tmp_path, Machine(tmp_path, [1, 0]))
    assert statuses == [BAD_DATA] * 2, (tmp_path / "log-0").read_text()
    assert "there is no such folder" in (tmp_path / "log-0").read_text()


LAYOUTS = [
    "",
    "--zero-stage=1 --async-save",
    "--zero-stage=3",
    "--tensor-model-parallel-size=2 --sequence-parallel",
    "--pipeline-model-parallel-size=2 --zero-stage=2",
    "--tensor-model-parallel-size=2 --pipeline-model-parallel-size=2",
]


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("number", [2, 4])
def test_layouts_go_on_exactly_on_own_disks(tmp_path: Path, number: int, layout: str) -> None:
    places = [rank // 2 for rank in range(2 * number)]
    moved = [(place + 1) % number for place in places]
    goes_on_exactly(tmp_path, places, [places, moved], layout)
