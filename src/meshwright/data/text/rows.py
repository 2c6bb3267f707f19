"""Turn the rows of CSV, TSV and SQLite into lines of JSON, which everything else here reads.

Rows of these can only be read in order: a field of CSV may hold line breaks.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import quote

import orjson

from meshwright.base.errors import bad_data
from meshwright.data.text import records
from meshwright.data.text.containers import DAMAGES, DamagedInput
from meshwright.data.text.encodings import BOM
from meshwright.data.text.folders import shown
from meshwright.data.text.records import BAD_ROW, MOST_KEYS, Bad, choose_key

# What SQLite's columns are declared as that hold no text.
NO_TEXT_TYPE = re.compile("INT|REAL|FLOA|DOUB|NUM|DEC|BOOL|BLOB|DATE|TIME", re.IGNORECASE)
CSV_NAME = re.compile(r"\.(csv|tsv)(\.(gz|xz|zst|bz2))?$", re.IGNORECASE)


class Refused(NamedTuple):
    """Why the texts under the keys cannot be read: what a table has, and what to do."""

    what: str
    cure: str

    def as_bad(self) -> Bad:
        """Say why the table is passed over in a folder or an archive."""
        return Bad(f"tables with {self.what}", is_passed=True, cure=self.cure)


def refuse_columns(columns: list[str], keys: Iterable[str], texts: Iterable[str] | None = None) -> Refused | None:
    """Return why a table cannot be read if a key is none of its columns, or several.

    `texts` are the columns that hold text, all if it is not known.
    """
    for key in keys:
        if columns.count(key) != 1:
            what = f"{columns.count(key)} columns" if key in columns else "no column"
            joined = " ".join(keys)
            quotes = f"; did you mean {joined!r} in quotes?" if joined != key and joined in columns else ""
            nothing = f"none of its columns is text: {', '.join(columns[:MOST_KEYS])}"
            if key in columns:
                nothing = "give them different names"
            elif "," in key and {*key.split(",")} <= {*columns}:
                quotes = f"; did you mean {key.replace(',', ' ')}, with spaces?"
            possible = (column for column in (columns if texts is None else texts) if columns.count(column) == 1)
            cure = choose_key(possible) or nothing
            return Refused(f"{what} {key!r}", cure + quotes)
    return None


def require_columns(path: str, refused: Refused | None) -> None:
    if refused:
        raise bad_data(f"{shown(path)} has {refused.what}; {refused.cure}")


def json_line(row: dict[str, Any]) -> bytes:
    """Return a row as a line of JSON; bytes of a text that are not UTF-8 stay as they are."""
    try:
        return orjson.dumps(row) + b"\n"
    except TypeError:
        pass
    try:
        return json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogateescape") + b"\n"
    except TypeError:
        key, value = next((key, value) for key, value in row.items() if not isinstance(value, str))
        return bad_line(f"no text under {key!r} ({type(value).__name__})")


def bad_line(kind: str, detail: str = "") -> bytes:
    """Return the line that stands for a row without a text, and says why."""
    return BAD_ROW + orjson.dumps([kind, detail]) + b"\n"


def header_of(start: bytes) -> tuple[bytes, bool]:
    """Return the first line of a file, which may be one of an old Mac, and whether it ends."""
    header, *rest = re.split(b"[\r\n]", start.removeprefix(BOM), maxsplit=1)
    return header, bool(rest)


def delimiter_of(name: str, header: bytes) -> str:
    """Return what separates the fields: a tab in TSV, in CSV the most frequent of the usual."""
    if re.search(r"\.tsv\b", name, re.IGNORECASE):
        return "\t"
    return max(",;\t|", key=lambda sign: header.count(sign.encode()))


def refuse_header(name: str, start: bytes, keys: list[str]) -> Refused | None:
    """Return why a file cannot be read whose first line lacks a column, as far as it is known."""
    header, is_complete = header_of(start)
    if not is_complete and all(key.encode() in header for key in keys):
        return None
    columns = next(csv.reader([header.decode("utf-8", "replace")], delimiter=delimiter_of(name, header)), [])
    return refuse_columns(columns, keys)


def csv_lines(stream: BinaryIO, name: str, start: bytes, keys: list[str]) -> Iterator[bytes]:
    """Yield the rows of CSV or TSV whose first line names the columns."""
    csv.field_size_limit(records.LONGEST)
    text = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
    sign = delimiter_of(name, header_of(start)[0])
    reader = csv.reader(text, delimiter=sign, strict=True)
    try:
        columns = next(reader, [])
        require_columns(name, refuse_columns(columns, keys))
        places = {key: columns.index(key) for key in keys}
        form = _Form(columns, set(places.values()), sign)
        for before, row, after in _with_neighbours(_rows(reader)):
            if isinstance(row, bytes):
                yield row
            elif bad := form.wrong_number(row) or form.half_row(before, after):
                yield bad
            else:
                yield json_line({key: row[place] for key, place in places.items()})
    finally:
        text.detach()


Row = list[str] | bytes  # the fields, or the line that says what is wrong


def _rows(reader: Iterator[list[str]]) -> Iterator[Row]:
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield bad_line(f"not CSV ({error})")
            continue
        if row:
            yield row


def _with_neighbours(rows: Iterator[Row]) -> Iterator[tuple[Row, Row, Row]]:
    """Yield each row between the ones before and after it; after damage, the intact ones."""
    before: Row = b""
    row, damage = next(rows, None), None
    while row is not None:
        try:
            after = next(rows, None)
        except DAMAGES as error:
            after, damage = None, error
        yield before, row, b"" if after is None else after
        before, row = row, after
    if damage:
        raise damage


@dataclass(frozen=True)
class _Form:
    """What a row of a table must look like, by its first line."""

    columns: list[str]
    places: set[int]  # of the texts
    sign: str  # between fields

    @cached_property
    def least(self) -> int:
        """The fewest fields of a row: columns without a name at the end may lack."""
        return max((number for number, column in enumerate(self.columns, 1) if column), default=0)

    def wrong_number(self, row: list[str]) -> bytes | None:
        """Return what is wrong with a row of more or fewer fields; more of them may be empty."""
        if len(row) < self.least:
            why = "too few fields, probably because a line break in a text lacks quotes"
        elif any(row[len(self.columns) :]):
            why = f"too many fields, probably because a {self.sign!r} in a text lacks quotes"
        else:
            return None
        return bad_line(why, f"{len(row)} instead of {len(self.columns)}")

    def half_row(self, before: Row, after: Row) -> bytes | None:
        """Return what is wrong with a row of all fields that may be half of one.

        A line break without quotes in the first column leaves a row of one field before the rest,
        in the last column one after the beginning.
        """
        for neighbour, place in ((before, 0), (after, len(self.columns) - 1)):
            if place in self.places and isinstance(neighbour, list) and len(neighbour) == 1 < self.least:
                return bad_line("perhaps half a row", "the row beside it has one field: does a line break lack quotes?")
        return None


def sqlite_lines(path: str, table: str | None, keys: list[str]) -> Iterator[bytes]:
    """Yield the rows of a table or view of an SQLite database; its only one needs no name."""
    try:
        with open_database(path) as database:
            tables = tables_of(database)
            require_columns(path, refuse_table(tables, table, keys))
            table = table or next(iter(tables))
            for row in database.execute(f"SELECT {', '.join(map(quoted, keys))} FROM {quoted(table)}"):
                yield json_line(dict(zip(keys, row, strict=True)))
    except sqlite3.Error as error:
        raise DamagedInput(str(error)) from None


@contextmanager
def open_database(path: str) -> Iterator[sqlite3.Connection]:
    address = f"file:{quote(os.fsencode(os.path.abspath(path)))}?mode=ro"
    with closing(sqlite3.connect(address, uri=True)) as database:
        database.text_factory = lambda text: text.decode("utf-8", "surrogateescape")
        database.execute("PRAGMA trusted_schema = OFF")  # a view of a stranger calls no functions with effects
        yield database


def tables_of(database: sqlite3.Connection) -> dict[str, dict[str, str]]:
    """Return the columns of each table and view, with their declared types."""
    names = "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite_%'"
    tables = [name for (name,) in database.execute(names)]
    return {
        table: {row[1]: row[2] for row in database.execute(f"PRAGMA table_info({quoted(table)})")} for table in tables
    }


def refuse_table(tables: dict[str, dict[str, str]], table: str | None, keys: list[str]) -> Refused | None:
    """Return why a database cannot be read in which a table or a column is still to be chosen."""
    table = table or (next(iter(tables)) if len(tables) == 1 else None)
    texts = {
        name: [column for column, declared in columns.items() if not NO_TEXT_TYPE.search(declared)]
        for name, columns in tables.items()
    }
    if table in tables:
        return refuse_columns(list(tables[table]), keys, texts[table])
    if not tables:
        return Refused("no table", "name another file")
    if any(columns.keys() >= set(keys) for columns in tables.values()):
        return Refused(f"the tables {', '.join(tables)}", "name one of them with --table")
    listed = ", ".join(f"{name} ({', '.join(columns[:MOST_KEYS])})" for name, columns in texts.items())
    cure = "name one of them with --table, and its column of text with --json-keys"
    return Refused(f"the tables {listed}", cure)


def quoted(name: str) -> str:
    """Return a name as SQL takes it, whatever it holds."""
    return '"' + name.replace('"', '""') + '"'
