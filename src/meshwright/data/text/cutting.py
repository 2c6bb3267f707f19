"""Cut texts, JSON lines, tables and archives into pieces of about a megabyte.

Where pieces begin depends on the input alone, so that an interrupted run continues at a piece and
several machines can share them.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator
from typing import BinaryIO

from meshwright.base.errors import IO, UserError, bad_data
from meshwright.config.text_inputs import TextInputs
from meshwright.data.text import containers, dumps, encodings, hub_sets, plain, records, rows, tables
from meshwright.data.text.dumps import Dump
from meshwright.data.text.encodings import BOM
from meshwright.data.text.folders import NOT_CHOSEN, PDF
from meshwright.data.text.inputs import (
    JSON_NAME,
    JSON_START,
    Input,
    Inputs,
    a_pdf,
    find_inputs,
    name_filter,
    open_source,
)
from meshwright.data.text.pieces import Broken, LinesAt, LinesHere, Piece, Rows, SmallFiles, Text, TextAt, TextsHere
from meshwright.data.text.plain import HTML_NAME, JSON_LINES, PIECE
from meshwright.data.text.records import TOO_LONG, Bad, Reading, advice

MOST_FILES = 1000  # in a piece
# How a JSON document of several lines begins, which files called .json mostly are.
SPREAD_JSON = re.compile(rb"(\xef\xbb\xbf)?\s*[\[{][ \t\r]*\n")


def cut_inputs(inputs: list[Input], given: TextInputs, rank: int = 0, size: int = 1) -> Iterator[Piece]:
    """Yield one rank's pieces, a range of the bytes, in the order of the documents."""
    total, base = sum(max(source.bytes, 1) for source in inputs), 0
    for number, source in enumerate(inputs):
        if not source.is_stream:
            at = 0
            for piece in cut_input(number, source, given):
                if (base + at) * size // total == rank:
                    yield piece
                at = piece.behind
        elif base * size // total == rank:
            yield from (cut_hub_set if source.kind == "hub" else cut_stream_of)(number, source, given)
        base += max(source.bytes, 1)


def reading(given: TextInputs, dump: Dump | None = None) -> Reading:
    return Reading(dump.separator if dump else given.document_separator, given.encoding, given.on_error)


def cut_input(number: int, source: Input, given: TextInputs) -> Iterator[Piece]:
    """Yield the pieces of anything but a stream."""
    how = reading(given, source.dump)
    if source.kind in ("lines", "text"):
        for begin in range(0, source.bytes, PIECE):
            end = min(begin + PIECE, source.bytes)
            if source.kind == "lines":
                yield LinesAt(number, source.path, begin, end, end, how)
            else:
                yield TextAt(number, source.path, begin, end, end, how, source.folder is None)
    elif source.kind == "small files":
        begin = end = 0
        paths: list[str] = []
        for left, (path, size, _) in zip(reversed(range(len(source.files))), source.files, strict=True):
            paths.append(path)
            end += max(size, 1)
            if end - begin >= PIECE or len(paths) == MOST_FILES or not left:
                yield SmallFiles(number, source.path, begin, end, end, how, source.folder is None, tuple(paths))
                begin, paths = end, []
    else:
        try:
            spans = tables.spans(source.path, source.kind, source.bytes, PIECE, given.json_keys)
            for begin, end, behind, start in spans:
                yield Rows(number, source.path, begin, behind, end, how, source.kind, start)
        except containers.DamagedInput as error:
            yield Broken(number, source.path, behind=source.bytes, why=str(error))


def cut_stream_of(number: int, source: Input, given: TextInputs) -> Iterator[Piece]:
    """Yield what can be read; after damage, a last piece says why."""
    path, how = source.path, reading(given)
    file = open_input(source)
    try:
        stream = containers.unpacked(containers.buffered(containers.chunks(file)))
        members = _archive(file, stream, source)
        if members is not None:
            for begin, texts in _joined_members(_chosen(members, given), given):
                at = containers.position(file)
                yield TextsHere(number, path, begin, at, 0, how, False, tuple(texts))
            return
        if source.folder is None and source.kind == "stream":
            _require_text(path, containers.peek(stream))
        stream = _as_utf8(path, stream, given)
        start = containers.peek(stream)
        begin, is_table = 0, source.kind in ("csv", "sqlite")
        if is_table or JSON_NAME.search(path) or JSON_START.match(start):
            if source.kind == "sqlite":
                lines_of = rows.sqlite_lines(path, given.table, list(given.json_keys))
            elif is_table:
                lines_of = rows.csv_lines(stream, path, start, list(given.json_keys))
            else:
                lines_of = _without_mark(stream)
            for lines in plain.cut_stream(lines_of, PIECE, JSON_LINES):
                at = containers.position(file)
                yield LinesHere(number, path, begin, at, how=how, content=lines, is_table=is_table)
                begin += lines.count(b"\n")
        else:
            how = reading(given, dumps.recognise(start))
            for part in _parts(path, stream, how.separator):
                at = containers.position(file)
                yield TextsHere(number, path, begin, at, 0, how, source.folder is None, (("", part),))
                begin += part.count(b"\n")
    except containers.DAMAGES as error:
        yield Broken(number, path, why=str(error) or type(error).__name__)
    except OSError as error:
        raise UserError(f"{path} cannot be read to its end: {error.strerror or error}", IO) from None
    finally:
        if path != "-":
            file.close()


def cut_hub_set(number: int, source: Input, given: TextInputs) -> Iterator[Piece]:
    begin, rows_of = 0, hub_sets.hub_lines(source.path, source.revision, list(given.json_keys))
    for lines in plain.cut_stream(rows_of, PIECE, JSON_LINES):
        yield LinesHere(number, source.path, begin, how=reading(given), content=lines, is_table=True)
        begin += lines.count(b"\n")


Member = tuple[str, BinaryIO | Exception | Bad]


def _archive(file: BinaryIO, stream: BinaryIO, source: Input) -> Iterator[Member] | None:
    """Return the members if a stream is an archive."""
    if containers.is_archive(stream):
        return containers.members(stream)
    if containers.kind_of_bytes(containers.peek(stream)) != "zip":
        return None
    if source.bytes:
        file.seek(0)
        if containers.kind_of_bytes(containers.peek(file)) == "zip":
            return containers.zip_members(file)
    raise bad_data(f"--input {source.path} is a zip archive in a stream: give it as a plain file")


def _chosen(members: Iterator[Member], given: TextInputs) -> Iterator[Member]:
    """Pass over the members that --include and --exclude do not choose."""
    for name, stream in members:
        yield name, stream if name_filter(given).chooses(name) else Bad(NOT_CHOSEN, is_passed=True)


def _require_text(path: str, start: bytes) -> None:
    """Raise if a stream turns out to hold something else than text."""
    kind = containers.kind_of_bytes(start)
    if kind == "pdf":
        raise a_pdf(path)
    if kind in ("parquet", "arrow", "sqlite"):
        raise bad_data(f"--input {path} is a table ({kind}) in a stream: give it as a plain file")


def _as_utf8(name: str, stream: BinaryIO, given: TextInputs) -> BinaryIO:
    codec = plain.codec_of_file(name, containers.peek(stream), given.encoding)
    return containers.buffered(encodings.transcode(containers.chunks(stream), codec)) if codec else stream


def _joined_members(members: Iterator[Member], given: TextInputs) -> Iterator[tuple[int, list[Text]]]:
    """Yield texts and JSON lines, about a piece at a time, and how many lines of the first member
    earlier pieces hold.
    """
    joined: list[Text] = []
    have = begin = 0
    try:
        for name, lines, part in _member_parts(members, given):
            if joined and lines and isinstance(part, bytes) and isinstance(joined[-1][1], bytes):
                joined[-1] = (name, joined[-1][1] + part)
            else:
                begin = begin if joined else lines
                joined.append((name, part))
            have += len(part) if isinstance(part, bytes) else 0
            if have >= PIECE or len(joined) == MOST_FILES:
                yield begin, joined
                joined, have = [], 0
    except containers.DAMAGES:
        if joined:
            yield begin, joined
        raise
    if joined:
        yield begin, joined


def _member_parts(members: Iterator[Member], given: TextInputs) -> Iterator[tuple[str, int, bytes | Bad]]:
    """Yield name, number of lines before in the same member, and content.

    Damage of a member is reported once the next one begins: otherwise the archive is cut short.
    """
    damage: list[tuple[str, int, Bad]] = []
    for name, stream in members:
        lines = 0
        if isinstance(stream, Bad):
            yield name, 0, stream
            continue
        try:
            if isinstance(stream, Exception):
                raise stream
            yield from damage
            damage = []
            stream = _as_utf8(name, stream, given)
            start = containers.peek(stream)
            if refused := _refuse_member(name, start, given):
                yield name, 0, refused
                continue
            if rows.CSV_NAME.search(name):
                parts = plain.cut_stream(rows.csv_lines(stream, name, start, given.json_keys), PIECE, JSON_LINES)
            else:
                parts = _parts(name, stream, given.document_separator)
            for part in parts:
                yield name, lines, part
                lines += part.count(b"\n")
        except containers.DAMAGES as error:
            damage = [(name, 0, Bad("damaged member", str(error)))]
    yield from damage


def _refuse_member(name: str, start: bytes, given: TextInputs) -> Bad | None:
    """Return why a member of an archive is passed over."""
    if dump := dumps.recognise(start):
        return Bad(f"{dump.name} in an archive", is_passed=True)
    if containers.kind_of_bytes(start) == "pdf":
        return Bad(PDF, is_passed=True)
    if rows.CSV_NAME.search(name) and (refused := rows.refuse_header(name, start, given.json_keys)):
        return refused.as_bad()
    is_other_json = name.lower().endswith(".json") and SPREAD_JSON.match(start)
    return Bad("not JSON lines", is_passed=True) if is_other_json else None


def _parts(name: str, stream: BinaryIO, separator: str) -> Iterator[bytes]:
    """Yield JSON lines or documents in pieces, a file of HTML at once."""
    if JSON_NAME.search(name):
        yield from plain.cut_stream(_without_mark(stream), PIECE, JSON_LINES)
    elif HTML_NAME.search(name):
        page = stream.read(records.LONGEST + 1)
        yield page if len(page) <= records.LONGEST else TOO_LONG
    else:
        yield from plain.cut_stream(_without_mark(stream), PIECE, separator) if containers.peek(stream) else [b""]


def _without_mark(stream: BinaryIO) -> Iterator[bytes]:
    if containers.peek(stream).startswith(BOM):
        stream.read(len(BOM))
    return containers.chunks(stream)


def open_input(source: Input) -> BinaryIO:
    if source.path == "-":
        if sys.stdin is None:
            raise UserError("--input - cannot be read: the standard input is closed; give it a file or a pipe", IO)
        return sys.stdin.buffer
    try:
        return open_source(source)
    except OSError as error:
        raise UserError(f"--input {source.path} cannot be read: {error.strerror}", IO) from None


def note_passed(inputs: Inputs, given: TextInputs) -> None:
    """Count texts in folders that will be passed over for their content; raise for a named one."""
    texts = [source for source in inputs.inputs if source.kind in ("small files", "text")]
    for piece in cut_inputs(texts, given):
        for number, unit in enumerate(piece.units(given.json_keys)):
            if isinstance(unit, Bad) and unit.is_passed:
                inputs.passed.note_unit(unit)
            elif isinstance(unit, Bad) and given.on_error != "skip":
                raise bad_data(f"{piece.place(number, given.json_keys)}: {unit}{advice(unit, not number)}")


def why_nothing(inputs: Inputs, given: TextInputs) -> list[str]:
    """Say what was left out of inputs without any text, and what the first bad line has instead."""
    lines, keys = inputs.left_out(given.on_error, given.encoding), list(dict.fromkeys(given.json_keys))
    readable = [source for source in inputs.inputs if source.bytes]  # a pipe is read but once
    units = (unit for piece in cut_inputs(readable, given) for unit in piece.units(keys))
    first = next((unit for unit in units if isinstance(unit, Bad) and not unit.is_passed), None)
    return [*lines, f"{first.detail}; {first.cure}"] if first and first.cure else lines


def read_texts(
    given: TextInputs, inputs: Inputs | None = None, advance: Callable[[int], None] = lambda count: None
) -> Iterator[str]:
    """Yield every text of the inputs; by default, raise for the first bad line.

    Lines that were left out or mended, and files that turn out to hold no text, are added to those
    of `inputs`; `advance` gets the number of bytes that are done.
    """
    inputs = inputs or find_inputs(given)
    is_start, done = True, (0, 0)
    keys = list(dict.fromkeys(given.json_keys))
    for piece in cut_inputs(inputs.inputs, given):
        if isinstance(piece, Broken):
            if given.on_error != "skip":
                raise bad_data(str(piece))
            inputs.bad.count("input cut short", 1, piece.place(0, keys))
        for number, unit in enumerate(piece.units(keys)):
            place = functools.partial(piece.place, number, keys)
            if isinstance(unit, Bad) and not unit.is_passed and given.on_error != "skip":
                raise bad_data(f"{place()}: {unit}{advice(unit, is_start)}")
            inputs.count_unit(unit, place)
            if unit and not isinstance(unit, Bad):
                is_start = False
                yield from unit
        advance(max(piece.behind - (done[1] if piece.number == done[0] else 0), 0))
        done = (piece.number, piece.behind)
