"""Pieces of the input, of about a megabyte each: what one holds, and the units read from it.

A piece of a plain file or of a table is a range, which the worker reads; a piece of a stream, which
can only be read in order, holds the bytes.
"""

from __future__ import annotations

import functools
import mmap
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from meshwright.data.text import containers, plain, tables
from meshwright.data.text.encodings import BOM
from meshwright.data.text.folders import shown
from meshwright.data.text.inputs import JSON_NAME, is_json_lines
from meshwright.data.text.plain import HTML_NAME, JSON_LINES, PIECE, Span
from meshwright.data.text.records import NOT_UTF8, Bad, Mended, Prose, Reading, Unit, check_row, parse_line
from meshwright.data.text.rows import CSV_NAME

JSON_ARRAY = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*\{")  # how a JSON array of objects begins

Text = tuple[str, bytes | Bad]  # a name, and what is in it or why nothing is


@dataclass(frozen=True)
class Piece(ABC):
    number: int  # of its input
    path: str
    begin: int = 0  # of a file in bytes, of a table in rows; of a stream or the first of texts, lines ahead of it
    behind: int = 0  # bytes of the input that are done with it
    end: int = 0  # of a file or table, where the next piece begins
    how: Reading = Reading()

    @property
    def size(self) -> int:
        """The bytes of what is read; 0 if only the texts in it count."""
        return self.end - self.begin

    @property
    def is_archive(self) -> bool:
        """Whether it holds members of an archive."""
        return False

    @abstractmethod
    def units(self, keys: list[str]) -> Iterator[Unit]:
        """Yield the texts under the keys of each line, row or text, or what is wrong."""

    @abstractmethod
    def place(self, unit: int, keys: list[str]) -> str:
        """Name the place of a unit, by its number in the piece."""


@dataclass(frozen=True)
class LinesAt(Piece):
    """JSON lines that begin within a range of a file's bytes."""

    def units(self, keys: list[str]) -> Iterator[Unit]:
        span, _ = plain.read_span(self.path, self.begin, self.end, JSON_LINES)
        yield from line_units(span, keys, not self.begin, self.how.on_error)

    def place(self, unit: int, keys: list[str]) -> str:
        _, start = plain.read_span(self.path, self.begin, self.end, JSON_LINES)
        return f"{shown(self.path)}:{count_lines(self.path, start) + unit + 1}"


@dataclass(frozen=True)
class LinesHere(Piece):
    """JSON lines of a stream, or rows of a table that are written so."""

    content: bytes = b""
    is_table: bool = False

    @property
    def size(self) -> int:
        return len(self.content)

    def units(self, keys: list[str]) -> Iterator[Unit]:
        for unit in line_units((self.content, 0, len(self.content)), keys, not self.begin, self.how.on_error):
            if self.is_table and isinstance(unit, Bad) and unit.kind == NOT_UTF8:
                unit = Bad(NOT_UTF8, unit.detail.partition(" at ")[0])  # the column is not the table's
            yield unit

    def place(self, unit: int, keys: list[str]) -> str:
        row = self.begin + unit + 1
        return f"{shown(self.path)}: row {row}" if self.is_table else f"{shown(self.path)}:{row}"


@dataclass(frozen=True)
class Rows(Piece):
    """Rows [begin, end) of a table."""

    kind: str = "parquet"
    start: tables.Start = (0, 0)

    @property
    def size(self) -> int:
        return 0

    def units(self, keys: list[str]) -> Iterator[Unit]:
        try:
            for row in tables.rows(self.path, self.kind, self.start, self.begin, self.end, keys):
                yield check_row(row, keys, self.how.on_error)
        except containers.DamagedInput as error:
            yield Bad("damaged table", str(error))

    def place(self, unit: int, keys: list[str]) -> str:
        return f"{shown(self.path)}: row {self.begin + unit + 1}"


@dataclass(frozen=True)
class Broken(Piece):
    """The end of an input that is cut short or damaged, after all that can be read of it."""

    why: str = ""

    def __str__(self) -> str:
        return f"{shown(self.path)} is cut short or damaged ({self.why})"

    def units(self, keys: list[str]) -> Iterator[Unit]:
        return iter(())

    def place(self, unit: int, keys: list[str]) -> str:
        return f"{shown(self.path)} ({self.why})"


Where = Callable[[], str]  # names the place of a unit, if somebody asks: lines may have to be counted


@dataclass(frozen=True)
class TextPiece(Piece):
    """Texts, each with a place of its own."""

    is_named: bool = True  # what is no text is an error; in folders and archives it is passed over

    @abstractmethod
    def placed_units(self, keys: list[str]) -> Iterator[tuple[Where, Unit]]: ...

    def units(self, keys: list[str]) -> Iterator[Unit]:
        for where, unit in self.placed_units(keys):
            yield unit._replace(place=where()) if isinstance(unit, Bad) and unit.is_passed else unit

    def place(self, unit: int, keys: list[str]) -> str:
        places = (where for where, _ in self.placed_units(keys))
        return next(islice(places, unit, None), lambda: shown(self.path))()

    def documents(self, content: bytes, name: str, keys: list[str], before: int = 0) -> Iterator[tuple[int, Unit]]:
        """Yield the documents in a text, and where they begin in it."""
        for begin, unit in plain.documents(content, name, self.how, before):
            if isinstance(unit, Bad):
                yield begin, unit._replace(is_passed=unit.is_passed and not self.is_named)
            else:
                texts = Prose(unit * len(keys)) if unit else unit
                yield begin, Mended(texts, unit.lines, unit.of) if texts and isinstance(unit, Mended) else texts

    def placed_lines(
        self, content: bytes, place: str, keys: list[str], is_first: bool, before: int = 0
    ) -> Iterator[tuple[Where, Unit]]:
        """Yield lines of JSON; `before` lines precede them in their file."""
        lines = line_units((content, 0, len(content)), keys, is_first, self.how.on_error)
        form = "{}: row {}" if CSV_NAME.search(place) else "{}:{}"
        for line, unit in enumerate(lines, before + 1):
            yield functools.partial(form.format, place, line), unit

    def file_units(self, content: bytes | Bad, name: str, place: str, keys: list[str]) -> Iterator[tuple[Where, Unit]]:
        """Yield the documents of a file, or why there is none."""
        if isinstance(content, Bad):
            yield lambda: place, content
            return
        is_empty = True
        text = content if HTML_NAME.search(name) else content.removeprefix(BOM)
        for begin, unit in self.documents(text, name, keys, len(content) - len(text)):
            is_empty = False
            yield place_in(place, text, begin, unit), unit
        if is_empty:
            yield lambda: place, Bad("empty", is_passed=True)


@dataclass(frozen=True)
class TextAt(TextPiece):
    """Documents that begin within a range of a text file's bytes."""

    def placed_units(self, keys: list[str]) -> Iterator[tuple[Where, Unit]]:
        (data, first, stop), start = plain.read_span(self.path, self.begin, self.end, self.how.separator)
        for begin, unit in self.documents(data[first:stop], self.path, keys, start):
            yield functools.partial(self.line_at, start + begin), unit

    def line_at(self, byte: int) -> str:
        return f"{shown(self.path)}:{count_lines(self.path, byte) + 1}"


@dataclass(frozen=True)
class SmallFiles(TextPiece):
    """Many small files of text; in a folder, those that look like JSON lines are read as such."""

    paths: tuple[str, ...] = ()

    def placed_units(self, keys: list[str]) -> Iterator[tuple[Where, Unit]]:
        for path in self.paths:
            place, content = shown(path), plain.read_text_file(path, self.how.encoding)
            if isinstance(content, bytes) and not self.is_named and is_json_lines(content[: containers.START], keys):
                yield from self.placed_lines(content.removeprefix(BOM), place, keys, True)
            else:
                yield from self.file_units(content, path, place, keys)


@dataclass(frozen=True)
class TextsHere(TextPiece):
    """Members of an archive, or documents of a stream of text, without a name."""

    texts: tuple[Text, ...] = ()

    @property
    def size(self) -> int:
        return sum(len(content) for _, content in self.texts if isinstance(content, bytes))

    @property
    def is_archive(self) -> bool:
        return any(name for name, _ in self.texts)

    def placed_units(self, keys: list[str]) -> Iterator[tuple[Where, Unit]]:
        before = self.begin
        for number, (name, content) in enumerate(self.texts):
            place = shown(f"{self.path}:{name}" if name else self.path)
            if isinstance(content, bytes) and (JSON_NAME.search(name) or CSV_NAME.search(name)):
                yield from self.placed_lines(content, place, keys, bool(number) or not self.begin, before)
            elif isinstance(content, bytes) and (not name or before):  # a part of a text
                for begin, unit in self.documents(content, name or self.path, keys):
                    yield place_in(place, content, begin, unit, before), unit
            else:
                yield from self.file_units(content, name, place, keys)
            before = 0


def is_broken(unit: Unit) -> bool:
    return isinstance(unit, Bad) and unit.kind == NOT_UTF8


def place_in(name: str, content: bytes, begin: int, unit: Unit, before: int = 0) -> Where:
    """Name a text, with the line if bytes of it are bad; `before` lines precede the content."""

    def place() -> str:
        if not is_broken(unit) and not isinstance(unit, Mended):
            return name
        line = before + content.count(b"\n", 0, begin) + 1
        return f"{name}:{line}"

    return place


def line_units(lines: Span, keys: list[str], is_first: bool, on_error: str) -> Iterator[Unit]:
    is_array = is_first and JSON_ARRAY.match(*lines) is not None
    for line in lines_of(*lines):
        unit = parse_line(line, keys)
        if on_error == "replace" and is_broken(unit):
            unit = parse_line(memoryview(bytes(line).decode("utf-8", "replace").encode()), keys)
            unit = Mended(unit) if isinstance(unit, list) else unit
        if is_array and isinstance(unit, Bad):
            unit = Bad("part of a JSON array", "one object a line is needed: jq -c '.[]' writes an array so")
            is_array = False
        yield unit


def lines_of(buffer: bytes | mmap.mmap, first: int, stop: int) -> Iterator[memoryview]:
    view = memoryview(buffer)
    while first < stop:
        end = buffer.find(b"\n", first, stop)
        end = stop if end < 0 else end
        yield view[first:end]
        first = end + 1


def count_lines(path: str, end: int) -> int:
    """Return how many lines end before this byte."""
    with open(path, "rb") as file:
        return sum(file.read(min(PIECE, end - at)).count(b"\n") for at in range(0, end, PIECE))
