"""Cut texts, JSON lines, tables and archives into pieces of about a megabyte, and read them.

A piece of a plain file or of a table is a place, which the worker reads; a piece of a stream, which
can only be read in order, holds the bytes. Where pieces begin depends on the input alone, so that
an interrupted run continues at a piece and several machines can share them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, BinaryIO, Literal

from meshwright.data.prepare import containers, markup, plain, records, tables, wiki
from meshwright.data.prepare.folders import NOT_CHOSEN, shown
from meshwright.data.prepare.inputs import JSON_NAME, JSON_START, START, Found, Input, choice_of, find, is_json_lines
from meshwright.data.prepare.plain import BOM, HTML_NAME, LINES, LONGEST, PIECE, TOO_LONG, Span
from meshwright.data.prepare.records import BadLine as BadLine
from meshwright.data.prepare.records import PassedFile, Texts, no_text
from meshwright.errors import IO, UserError, bad_data
from meshwright.settings.text_inputs import TextInputs

FILES = 1000  # in a piece at most
ARRAY = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*\{")  # how a JSON array of objects begins


# How a JSON document of several lines begins, which files called .json mostly are.
SPREAD = re.compile(rb"(\xef\xbb\xbf)?\s*[\[{][ \t\r]*\n")

Text = tuple[str, bytes | BadLine]  # a name, and what is in it or why nothing is


@dataclass(frozen=True)
class Piece:
    number: int  # of its input
    path: str
    kind: Literal["place", "lines", "text", "texts", "files", "parquet", "arrow", "broken"]
    begin: int = 0  # of a file in bytes, of a table in rows; of a stream or the first of texts, lines ahead of it
    end: int = 0
    # Lines as bytes; Text of texts; paths of files; where to enter a table; why one is broken.
    content: Any = b""
    behind: int = 0  # bytes of the input that are done with it
    separator: str = ""  # line between the documents of a text
    is_named: bool = True  # what is no text is an error; in folders and archives it is passed over


# Cutting.


def pieces(inputs: list[Input], given: TextInputs, rank: int = 0, size: int = 1) -> Iterator[Piece]:
    """Yield one rank's pieces, a range of the bytes, in the order of the documents."""
    total, base = sum(max(one.bytes, 1) for one in inputs), 0
    for number, one in enumerate(inputs):
        if one.kind != "stream":
            at = 0
            for piece in _input_pieces(number, one, given):
                if (base + at) * size // total == rank:
                    yield piece
                at = piece.behind
        elif base * size // total == rank:
            yield from _input_pieces(number, one, given)
        base += max(one.bytes, 1)


def _input_pieces(number: int, one: Input, given: TextInputs) -> Iterator[Piece]:
    how: dict[str, Any] = {
        "separator": wiki.PAGES if one.is_wiki else given.document_separator,
        "is_named": one.folder is None,
    }
    if one.kind in ("lines", "text"):
        kind: Any = "place" if one.kind == "lines" else "text"
        for begin in range(0, one.bytes, PIECE):
            end = min(begin + PIECE, one.bytes)
            yield Piece(number, one.path, kind, begin, end, behind=end, **how)
    elif one.kind == "texts":
        begin = end = 0
        paths: list[str] = []
        for path, size, _ in one.files:
            paths.append(path)
            end += max(size, 1)
            if end - begin >= PIECE or len(paths) == FILES:
                yield Piece(number, one.path, "files", begin, end, paths, behind=end, **how)
                begin, paths = end, []
        if paths:
            yield Piece(number, one.path, "files", begin, end, paths, behind=end, **how)
    elif one.kind == "stream":
        yield from _stream_pieces(number, one, given)
    else:
        try:
            for begin, end, behind, start in tables.spans(one.path, one.kind, one.bytes, PIECE):
                yield Piece(number, one.path, one.kind, begin, end, start, behind)
        except containers.Damaged as error:
            yield Piece(number, one.path, "broken", content=str(error), behind=one.bytes)


def _stream_pieces(number: int, one: Input, given: TextInputs) -> Iterator[Piece]:
    """Yield what can be read; after damage, a last piece says why."""
    path, separator = one.path, given.document_separator
    file = open_input(path)
    try:
        stream = containers.unpacked(containers.steady(file))
        start = containers.peek(stream)
        members = _archive(file, stream, one)
        begin = 0
        if members is not None:
            for begin, texts in _joined_members(_chosen(members, given), separator):
                at = containers.position(file)
                yield Piece(number, path, "texts", begin, 0, texts, at, separator, is_named=False)
        elif JSON_NAME.search(path) or JSON_START.match(start):
            _require_text(path, start)
            for lines in plain.cut(_without_mark(stream), PIECE, LINES):
                yield Piece(number, path, "lines", begin, content=lines, behind=containers.position(file))
                begin += lines.count(b"\n")
        else:
            if one.folder is None:
                _require_text(path, start)
            if wiki.IS_DUMP.match(start):
                separator = wiki.PAGES
            for part in _parts(path, stream, separator):
                at = containers.position(file)
                yield Piece(number, path, "texts", begin, 0, [("", part)], at, separator, one.folder is None)
                begin += part.count(b"\n")
    except containers.DAMAGES as error:
        yield Piece(number, path, "broken", content=str(error) or type(error).__name__)
    except OSError as error:
        raise UserError(f"{path} cannot be read to its end: {error.strerror or error}", IO) from None
    finally:
        if path != "-":
            file.close()


Member = tuple[str, BinaryIO | Exception]


def _archive(file: BinaryIO, stream: BinaryIO, one: Input) -> Iterator[Member] | None:
    """Return the members if a stream is an archive."""
    if containers.is_archive(stream):
        return containers.members(stream)
    if containers.kind_of(containers.peek(stream)) != "zip":
        return None
    if one.bytes:
        file.seek(0)
        if containers.kind_of(containers.peek(file)) == "zip":
            return containers.zip_members(file)
    raise bad_data(f"--input {one.path} is a zip archive in a stream: give it as a plain file")


def _chosen(members: Iterator[Member], given: TextInputs) -> Iterator[Member]:
    """Pass over the members that --include and --exclude do not choose."""
    for name, stream in members:
        refused = choice_of(given).refusal(name, is_named=True)
        yield name, PassedFile(NOT_CHOSEN) if refused else stream


def _require_text(path: str, start: bytes) -> None:
    """Raise if a stream turns out to hold something else than text."""
    if other := containers.foreign_encoding(start):
        raise bad_data(f"--input {path} {other}")
    if (kind := containers.kind_of(start)) in ("parquet", "arrow"):
        raise bad_data(f"--input {path} is a table ({kind}) in a stream: give it as a plain file")


def _joined_members(members: Iterator[Member], separator: str) -> Iterator[tuple[int, list[Text]]]:
    """Yield texts and JSON lines, about a piece at a time, and how many lines of the first member
    earlier pieces hold.
    """
    kept: list[Text] = []
    have = begin = 0
    try:
        for name, lines, part in _member_parts(members, separator):
            if kept and lines:
                kept[-1] = (name, kept[-1][1] + part)
            else:
                begin = begin if kept else lines
                kept.append((name, part))
            have += len(part) if isinstance(part, bytes) else 0
            if have >= PIECE or len(kept) == FILES:
                yield begin, kept
                kept, have = [], 0
    except containers.DAMAGES:
        if kept:
            yield begin, kept
        raise
    if kept:
        yield begin, kept


def _member_parts(members: Iterator[Member], separator: str) -> Iterator[tuple[str, int, Any]]:
    """Yield name, number of lines before in the same member, and content.

    Damage of a member is reported once the next one begins: otherwise the archive is cut short.
    """
    damage: list[tuple[str, int, BadLine]] = []
    for name, stream in members:
        lines = 0
        if isinstance(stream, PassedFile):
            yield name, 0, stream
            continue
        try:
            if isinstance(stream, Exception):
                raise stream
            yield from damage
            damage = []
            start = containers.peek(stream)
            if refused := _refused_member(name, start):
                yield name, 0, PassedFile(refused)
                continue
            for part in _parts(name, stream, separator):
                yield name, lines, part
                lines += part.count(b"\n")
        except containers.DAMAGES as error:
            damage = [(name, 0, BadLine("damaged member", str(error)))]
    yield from damage


def _refused_member(name: str, start: bytes) -> str:
    if wiki.IS_DUMP.match(start):
        return "wiki dumps in an archive"
    return "not JSON lines" if name.lower().endswith(".json") and SPREAD.match(start) else ""


def _parts(name: str, stream: BinaryIO, separator: str) -> Iterator[bytes]:
    """Yield JSON lines or documents in pieces, a page of HTML at once."""
    start = containers.peek(stream)
    if containers.foreign_encoding(start):
        yield start  # enough to name the encoding
    elif JSON_NAME.search(name):
        yield from plain.cut(_without_mark(stream), PIECE, LINES)
    elif HTML_NAME.search(name) or markup.IS_HTML.match(start):
        page = stream.read(LONGEST + 1)
        yield page if len(page) <= LONGEST else TOO_LONG
    else:
        yield from plain.cut(_without_mark(stream), PIECE, separator) if start else [b""]


def _without_mark(stream: BinaryIO) -> Iterator[bytes]:
    if containers.peek(stream).startswith(BOM):
        stream.read(len(BOM))
    return containers.chunks(stream)


def _has_lines(name: str, content: bytes) -> bool:
    return bool(JSON_NAME.search(name)) and not containers.foreign_encoding(content)


def open_input(path: str) -> BinaryIO:
    if path == "-":
        if sys.stdin is None:
            raise UserError("--input - cannot be read: the standard input is closed; give it a file or a pipe", IO)
        return sys.stdin.buffer
    try:
        return open(path, "rb", buffering=PIECE)
    except OSError as error:
        raise UserError(f"--input {path} cannot be read: {error.strerror}", IO) from None


# Reading.


def units(piece: Piece, keys: list[str]) -> Iterator[Texts | BadLine | None]:
    """Yield the texts under the keys of each line, row or text; what is wrong; None if blank."""
    if piece.kind == "place":
        span, _ = plain.read_place(piece.path, piece.begin, piece.end, LINES)
        yield from _line_units(span, keys, not piece.begin)
    elif piece.kind == "lines":
        yield from _line_units((piece.content, 0, len(piece.content)), keys, not piece.begin)
    elif piece.kind in ("parquet", "arrow"):
        try:
            for row in tables.rows(piece.path, piece.kind, piece.content, piece.begin, piece.end, keys):
                yield row if all(type(text) is str for text in row) else no_text(row, keys)
        except containers.Damaged as error:
            yield BadLine("damaged table", str(error))
    else:
        for place, unit in _placed_units(piece, keys):
            if isinstance(unit, PassedFile):
                unit.place = place
            yield unit


def _placed_units(piece: Piece, keys: list[str]) -> Iterator[tuple[str, Texts | BadLine | None]]:
    """Yield the units of texts with their places."""
    if piece.kind == "text":
        (data, first, stop), at = plain.read_place(piece.path, piece.begin, piece.end, piece.separator)
        for begin, unit in _documents(piece, data[first:stop], piece.path, keys):
            yield f"{shown(piece.path)}: document at byte {at + begin:,}", unit
    elif piece.kind == "files":
        for path in piece.content:
            place, read = shown(path), plain.read_file(path)
            if isinstance(read, bytes) and not piece.is_named and is_json_lines(read[:START], keys):
                lines = _line_units((read, 0, len(read)), keys, True)
                yield from ((f"{place}:{line}", unit) for line, unit in enumerate(lines, 1))
            else:
                yield from ((place, unit) for unit in _whole(piece, read, path, keys))
    elif piece.kind == "texts":
        before = piece.begin
        for number, (name, content) in enumerate(piece.content):
            place = shown(f"{piece.path}:{name}" if name else piece.path)
            if isinstance(content, bytes) and _has_lines(name, content):
                lines = _line_units((content, 0, len(content)), keys, bool(number) or not piece.begin)
                yield from ((f"{place}:{line}", unit) for line, unit in enumerate(lines, before + 1))
            elif not name or before:  # a part of a text
                yield from ((place, unit) for _, unit in _documents(piece, content, name or piece.path, keys))
            else:
                yield from ((place, unit) for unit in _whole(piece, content, name, keys))
            before = 0


def _whole(piece: Piece, content: bytes | BadLine, name: str, keys: list[str]) -> Iterator[Texts | BadLine]:
    """Yield the documents of a file, or why there is none."""
    if isinstance(content, BadLine):
        yield content
        return
    has_any = False
    for _, unit in _documents(piece, content, name, keys):
        has_any = True
        yield unit
    if not has_any:
        yield PassedFile("empty")


def _documents(piece: Piece, content: bytes, name: str, keys: list[str]) -> Iterator[tuple[int, Texts | BadLine]]:
    for begin, text in plain.documents(content, name, piece.separator):
        if isinstance(text, str):
            yield begin, [text] * len(keys)
        else:
            yield begin, BadLine(text.kind, text.detail) if piece.is_named else text


def _line_units(lines: Span, keys: list[str], is_first: bool) -> Iterator[Texts | BadLine | None]:
    is_array = is_first and ARRAY.match(lines[0], lines[1], lines[2]) is not None
    for line in lines_of(*lines):
        try:
            unit: Texts | BadLine | None = parse(line, keys)
        except BadLine as bad:
            unit = bad
        if is_array and isinstance(unit, BadLine):
            unit = BadLine("part of a JSON array", "one object a line is needed: jq -c '.[]' writes an array so")
            is_array = False
        yield unit


def parse(line: memoryview, keys: list[str]) -> Texts | None:
    """Return the text under each key, None for a blank line; raise BadLine."""
    if line == TOO_LONG:
        raise BadLine(f"longer than {LONGEST:,} bytes")
    return records.parse(line, keys)


def describe_place(piece: Piece, unit: int, first_line: int, keys: list[str]) -> str:
    """Name the place of a unit; `first_line` is the number of the piece's first line."""
    if piece.kind in ("parquet", "arrow"):
        return f"{shown(piece.path)}: row {piece.begin + unit + 1}"
    if piece.kind in ("place", "lines"):
        return f"{shown(piece.path)}:{first_line + unit}"
    return next((place for place, _ in islice(_placed_units(piece, keys), unit, None)), shown(piece.path))


def lines_of(buffer: bytes, first: int, stop: int) -> Iterator[memoryview]:
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


def read_texts(
    given: TextInputs, found: Found | None = None, advance: Callable[[int], None] = lambda count: None
) -> Iterator[str]:
    """Yield every text of the inputs; raise for the first bad line.

    Files that turn out to hold no text are added to those that `found` passed over; `advance` gets
    the number of bytes that are done.
    """
    found = found or find(given)
    is_start, lines, done = True, dict[int, int](), (0, 0)
    keys = list(dict.fromkeys(given.json_keys))
    for piece in pieces(found.inputs, given):
        if piece.kind == "broken":
            raise bad_data(damage_message(piece))
        first, count = lines.get(piece.number, 1), 0
        for unit in units(piece, keys):
            if isinstance(unit, PassedFile):
                found.passed.note(unit.kind, unit.place)
            elif isinstance(unit, BadLine):
                place = describe_place(piece, count, first, keys)
                raise bad_data(f"{place}: {unit}{expected_format(unit, is_start)}")
            elif unit:
                is_start = False
                yield from unit
            count += 1
        lines[piece.number] = first + count
        advance(max(piece.behind - (done[1] if piece.number == done[0] else 0), 0))
        done = (piece.number, piece.behind)


def damage_message(piece: Piece) -> str:
    return f"{shown(piece.path)} is cut short or damaged ({piece.content})"


def expected_format(bad: BadLine, is_first: bool) -> str:
    """Return a hint for a file of plain text that is named like JSON lines."""
    if not is_first or bad.kind != "not JSON":
        return ""
    return '; in a file of this name one {"text": "..."} a line is expected; plain text is called .txt'
