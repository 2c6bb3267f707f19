"""What a run looks at before its first step: its folders, and the checkpoint of --load."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from helpers import TINY_FLAGS, TinyRun
from meshwright import api
from meshwright.__main__ import main
from meshwright.checkpoint.huggingface import reader
from on_ranks import train_on_ranks

OPENED = "opened"  # a file with the word "again" for each opening, of each rank


def note_openings(folder: Path, rank: int = 0) -> None:
    """Have each opening of a Hugging Face folder in this process leave a line in a file."""
    real = reader.open_huggingface

    def noting(*arguments: Any) -> Any:
        with open(folder / f"{OPENED}-{rank}", "a") as file:
            file.write("again\n")
        return real(*arguments)

    reader.open_huggingface = noting


@pytest.fixture
def exported(tmp_path, capsys):
    """Return a model in Hugging Face's format."""
    folder = tmp_path / "exported"
    flags = ["--save", tmp_path / "first", "--save-hf", folder, "--train-iters", 1]
    assert TinyRun(tmp_path / "log", capsys, *flags, "--eval-iters", 0).status == 0
    return folder


def openings(folder: Path) -> list[int]:
    return [len(path.read_text().split()) for path in sorted(folder.glob(f"{OPENED}-*"))]


def test_another_programs_checkpoint_is_opened_once(exported, tmp_path, capsys, monkeypatch):
    """For its settings and for its weights alike; by the command line, a dry run and Python."""
    monkeypatch.setattr(reader, "open_huggingface", reader.open_huggingface)
    note_openings(tmp_path)
    flags = ["--load", str(exported), "--train-iters", "2", "--eval-iters", "0"]
    assert TinyRun(tmp_path / "run", capsys, *flags).status == 0
    assert openings(tmp_path) == [1]
    assert TinyRun(tmp_path / "dry", capsys, *flags, "--dry-run").status == 0
    assert openings(tmp_path) == [2]
    assert api.train([*TINY_FLAGS, *flags], quiet=True).status == 0
    assert openings(tmp_path) == [3]


@pytest.mark.long
def test_each_rank_opens_another_programs_checkpoint_once(exported, tmp_path):
    flags = [*TINY_FLAGS, f"--load={exported}", "--train-iters=2", "--eval-iters=0"]
    prepare = functools.partial(note_openings, tmp_path)
    assert train_on_ranks(2, flags, tmp_path, prepare) == [0, 0]
    assert openings(tmp_path) == [1, 1]


@pytest.mark.parametrize("flag", ["--save", "--run-dir", "--tensorboard-dir"])
def test_a_file_where_a_folder_is_to_be(tmp_path, capsys, flag):
    """It is named before anything is built, by a dry run too."""
    (tmp_path / "file").write_text("")
    said = "is a file, not a folder; give another path"
    for path, words in (
        (tmp_path / "file", f"{flag} {tmp_path}/file {said}"),
        (tmp_path / "file/a/run", f"{flag} {tmp_path}/file/a/run: {tmp_path}/file {said}"),
    ):
        for more in ([], ["--dry-run"]):
            assert main(["train", *TINY_FLAGS, flag, str(path), *more]) == 2
            assert words in capsys.readouterr().err
