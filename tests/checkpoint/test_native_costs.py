"""What each rank sends, receives and asks of the folder does not grow with the number of ranks.

The ranks are threads of this process, whose messages and calls of the system are counted.
"""

from __future__ import annotations

import math
import os
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks.test_team import on_threads

from helpers import blank, box_elements, hold_equal, random_boxes
from meshwright.checkpoint import loading, manifests, native, publish, steps
from meshwright.checkpoint.loading import OpenOptions
from meshwright.checkpoint.native import BoxedTensor
from meshwright.config.fields import with_settings
from meshwright.config.schema import TrainConfig
from meshwright.parallel.layout import Layout
from meshwright.runtime.ranks import team as teams
from meshwright.runtime.ranks.team import Team
from meshwright.training.state.saver import Saver

NAMES = [f"h.{n}.mlp.fc.weight" for n in range(4)]
ROWS = 64
RANK = threading.local()  # .counts: the calls of a rank
FOLDERS: set[str] = set()  # below which calls are counted


def see(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and hasattr(RANK, "counts") and is_counted(args[0]):
        RANK.counts["opens"] += 1


sys.addaudithook(see)


def is_counted(path: Any) -> bool:
    return any(str(path).startswith(folder) for folder in FOLDERS)


def counted(size: int, body: Callable[[Team], Any]) -> list[Counter[str]]:
    """Call body(team) in a thread for each rank; return what each of them counted."""

    def act(team: Team) -> Counter[str]:
        RANK.counts = Counter()
        body(team)
        return RANK.counts

    counts, received = on_threads(size, act)
    for one in counts:
        if isinstance(one, BaseException):
            raise one
    for one, sizes in zip(counts, received, strict=True):
        one["bytes received"] = sum(sizes)
    return counts


@pytest.fixture(autouse=True)
def counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Count the calls of the threads below this test's folder."""

    def wrap(name: str, counter: str) -> None:
        original = getattr(os, name)

        def call(path: Any, *args: Any, **more: Any) -> Any:
            if hasattr(RANK, "counts") and is_counted(path):
                RANK.counts[counter] += 1
            return original(path, *args, **more)

        monkeypatch.setattr(os, name, call)

    for name, counter in (
        ("stat", "stats"),
        ("lstat", "stats"),
        ("listdir", "listings"),
        ("scandir", "listings"),
    ):
        wrap(name, counter)
    FOLDERS.add(str(tmp_path))
    yield
    FOLDERS.clear()


def share(team: Team) -> dict[str, BoxedTensor]:
    """Return a rank's rows of every tensor."""
    begin, end = ROWS * team.rank // team.size, ROWS * (team.rank + 1) // team.size
    fulls = {
        name: torch.arange(ROWS * 8, dtype=torch.float32).view(ROWS, 8) + n
        for n, name in enumerate(NAMES)
    }
    return {
        name: BoxedTensor((ROWS, 8), [((begin, 0), (end - begin, 8))], full[begin:end].clone())
        for name, full in fulls.items()
    }


def save(root: Path, team: Team) -> None:
    publish.check_writable(root, 1000, team)
    native.save_step(root, 1, share(team), {"iteration": 1}, {"of": team.size}, team=team)


def load(root: Path, team: Team, verify: str) -> None:
    want = blank(share(team))
    assert loading.load_checkpoint(root, want, options=OpenOptions(verify), team=team)
    assert hold_equal(share(team), want)


def largest(counts: list[Counter[str]]) -> Counter[str]:
    """Return the largest of each count over the ranks that pass on no other rank's messages."""
    leaves = [one for rank, one in enumerate(counts) if rank % teams.BRANCHES]
    return Counter({name: max(one[name] for one in leaves) for name in set().union(*counts)})


@pytest.mark.parametrize("act", ["save", "read"])
def test_costs_of_a_rank_do_not_grow_with_the_ranks(tmp_path: Path, act: str) -> None:
    costs = []
    for size in (4, 32):
        root = tmp_path / str(size)
        counts = counted(size, lambda team, root=root: save(root, team))
        if act != "save":
            counts = counted(size, lambda team, root=root: load(root, team, act))
        costs.append(largest(counts))
    few, many = costs
    assert (
        not many["listings"]
        and many["opens"] <= few["opens"] <= 5
        and many["stats"] <= few["stats"] <= 8
    )
    assert many["bytes received"] <= few["bytes received"] * 1.05


def test_another_layout_reads_what_it_shares(tmp_path: Path) -> None:
    """Of 16 ranks' files, each of 4 ranks opens the 4 that hold its rows, and each of 32 one."""
    counted(16, lambda team: save(tmp_path, team))
    for size, files in ((4, 4), (32, 1)):
        counts = counted(size, lambda team: load(tmp_path, team, "read"))
        assert {c["opens"] for c in counts[1:]} == {files + 1}  # and the end of the manifest


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 40, 100])
def test_chunks_are_divided_evenly(ranks: int) -> None:
    sizes = [0, 1, 30, 5, 0, 4]
    manifest = {
        f"f{n}": manifests.File(size, "".join(f"{n:032d}{k:032d}" for k in range(size)))
        for n, size in enumerate(sizes)
    }
    shares = manifests.divide_chunks(manifest, ranks)
    joined = [digests for share in shares for *_, digests in share]
    assert "".join(joined) == "".join(file.sha256 for file in manifest.values())
    counts = [sum(len(digests) // 64 for *_, digests in share) for share in shares]
    assert max(counts) - min(counts) <= 1
    for name, size, first, digests in (row for share in shares for row in share):
        assert (size, digests) == (
            manifest[name].size,
            manifest[name].sha256[64 * first :][: len(digests)],
        )


def test_settings_are_read_without_a_look_at_every_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before they have met, ranks look for a checkpoint's settings, and not at its files."""
    counted(4, lambda team: save(tmp_path, team))
    seen = Counter[str]()

    def note(path: Any) -> Any:
        seen[os.path.basename(path)] += 1
        return original(path)

    original = os.listdir
    monkeypatch.setattr(os, "listdir", note)
    looked_at = list[str]()
    monkeypatch.setattr(manifests, "check_size", lambda path, file: looked_at.append(path.name))
    monkeypatch.setattr(native, "read_index", lambda *_: pytest.fail("the index"))
    source = loading.open_checkpoint(tmp_path, OpenOptions("none"))
    assert (
        source is not None
        and source.config["of"] == 4
        and steps.find_step(tmp_path, sizes=False)[0] is not None
    )
    assert (
        seen[tmp_path.name] <= 4
        and "iter_0000001" not in seen
        and set(looked_at) == {native.STATE, native.CONFIG}
    )


@pytest.mark.parametrize("shape", [(), (40,), (30, 8), (6, 5, 4)])
def test_boxes_that_meet_are_found_with_the_bytes_they_share(shape: tuple[int, ...]) -> None:
    rng = random.Random(len(shape))
    elements = torch.arange(math.prod(shape)).view(shape)
    for _ in range(40):
        stored, wanted = (
            [box for box in random_boxes(shape, rng) if rng.random() < 0.6] for _ in range(2)
        )
        rows = [("f", 1000 * n, *box) for n, box in enumerate(stored)]
        tensor = native.parse_boxes(len(shape), "F32", rows)
        expected = []
        for row, (offset, size) in enumerate(wanted):
            inside = set(box_elements(elements, [(offset, size)]).flatten().tolist())
            for number, box in enumerate(stored):
                places = [
                    k
                    for k, x in enumerate(box_elements(elements, [box]).flatten().tolist())
                    if x in inside
                ]
                if places:
                    expected.append(
                        (
                            row,
                            number,
                            1000 * number + 4 * places[0],
                            1000 * number + 4 * places[-1] + 4,
                        )
                    )
        found = zip(*(values.tolist() for values in native.meetings(tensor, wanted)), strict=True)
        assert sorted(found) == expected


def test_a_tensor_in_thousands_of_slices_is_dealt_to_as_many() -> None:
    """Not every slice is compared with every other."""
    size, ranks = 16, 4096
    rows = [(native.rank_file(n), 8, (size * n, 0), (size, 4)) for n in range(ranks)]
    stored = {"x": native.parse_boxes(2, "F32", rows)}
    manifest = {file: manifests.File(8 + 16 * size, "0" * 64) for file, *_ in rows}
    wanted = [[(["x"], [(0, (size * n, 0), (size, 4))])] for n in range(ranks)]
    compared = 0
    original = np.maximum

    def count(a: Any, b: Any) -> Any:
        nonlocal compared
        compared += max(np.size(a), np.size(b))
        return original(a, b)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native.np, "maximum", count)
        dealt = native.deal_boxes(stored, manifest, wanted)  # type: ignore[arg-type]
    assert dealt[7] == [
        {"x": [(native.rank_file(7), 8, (size * 7, 0), (size, 4))]},
        {native.rank_file(7): [264, [(0, "0" * 64)]]},
    ]
    assert compared < 10 * 2 * ranks


def test_tensors_that_many_ranks_have_are_described_once() -> None:
    """Messages grow with the boxes of the ranks, not with tensors times ranks."""

    def act(team: Team) -> native.Described:
        own = share(team)
        return team.collect_merged(
            lambda: native.describe_wanted(own, team.rank), native.merge_described
        )

    described, received = on_threads(32, act)
    assert native.kinds_of(described[0]) == {name: ((ROWS, 8), "F32") for name in NAMES}
    assert [names for rows in described[0].boxes for names, _ in rows] == [NAMES] * 32
    sizes = [size for size in received[0] if size > 8]
    assert len(sizes) == 16 and sizes[-1] < 0.6 * 16 * max(sizes[:-1])


def test_ranks_that_write_nothing_of_megatrons_format_read_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank for each of its files reads the temporary step."""
    written = list[Any]()
    monkeypatch.setattr(native, "save_step", lambda *_, **more: None)
    monkeypatch.setattr(native, "open_native", lambda *_: pytest.fail("the step was opened"))
    monkeypatch.setattr(
        publish, "write_step", lambda root, step, files, **more: written.append(files)
    )
    layout = Layout(shard=4, rank=2)
    config = with_settings(TrainConfig(), ckpt_format="torch")
    saver = Saver(config, layout, Team(), torch.device("cpu"))
    saver.write_for_megatron(tmp_path, 1, {}, {"padded_vocab_size": 128}, {}, Team())
    assert written == [{}]
