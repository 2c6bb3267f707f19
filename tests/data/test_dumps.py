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
from meshwright.data.text import cutting, dumps, inputs, plain
from meshwright.data.text.dumps import Dump
from meshwright.data.text.records import Reading, Unit
from meshwright.data.text.sentences import build_splitter

ARTICLE = (
    "<mediawiki>\n<page><title>A</title><ns>0</ns><revision><text>''Hello''</text></revision></page>\n</mediawiki>\n"
)


def animals(content: bytes, how: Reading) -> Iterator[tuple[int, Unit]]:
    for animal in re.finditer(rb"(\w+);", content):
        yield animal.start(), [animal[1].decode()]


ZOO = Dump("zoo dumps", ";\n", re.compile(rb"<zoo>"), (re.compile(rb";\n"), re.compile(rb";\n|\Z")), animals)


def by_word(language: str, keep_newlines: bool) -> Callable[[str], list[str]]:
    return str.split


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    def forget() -> None:
        dumps.all_dumps.cache_clear()
        plain.ends_of.cache_clear()

    def use(**entries: str) -> None:
        monkeypatch.setattr(registry, "entries", lambda group: entries)
        monkeypatch.setattr(registry, "_ours", dict)
        forget()

    yield use
    forget()


def read(path: Path) -> list[str]:
    return list(cutting.read_texts(TextInputs(input=[str(path)])))


def test_a_dump_without_its_reader_is_plain_text(register, tmp_path: Path) -> None:
    (tmp_path / "d.xml").write_text(ARTICLE)
    assert read(tmp_path / "d.xml") == ["A\n\nHello\n"]
    register()
    assert read(tmp_path / "d.xml") == [ARTICLE]
    assert "1 XML" in str(error_of(lambda: inputs.find_inputs(TextInputs(input=[str(tmp_path)]))))
    assert dumps.but_for_dumps("XML") == "XML"


def test_another_package_s_dumps(register, tmp_path: Path) -> None:
    register(zoo=f"{__name__}:ZOO")
    (tmp_path / "d.txt").write_text("<zoo>\nlion;\nape;\n")
    assert read(tmp_path / "d.txt") == ["lion", "ape"]
    assert inputs.find_inputs(TextInputs(input=[str(tmp_path / "d.txt")])).describe() == "1 of zoo dumps"
    assert dumps.but_for_dumps("XML") == "XML other than zoo dumps"


def test_splitters(register) -> None:
    register(rules=f"{__name__}:by_word")
    assert build_splitter("rules", "english", False)("Two words") == ["Two", "words"]
    message = error_of(lambda: build_splitter("punkt", "english", False), UNAVAILABLE)
    assert "--split-sentences: there is no splitter 'punkt'" in message
