"""Documents out of what people have them in: JSON lines, plain or compressed, tables, archives of text files.

An input is cut into pieces of about a megabyte, which worker processes turn into tokens. A piece of a plain file or of a table
is a place, which the worker reads; of a stream, which can be read in one order only, it holds the bytes. Where pieces begin
depends on the input alone, so that an interrupted run goes on at a piece, and several machines share them out.

Lines are cut as bytes, so that one that is not UTF-8 costs that line and no other (data/records.py).
"""

from __future__ import annotations

import glob
import io
import os
import re
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from meshwright.data import containers, records, tables
from meshwright.data.records import BadLine as BadLine
from meshwright.data.records import Texts, no_text
from meshwright.errors import BAD_DATA, IO, UserError

BOM = b"\xef\xbb\xbf"
PIECE = 1 << 20  # bytes
REST = 1 << 16  # read with a piece, for its last line mostly ends within it
LONGEST = 1 << 28  # bytes of a line: what is longer counts as a bad one
TOO_LONG = b"\xff too long"  # stands for such a line
JSON_NAME = re.compile(r"\.(json|jsonl|ndjson)(\.(gz|xz|zst|bz2))?$", re.IGNORECASE)  # of members of archives
ARRAY = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*\{")  # how a JSON array of objects begins


@dataclass(frozen=True)
class Input:
    """`bytes` of a stream are unknown (0) or those of the compressed file."""

    path: str
    kind: Literal["lines", "stream", "parquet", "arrow"]
    bytes: int = 0

    @property
    def is_cut(self) -> bool:
        """Whether its pieces can be read in any order."""
        return self.kind != "stream"


@dataclass(frozen=True)
class Piece:
    number: int  # of its input
    path: str
    kind: Literal["place", "lines", "texts", "parquet", "arrow", "broken"]
    begin: int = 0  # of a file in bytes, of a table in rows; of a stream or the first of texts, lines ahead of it
    end: int = 0
    content: Any = b""  # lines as bytes; (name, bytes) of texts; of a table, where to enter; of what is broken, why
    behind: int = 0  # bytes of the input that are done with it


# What the inputs are.


def find_inputs(patterns: list[str]) -> list[str]:
    """Files and `-` as given, patterns in sorted order; all are looked for before work starts."""
    found = []
    for pattern in patterns:
        matches = [pattern] if pattern == "-" or Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
        if not matches:
            raise UserError(f"--input {pattern} does not exist", BAD_DATA)
        found += matches
    return found


def look(paths: list[str]) -> list[Input]:
    """What each is, by its first bytes; a folder is the tables in it."""
    return [one for path in paths for one in ([Input("-", "stream")] if path == "-" else _look(path))]


def _look(path: str) -> list[Input]:
    if os.path.isdir(path):
        found = tables.tables_in(path)
        if not found:
            raise UserError(
                f"--input {path} cannot be read: Is a directory, in which no .parquet or .arrow file is", IO
            )
        return [one for table in found for one in _look(table)]
    try:
        about = os.stat(path)
        if not stat.S_ISREG(about.st_mode):
            return [Input(path, "stream")]  # a pipe must not be read here
        with open(path, "rb") as file:
            start = file.read(containers.HEAD)
    except OSError as error:
        raise UserError(f"--input {path} cannot be read: {error.strerror}", IO) from None
    if other := containers.foreign(start):
        raise UserError(f"--input {path} {other} {path} > {path}.utf8", BAD_DATA)
    kind = containers.kind_of(start)
    if kind in ("parquet", "arrow"):
        return [Input(path, cast(Any, kind), about.st_size)]
    if kind == "legacy arrow":
        return (
            [Input(path, "arrow", about.st_size)] if path.endswith(".arrow") else [Input(path, "lines", about.st_size)]
        )
    return [Input(path, "stream" if kind else "lines", about.st_size)]


# Cutting.


def pieces(inputs: list[Input]) -> Iterator[Piece]:
    """All of them, in the order of the documents."""
    return shared(inputs, 0, 1)


def _of_input(number: int, one: Input) -> Iterator[Piece]:
    if one.kind == "lines":
        for begin in range(0, one.bytes, PIECE):
            end = min(begin + PIECE, one.bytes)
            yield Piece(number, one.path, "place", begin, end, behind=end)
    elif one.kind == "stream":
        yield from _of_stream(number, one.path)
    else:
        yield from _of_table(number, one)


def _of_table(number: int, one: Input) -> Iterator[Piece]:
    try:
        for begin, end, behind, start in tables.spans(one.path, one.kind, one.bytes, PIECE):
            yield Piece(number, one.path, cast(Any, one.kind), begin, end, start, behind)
    except containers.Damaged as error:
        yield Piece(number, one.path, "broken", content=str(error), behind=one.bytes)


def shared(inputs: list[Input], rank: int, size: int) -> Iterator[Piece]:
    """One rank's pieces: a range of the bytes, so that all ranks' pieces one after the other are those of the whole."""
    total, base = sum(max(one.bytes, 1) for one in inputs), 0
    for number, one in enumerate(inputs):
        if one.is_cut:
            at = 0
            for piece in _of_input(number, one):
                if (base + at) * size // total == rank:
                    yield piece
                at = piece.behind
        elif base * size // total == rank:
            yield from _of_input(number, one)
        base += max(one.bytes, 1)


def _of_stream(number: int, path: str) -> Iterator[Piece]:
    """Cut short, it gives all that was whole, and then why it ended."""
    file = open_input(path)
    try:
        if containers.is_archive(file):
            for begin, texts in _members(file):
                yield Piece(number, path, "texts", begin, content=texts, behind=containers.position(file))
        else:
            begin, stream = 0, containers.unpacked(file)
            _check(path, containers.peek(stream))
            for lines in cut(containers.chunks(stream), PIECE):
                yield Piece(number, path, "lines", begin, content=lines, behind=containers.position(file))
                begin += lines.count(b"\n")
    except containers.DAMAGES as error:
        yield Piece(number, path, "broken", content=str(error) or type(error).__name__)
    except OSError as error:
        raise UserError(f"{path} cannot be read to its end: {error.strerror or error}", IO) from None
    finally:
        if path != "-":
            file.close()


def _check(path: str, start: bytes) -> None:
    """Of what is no file of lines after all."""
    if other := containers.foreign(start):
        raise UserError(f"--input {path} {other}", BAD_DATA)
    if (kind := containers.kind_of(start)) in ("parquet", "arrow"):
        raise UserError(f"--input {path} is a table ({kind}) in a stream: give it as a plain file", BAD_DATA)


def _members(file: BinaryIO) -> Iterator[tuple[int, list[tuple[str, bytes]]]]:
    """Texts and JSON lines, about a piece of them; and how many lines of the first one were in the piece before."""
    kept: list[tuple[str, bytes]] = []
    have = begin = 0
    try:
        for name, stream in containers.members(file):
            lines = 0
            for part in _parts(name, stream):
                if kept and lines:
                    kept[-1] = (name, kept[-1][1] + part)
                else:
                    begin = begin if kept else lines
                    kept.append((name, part))
                have += len(part)
                lines += part.count(b"\n")
                if have >= PIECE:
                    yield begin, kept
                    kept, have = [], 0
    except containers.DAMAGES:
        if kept:
            yield begin, kept
        raise
    if kept:
        yield begin, kept


def _parts(name: str, stream: BinaryIO) -> Iterator[bytes]:
    """Of JSON lines pieces, of another text all of it."""
    start = containers.peek(stream)
    if containers.foreign(start):
        yield start  # enough to tell why
    elif is_json(name):
        yield from cut(containers.chunks(stream), PIECE)
    else:
        parts, have = [], 0
        for chunk in containers.chunks(stream):
            parts.append(chunk)
            have += len(chunk)
            if have > LONGEST:
                parts = [TOO_LONG]
                break
        yield b"".join(parts)


def is_json(name: str) -> bool:
    """Whether a member of an archive holds JSON lines."""
    return JSON_NAME.search(name) is not None


def open_input(path: str) -> BinaryIO:
    if path == "-":
        stdin = sys.stdin.buffer
        return stdin if hasattr(stdin, "peek") else cast(BinaryIO, io.BufferedReader(cast(Any, stdin)))
    try:
        return open(path, "rb", buffering=PIECE)
    except OSError as error:
        raise UserError(f"--input {path} cannot be read: {error.strerror}", IO) from None


def cut(chunks: Iterator[bytes], size: int) -> Iterator[bytes]:
    """Whole lines, of about this many bytes together; a stream that breaks off gives its whole lines before the error."""
    kept: list[bytes] = []
    have, ends, too_long = 0, False, False  # ends: a line feed is among them

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
    """One for each line, row or text of the piece: the text under each key, what is wrong with it, or None for a blank line."""
    if piece.kind == "place":
        yield from _of_lines(read_place(piece.path, piece.begin, piece.end), keys, not piece.begin)
    elif piece.kind == "lines":
        yield from _of_lines((piece.content, 0, len(piece.content)), keys, not piece.begin)
    elif piece.kind == "texts":
        for number, (name, content) in enumerate(piece.content):
            if is_json(name) and not containers.foreign(content):
                yield from _of_lines((content, 0, len(content)), keys, bool(number) or not piece.begin)
            else:
                yield _of_text(content, keys)
    elif piece.kind in ("parquet", "arrow"):
        try:
            for row in tables.rows(piece.path, piece.kind, piece.content, piece.begin, piece.end, keys):
                yield row if all(type(text) is str for text in row) else no_text(row, keys)
        except containers.Damaged as error:
            yield BadLine("damaged table", str(error))


def _of_lines(lines: Lines, keys: list[str], is_first: bool) -> Iterator[Texts | BadLine | None]:
    """`is_first`: they are the first of their file."""
    is_array = is_first and ARRAY.match(lines[0], lines[1], lines[2]) is not None
    for line in lines_of(*lines):
        unit = _tried(line, keys)
        if is_array and isinstance(unit, BadLine):
            unit = BadLine("part of a JSON array", "one object a line is needed: jq -c '.[]' writes an array so")
            is_array = False
        yield unit


def _tried(line: memoryview, keys: list[str]) -> Texts | BadLine | None:
    try:
        return records.parse(line, keys)
    except BadLine as bad:
        return _too_long() if line == TOO_LONG else bad


def parse(line: memoryview, keys: list[str]) -> Texts | None:
    """The text under each key; None for a blank line."""
    unit = _tried(line, keys)
    if isinstance(unit, BadLine):
        raise unit
    return unit


def _too_long() -> BadLine:
    return BadLine(f"longer than {LONGEST:,} bytes")


def _of_text(content: bytes, keys: list[str]) -> Texts | BadLine:
    if content == TOO_LONG:
        return _too_long()
    try:
        return [content.decode("utf-8")] * len(keys)
    except UnicodeDecodeError as error:
        byte = f"byte 0x{content[error.start]:02x} at {error.start}"
        return BadLine("not UTF-8", containers.foreign(content) or byte)


def place_of(piece: Piece, unit: int, first_line: int) -> str:
    """Of a unit, for people; `first_line` is the number of the piece's first line in its file."""
    if piece.kind in ("parquet", "arrow"):
        return f"{piece.path}: row {piece.begin + unit + 1}"
    if piece.kind != "texts":
        return f"{piece.path}:{first_line + unit}"
    before = piece.begin
    for name, content in piece.content:
        if not is_json(name) or containers.foreign(content):
            count, line = 1, ""
        else:
            count, line = sum(1 for _ in lines_of(content, 0, len(content))), f":{before + unit + 1}"
        if unit < count:
            break
        unit, before = unit - count, 0
    return f"{piece.path}:{name}{line}"


Lines = tuple[bytes, int, int]  # whole lines between two places of a buffer: nothing is copied to cut it


def lines_of(buffer: bytes, first: int, stop: int) -> Iterator[memoryview]:
    view = memoryview(buffer)
    while first < stop:
        end = buffer.find(b"\n", first, stop)
        end = stop if end < 0 else end
        yield view[first:end]
        first = end + 1


def read_place(path: str, begin: int, end: int) -> Lines:
    """The lines that begin within these bytes of a file."""
    start = max(begin - 1, 0)
    size = end - start
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(start)
            data = read_fully(file, size + REST)
            first = data.find(b"\n", 0, size) + 1 if begin else len(BOM) * data.startswith(BOM)
            if first >= size or (begin and not first):
                return b"", 0, 0  # in the middle of one line, or it ends here
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


def read_fully(file: Any, size: int) -> bytes:
    parts = []
    while size > 0 and (part := file.read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def lines_before(path: str, end: int) -> int:
    """How many lines end before this byte."""
    if not end:
        return 0
    with open(path, "rb", buffering=0) as file:
        return sum(file.read(min(PIECE, end - at)).count(b"\n") for at in range(0, end, PIECE))


def read_texts(inputs: list[str], keys: list[str]) -> Iterator[str]:
    """Every text of the inputs; the first bad line is an error."""
    none_yet = True
    lines: dict[int, int] = {}
    for piece in pieces(look(inputs)):
        if piece.kind == "broken":
            raise UserError(broken(piece), BAD_DATA)
        first, count = lines.get(piece.number, 1), 0
        for unit in units(piece, keys):
            if isinstance(unit, BadLine):
                place = place_of(piece, count, first)
                raise UserError(f"{place}: {unit}{expected(unit, none_yet)}", BAD_DATA)
            count += 1
            if unit:
                none_yet = False
                yield from unit
        lines[piece.number] = first + count


def broken(piece: Piece) -> str:
    return f"{piece.path} is cut short or damaged ({piece.content})"


def expected(bad: BadLine, is_first: bool) -> str:
    """What is said to those whose file is plain text."""
    if not is_first or bad.kind != "not JSON":
        return ""
    return '; one {"text": "..."} a line is expected, and docs/data.md shows how plain text becomes that'
