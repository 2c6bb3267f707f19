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
from contextlib import closing
from typing import Any, BinaryIO
from urllib.parse import quote

import orjson

from meshwright.data.prepare import records
from meshwright.data.prepare.containers import DamagedInput
from meshwright.data.prepare.encodings import BOM
from meshwright.data.prepare.folders import shown
from meshwright.data.prepare.records import BAD_ROW
from meshwright.errors import bad_data

CSV_NAME = re.compile(r"\.(csv|tsv)(\.(gz|xz|zst|bz2))?$", re.IGNORECASE)
NO_COLUMN = "tables without the column of --json-keys"  # why a file of a folder is passed over


def require_columns(path: str, columns: list[str], keys: Iterable[str]) -> None:
    """Raise unless each key is one of the columns of a table."""
    for key in keys:
        if columns.count(key) != 1:
            what = f"{columns.count(key)} columns" if key in columns else "no column"
            have, joined = ", ".join(columns[:10]), " ".join(keys)
            quotes = f"; did you mean {joined!r} in quotes?" if joined != key and joined in columns else ""
            raise bad_data(f"{shown(path)} has {what} {key!r}; --json-keys must name one of {have}{quotes}")


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
        return BAD_ROW + f"no text under {key!r} ({type(value).__name__})\n".encode()


def header_of(start: bytes) -> tuple[bytes, bool]:
    """Return the first line of a file, which may be one of an old Mac, and whether it ends."""
    header, *rest = re.split(b"[\r\n]", start.removeprefix(BOM), maxsplit=1)
    return header, bool(rest)


def delimiter_of(name: str, header: bytes) -> str:
    """Return what separates the fields: a tab in TSV, in CSV the most frequent of the usual."""
    if re.search(r"\.tsv\b", name, re.IGNORECASE):
        return "\t"
    return max(",;\t|", key=lambda sign: header.count(sign.encode()))


def has_columns(name: str, start: bytes, keys: list[str]) -> bool:
    """Return whether the first line of a file names these columns, as far as it is known."""
    header, is_complete = header_of(start)
    if not is_complete:
        return all(key.encode() in header for key in keys)
    columns = next(csv.reader([header.decode("utf-8", "replace")], delimiter=delimiter_of(name, header)), [])
    return all(columns.count(key) == 1 for key in keys)


def csv_lines(stream: BinaryIO, name: str, start: bytes, keys: list[str]) -> Iterator[bytes]:
    """Yield the rows of CSV or TSV whose first line names the columns.

    A row with more fields than columns is bad: a comma in a text lacks its quotes.
    """
    csv.field_size_limit(records.LONGEST)
    text = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
    reader = csv.reader(text, delimiter=delimiter_of(name, header_of(start)[0]), strict=True)
    try:
        columns = next(reader, [])
        require_columns(name, columns, keys)
        places = {key: columns.index(key) for key in keys}
        while True:
            try:
                row = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield BAD_ROW + f"not CSV ({error})\n".encode()
                continue
            if len(row) > len(columns) or 0 < len(row) <= max(places.values()):
                yield BAD_ROW + f"{len(row)} fields instead of {len(columns)}\n".encode()
            elif row:
                yield json_line({key: row[place] for key, place in places.items()})
    finally:
        text.detach()


def sqlite_lines(path: str, table: str | None, keys: list[str]) -> Iterator[bytes]:
    """Yield the rows of a table or view of an SQLite database; its only one needs no name."""
    address = f"file:{quote(os.fsencode(os.path.abspath(path)))}?mode=ro"
    try:
        with closing(sqlite3.connect(address, uri=True)) as database:
            database.text_factory = lambda text: text.decode("utf-8", "surrogateescape")
            database.execute("PRAGMA trusted_schema = OFF")  # a view of a stranger calls no functions with effects
            names = "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite_%'"
            tables = [name for (name,) in database.execute(names)]
            table = table or (tables[0] if len(tables) == 1 else None)
            if table is None or table not in tables:
                named = f"the tables {', '.join(tables)}; name one of them with --table" if tables else "no table"
                raise bad_data(f"{shown(path)} has {named}")
            require_columns(path, [row[1] for row in database.execute(f"PRAGMA table_info({quoted(table)})")], keys)
            for row in database.execute(f"SELECT {', '.join(map(quoted, keys))} FROM {quoted(table)}"):
                yield json_line(dict(zip(keys, row, strict=True)))
    except sqlite3.Error as error:
        raise DamagedInput(str(error)) from None


def quoted(name: str) -> str:
    """Return a name as SQL takes it, whatever it holds."""
    return '"' + name.replace('"', '""') + '"'
