"""Read the rows of CSV, TSV and SQLite, which come in order alone, and check those of any table.

A field of CSV may hold line breaks, so a worker cannot begin within a file.
"""

from __future__ import annotations

import csv
import io
import os
import re
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO
from urllib.parse import quote

from meshwright.base.errors import bad_data
from meshwright.data.text import charsets, containers, limits
from meshwright.data.text.charsets import BOM
from meshwright.data.text.containers import DAMAGES, DamagedInput
from meshwright.data.text.jsonl import chat_cure, lone_surrogate, not_text
from meshwright.data.text.records import (
    MOST_KEYS,
    NOT_UTF8,
    Document,
    ReadOptions,
    Record,
    Rejected,
    TextPlace,
    choose_key,
    shown,
)

# What SQLite's columns are declared as that hold no text.
NO_TEXT_TYPE = re.compile("INT|REAL|FLOA|DOUB|NUM|DEC|BOOL|BLOB|DATE|TIME", re.IGNORECASE)


# The values under the keys in a row, or why it gives no document.
Row = Sequence[Any] | Rejected


# Rows of any table.


def read_rows(
    rows: Iterable[Row], options: ReadOptions, path: str, before: int
) -> Iterator[Record]:
    """Yield the documents of rows, which so many others precede in their table."""
    for number, row in enumerate(rows, before + 1):
        if isinstance(row, Rejected):
            yield row
        else:
            yield read_row(row, options, TextPlace(path, number, "row"))


def read_row(values: Iterable[Any], options: ReadOptions, place: TextPlace) -> Record:
    """Return the document of a row, in which bytes that are not UTF-8 are surrogates (PEP 383)."""
    texts = list[str]()
    repaired = 0
    for key, value in zip(options.keys, values, strict=True):
        if type(value) is not str:
            return not_text(key, value, place, chat_cure(key, value))
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                bad = _bad_character(value, error.start, key, place)
                if options.on_error != "replace" or bad.reason != NOT_UTF8:
                    return bad
                value = value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
                repaired = 1
        texts.append(value)
    return Document(tuple(texts), place, repaired=repaired)


def _bad_character(text: str, at: int, key: str, place: TextPlace) -> Rejected:
    try:
        content = text.encode("utf-8", "surrogateescape")
        content.decode("utf-8")
    except UnicodeEncodeError as error:  # it is none of a byte
        return lone_surrogate(text[error.start], key, place)
    except UnicodeDecodeError as error:
        byte = charsets.broken_byte(error)
        byte = content[error.start] if byte is None else byte
        return Rejected(NOT_UTF8, place, f"byte 0x{byte:02x} at {error.start:,} under {key!r}")
    return lone_surrogate(text[at], key, place)


def refuse_columns(
    path: str, columns: Sequence[str], keys: Iterable[str], texts: Iterable[str] | None = None
) -> Rejected | None:
    """Return why a table cannot be read if a key is none of its columns, or several.

    `texts` are the columns that hold text, all if it is not known.
    """
    for key in keys:
        count = columns.count(key)
        if count == 1:
            continue
        what = f"{count} columns" if count else "no column"
        named = columns if texts is None else texts
        possible = [name for name in named if columns.count(name) == 1]
        cure = choose_key(possible)
        if not cure and count:
            cure = "give them different names"
        elif not cure:
            cure = f"none of its columns is text: {', '.join(columns[:MOST_KEYS])}"
        return refused_table(path, f"{what} {key!r}", cure + _meant(key, keys, columns))
    return None


def _meant(key: str, keys: Iterable[str], columns: Sequence[str]) -> str:
    """Return how columns were meant whose names were given with blanks or commas, or ""."""
    if "," in key and key not in columns:
        parts = key.split(",")
        if all(part in columns for part in parts):
            return f"; did you mean {' '.join(parts)}, with spaces?"
    joined = " ".join(keys)
    if joined != key and joined in columns:
        return f"; did you mean {joined!r} in quotes?"
    return ""


def refused_table(path: str, what: str, cure: str) -> Rejected:
    """Return why a table is passed over in a folder or an archive: what it has, and what to do."""
    return Rejected(f"tables with {what}", TextPlace(path), what, cure, is_error=False)


def require_columns(path: str, refused: Rejected | None) -> None:
    if refused:
        raise bad_data(f"{shown(path)} has {refused.detail}; {refused.cure}")


# CSV and TSV.


def header_of(start: bytes) -> tuple[bytes, bool]:
    """Return the first line of a file, which may be one of an old Mac, and whether it ends."""
    header, *rest = re.split(b"[\r\n]", start.removeprefix(BOM), maxsplit=1)
    return header, bool(rest)


def delimiter_of(name: str, header: bytes) -> str:
    """Return what separates the fields: a tab in TSV, in CSV the most frequent of the usual."""
    if re.search(r"\.tsv\b", name, re.IGNORECASE):
        return "\t"
    return max(",;\t|", key=lambda sign: header.count(sign.encode()))


def refuse_header(path: str, start: bytes, keys: Sequence[str]) -> Rejected | None:
    """Return why a file cannot be read whose first line lacks a column, as far as it is known."""
    header, is_complete = header_of(start)
    if not is_complete and all(key.encode() in header for key in keys):
        return None
    line = header.decode("utf-8", "replace")
    reader = csv.reader([line], delimiter=delimiter_of(path, header))
    return refuse_columns(path, next(reader, []), keys)


def read_csv(stream: BinaryIO, path: str, name: str, keys: Sequence[str]) -> Iterator[Row]:
    """Yield the fields under the keys of CSV or TSV, whose first line names the columns.

    `name` is that of the file, which `path` may name as a member of an archive.
    """
    csv.field_size_limit(limits.LONGEST)
    sign = delimiter_of(name, header_of(containers.peek(stream))[0])
    # A member of a tar archive cannot say whether it is seekable.
    buffered = containers.buffered(containers.chunks(stream))
    text = io.TextIOWrapper(buffered, "utf-8-sig", errors="surrogateescape", newline="")
    reader = csv.reader(text, delimiter=sign, strict=True)
    try:
        # The header.
        columns = next(reader, [])
        require_columns(path, refuse_columns(path, columns, keys))
        places = [columns.index(key) for key in keys]
        form = _Form(columns, frozenset(places), sign)

        # The rows, each seen with its neighbours.
        for number, (before, row, after) in enumerate(_with_neighbours(_rows(reader)), 1):
            if isinstance(row, csv.Error):
                yield Rejected(f"not CSV ({row})", TextPlace(path, number, "row"))
            elif why := form.wrong_number(row) or form.half_row(before, after):
                reason, detail = why
                yield Rejected(reason, TextPlace(path, number, "row"), detail)
            else:
                yield [row[column] for column in places]
    finally:
        text.detach()


_Fields = list[str] | csv.Error


def _rows(reader: Iterator[list[str]]) -> Iterator[_Fields]:
    """Yield the fields of each row, or what is wrong with it."""
    while True:
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield error
            continue
        if fields:
            yield fields


def _with_neighbours(
    rows: Iterator[_Fields],
) -> Iterator[tuple[_Fields | None, _Fields, _Fields | None]]:
    """Yield each row between the ones before and after it; after damage, the intact ones."""
    before: _Fields | None = None
    row = next(rows, None)
    damage = None
    while row is not None:
        try:
            after = next(rows, None)
        except DAMAGES as error:
            after = None
            damage = error
        yield before, row, after
        before = row
        row = after
    if damage:
        raise damage


@dataclass(frozen=True)
class _Form:
    """What a row of a table must look like, by its first line."""

    columns: list[str]
    places: frozenset[int]  # of the texts
    sign: str  # between fields

    @cached_property
    def least(self) -> int:
        """The fewest fields of a row: columns without a name at the end may lack."""
        return max((number for number, column in enumerate(self.columns, 1) if column), default=0)

    def wrong_number(self, row: list[str]) -> tuple[str, str] | None:
        """Return what is wrong with a row of more or fewer fields; more of them may be empty."""
        if len(row) < self.least:
            why = "too few fields, probably because a line break in a text lacks quotes"
        elif any(row[len(self.columns) :]):
            why = f"too many fields, probably because a {self.sign!r} in a text lacks quotes"
        else:
            return None
        return why, f"{len(row)} instead of {len(self.columns)}"

    def half_row(self, before: _Fields | None, after: _Fields | None) -> tuple[str, str] | None:
        """Return what is wrong with a row of all fields that may be half of one.

        A line break without quotes in the first column leaves a row of one field before the rest,
        in the last column one after the beginning.
        """
        why = "the row beside it has one field: does a line break lack quotes?"
        for neighbour, place in ((before, 0), (after, len(self.columns) - 1)):
            if place not in self.places or not isinstance(neighbour, list):
                continue
            if len(neighbour) == 1 < self.least:
                return "perhaps half a row", why
        return None


# SQLite.


def read_sqlite(path: str, table: str | None, keys: Sequence[str]) -> Iterator[Row]:
    """Yield the values under the keys of a table or view of an SQLite database.

    Its only one needs no name.
    """
    try:
        with open_database(path) as database:
            tables = tables_of(database)
            require_columns(path, refuse_table(path, tables, table, keys))
            table = table or next(iter(tables))
            yield from database.execute(
                f"SELECT {', '.join(map(quoted, keys))} FROM {quoted(table)}"
            )
    except sqlite3.Error as error:
        raise DamagedInput(str(error)) from None


@contextmanager
def open_database(path: str) -> Iterator[sqlite3.Connection]:
    address = f"file:{quote(os.fsencode(os.path.abspath(path)))}?mode=ro"
    with closing(sqlite3.connect(address, uri=True)) as database:
        database.text_factory = lambda text: text.decode("utf-8", "surrogateescape")
        # a view of a stranger calls no functions with effects
        database.execute("PRAGMA trusted_schema = OFF")
        yield database


def tables_of(database: sqlite3.Connection) -> dict[str, dict[str, str]]:
    """Return the columns of each table and view, with their declared types."""
    names = "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite_%'"
    tables = [name for (name,) in database.execute(names)]
    return {
        table: {row[1]: row[2] for row in database.execute(f"PRAGMA table_info({quoted(table)})")}
        for table in tables
    }


def refuse_table(
    path: str, tables: dict[str, dict[str, str]], table: str | None, keys: Sequence[str]
) -> Rejected | None:
    """Return why a database cannot be read in which a table or a column is still to be chosen."""
    table = table or (next(iter(tables)) if len(tables) == 1 else None)
    texts = {
        name: [column for column, declared in columns.items() if not NO_TEXT_TYPE.search(declared)]
        for name, columns in tables.items()
    }
    if table in tables:
        return refuse_columns(path, list(tables[table]), keys, texts[table])
    if not tables:
        return refused_table(path, "no table", "name another file")
    if any(columns.keys() >= set(keys) for columns in tables.values()):
        return refused_table(
            path, f"the tables {', '.join(tables)}", "name one of them with --table"
        )
    listed = ", ".join(
        f"{name} ({', '.join(columns[:MOST_KEYS])})" for name, columns in texts.items()
    )
    cure = "name one of them with --table, and its column of text with --json-keys"
    return refused_table(path, f"the tables {listed}", cure)


def quoted(name: str) -> str:
    """Return a name as SQL takes it, whatever it holds."""
    return '"' + name.replace('"', '""') + '"'
