"""Cut the inputs into pieces of about a megabyte, and read the documents in them.

Where pieces begin depends on the input alone, so that an interrupted run continues at a piece and
several machines can share them. A piece holds parts, each of which says what it is and reads
itself: a range of a file or of a table, which the worker opens, files that it reads as a whole, and
what came out of a stream, which can only be read in order: bytes, or documents.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import BinaryIO, TypeVar

from meshwright.config.text_inputs import TextInputs
from meshwright.data.text import (
    archives,
    charsets,
    containers,
    detect,
    folders,
    formats,
    hub_sets,
    limits,
    rows,
    tables,
)
from meshwright.data.text.containers import DAMAGES, DamagedInput
from meshwright.data.text.detect import Detected, Origin
from meshwright.data.text.divide import Slice, cut_stream, read_range, whole
from meshwright.data.text.folders import NOT_CHOSEN
from meshwright.data.text.inputs import Input, name_filter, open_source
from meshwright.data.text.records import (
    EMPTY,
    ReadOptions,
    Record,
    Rejected,
    TextPlace,
    cut_short,
    options_of,
    shown,
)
from meshwright.data.text.rows import Row


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
    is_named: bool

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
            return iter([Rejected("damaged file", TextPlace(self.path), str(error))])
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
                    # Reading all of it is many times as fast as reading up to a limit.
                    content = file.read()
                    if containers.kind_of_bytes(content) not in containers.STREAMS:
                        return content
                    file.seek(0)
                return containers.unpacked(file).read(limits.LONGEST + 1)
        except OSError as error:
            raise folders.interrupted(f"{shown(self.path)} cannot be read", error) from None


def read_file(content: Slice, reader: str, options: ReadOptions) -> Iterator[Record]:
    """Yield the documents of a whole file, which is rejected if there are none."""
    is_empty = True
    for record in formats.find(reader, options.separator).read(content, options):
        is_empty = False
        yield record
    if is_empty and reader != formats.JSONL:
        yield Rejected(EMPTY, TextPlace(content.path), is_error=False)


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
        values = tables.rows(self.path, self.kind, self.start, self.begin, self.end, options.keys)
        number = self.begin
        try:
            for record in rows.read_rows(values, options, self.path, self.begin):
                yield record
                number += 1
        except DamagedInput as error:
            yield Rejected("damaged table", TextPlace(self.path, number + 1, "row"), str(error))


# The parts of streams, which hold what was read.


@dataclass(frozen=True)
class StreamBlock(Part):
    """Whole documents of a stream, or of a member of an archive, in bytes."""

    documents: Slice
    reader: str
    is_whole: bool = False  # a file, which is rejected if it has no document

    @property
    def path(self) -> str:  # type: ignore[override]
        return self.documents.path

    @property
    def size(self) -> int:  # type: ignore[override]
        return len(self.documents.data)

    @property
    def weight(self) -> int:
        """The bytes, which bound the memory."""
        return self.size

    @property
    def before(self) -> int:
        """The lines that precede it."""
        return self.documents.line

    def read(self, options: ReadOptions) -> Iterator[Record]:
        if self.is_whole:
            return read_file(self.documents, self.reader, options)
        return formats.find(self.reader, options.separator).read(self.documents, options)


@dataclass(frozen=True)
class Rows(Part):
    """Rows of a table that can only be read in order, with the number of those before."""

    size = 0
    path: str
    before: int
    rows: tuple[Row, ...]

    @property
    def weight(self) -> int:
        """The characters, which bound the memory."""
        return sum(map(_characters, self.rows))

    def read(self, options: ReadOptions) -> Iterator[Record]:
        return rows.read_rows(self.rows, options, self.path, self.before)


@dataclass(frozen=True)
class UnreadPart(Part):
    """Why nothing more, or no member of an archive, is read."""

    size = weight = before = 0
    path: str
    rejected: Rejected

    def read(self, options: ReadOptions) -> Iterator[Record]:
        return iter([self.rejected])


StreamPart = StreamBlock | Rows | UnreadPart


# Cutting.


def cut_inputs(
    inputs: list[Input], given: TextInputs, shard: int = 0, shards: int = 1
) -> Iterator[Piece]:
    """Yield the pieces of one shard, a range of the bytes, in the order of the documents."""
    total = sum(max(source.bytes, 1) for source in inputs)
    base = 0
    for number, source in enumerate(inputs):
        if source.is_stream:
            # It is read in order, so it belongs to one shard.
            if base * shards // total == shard:
                yield from _stream_pieces(number, source, given)
        else:
            at = 0
            for piece in cut_input(number, source, given):
                if (base + at) * shards // total == shard:
                    yield piece
                at = piece.done
        base += max(source.bytes, 1)


def cut_input(number: int, source: Input, given: TextInputs) -> Iterator[Piece]:
    """Yield the pieces of anything but a stream."""
    if source.files:
        yield from _pieces_of_small_files(number, source)
        return
    assert source.found
    reader = source.found.reader
    path = source.path

    # The rows of a table; its damage comes after the intact ones.
    if reader in detect.TABLES:
        try:
            spans = tables.spans(path, reader, source.bytes, limits.PIECE, given.json_keys)
            for begin, end, done, start in spans:
                table_rows = TableRows(path, reader, begin, end, start)
                yield Piece(number, path, (table_rows,), begin, done)
        except DamagedInput as error:
            unread = UnreadPart(path, cut_short(path, error))
            yield Piece(number, path, (unread,), done=source.bytes)
        return

    # The bytes of a file, cut anywhere: a worker finds the documents that begin in a range.
    for begin in range(0, source.bytes, limits.PIECE):
        end = min(begin + limits.PIECE, source.bytes)
        part = FileRange(path, reader, begin, end, source.folder is None)
        yield Piece(number, path, (part,), begin, end)


def _pieces_of_small_files(number: int, source: Input) -> Iterator[Piece]:
    files = (WholeFile(path, max(size, 1), source.origin) for path, size, _ in source.files)
    begin = 0
    for parts in gathered(files, lambda file: file.size, limits.MOST_FILES):
        end = begin + sum(file.size for file in parts)
        yield Piece(number, source.path, parts, begin, end)
        begin = end


T = TypeVar("T")


def gathered(items: Iterable[T], size_of: Callable[[T], int], most: int) -> Iterator[tuple[T, ...]]:
    """Yield what makes about a piece each; raise damage after the intact ones."""
    some = list[T]()
    size = 0
    try:
        for item in items:
            some.append(item)
            size += size_of(item)
            if size >= limits.PIECE or len(some) == most:
                yield tuple(some)
                some = []
                size = 0
    except DAMAGES:
        if some:
            yield tuple(some)
        raise
    if some:
        yield tuple(some)


def _stream_pieces(number: int, source: Input, given: TextInputs) -> Iterator[Piece]:
    """Yield the pieces of a stream, and at the end why its rest cannot be read."""
    path = source.path
    if source.found and source.found.reader == detect.HUB:
        hub_rows = hub_sets.read_hub_set(path, source.revision, options_of(given).keys)
        for part in _batches(path, hub_rows):
            yield Piece(number, path, (part,), part.before)
        return
    file = open_source(source)
    try:
        for parts in _stream_parts(file, source, given):
            yield Piece(number, path, parts, parts[0].before, containers.position(file))
    except DAMAGES as error:
        yield Piece(number, path, (UnreadPart(path, cut_short(path, error)),))
    except OSError as error:
        raise folders.interrupted(f"{shown(path)} cannot be read to its end", error) from None
    finally:
        if path != "-":  # the standard input belongs to the caller
            file.close()


def _stream_parts(
    file: BinaryIO, source: Input, given: TextInputs
) -> Iterator[tuple[StreamPart, ...]]:
    """Yield the parts of each piece of a stream."""
    path = source.path
    options = options_of(given)
    found = source.found
    stream = containers.buffered(containers.chunks(file))

    # A pipe, or an object that was not opened yet, is only known now.
    if found is None:
        start, stream = detect.look_into(stream)
        looked = detect.detect(path, start, given, source.origin, is_pipe=not source.bytes)
        if isinstance(looked, Rejected):
            yield (UnreadPart(path, looked),)
            return
        found = looked
    elif found.is_packed:
        stream = containers.unpacked(stream)

    # Archives.
    if found.reader in (detect.TAR, detect.ZIP):
        if found.reader == detect.TAR:
            members = archives.members(stream)
        else:
            file.seek(0)
            members = archives.zip_members(file)
        inside = _member_parts(path, members, given)
        yield from gathered(inside, lambda part: part.weight, limits.MOST_FILES)
        return

    # Rows, which are read here, and text.
    parts: Iterator[StreamPart]
    if found.reader == detect.SQLITE:
        parts = _batches(path, rows.read_sqlite(path, given.table, options.keys))
    else:
        text = Slice(path, is_named=source.folder is None)
        parts = _parts_of_text(text, path, stream, found, options)
    for part in parts:
        yield (part,)


def _parts_of_text(
    text: Slice, name: str, stream: BinaryIO, found: Detected, options: ReadOptions
) -> Iterator[StreamPart]:
    """Yield CSV or text, about a piece at a time; a page at once."""
    if found.codec:
        stream = containers.buffered(charsets.transcode(containers.chunks(stream), found.codec))
    if found.reader == detect.CSV:
        yield from _batches(text.path, rows.read_csv(stream, text.path, name, options.keys))
        return
    text = text._replace(codec=found.codec)
    if found.reader == formats.PAGE:
        page = stream.read(limits.LONGEST + 1)
        is_long = len(page) > limits.LONGEST
        content = b"" if is_long else page
        text = text._replace(data=content, stop=len(content), lacking=is_long)
        yield StreamBlock(text, found.reader)
        return

    # Text begins behind a byte order mark.
    if containers.peek(stream).startswith(charsets.BOM):
        text = text._replace(byte=len(charsets.BOM))
        stream.read(text.byte)
    division = formats.find(found.reader, options.separator).division
    for documents in cut_stream(containers.chunks(stream), limits.PIECE, division, text):
        yield StreamBlock(documents, found.reader)


def _batches(path: str, some: Iterable[Row]) -> Iterator[Rows]:
    """Yield rows, about a piece at a time."""
    before = 0
    for batch in gathered(some, _characters, limits.MOST_ROWS):
        yield Rows(path, before, batch)
        before += len(batch)


def _characters(row: Row) -> int:
    if isinstance(row, Rejected):
        return 0
    return sum(len(value) for value in row if isinstance(value, str))


def _member_parts(
    path: str, members: Iterator[archives.Member], given: TextInputs
) -> Iterator[StreamPart]:
    """Yield the parts of each member of an archive.

    Damage of a member is reported once the next one begins: otherwise the archive is cut short.
    """
    damage: list[UnreadPart] = []
    for name, stream in members:
        inside = f"{path}:{name}"
        if not name_filter(given).chooses(name):
            yield UnreadPart(inside, Rejected(NOT_CHOSEN, TextPlace(inside), is_error=False))
            continue
        try:
            if isinstance(stream, Exception):
                raise stream
            yield from damage
            damage = []
            yield from _parts_of_member(inside, name, stream, given)
        except DAMAGES as error:
            damage = [UnreadPart(inside, Rejected("damaged member", TextPlace(inside), str(error)))]
    yield from damage


def _parts_of_member(
    inside: str, name: str, stream: BinaryIO, given: TextInputs
) -> Iterator[StreamPart]:
    found = detect.detect_member(name, containers.peek(stream), given)
    if isinstance(found, Rejected):
        yield UnreadPart(inside, found._replace(place=TextPlace(inside)))
        return
    text = Slice(inside, is_named=False)
    parts = _parts_of_text(text, name, stream, found, options_of(given))

    # A text without a document is reported, by its first part.
    if found.reader in (detect.CSV, formats.JSONL):
        yield from parts
        return
    first = next(parts, None) or StreamBlock(text, found.reader)
    assert isinstance(first, StreamBlock)
    yield replace(first, is_whole=not first.documents.lacking)
    yield from parts
