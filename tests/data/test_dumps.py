"""Kinds of dumps and splitters of sentences are what is registered."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers import error_of
from meshwright.base import registry
from meshwright.base.errors import UNAVAILABLE
from meshwright.config.text_inputs import TextInputs
from meshwright.data.text import formats, inputs, reading
from meshwright.data.text.divide import Division, Slice
from meshwright.data.text.formats import TextFormat
from meshwright.data.text.records import Document, ReadOptions, Record
from meshwright.data.text.splitting import build_splitter

ARTICLE = "<mediawiki>\n<page><title>A</title><ns>0</ns><revision><text>''Hello''</text></revision></page>\n</mediawiki>\n"


def animals(lines: Slice, options: ReadOptions) -> Iterator[Record]:
    for animal in re.finditer(rb"(\w+);", lines.content):
        yield Document((animal[1].decode(),), lines.place(animal.start()))


ENDS = Division(re.compile(rb";\n"), re.compile(rb";\n|\Z"), 3)
ZOO = TextFormat("zoo dumps", ENDS, animals, begins=re.compile(rb"<zoo>"))


def by_word(language: str, keep_newlines: bool) -> Callable[[str], list[str]]:
    return str.split


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    def use(**entries: str) -> None:
        monkeypatch.setattr(registry, "entries", lambda group: entries)
        monkeypatch.setattr(registry, "_ours", dict)
        formats.all_dumps.cache_clear()

    yield use
    formats.all_dumps.cache_clear()


def read(path: Path) -> list[str]:
    return list(reading.read_texts(TextInputs(input=[str(path)])))


def test_a_dump_without_its_reader_is_plain_text(register, tmp_path: Path) -> None:
    (tmp_path / "d.xml").write_text(ARTICLE)
    assert read(tmp_path / "d.xml") == ["A\n\nHello\n"]
    register()
    assert read(tmp_path / "d.xml") == [ARTICLE]
    assert "1 XML" in str(error_of(lambda: inputs.find_inputs(TextInputs(input=[str(tmp_path)]))))
    assert formats.but_for_dumps("XML") == "XML"


def test_another_package_s_dumps(register, tmp_path: Path) -> None:
    register(zoo=f"{__name__}:ZOO")
    (tmp_path / "d.txt").write_text("<zoo>\nlion;\nape;\n")
    assert read(tmp_path / "d.txt") == ["lion", "ape"]
    assert (
        inputs.find_inputs(TextInputs(input=[str(tmp_path / "d.txt")])).describe()
        == "1 of zoo dumps"
    )
    assert formats.but_for_dumps("XML") == "XML other than zoo dumps"


def test_splitters(register) -> None:
    register(rules=f"{__name__}:by_word")
    assert build_splitter("rules", "english", False)("Two words") == ["Two", "words"]
    message = error_of(lambda: build_splitter("punkt", "english", False), UNAVAILABLE)
    assert "--split-sentences: there is no splitter 'punkt'" in message
