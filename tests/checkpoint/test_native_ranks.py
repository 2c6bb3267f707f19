"""Many ranks write one step and read it in any other split; a failure of one is raised by all."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import on_ranks
from helpers import (
    DTYPES,
    Box,
    blank,
    box_elements,
    captured_output,
    flip_bit,
    hold_equal,
    random_boxes,
    random_tensor,
)
from meshwright.base import console
from meshwright.base.errors import BAD_DATA, IO, LOCKED, UNEXPECTED, UserError
from meshwright.checkpoint import boxes as geometry
from meshwright.checkpoint import loading, manifests, native, publish, steps
from meshwright.checkpoint.loading import OpenOptions
from meshwright.checkpoint.native import BoxedTensor, undivided
from meshwright.checkpoint.sources import Source
from meshwright.config.schema import Checkpoint, Data, TokenizerFlags, TrainConfig
from meshwright.parallel import shard
from meshwright.runtime.ranks.team import ALONE, Team
from meshwright.runtime.ranks.world import World
from meshwright.training.before import preflight
from meshwright.training.before.resolve import identity_of, look_at_files
from on_ranks import make_team, run_ranks


def team() -> Team:
    console.set_stream("stdout" if dist.get_rank() == 0 else None)
    return make_team()


def error_of(call: Callable[[], object], status: int = BAD_DATA) -> str:
    """Return the message of the error, which must be the same on every rank."""
    with pytest.raises(UserError) as caught:
        call()
    assert caught.value.everywhere  # so that rank 0 alone reports it
    errors = team().gather([type(caught.value).__name__, str(caught.value), caught.value.status])
    assert all(one == errors[0] for one in errors) and errors[0][2] == status, errors
    return str(caught.value)


def entry(full: torch.Tensor, boxes: list[Box]) -> BoxedTensor:
    return BoxedTensor(
        tuple(full.shape), boxes, box_elements(full, boxes) if boxes else full.new_empty(0)
    )


def sharded(shape: tuple[int, ...], dim: int, tp: int, zero: int, rank: int) -> list[Box]:
    """Return this rank's boxes when ZeRO slices its tensor-parallel part along `dim`."""
    part, slice_ = rank % tp, rank // tp % zero
    local = shape[:dim] + (shape[dim] // tp,) + shape[dim + 1 :]
    shift = tuple(part * local[dim] if d == dim else 0 for d in range(len(shape)))
    n = torch.Size(local).numel()
    boxes = shard.boxes(local, n * slice_ // zero, n * (slice_ + 1) // zero)
    return [(geometry.plus(offset, shift), size) for offset, size in boxes]


def any_cutting(root: Path) -> None:
    everybody = team()
    some_of_us = {n: dist.new_group(list(range(n))) for n in (2, 3)}
    teams = [
        ALONE,
        *(Team(everybody.rank, n, (group,)) for n, group in some_of_us.items()),
        everybody,
    ]
    for trial in range(4):
        how = ("one rank", "random boxes", "slices", "columns and slices")[trial % 4]
        common, own = random.Random(trial), random.Random(100 * trial + everybody.rank)
        manifests.CHUNK, native.PART = common.choice([64, 200, 4096]), common.choice([16, 64, 1000])
        fulls, saved = {}, {}
        for i in range(5):
            shape = tuple(common.randrange(1, 9) for _ in range(common.randrange(1, 4) if i else 0))
            if how.startswith("columns"):
                shape = shape[:-1] + tuple(2 * n for n in shape[-1:])
            full = fulls[f"t{i}"] = random_tensor(shape, common.choice(DTYPES), 100 * trial + i)
            if how == "one rank":
                boxes: list[Box] = undivided(full).boxes * everybody.is_rank_0  # type: ignore[operator]
            elif how == "random boxes" or not shape:
                boxes = [
                    box
                    for box in random_boxes(shape, common)
                    if common.randrange(4) == everybody.rank
                ]
            elif how == "slices":
                boxes = sharded(shape, 0, 1, 4, everybody.rank)
            else:
                boxes = sharded(shape, len(shape) - 1, 2, 2, everybody.rank)
            if boxes or own.random() < 0.5:  # who holds nothing of it may name it or not
                saved[f"t{i}"] = entry(full, boxes)
        native.save_step(root, trial, saved, {"iteration": trial}, team=everybody)
        for number, holds in enumerate(everybody.gather(any(e.boxes for e in saved.values()))):
            assert (
                steps.step_folder(root, trial) / f"rank_{number:05d}.safetensors"
            ).exists() == holds
        for t, verify in [(t, common.choice(["read", "full"])) for t in teams]:
            if everybody.rank < t.size:
                want = {}
                for name, full in fulls.items():
                    boxes = [
                        box for box in random_boxes(tuple(full.shape), own) if own.random() < 0.7
                    ]
                    if boxes or t.is_rank_0 or own.random() < 0.5:
                        want[name] = entry(full, boxes)
                filled = blank(want)
                assert loading.load_checkpoint(root, filled, options=OpenOptions(verify), team=t)[
                    :2
                ] == (
                    trial,
                    {"iteration": trial},
                )
                assert hold_equal(want, filled)
            everybody.wait()


@pytest.mark.fault("F5")
def test_any_cutting_to_any_other(tmp_path: Path) -> None:
    """Save with one rank or four, read with one to four; the chunks are small."""
    run_ranks(any_cutting, 4, tmp_path)


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    shapes = {"wte.weight": (48, 8), "h.0.mlp.fc.weight": (2, 16, 8)}
    shapes |= {"h.1.mlp.fc.weight": (2, 16, 8), "ln_f.bias": (8,)}  # type: ignore[dict-item]
    return {
        name: random_tensor(shape, torch.float32, seed + i)
        for i, (name, shape) in enumerate(shapes.items())
    }


def mine(t: Team, seed: int = 0) -> dict[str, BoxedTensor]:
    """Return the entries of a rank of two stages, which share their layer; ln_f has one rank."""
    fulls = model(seed)
    stage, place = divmod(t.rank, t.size // 2)
    fc = f"h.{stage}.mlp.fc.weight"
    out = {fc: entry(fulls[fc], sharded((2, 16, 8), 1, 1, t.size // 2, place))}
    if stage == 0:
        out["wte.weight"] = entry(fulls["wte.weight"], sharded((48, 8), 1, t.size // 2, 1, place))
    else:
        out["ln_f.bias"] = entry(fulls["ln_f.bias"], [((0,), (8,))] if place == 0 else [])
    return out


def save(root: Path, step: int, named: native.TensorBoxes) -> None:
    native.save_step(root, step, named, {"iteration": step}, {"of": team().size}, team=team())


def full_entries(seed: int = 0) -> dict[str, BoxedTensor]:
    return {name: undivided(full) for name, full in model(seed).items()}


def a_step_again(root: Path) -> None:
    t = team()
    save(root, 5, mine(t))
    written = steps.step_folder(root, 5).stat().st_ino
    assert "never overwritten" in error_of(lambda: save(root, 5, mine(t, 1)), LOCKED)
    assert "never overwritten" in error_of(
        lambda: save(root, 5, full_entries() if t.is_rank_0 else {}), LOCKED
    )
    assert steps.step_folder(root, 5).stat().st_ino == written
    t.wait()
    if t.is_rank_0:
        flip_bit(steps.step_folder(root, 5) / "rank_00002.safetensors", 8 * 600)
    t.wait()
    with captured_output() as (said, _):
        save(root, 5, mine(t))
    assert [line for line in said if "WARNING" in line and "rank_00002" in line] == said[
        :1
    ] * t.is_rank_0
    assert (root / "iter_0000005.damaged").is_dir()
    manifests.verify_step(steps.step_folder(root, 5), full=True)


def test_a_complete_step_stays_and_a_damaged_one_is_written_again(tmp_path: Path) -> None:
    run_ranks(a_step_again, 4, tmp_path)


def disk_full(root: Path) -> None:
    t = team()
    save(root, 1, mine(t))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if t.rank == 2:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    message = error_of(lambda: save(root, 2, mine(t, 7)), IO)
    needed = native.bytes_of(mine(t), t)
    assert needed == sum(t.gather(sum(e.tensor.numel() * 4 for e in mine(t).values())))
    assert "iter_0000002.tmp/rank_00002.safetensors while saving iteration 2" in message
    assert "iter_0000001, is intact" in message
    assert (
        needed < int(message.split("needs ")[1].split(" bytes")[0].replace(",", "")) < needed + 8000
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    t.wait()
    assert steps.listing(root) == ["iter_0000001", steps.TRACKER]
    assert f"{2 << 60:,}" in error_of(lambda: publish.check_writable(root, 1 << 60, t), IO)
    t.wait()
    assert not list(root.glob(".write*"))
    save(root, 2, mine(t, 7))


@pytest.mark.fault("F6")
def test_one_ranks_full_disk_fails_the_save_of_all(tmp_path: Path) -> None:
    run_ranks(disk_full, 4, tmp_path)


def defects(root: Path) -> None:
    t = team()

    def refused(named: native.TensorBoxes, *words: str) -> None:
        # rank 0 compares what all have
        with pytest.raises(ValueError if t.is_rank_0 else UserError) as caught:
            save(root, 1, named)
        assert all(word in str(caught.value) for word in words), caught.value

    full = model()["wte.weight"]
    refused({"x": entry(full, [((0, 0), (48, 8))])}, "384 elements", "768", "twice")
    refused({"x": entry(full, [((0, 0), (48, 8))] if t.rank > 7 else [])}, "384 elements", "hold 0")
    refused({"x": entry(full, [((24 * t.rank, 0), (24, 7))])}, "384 elements", "336")
    refused({"x": entry(full[: 48 - t.rank], [])}, "[47, 8] F32 on rank 1", "48, 8")
    refused(
        {"x": entry(full.to([torch.float32, torch.float16][t.rank]), [])}, "F16 on rank 1", "F32"
    )
    bad = {"x": BoxedTensor((4,), [((0,), (3,))], torch.zeros(4))} if t.rank == 1 else {}
    # its own defect has its traceback
    with pytest.raises(ValueError if t.rank == 1 else UserError) as caught:
        save(root, 1, bad)
    if t.is_rank_0:
        assert (
            str(caught.value).startswith("rank 1: ValueError: x")
            and caught.value.status == UNEXPECTED
        )  # type: ignore[union-attr,attr-defined]
    t.wait()
    assert steps.listing(root) == []


def test_the_boxes_of_all_ranks_cover_every_tensor_once(tmp_path: Path) -> None:
    run_ranks(defects, 2, tmp_path)


def loads(root: Path) -> None:
    t = team()
    with captured_output() as (said, _):
        assert loading.load_checkpoint(root / "none", mine(t), team=t) is None
    assert said == []
    for step in (1, 2, 3):
        save(root, step, mine(t, 10 * step))
    if t.is_rank_0:  # a part that rank 2 alone reads
        flip_bit(steps.step_folder(root, 3) / "rank_00002.safetensors", 8 * 600)
    t.wait()
    want, seen = blank(mine(t)), list[int]()

    def accept(source: Source) -> Source:
        assert source.config["of"] == 4
        seen.append(source.state["iteration"])
        return source

    with captured_output() as (said, _):
        loaded = loading.load_checkpoint(root, want, accept=accept, team=t)
    assert (
        loaded is not None
        and loaded[:2] == (2, {"iteration": 2})
        and hold_equal(mine(t, 20), want)
        and seen == [3, 2]
    )
    assert (
        len([line for line in said if "skipping iter_0000003" in line and "rank_00002" in line])
        == t.is_rank_0
    )
    assert "rank_00002" in error_of(
        lambda: loading.load_checkpoint(steps.step_folder(root, 3), want, team=t)
    )
    if t.is_rank_0:  # full verification is shared, and finds what no rank reads
        flip_bit(steps.step_folder(root, 2) / native.CONFIG, 8)
    t.wait()
    assert loading.load_checkpoint(root, want, options=OpenOptions("full"), team=t)[:2] == (
        1,
        {"iteration": 1},
    )
    assert hold_equal(mine(t, 10), want)

    def refuse(source: Source) -> Source:
        if t.rank == 1:
            raise UserError("not this one", 2)
        return source

    assert (
        error_of(lambda: loading.load_checkpoint(root, want, accept=refuse, team=t), 2)
        == "not this one"
    )
    if t.rank == 1:
        want["x"] = undivided(torch.zeros(3))
    if t.rank > 1:
        del want["ln_f.bias"]
    message = error_of(lambda: loading.load_checkpoint(root, want, team=t))
    assert "x: the model has (3,), the checkpoint has none" in message
    assert (
        "ln_f.bias: the model has none, the checkpoint has (8,)" in message
        and message.count("\n") == 2
    )
    half = {
        n: BoxedTensor(e.shape, e.boxes, e.tensor.bfloat16()) for n, e in blank(mine(t)).items()
    }
    with captured_output() as (said, _):
        loading.load_checkpoint(steps.step_folder(root, 1), half, team=t)
    assert (" 4 tensors converted from F32 to BF16" in said) == t.is_rank_0
    if t.is_rank_0:
        for step in (1, 2, 3):
            (steps.step_folder(root, step) / native.STATE).unlink()
    t.wait()
    message = error_of(lambda: loading.load_checkpoint(root, half, team=t))
    assert all(f"iter_000000{step}" in message for step in (1, 2, 3))


@pytest.mark.fault("F9")
def test_all_ranks_load_the_same_step(tmp_path: Path) -> None:
    run_ranks(loads, 4, tmp_path)


def not_shared(root: Path) -> None:
    """Let rank 1 have a folder of its own, as on another node, where --save must be shared."""
    t = team()
    publish.SEEN_WITHIN = 0.1
    here = root / f"node{t.rank}"
    with pytest.raises(UserError, match="all nodes share"):
        publish.check_writable(here, 1, t)
    with pytest.raises(UserError, match="all nodes share"):
        save(here, 1, mine(t))
    if t.rank:
        (here / "iter_0000001.tmp").mkdir()
    with pytest.raises(UserError, match=r"rank 0 on .* does not see .*rank_00001.*all nodes share"):
        save(here, 1, mine(t))
    t.wait()
    assert not t.is_rank_0 or not list(here.iterdir())  # rank 0 looks: it goes on to save there
    native.save_step(root / "node0", 1, full_entries(), {}) if t.is_rank_0 else None
    t.wait()
    if t.rank:
        native.save_step(here, 1, full_entries(1), {})
    t.wait()
    with pytest.raises(UserError, match="two different steps iter_0000001"):
        loading.load_checkpoint(here, blank(mine(t)), team=t)
    if t.rank:
        shutil.rmtree(here)
        shutil.copytree(root / "node0", here)
    t.wait()
    assert loading.load_checkpoint(here, want := blank(mine(t)), team=t)  # copies are as good
    assert hold_equal(mine(t), want)


@pytest.mark.fault("F7")
def test_a_folder_that_nodes_do_not_share_is_refused(tmp_path: Path) -> None:
    run_ranks(not_shared, 2, tmp_path)


def killed(root: Path, who: int, point: str) -> None:
    t = team()
    save(root, 1, mine(t))

    def reached(name: str) -> None:
        if t.rank == who and name == point:
            os.kill(os.getpid(), signal.SIGKILL)

    publish.crash_point = reached
    save(root, 2, mine(t, 7))


POINTS = ("begin", "after_mkdir", "written_unsynced", "shard_done")
OF_RANK_0 = (
    "manifest_unsynced",
    "before_rename",
    "after_rename",
    "before_tracker",
    "after_tracker",
)


@pytest.mark.parametrize(
    ("who", "point"), [*((0, p) for p in POINTS + OF_RANK_0), *((1, p) for p in POINTS)]
)
@pytest.mark.fault("F2")
def test_a_rank_is_killed_while_others_wait(tmp_path: Path, who: int, point: str) -> None:
    root, files = tmp_path / "run", str(tmp_path / "store")
    args = (killed, 2, files, (root, who, point))
    context = mp.start_processes(on_ranks._rank, args, 2, join=False, start_method="forkserver")
    for process in context.processes:
        process.join(30)
    assert [p.exitcode for p in context.processes] == [
        -signal.SIGKILL if n == who else 1 for n in range(2)
    ]
    step, _ = steps.latest(root)
    assert step == (2 if point in OF_RANK_0[2:] else 1)
    manifests.verify_step(steps.step_folder(root, step), full=True)
    # as the run does that continues
    native.save_step(root, step + 1, full_entries(7), {"iteration": step + 1})
    assert steps.latest(root)[0] == step + 1 and not list(root.glob("*.tmp"))
    loading.load_checkpoint(root, want := blank(full_entries()))
    assert hold_equal(full_entries(7), want)


def other_files(folder: Path) -> None:
    """Give each rank its own disk, with other vocabularies and data of one name."""
    t = team()
    os.chdir(folder / f"node{t.rank}")
    given = TokenizerFlags(tokenizer_type="HuggingFaceTokenizer", tokenizer_model="tokenizer.json")
    checkpoint = Checkpoint(run_dir=f"run{t.rank}")  # which only rank 0 writes to
    config = TrainConfig(tokenizer=given, data=Data(data_path=["a"]), checkpoint=checkpoint)

    def require_equal(config: TrainConfig) -> None:
        config, vocabulary, problem = look_at_files(config, World(t.rank, t.size))
        preflight.require_equal_ranks(t, identity_of(config, vocabulary), problem)

    with pytest.raises(
        UserError, match=r"SHA-256 of the tokenizer's tokenizer.json: \w+ on rank 0, \w+"
    ) as caught:
        require_equal(config)
    assert re.search(
        r"--data-path a \(its files\): \w+ on rank 0, \w+ on rank 1", str(caught.value)
    )
    assert "data_fingerprint" not in str(caught.value) and "run_dir" not in str(caught.value)
    shared = replace(config, tokenizer=replace(given, tokenizer_model="none.json"))
    assert "none.json cannot be read: No such file" in error_of(lambda: require_equal(shared))


def test_files_that_differ_between_nodes_are_refused(tmp_path: Path) -> None:
    for rank, eod in enumerate(["</s>", "<eos>"]):
        (tmp_path / f"node{rank}").mkdir()
        model = {"type": "WordLevel", "vocab": {"x": 0, eod: 1}, "unk_token": "x"}
        (tmp_path / f"node{rank}" / "tokenizer.json").write_text(
            json.dumps({"version": "1.0", "model": model})
        )
        for end in (".idx", ".bin"):
            (tmp_path / f"node{rank}" / f"a{end}").write_bytes(b"x" * (rank + 1))
    run_ranks(other_files, 2, tmp_path)
