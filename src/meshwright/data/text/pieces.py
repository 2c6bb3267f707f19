"""Cut the inputs into pieces of about a megabyte, and read the documents in them.

Where pieces begin depends on the input alone, so that an interrupted run continues at a piece and
several machines can share them. A piece holds parts, each of which says what it is and reads
itself: a range of a file or of a table, which the worker opens, files that it reads as a whole, and
what came out of a stream, which can only be read in order: bytes, or documents.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

from meshwright.base.errors import IO, UserError
from meshwright.config.text_inputs import TextInputs
from meshwright.data.text import archives, charsets, containers, detect, formats, hub_sets, limits, rows, tables
from meshwright.data.text.containers import DAMAGES, DamagedInput
from meshwright.data.text.detect import Origin
from meshwright.data.text.divide import Cut, Slice, cut_stream, read_range, whole
from meshwright.data.text.folders import NOT_CHOSEN
from meshwright.data.text.inputs import Input, name_filter, open_source
from meshwright.data.text.records import (
    EMPTY,
    Document,
    Place,
    ReadOptions,
    Record,
    Rejected,
    cut_short,
    options_of,
    shown,
)


class Part(ABC):
    """What is read in one way, and from one file."""

    path: str
    # Bytes of the input; 0 if only those of the texts in it count.
    size: int

    @abstractmethod
    def read(self, options: ReadOptions) -> Iterator[Record]:
        """Yield the documents, and what is none."""


@dataclass(frozen=True)
class Piece:
    """A piece of the input of this `number`."""

    number: int
    path: str
    parts: tuple[Part, ...]
    begin: int = 0  # in a file in bytes, in a table in rows, in a stream in lines; 0 for the first
    done: int = 0  # bytes of the input that are done with it

    def read(self, options: ReadOptions) -> Iterator[Record]:
        for part in self.parts:
            yield from part.read(options)


# The parts of files, which a worker opens.


@dataclass(frozen=True)
class FileRange(Part):
    """Documents that begin within a range of a file's bytes."""

    path: str
    reader: str
    begin: int
    end: int
    is_named: bool = True

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.end - self.begin

    def slice(self, options: ReadOptions) -> Slice:
        division = formats.find(self.reader, options.separator).division
        return read_range(self.path, self.begin, self.end, division, self.is_named)

    def read(self, options: ReadOptions) -> Iterator[Record]:
        return formats.find(self.reader, options.separator).read(self.slice(options), options)


@dataclass(frozen=True)
class WholeFile(Part):
    """A small text, or a page of any size; what it is is decided when it is opened, once."""

    path: str
    size: int
    origin: Origin

    def read(self, options: ReadOptions) -> Iterator[Record]:
        is_named = self.origin == "named"
        try:
            content = self._content()
        except DAMAGES as error:
            return iter([Rejected("damaged file", Place(self.path), str(error))])
        found = detect.detect_text(self.path, content, options.keys, options.encoding, self.origin)
        if len(content) > limits.LONGEST:
            text_format = formats.find(found.reader, options.separator)
            return iter([text_format.too_long(whole(self.path, b"", is_named))])
        content = charsets.to_utf8(content, found.codec)
        return read_file(whole(self.path, content, is_named, found.codec), found.reader, options)

    def _content(self) -> bytes:
        """Return the bytes, unpacked, and few more than are allowed."""
        try:
            with open(self.path, "rb") as file:
                if os.fstat(file.fileno()).st_size <= limits.LONGEST:
                    content = file.read()  # many times as fast as reading up to a limit
                    if containers.kind_of_bytes(content) not in containers.STREAMS:
                        return content
                    file.seek(0)
                return containers.unpacked(file).read(limits.LONGEST + 1)
        except OSError as error:
            why = "it has vanished" if isinstance(error, FileNotFoundError) else error.strerror or error
            raise UserError(f"{shown(self.path)} cannot be read: {why}; start again", IO) from None


def read_file(content: Slice, reader: str, options: ReadOptions) -> Iterator[Record]:
    """Yield the documents of a whole file, which is rejected if there are none."""
    is_empty = True
    for record in formats.find(reader, options.separator).read(content, options):
        is_empty = False
        yield record
    if is_empty and reader != formats.JSONL:
        yield Rejected(EMPTY, Place(content.path), is_error=False)


@dataclass(frozen=True)
class TableRows(Part):
    """Rows [begin, end) of a table."""

    size = 0
    path: str
    kind: str
    begin: int
    end: int
    start: tables.Start

    def read(self, options: ReadOptions) -> Iterator[Record]:
        number = self.begin
        try:
            for row in tables.rows(self.path, self.kind, self.start, self.begin, self.end, options.keys):
                number += 1
                yield rows.read_row(row, options, Place(self.path, number, "row"))
        except DamagedInput as error:
            yield Rejected("damaged table", Place(self.path, number + 1, "row"), str(error))


# The parts of streams, which hold what was read.


@dataclass(frozen=True)
class Block(Part):
    """Whole documents of a stream, or of a member of an archive, in bytes."""

    path: str
    reader: str
    cut: Cut
    is_named: bool = True
    is_whole: bool = False  # a file, which is rejected if it has no document
    codec: str = ""

    @property
    def size(self) -> int:  # type: ignore[override]
        return len(self.cut.content)

    def read(self, options: ReadOptions) -> Iterator[Record]:
        content, line, byte, lacking = self.cut
        documents = Slice(
            self.path,
            content,
            0,
            len(content),
            line=line,
            byte=byte,
            lacking=lacking,
            is_named=self.is_named,
            codec=self.codec,
        )
        if self.is_whole:
            return read_file(documents, self.reader, options)
        return formats.find(self.reader, options.separator).read(documents, options)


@dataclass(frozen=True)
class Records(Part):
    """Documents that have been read, and what is none."""

    size = 0
    path: str
    records: tuple[Record, ...]

    def read(self, options: ReadOptions) -> Iterator[Record]:
        return iter(self.records)

    @property
    def characters(self) -> int:
        return sum(len(text) for record in self.records if isinstance(record, Document) for text in record.texts)


# Cutting.


def cut_inputs(inputs: list[Input], given: TextInputs, rank: int = 0, size: int = 1) -> Iterator[Piece]:
    """Yield one rank's pieces, a range of the bytes, in the order of the documents."""
    total, base = sum(max(source.bytes, 1) for source in inputs), 0
    for number, source in enumerate(inputs):
        if source.is_stream:
            # Only one rank can read it.
            if base * size // total == rank:
                yield from _stream_pieces(number, source, given)
        else:
            at = 0
            for piece in cut_input(number, source, given):
                if (base + at) * size // total == rank:
                    yield piece
                at = piece.done
        base += max(source.bytes, 1)


def cut_input(number: int, source: Input, given: TextInputs) -> Iterator[Piece]:
    """Yield the pieces of anything but a stream."""
    if source.files:
        yield from _pieces_of_small_files(number, source)
        return
    assert source.found
    reader, path = source.found.reader, source.path
    if reader in detect.TABLES:
        try:
            spans = tables.spans(path, reader, source.bytes, limits.PIECE, given.json_keys)
            for begin, end, done, start in spans:
                yield Piece(number, path, (TableRows(path, reader, begin, end, start),), begin, done)
        except DamagedInput as error:
            yield Piece(number, path, (Records(path, (cut_short(path, error),)),), done=source.bytes)
        return
    for begin in range(0, source.bytes, limits.PIECE):
        end = min(begin + limits.PIECE, source.bytes)
        part = FileRange(path, reader, begin, end, source.folder is None)
        yield Piece(number, path, (part,), begin, end)


def _pieces_of_small_files(number: int, source: Input) -> Iterator[Piece]:
    begin = end = 0
    parts: list[Part] = []
    for path, size, _ in source.files:
        parts.append(WholeFile(path, max(size, 1), source.origin))
        end += max(size, 1)
        if end - begin >= limits.PIECE or len(parts) == limits.MOST_FILES:
            yield Piece(number, source.path, tuple(parts), begin, end)
            begin, parts = end, []
    if parts:
        yield Piece(number, source.path, tuple(parts), begin, end)


def _stream_pieces(number: int, source: Input, given: TextInputs) -> Iterator[Piece]:
    """Yield the pieces of a stream, and at the end why its rest cannot be read."""
    if source.found and source.found.reader == detect.HUB:
        for records in _batches(hub_sets.read_hub_set(source.path, source.revision, options_of(given))):
            yield Piece(number, source.path, (Records(source.path, records),), _rows_before(records))
        return
    file = open_source(source)
    try:
        for parts, begin in _stream_parts(file, source, given):
            yield Piece(number, source.path, parts, begin, containers.position(file))
    except DAMAGES as error:
        yield Piece(number, source.path, (Records(source.path, (cut_short(source.path, error),)),))
    except OSError as error:
        raise UserError(f"{source.path} cannot be read to its end: {error.strerror or error}", IO) from None
    finally:
        if source.path != "-":
            file.close()


def _stream_parts(file: BinaryIO, source: Input, given: TextInputs) -> Iterator[tuple[tuple[Part, ...], int]]:
    """Yield the parts of each piece of a stream, and the lines or rows before them."""
    path, options, found = source.path, options_of(given), source.found
    stream = containers.buffered(containers.chunks(file))

    # A pipe, or an object that was not opened yet, is only known now.
    if found is None:
        start, stream = detect.look_into(stream)
        looked = detect.detect(path, start, given, source.origin, is_pipe=not source.bytes)
        if isinstance(looked, Rejected):
            yield (Records(path, (looked,)),), 0
            return
        found = looked
    elif found.is_packed:
        stream = containers.unpacked(stream)

    # Archives.
    if found.reader == detect.TAR:
        yield from _archive_parts(path, archives.members(stream), given)
        return
    if found.reader == detect.ZIP:
        file.seek(0)
        yield from _archive_parts(path, archives.zip_members(file), given)
        return

    # Rows, which are read here.
    stream = decoded(stream, found.codec)
    if found.reader in (detect.CSV, detect.SQLITE):
        if found.reader == detect.CSV:
            records_of = rows.read_csv(stream, path, path, options)
        else:
            records_of = rows.read_sqlite(path, given.table, options)
        for records in _batches(records_of):
            yield (Records(path, records),), _rows_before(records)
        return

    # Text.
    make = partial(Block, path, found.reader, is_named=source.folder is None, codec=found.codec)
    for cut in _cuts(stream, found.reader, options):
        yield (make(cut),), cut.line


def decoded(stream: BinaryIO, codec: str) -> BinaryIO:
    """Return a stream in UTF-8."""
    return containers.buffered(charsets.transcode(containers.chunks(stream), codec)) if codec else stream


def _cuts(stream: BinaryIO, reader: str, options: ReadOptions) -> Iterator[Cut]:
    """Yield the documents of a text, about a piece at a time; a page at once."""
    if reader == formats.PAGE:
        page = stream.read(limits.LONGEST + 1)
        yield Cut(page) if len(page) <= limits.LONGEST else Cut(b"", lacking=True)
        return
    mark = len(charsets.BOM) * containers.peek(stream).startswith(charsets.BOM)
    stream.read(mark)
    division = formats.find(reader, options.separator).division
    yield from cut_stream(containers.chunks(stream), limits.PIECE, division, byte=mark)


def _batches(records: Iterable[Record]) -> Iterator[tuple[Record, ...]]:
    """Yield rows, about a piece at a time; raise damage after the intact ones."""
    batch, characters = list[Record](), 0
    try:
        for record in records:
            batch.append(record)
            if isinstance(record, Document):
                characters += sum(map(len, record.texts))
            if characters >= limits.PIECE or len(batch) == limits.MOST_ROWS:
                yield tuple(batch)
                batch, characters = [], 0
    except DAMAGES:
        if batch:
            yield tuple(batch)
        raise
    if batch:
        yield tuple(batch)


def _rows_before(records: tuple[Record, ...]) -> int:
    return records[0].place.number - 1


def _archive_parts(
    path: str, members: Iterator[archives.Member], given: TextInputs
) -> Iterator[tuple[tuple[Part, ...], int]]:
    """Yield the members of an archive, about a piece at a time."""
    parts, size = list[Part](), 0
    try:
        for part in _member_parts(path, members, given):
            parts.append(part)
            size += part.characters if isinstance(part, Records) else part.size
            if size >= limits.PIECE or len(parts) == limits.MOST_FILES:
                yield tuple(parts), _lines_before(parts[0])
                parts, size = [], 0
    except DAMAGES:
        if parts:
            yield tuple(parts), _lines_before(parts[0])
        raise
    if parts:
        yield tuple(parts), _lines_before(parts[0])


def _lines_before(part: Part) -> int:
    return part.cut.line if isinstance(part, Block) else 0


def _member_parts(path: str, members: Iterator[archives.Member], given: TextInputs) -> Iterator[Part]:
    """Yield the parts of each member.

    Damage of a member is reported once the next one begins: otherwise the archive is cut short.
    """
    damage: list[Part] = []
    for name, stream in members:
        inside = f"{path}:{name}"
        if not name_filter(given).chooses(name):
            yield Records(inside, (Rejected(NOT_CHOSEN, Place(inside), is_error=False),))
            continue
        try:
            if isinstance(stream, Exception):
                raise stream
            yield from damage
            damage = []
            yield from _parts_of_member(inside, name, stream, given)
        except DAMAGES as error:
            damage = [Records(inside, (Rejected("damaged member", Place(inside), str(error)),))]
    yield from damage


def _parts_of_member(inside: str, name: str, stream: BinaryIO, given: TextInputs) -> Iterator[Part]:
    options = options_of(given)
    found = detect.detect_member(name, containers.peek(stream), given)
    if isinstance(found, Rejected):
        yield Records(inside, (found._replace(place=Place(inside)),))
        return
    stream = decoded(stream, found.codec)
    if found.reader == detect.CSV:
        for records in _batches(rows.read_csv(stream, inside, name, options)):
            yield Records(inside, records)
        return
    make = partial(Block, inside, found.reader, is_named=False, codec=found.codec)
    is_text = found.reader != formats.JSONL
    cuts = _cuts(stream, found.reader, options)
    first = next(cuts, Cut(b""))
    yield make(first, is_whole=is_text and not first.lacking)
    yield from map(make, cuts)
