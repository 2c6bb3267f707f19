"""What a power cut leaves: bytes are on the disk before they get their names, and names at the end.

A disk keeps of a file what it held at its last fsync, and of a folder the names at its own. The
model here follows fsync and rename, and refuses a rename of anything that is not on the disk yet.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from meshwright.base.files import replacing
from meshwright.checkpoint import publish
from meshwright.checkpoint.manifests import verify_step
from meshwright.checkpoint.steps import TRACKER, latest
from meshwright.data.files.indexed import Indexed
from meshwright.data.files.writer import Writer


class Disk:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files: dict[int, bytes] = {}  # by inode
        self.folders: dict[int, dict[str, int]] = {}  # names and inodes
        self.before_rename: Callable[[Path], None] = lambda target: None
        for name in ("rename", "replace"):
            monkeypatch.setattr(os, name, self.watched(getattr(os, name)))
        monkeypatch.setattr(os, "fsync", self.fsync)

    def fsync(self, fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.is_dir():
            self.folders[os.fstat(fd).st_ino] = names_in(path)
        else:
            self.files[os.fstat(fd).st_ino] = path.read_bytes()

    def watched(self, rename: Callable[[Path, Path], None]) -> Callable[[Path, Path], None]:
        def check_and_rename(source: Path, target: Path) -> None:
            self.require(Path(source))
            self.before_rename(Path(target))
            rename(source, target)

        return check_and_rename

    def require(self, path: Path) -> None:
        """Fail unless all of a file or folder is on the disk."""
        inode = path.stat().st_ino
        if path.is_dir():
            assert self.folders.get(inode) == names_in(path), (
                f"the names in {path} are not on the disk"
            )
            for child in path.iterdir():
                self.require(child)
        else:
            assert self.files.get(inode) == path.read_bytes(), (
                f"the bytes of {path} are not on the disk"
            )

    def has_name(self, path: Path) -> bool:
        return self.folders.get(path.parent.stat().st_ino, {}).get(path.name) == path.stat().st_ino

    def cut_power(self, folder: Path, to: Path) -> Path:
        """Return a copy of what the disk holds of a folder."""
        to.mkdir()
        for name, inode in self.folders.get(folder.stat().st_ino, {}).items():
            child = folder / name
            if child.is_dir():
                self.cut_power(child, to / name)
            else:
                (to / name).write_bytes(self.files.get(inode, b""))
        return to


def names_in(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in folder.iterdir()}


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.mark.parametrize("names", [["a.bin", "b.bin"], ["mp_rank_00/a.bin", "mp_rank_01/b.bin"]])
def test_a_published_step_survives_a_power_cut(
    names: list[str], disk: Disk, tmp_path: Path
) -> None:
    root = tmp_path / "run"

    def check_tracker(target: Path) -> None:
        """A tracker names a step that is on the disk under its name."""
        if target.name == TRACKER:
            assert disk.has_name(root / "iter_0000005"), "the tracker may be there without its step"

    disk.before_rename = check_tracker
    publish.write_step(
        root, 5, {name: lambda write, name=name: write(name.encode() * 1000) for name in names}
    )
    left = disk.cut_power(root, tmp_path / "left")
    assert verify_step(left / "iter_0000005", True)
    assert (left / TRACKER).read_text() == "5" and latest(left) == (5, [])


def test_a_file_is_replaced_by_bytes_on_the_disk(disk: Disk, tmp_path: Path) -> None:
    with replacing(tmp_path / "file", durably=True) as file:
        file.write(b"new")
    with (
        pytest.raises(AssertionError, match="not on the disk"),
        replacing(tmp_path / "file") as file,
    ):
        file.write(b"newer")


def test_a_pair_of_token_files_survives_a_power_cut(disk: Disk, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with Writer(tmp_path / "data/pair", np.uint16) as writer:
        writer.add(np.arange(100))
        writer.end_document()
    left = disk.cut_power(tmp_path / "data", tmp_path / "left")
    assert (left / "pair.bin").read_bytes() == np.arange(100, dtype=np.uint16).tobytes()
    assert Indexed(str(left / "pair")).sizes.tolist() == [100]
