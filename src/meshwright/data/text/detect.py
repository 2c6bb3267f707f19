"""Decide what a file, a stream or a member of an archive is: its container, charset and reader.

Nothing else decides that. The first bytes count first. The name decides where they may mean several
things: CSV, JSON lines and pages. In a folder, nobody has said that a file holds text, so there it
must look like it; what is left out is a `Rejected`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from typing import BinaryIO, Literal, NamedTuple

from meshwright.base.errors import UserError, bad_data
from meshwright.config.text_inputs import TextInputs
from meshwright.data.text import charsets, containers, folders, formats, html_pages, jsonl
from meshwright.data.text.containers import STREAMS
from meshwright.data.text.formats import JSONL, PAGE, TEXT
from meshwright.data.text.records import BINARY, Rejected, TextPlace, named
from meshwright.data.text.rows import refuse_header

_PACKED = r"(\.(gz|xz|zst|bz2))?$"
CSV_NAME = re.compile(r"\.(csv|tsv)" + _PACKED, re.IGNORECASE)
HTML_NAME = re.compile(r"\.x?html?" + _PACKED, re.IGNORECASE)
# Names of JSON lines; in a folder, what is only called .json must look like them.
JSON_NAME = re.compile(r"\.(json|jsonl|ndjson)" + _PACKED, re.IGNORECASE)
# How JSON lines begin: with an object on one line; or an array of objects, which gets a hint.
JSON_START = re.compile(rb"(\xef\xbb\xbf)?\s*(\{[ \t]*[\"}]|\[\s*\{)")
# How a JSON document of several lines begins, which files called .json mostly are.
SPREAD_JSON = re.compile(rb"(\xef\xbb\xbf)?\s*[\[{][ \t\r]*\n")

# Readers besides the formats of many documents.
CSV = "CSV"
SQLITE = "sqlite"
PARQUET = "parquet"
ARROW = "arrow"
HUB = "hub"
TAR = "tar"
ZIP = "zip"
TABLES = (PARQUET, ARROW)

# Where something was found: named by the user, in a folder, or in an archive.
Origin = Literal["named", "folder", "archive"]


class Detected(NamedTuple):
    """What reads an input: a constant above, or the name of a kind of dumps."""

    reader: str
    codec: str = ""  # of text that is not UTF-8
    is_packed: bool = False  # it is in a compressed stream


class Start(NamedTuple):
    """The beginning of a file: its kind, and the kind and the first bytes of what it unpacks to."""

    outer: str | None
    inner: str | None = None
    content: bytes = b""

    @property
    def is_packed(self) -> bool:
        return self.outer in STREAMS


def look_into(file: BinaryIO) -> tuple[Start, BinaryIO]:
    """Return the beginning of a buffered file and the stream in it; raise if that is damaged."""
    outer = containers.kind_of_bytes(containers.peek(file))
    stream = containers.unpacked(file)
    content = containers.peek(stream)
    inner = containers.kind_of_bytes(content) if content else None
    return Start(outer, inner, content), stream


def look_at(file: BinaryIO) -> Start:
    """Return the beginning of a buffered file; of a damaged one, which is read later, its kind."""
    outer = containers.kind_of_bytes(containers.peek(file))
    try:
        return look_into(file)[0]
    except containers.DAMAGES:
        return Start(outer)


def detect(
    path: str, start: Start, given: TextInputs, origin: Origin, is_pipe: bool = False
) -> Detected | Rejected:
    """Return what a file or a pipe is, or why it is passed over; raise if it was named."""
    suffix = folders.suffix_of(path)
    place = TextPlace(path)
    is_chosen = origin == "named" or bool(given.include) or folders.is_known(suffix)

    # Files that are no text.
    if start.outer == "pdf" and origin == "named":
        raise a_pdf(path)
    if is_chosen and (found := _of_bytes(path, start, origin, is_pipe)):
        return found
    if start.outer == "sqlite":
        if origin == "named" or given.table:
            return Detected(SQLITE)
        return Rejected("SQLite databases, which need --table", place, is_error=False)

    # Text: its charset, then its format.
    codec = ""
    reader = TEXT
    head = start.content[: containers.HEAD] if start.is_packed else start.content
    if start.inner is None:
        codec = charset_of(path, start.content, given.encoding)
        head = charsets.to_utf8(head, codec)
        reader = reader_of(path, head, given.json_keys, origin)
    found = Detected(reader, codec, start.is_packed)
    if reader in (CSV, JSONL):
        return found

    # In a folder it must look like text, and a named one is looked at before the work begins.
    if not is_chosen:
        return Rejected(folders.OTHER_SUFFIX + (suffix or "no suffix"), place, is_error=False)
    if reader in (TEXT, PAGE):
        if origin == "folder" and (rejected := _refuse_text(place, suffix, start, head, given)):
            return rejected
        if origin == "named" and not start.outer and not is_pipe and given.on_error != "skip":
            _require_text(path, head)
    return found


def detect_member(path: str, content: bytes, given: TextInputs) -> Detected | Rejected:
    """Return what a member of an archive is by its first bytes, or why it is passed over."""
    if containers.kind_of_bytes(content) == "pdf":
        return Rejected(folders.PDF, TextPlace(path), is_error=False)
    codec = charset_of(path, content, given.encoding)
    head = charsets.to_utf8(content, codec)
    reader = reader_of(path, head, given.json_keys, "archive")
    if reader == CSV and (refused := refuse_header(path, head, given.json_keys)):
        return refused
    if reader not in (JSONL, CSV, TEXT, PAGE):
        return Rejected(f"{reader} in an archive", TextPlace(path), is_error=False)
    if reader == JSONL and path.lower().endswith(".json") and SPREAD_JSON.match(head):
        return Rejected("not JSON lines", TextPlace(path), is_error=False)
    return Detected(reader, codec)


def detect_text(
    path: str, content: bytes, keys: Sequence[str], encoding: str, origin: Origin
) -> Detected:
    """Return the charset and the format of a text that is read as a whole."""
    codec = charset_of(path, content, encoding)
    head = charsets.to_utf8(content[: containers.START], codec)
    return Detected(reader_of(path, head, keys, origin), codec)


def reader_of(path: str, head: bytes, keys: Sequence[str], origin: Origin) -> str:
    """Return the reader of a text by its name and first bytes in UTF-8."""
    if CSV_NAME.search(path):
        return CSV
    if origin == "named":
        is_json = bool(JSON_NAME.search(path) or JSON_START.match(head))
    elif origin == "folder":
        is_json = folders.suffix_of(path) in (".jsonl", ".ndjson") or is_json_lines(head, keys)
    else:
        is_json = bool(JSON_NAME.search(path))
    if is_json:
        return JSONL
    if dump := formats.recognise(head):
        return dump.name
    return PAGE if HTML_NAME.search(path) else TEXT


def charset_of(path: str, start: bytes, given: str) -> str:
    """Return the codec of a text that begins so, "" for UTF-8.

    A page declares its own; that of a text which begins with a page counts for that page alone.
    """
    if HTML_NAME.search(path):
        return charsets.codec_of_page(start, given)
    declares = html_pages.IS_HTML.match(start) and charsets.declared_codec(start)
    return charsets.codec_of(start, "" if declares else given)


def is_json_lines(start: bytes, keys: Sequence[str]) -> bool:
    """Return whether the first line is an object with these keys, as far as can be seen."""
    if not JSON_START.match(start):
        return False
    line, feed, _ = start.removeprefix(charsets.BOM).lstrip().partition(b"\n")
    # The line goes on beyond what was read; of HEAD bytes it may have the keys later.
    if not feed and len(start) == containers.HEAD:
        return True
    if not feed and len(start) == containers.START:
        return all(json.dumps(key).encode() in line for key in keys)
    try:
        record = json.loads(line)
    except ValueError:
        return False
    return isinstance(record, dict) and all(key in record for key in keys)


def a_pdf(path: str) -> UserError:
    text = shlex.quote(f"{path.removesuffix('.pdf')}.txt")
    return bad_data(
        f"{named(path)} is a PDF; convert it to text first: pdftotext {shlex.quote(path)} {text}"
    )


def _of_bytes(path: str, start: Start, origin: Origin, is_pipe: bool) -> Detected | Rejected | None:
    """Return what the first bytes show alone: tables and archives, and what no stream may hold."""
    outer = start.outer
    inner = start.inner
    if inner == "tar":
        return Detected(TAR, is_packed=start.is_packed)
    if not start.is_packed and not is_pipe:
        if outer == "arrow stream":
            return Detected(ARROW) if path.endswith(".arrow") else Detected(TEXT)
        return Detected(outer) if outer in (PARQUET, ARROW, ZIP) else None

    # These can only be read in any order, so not from a stream.
    if inner == "zip":
        raise bad_data(f"{named(path)} is a zip archive in a stream: give it as a plain file")
    if inner in (*TABLES, SQLITE) and origin == "named":
        raise bad_data(f"{named(path)} is a table ({inner}) in a stream: give it as a plain file")
    if inner in (*TABLES, SQLITE):
        return Rejected(BINARY, TextPlace(path), is_error=False)
    if inner != "pdf":
        return None
    if origin == "named":
        raise a_pdf(path)
    return Rejected(folders.PDF, TextPlace(path), is_error=False) if start.is_packed else None


def _refuse_text(
    place: TextPlace, suffix: str, start: Start, head: bytes, given: TextInputs
) -> Rejected | None:
    """Return why a file in a folder that is no table, archive or JSON lines is passed over."""
    if suffix == ".json" and not given.include:
        return _refuse_json(place, head, given.json_keys)
    reason = ""
    if suffix == ".xml" and not given.include:
        reason = formats.but_for_dumps("XML")
    elif suffix in folders.DATA and suffix not in (".json", ".xml") and not start.outer:
        reason = "not of the kind that their suffix says"
    elif start.outer == "pdf":
        reason = folders.PDF
    elif b"\0" in head:
        reason = BINARY
    return Rejected(reason, place, is_error=False) if reason else None


def _refuse_json(place: TextPlace, head: bytes, keys: Sequence[str]) -> Rejected:
    """Say why a .json file is passed over, which may hold JSON lines without the key."""
    line, _, _ = head.removeprefix(charsets.BOM).lstrip().partition(b"\n")
    record = jsonl.parse_line(memoryview(line), keys, place)
    reason = "not JSON lines"
    cure = ""
    if isinstance(record, Rejected) and record.reason.startswith("no key"):
        reason = f"JSON lines with {record.reason}"
        cure = record.cure
    return Rejected(reason, place, cure=cure, is_error=False)


def _require_text(path: str, head: bytes) -> None:
    if why := charsets.why_binary(head):
        binary = Rejected(BINARY, TextPlace(path), why)
        raise bad_data(binary.complaint(True))
