"""What each command refuses: command lines, exit statuses and words, from `refusals.toml`.

A group of the table has rows `[argv, words]` or `[argv, words, content of the group's file]`:

* `base` stands before each row's argv; TINY and other names stand for the words under `[words]`.
* `status` is the exit status, 2 unless it is given.
* Each part of a row's words between `…` must occur in the error, which has as many lines as `lines`
  says, if it does.
* `files` lie in the folder in which the commands run; nothing else may be there afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import io
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from meshwright.__main__ import main
from meshwright.base.errors import USAGE

TABLE = Path(__file__).with_name("refusals.toml")


@dataclass(frozen=True)
class Refusal:
    """One row of the table."""

    argv: tuple[str, ...]
    status: int
    words: tuple[str, ...]
    lines: int | None
    files: dict[str, str] = field(hash=False)


@functools.cache
def refusals() -> list[Refusal]:
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return [
        read_row(table["words"], group, row) for group in table["group"] for row in group["rows"]
    ]


def read_row(names: dict[str, str], group: dict[str, Any], row: list[str]) -> Refusal:
    argv, words, *content = row
    typed = spelled(names, shlex.split(group.get("base", "")) + shlex.split(argv))
    files = group.get("files", {}) | ({group["file"]: content[0]} if content else {})
    parts = tuple(part.strip() for part in words.split("…"))
    return Refusal(tuple(typed), group.get("status", USAGE), parts, group.get("lines"), files)


def spelled(names: dict[str, str], words: list[str]) -> list[str]:
    """Return words with those that a name of the table stands for."""
    return [
        part
        for word in words
        for part in (spelled(names, names[word].split()) if word in names else [word])
    ]


def described(refusal: Refusal) -> str:
    """Return the end of the command line, which says what is wrong with it."""
    return " ".join(refusal.argv)[-60:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Run the commands in one empty folder."""
    # A folder deeper than those of other tests, whose files are no near names for a message.
    place = tmp_path_factory.mktemp("refusals") / "alone"
    place.mkdir()
    with contextlib.chdir(place):
        yield place


def test_the_table_is_large_and_has_no_row_twice() -> None:
    rows = [(refusal.argv, tuple(refusal.files.items())) for refusal in refusals()]
    assert len(rows) >= 300
    assert [row for number, row in enumerate(rows) if row in rows[:number]] == []


@pytest.mark.flag("cp_comm_type")
@pytest.mark.fault("F29")
@pytest.mark.promise("Unknown names and wrong types are refused")
@pytest.mark.parametrize("refusal", refusals(), ids=described)
def test_a_refusal(refusal: Refusal, folder: Path) -> None:
    for name, content in refusal.files.items():
        (folder / name).write_text(content, encoding="utf-8")
    error = io.StringIO()
    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
        status = main(list(refusal.argv))
    said = error.getvalue()
    found = sorted(path.name for path in folder.iterdir())
    for name in refusal.files:
        (folder / name).unlink()
    missing = [words for words in refusal.words if words not in said]
    assert (status, missing) == (refusal.status, []), said
    assert found == sorted(refusal.files) and "Traceback" not in said
    assert refusal.lines in (None, len(said.splitlines())), said
