"""Cut JSON lines, tables and archives of text files into pieces of about a megabyte, and read them.

A piece of a plain file or of a table is a place, which the worker reads; a piece of a stream, which
can only be read in order, holds the bytes. Where pieces begin depends on the input alone, so that
an interrupted run continues at a piece and several machines can share them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, cast

from meshwright.data.prepare import containers, records, tables
from meshwright.data.prepare.inputs import Input, inspect_inputs
from meshwright.data.prepare.records import BadLine as BadLine
from meshwright.data.prepare.records import Texts, no_text
from meshwright.errors import BAD_DATA, IO, UserError

BOM = b"\xef\xbb\xbf"
PIECE = 1 << 20  # bytes
REST = 1 << 16  # bytes read beyond a piece, within which its last line mostly ends
LONGEST = 1 << 28  # bytes of a line; a longer one counts as bad
TOO_LONG = b"\xff too long"  # stands for such a line
# Members of archives that hold JSON lines.
JSON_NAME = re.compile(r"\.(json|jsonl|ndjson)(\.(gz|xz|zst|bz2))?$", re.IGNORECASE)
ARRAY = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*\{")  # how a JSON array of objects begins


Text = tuple[str, bytes | str]  # a name, and what is in it or why that is damaged


@dataclass(frozen=True)
class Piece:
    number: int  # of its input
    path: str
    kind: Literal["place", "lines", "texts", "parquet", "arrow", "broken"]
    begin: int = 0  # of a file in bytes, of a table in rows; of a stream or the first of texts, lines ahead of it
    end: int = 0
    content: Any = b""  # lines as bytes; Text of texts; of a table, where to enter; of what is broken, why
    behind: int = 0  # bytes of the input that are done with it


# Cutting.


def pieces(inputs: list[Input], rank: int = 0, size: int = 1) -> Iterator[Piece]:
    """Yield one rank's pieces, a range of the bytes, in the order of the documents."""
    total, base = sum(max(one.bytes, 1) for one in inputs), 0
    for number, one in enumerate(inputs):
        if one.kind != "stream":
            at = 0
            for piece in _input_pieces(number, one):
                if (base + at) * size // total == rank:
                    yield piece
                at = piece.behind
        elif base * size // total == rank:
            yield from _input_pieces(number, one)
        base += max(one.bytes, 1)


def _input_pieces(number: int, one: Input) -> Iterator[Piece]:
    if one.kind == "lines":
        for begin in range(0, one.bytes, PIECE):
            end = min(begin + PIECE, one.bytes)
            yield Piece(number, one.path, "place", begin, end, behind=end)
    elif one.kind == "stream":
        yield from _stream_pieces(number, one.path)
    else:
        try:
            for begin, end, behind, start in tables.spans(one.path, one.kind, one.bytes, PIECE):
                yield Piece(number, one.path, one.kind, begin, end, start, behind)
        except containers.Damaged as error:
            yield Piece(number, one.path, "broken", content=str(error), behind=one.bytes)


def _stream_pieces(number: int, path: str) -> Iterator[Piece]:
    """Yield what can be read; after damage, a last piece says why."""
    file = open_input(path)
    try:
        stream = containers.unpacked(containers.steady(file))
        if containers.is_archive(stream):
            for begin, texts in _members(stream):
                yield Piece(number, path, "texts", begin, content=texts, behind=containers.position(file))
        else:
            begin = 0
            _require_lines(path, containers.peek(stream))
            for lines in cut(_without_mark(stream), PIECE):
                yield Piece(number, path, "lines", begin, content=lines, behind=containers.position(file))
                begin += lines.count(b"\n")
    except containers.DAMAGES as error:
        yield Piece(number, path, "broken", content=str(error) or type(error).__name__)
    except OSError as error:
        raise UserError(f"{path} cannot be read to its end: {error.strerror or error}", IO) from None
    finally:
        if path != "-":
            file.close()


def _require_lines(path: str, start: bytes) -> None:
    """Raise if a stream turns out to hold something else than lines."""
    if other := containers.foreign_encoding(start):
        raise UserError(f"--input {path} {other}", BAD_DATA)
    if (kind := containers.kind_of(start)) in ("parquet", "arrow"):
        raise UserError(f"--input {path} is a table ({kind}) in a stream: give it as a plain file", BAD_DATA)


def _members(archive: BinaryIO) -> Iterator[tuple[int, list[Text]]]:
    """Yield texts and JSON lines, about a piece at a time, and how many lines of the first member
    earlier pieces hold.
    """
    kept: list[Text] = []
    have = begin = 0
    try:
        for name, lines, part in _member_parts(archive):
            if kept and lines:
                kept[-1] = (name, kept[-1][1] + part)
            else:
                begin = begin if kept else lines
                kept.append((name, part))
            have += len(part)
            if have >= PIECE:
                yield begin, kept
                kept, have = [], 0
    except containers.DAMAGES:
        if kept:
            yield begin, kept
        raise
    if kept:
        yield begin, kept


def _member_parts(archive: BinaryIO) -> Iterator[tuple[str, int, Any]]:
    """Yield name, number of lines before in the same member, and content.

    Damage of a member is reported once the next one begins: otherwise the archive is cut short.
    """
    damage: list[tuple[str, int, str]] = []
    for name, stream in containers.members(archive):
        lines = 0
        try:
            if isinstance(stream, Exception):
                raise stream
            yield from damage
            damage = []
            for part in _parts(name, stream):
                yield name, lines, part
                lines += part.count(b"\n")
        except containers.DAMAGES as error:
            damage = [(name, 0, str(error))]
    yield from damage


def _parts(name: str, stream: BinaryIO) -> Iterator[bytes]:
    """Yield JSON lines in pieces, any other text at once."""
    start = containers.peek(stream)
    if containers.foreign_encoding(start):
        yield start  # enough to name the encoding
    elif JSON_NAME.search(name):
        yield from cut(_without_mark(stream), PIECE)
    else:
        parts, have = [], 0
        for chunk in _without_mark(stream):
            parts.append(chunk)
            have += len(chunk)
            if have > LONGEST:
                parts = [TOO_LONG]
                break
        yield b"".join(parts)


def _without_mark(stream: BinaryIO) -> Iterator[bytes]:
    if containers.peek(stream).startswith(BOM):
        stream.read(len(BOM))
    return containers.chunks(stream)


def _has_lines(name: str, content: bytes | str) -> bool:
    is_json = isinstance(content, bytes) and JSON_NAME.search(name)
    return bool(is_json) and not containers.foreign_encoding(cast(bytes, content))


def open_input(path: str) -> BinaryIO:
    if path == "-":
        if sys.stdin is None:
            raise UserError("--input - cannot be read: the standard input is closed; give it a file or a pipe", IO)
        return sys.stdin.buffer
    try:
        return open(path, "rb", buffering=PIECE)
    except OSError as error:
        raise UserError(f"--input {path} cannot be read: {error.strerror}", IO) from None


def cut(chunks: Iterator[bytes], size: int) -> Iterator[bytes]:
    """Yield complete lines, about `size` bytes at a time; damage is raised after all of them."""
    kept: list[bytes] = []
    have, ends, too_long = 0, False, False  # `ends`: `kept` contains a line feed

    def lines() -> bytes:
        nonlocal kept, have, ends
        data = b"".join(kept)
        end = data.rfind(b"\n") + 1
        kept, have, ends = [data[end:]], len(data) - end, False
        return data[:end]

    try:
        for chunk in chunks:
            if too_long:
                _, feed, chunk = chunk.partition(b"\n")
                if not feed:
                    continue
                kept, have, ends, too_long = [TOO_LONG, b"\n"], len(TOO_LONG) + 1, True, False
            kept.append(chunk)
            have += len(chunk)
            ends = ends or b"\n" in chunk
            if have >= size and ends:
                yield lines()
            if have > LONGEST:
                kept, have, ends, too_long = [], 0, False, True
    except containers.DAMAGES:
        if ends:
            yield lines()
        raise
    if rest := TOO_LONG if too_long else b"".join(kept):
        yield rest


# Reading.


def units(piece: Piece, keys: list[str]) -> Iterator[Texts | BadLine | None]:
    """Yield the texts under the keys of each line, row or text; what is wrong; None if blank."""
    if piece.kind == "place":
        yield from _line_units(read_place(piece.path, piece.begin, piece.end), keys, not piece.begin)
    elif piece.kind == "lines":
        yield from _line_units((piece.content, 0, len(piece.content)), keys, not piece.begin)
    elif piece.kind == "texts":
        for number, (name, content) in enumerate(piece.content):
            if isinstance(content, str):
                yield BadLine("damaged member", content)
            elif _has_lines(name, content):
                yield from _line_units((content, 0, len(content)), keys, bool(number) or not piece.begin)
            else:
                try:
                    yield [decode(content)] * len(keys)
                except BadLine as bad:
                    yield bad
    elif piece.kind in ("parquet", "arrow"):
        try:
            for row in tables.rows(piece.path, piece.kind, piece.content, piece.begin, piece.end, keys):
                yield row if all(type(text) is str for text in row) else no_text(row, keys)
        except containers.Damaged as error:
            yield BadLine("damaged table", str(error))


def _line_units(lines: Lines, keys: list[str], is_first: bool) -> Iterator[Texts | BadLine | None]:
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


def decode(content: bytes) -> str:
    """Return the text of a file; raise BadLine."""
    if content == TOO_LONG:
        raise BadLine(f"longer than {LONGEST:,} bytes")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = f"byte 0x{content[error.start]:02x} at {error.start}"
        raise BadLine("not UTF-8", containers.foreign_encoding(content) or byte) from None


def describe_place(piece: Piece, unit: int, first_line: int) -> str:
    """Name the place of a unit; `first_line` is the number of the piece's first line."""
    if piece.kind in ("parquet", "arrow"):
        return f"{piece.path}: row {piece.begin + unit + 1}"
    if piece.kind != "texts":
        return f"{piece.path}:{first_line + unit}"
    before = piece.begin
    for name, content in piece.content:
        count, line = 1, ""
        if _has_lines(name, content):
            count, line = sum(1 for _ in lines_of(content, 0, len(content))), f":{before + unit + 1}"
        if unit < count:
            break
        unit, before = unit - count, 0
    return f"{piece.path}:{name}{line}"


Lines = tuple[bytes, int, int]  # a buffer, and where its lines begin and end; cutting copies nothing


def lines_of(buffer: bytes, first: int, stop: int) -> Iterator[memoryview]:
    view = memoryview(buffer)
    while first < stop:
        end = buffer.find(b"\n", first, stop)
        end = stop if end < 0 else end
        yield view[first:end]
        first = end + 1


def read_place(path: str, begin: int, end: int) -> Lines:
    """Return the lines that begin within these bytes of a file."""
    start = max(begin - 1, 0)
    size = end - start
    try:
        with open(path, "rb") as file:
            file.seek(start)
            data = file.read(size + REST)
            if len(data) < size:
                raise UserError(
                    f"{path} has become shorter while it was read: it ends at byte {start + len(data):,} and had at "
                    f"least {end:,}; start again when it is complete",
                    BAD_DATA,
                )
            first = data.find(b"\n", 0, size) + 1 if begin else len(BOM) * data.startswith(BOM)
            if first >= size or (begin and not first):
                return b"", 0, 0  # no line begins here
            stop = data.find(b"\n", size - 1) + 1
            if stop or len(data) < size + REST:
                return data, first, stop or len(data)
            parts, have = [data], len(data)
            while more := file.read(PIECE):
                stop = more.find(b"\n") + 1
                parts.append(more[: stop or len(more)])
                have += len(parts[-1])
                if stop:
                    break
                if have > LONGEST:  # only the last line can be so long
                    data = data[: data.rfind(b"\n") + 1] + TOO_LONG
                    return data, first, len(data)
    except OSError as error:
        raise UserError(f"{path} cannot be read at byte {begin:,}: {error.strerror or error}", IO) from None
    return b"".join(parts), first, have


def count_lines(path: str, end: int) -> int:
    """Return how many lines end before this byte."""
    with open(path, "rb") as file:
        return sum(file.read(min(PIECE, end - at)).count(b"\n") for at in range(0, end, PIECE))


def read_texts(inputs: list[str], keys: list[str]) -> Iterator[str]:
    """Yield every text of the inputs; raise for the first bad line."""
    is_start, lines = True, dict[int, int]()
    for piece in pieces(inspect_inputs(inputs)):
        if piece.kind == "broken":
            raise UserError(damage_message(piece), BAD_DATA)
        first, count = lines.get(piece.number, 1), 0
        for unit in units(piece, keys):
            if isinstance(unit, BadLine):
                place = describe_place(piece, count, first)
                raise UserError(f"{place}: {unit}{expected_format(unit, is_start)}", BAD_DATA)
            count += 1
            if unit:
                is_start = False
                yield from unit
        lines[piece.number] = first + count


def damage_message(piece: Piece) -> str:
    return f"{piece.path} is cut short or damaged ({piece.content})"


def expected_format(bad: BadLine, is_first: bool) -> str:
    """Return a hint for a file of plain text."""
    if not is_first or bad.kind != "not JSON":
        return ""
    return '; one {"text": "..."} a line is expected, and docs/data.md shows how plain text becomes that'
