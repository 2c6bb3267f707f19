"""`meshwright collect`: parts of steps from other machines, verified, together in one folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from helpers import blank, error_of, flip_bit, hold_equal
from meshwright.__main__ import main
from meshwright.apps.collect import collect as collecting
from meshwright.base.errors import BAD_DATA, IO, UNAVAILABLE, USAGE
from meshwright.checkpoint import disks, loading, manifests, native, publish, steps
from meshwright.checkpoint.native import undivided

FULL = torch.arange(48, dtype=torch.float64).view(6, 8)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the parts of two machines of one step, as their ranks write them."""
    named = {"wte.weight": undivided(FULL)}
    native.save_step(tmp_path / "whole", 5, named, {"iteration": 5}, {})
    whole = tmp_path / "whole" / "iter_0000005"
    manifest = manifests.read_manifest(whole)
    places = {}
    for name in ("a", "b"):
        root = tmp_path / name
        root.mkdir()
        disks.name_disk(root)
        places[name] = f"node-{name}:{root}#{disks.disk_of(root)}"
    divided = {
        name: file._replace(place=places["b" if name.startswith("rank") else "a"])
        for name, file in manifest.items()
    }
    for name, keeps in (
        ("a", "state.json config.json index.json"),
        ("b", "rank_00000.safetensors"),
    ):
        folder = tmp_path / name / "iter_0000005.tmp"
        folder.mkdir()
        for file in keeps.split():
            shutil.copy(whole / file, folder)
        publish.add_manifest(tmp_path / name, 5, divided)
        publish.give_name(tmp_path / name, 5)
    (tmp_path / "b" / "log.txt").write_text("log")
    return tmp_path / "a"


def is_whole(run: Path) -> bool:
    want = blank({"wte.weight": undivided(FULL)})
    loaded = loading.load_checkpoint(run, want)
    return (
        loaded is not None
        and loaded.step == 5
        and hold_equal({"wte.weight": undivided(FULL)}, want)
    )


def test_one_machine_alone_says_where_the_rest_is(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert steps.latest(run) == (5, [])
    assert main(["inspect", str(run)]) == 0
    where = f"node-b:{run.parent / 'b'}"
    assert (
        f"1 of 4 files are on {where}; `meshwright collect {run} --from {where}`"
        in capsys.readouterr().out
    )
    message = error_of(lambda: is_whole(run))
    assert (
        f"is on the disk of {where}; bring all parts together with `meshwright collect" in message
    )
    # What should be on this machine and is not is damage.
    (run / "iter_0000005" / "state.json").unlink()
    assert "no undamaged checkpoint" in error_of(lambda: steps.latest(run))


def test_parts_of_a_folder_are_brought_together(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["collect", str(run), "--from", str(run.parent / "b")]) == 0
    assert "iter_0000005  complete, 4 files" in capsys.readouterr().out
    assert is_whole(run) and (run / steps.TRACKER).read_text() == "5"
    assert (run / "log.txt").read_text() == "log" and not (run / collecting.STAGE).exists()
    # Into a folder without a part; what lacks is named.
    new = run.parent / "new"
    shutil.rmtree(run.parent / "b")
    shutil.copytree(run, run.parent / "c")
    (run.parent / "c" / "iter_0000005" / "rank_00000.safetensors").unlink()
    assert main(["collect", str(new), "--from", str(run.parent / "c")]) == BAD_DATA
    assert f"1 file still on node-b:{run.parent / 'b'}" in capsys.readouterr().out
    assert main(["collect", str(new), "--from", str(run)]) == 0 and is_whole(new)


def test_a_file_that_was_cut_is_replaced(run: Path) -> None:
    """A step with one is complete once another machine's copy is here, and not before."""
    b, c = run.parent / "b", run.parent / "c"
    shutil.copytree(run, c)
    cut = run / "iter_0000005" / "index.json"
    os.truncate(cut, 10)
    assert main(["collect", str(run), "--from", str(b)]) == BAD_DATA
    assert not (run / steps.TRACKER).exists()
    assert main(["collect", str(run), "--from", str(c)]) == 0 and is_whole(run)
    assert (run / steps.TRACKER).read_text() == "5"


def test_a_step_is_no_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside its files there would be a step in the step."""
    step, b = run / "iter_0000005", run.parent / "b"
    names = os.listdir(step)
    for words in (
        [str(step), "--from", str(b)],
        [str(run), "--from", str(b / "iter_0000005")],
        [str(run), "--from", f"node-b:{b}/iter_0000005/"],
    ):
        assert main(["collect", *words]) == BAD_DATA
        assert "is a step; give the folder of the run, " in capsys.readouterr().err
    assert os.listdir(step) == names
    assert main(["collect", str(step / "state.json"), "--from", str(b)]) == BAD_DATA
    assert "is a file; give the run's folder" in capsys.readouterr().err


SSH = """#!/bin/sh
echo "$1" >> "$SSH_LOG"
exec sh -c "$2"
"""


@pytest.fixture
def tools(run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let commands find an ssh that runs here, tar, and no rsync."""
    tools = run.parent / "bin"
    tools.mkdir()
    (tools / "ssh").write_text(SSH)
    (tools / "ssh").chmod(0o755)
    for tool in ("sh", "ls", "tar", "mkdir"):
        (tools / tool).symlink_to(shutil.which(tool) or "")
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setenv("SSH_LOG", str(run.parent / "hosts"))
    return tools


@pytest.mark.usefixtures("tools")
def test_parts_come_by_ssh_from_where_the_step_says(run: Path) -> None:
    assert main(["collect", str(run)]) == 0 and is_whole(run)
    assert {*(run.parent / "hosts").read_text().split()} == {"node-b"}


def test_what_differs_is_not_taken(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = run.parent / "b" / "iter_0000005" / "rank_00000.safetensors"
    flip_bit(other, 8 * 200)
    assert main(["collect", str(run), "--from", str(run.parent / "b")]) == BAD_DATA
    assert "not what was written" in capsys.readouterr().err
    assert sorted(os.listdir(run / "iter_0000005")) == [
        "config.json",
        "index.json",
        "manifest.json",
        "state.json",
    ]
    # Another step of that number is passed over.
    shutil.rmtree(run.parent / "b" / "iter_0000005")
    native.save_step(run.parent / "b", 5, {"x": undivided(FULL)}, {"iteration": 5}, {})
    assert main(["collect", str(run), "--from", str(run.parent / "b")]) == BAD_DATA
    assert "it is another step of that number" in capsys.readouterr().out


def test_links_are_not_followed_nor_taken(run: Path) -> None:
    """Neither in a source nor in the run itself does a link lead to another file."""
    source = run.parent / "b"
    secret = run.parent / "secret"
    secret.write_text("secret")
    (source / "log.txt").unlink()
    (source / "tokenizer").mkdir()
    for name in ("log.txt", "tokenizer/vocab.json", "iter_0000005/rank_00000.safetensors"):
        (source / name).unlink(missing_ok=True)
        (source / name).symlink_to(secret)
    assert main(["collect", str(run), "--from", str(source)]) == BAD_DATA
    assert {"log.txt", "tokenizer", collecting.STAGE}.isdisjoint(os.listdir(run))
    (run / collecting.STAGE).symlink_to(run.parent)
    assert main(["collect", str(run), "--from", str(source)]) == IO
    assert secret.read_text() == "secret"


def test_a_damaged_step_does_not_keep_others_back(run: Path) -> None:
    """Nor does a source that is the run itself, or what an earlier copying has left."""
    for name, text in (("iter_0000004/state.json", "{}"), ("iter_0000009/manifest.json", "{}")):
        (run / name).parent.mkdir()
        (run / name).write_text(text)
    assert main(["collect", str(run), "--from", str(run)]) == BAD_DATA
    assert main(["collect", str(run), "--from", str(run.parent / "b")]) == 0
    assert (run / steps.TRACKER).read_text() == "5"


RSYNC = """#!/bin/sh
echo "$@" >> "$SSH_LOG"
for target; do :; done
mkdir -p "$target/iter_0000005"
echo part > "$target/iter_0000005/rank_00000.safetensors"
exit 1
"""


def test_a_place_is_for_no_shell_and_no_terminal(
    run: Path, tools: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever wrote the manifest chose it; and what rsync has left before it failed is replaced."""
    b = run.parent / "b"
    odd = run.parent / "it's $(touch x)\x1b[2J"
    b.rename(odd)
    manifest = manifests.read_manifest(run / "iter_0000005")
    part = "rank_00000.safetensors"
    manifest[part] = manifest[part]._replace(place=f"node-b:{odd}#{disks.disk_of(odd)}")
    for root in (run, odd):
        raw = manifests.encode_manifest(manifest)
        (root / "iter_0000005" / "manifest.json").write_bytes(raw)
    assert main(["inspect", str(run)]) == 0
    assert "\x1b" not in capsys.readouterr().out
    (tools / "rsync").write_text(RSYNC)
    (tools / "rsync").chmod(0o755)
    assert main(["collect", str(run), "--from", f"node-b:{odd}"]) == 0 and is_whole(run)
    assert "--protect-args" in (run.parent / "hosts").read_text()
    assert not list(Path().glob("x"))


@pytest.mark.parametrize(
    ("source", "status", "words"),
    [
        ("node::module", USAGE, "names no machine"),
        ("-oProxyCommand=touch x:/run", USAGE, "names no machine"),
        ("nothing", BAD_DATA, "nothing is no folder; give HOST:DIR or DIR"),
        ("node:/run", UNAVAILABLE, "ssh is needed to read from node"),
    ],
)
def test_sources_that_cannot_be_read(
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    source: str,
    status: int,
    words: str,
) -> None:
    monkeypatch.setenv("PATH", "")
    assert main(["collect", str(run), f"--from={source}"]) == status
    assert words in capsys.readouterr().err


def test_a_folder_without_a_run_is_not_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["collect", str(tmp_path / "typo")]) == BAD_DATA
    assert "give --from HOST:DIR or DIR" in capsys.readouterr().err
    assert not (tmp_path / "typo").exists()
