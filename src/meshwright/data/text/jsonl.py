"""Read JSON lines: a document a line.

orjson parses a line; the standard library tries what orjson refuses. It is laxer (NaN, a lone
surrogate in a key that is not read), so no line is lost that Megatron would have kept, and its
errors say more.
"""

from __future__ import annotations

import json
import mmap
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import orjson

from meshwright.data.text.divide import Slice
from meshwright.data.text.records import (
    MOST_KEYS,
    NOT_UTF8,
    Document,
    ReadOptions,
    Record,
    Rejected,
    TextPlace,
    choose_key,
)

# How a JSON array of objects begins.
ARRAY = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*\{")
# Keys of a message in a list of them.
MESSAGES = (("role", "content"), ("from", "value"))


def documents(lines: Slice, options: ReadOptions) -> Iterator[Record]:
    """Yield the document of each line, or what is wrong with it."""
    path = lines.path
    keys = options.keys
    after = lines.after
    is_array = lines.is_start and ARRAY.match(lines.data, lines.first, lines.stop) is not None
    for number, line in enumerate(lines_of(lines.data, lines.first, lines.stop), lines.line + 1):
        place = TextPlace(path, number, "line", after)
        record = parse_line(line, keys, place)
        if isinstance(record, Rejected):
            if record.reason == NOT_UTF8 and options.on_error == "replace":
                record = _repaired(line, keys, place)
            # Lines of an array are no objects; the first one says why, once.
            if is_array and isinstance(record, Rejected):
                how = "one object a line is needed: jq -c '.[]' writes an array so"
                record = Rejected("part of a JSON array", place, how)
                is_array = False
        if record is not None:
            yield record


def lines_of(buffer: bytes | mmap.mmap, first: int, stop: int) -> Iterator[memoryview]:
    view = memoryview(buffer)
    while first < stop:
        end = buffer.find(b"\n", first, stop)
        end = stop if end < 0 else end
        yield view[first:end]
        first = end + 1


def _repaired(line: memoryview, keys: Sequence[str], place: TextPlace) -> Record | None:
    repaired = bytes(line).decode("utf-8", "replace").encode()
    record = parse_line(memoryview(repaired), keys, place)
    return replace(record, repaired=1) if isinstance(record, Document) else record


def parse_line(line: memoryview, keys: Sequence[str], place: TextPlace) -> Record | None:
    """Return the text under each key, what is wrong, or None for a blank line."""
    is_lax = False
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        content = bytes(line)
        if not content.strip():
            return None
        record = parse_laxly(content, place)
        is_lax = True
        if isinstance(record, Rejected):
            return record
    if type(record) is not dict:
        what = f"but a {type(record).__name__}; one object a line is needed"
        return Rejected("not a JSON object", place, what)

    texts = []
    for key in keys:
        text = record.get(key)
        if type(text) is not str:
            return explain_lack(record, key, place)
        if is_lax and (half := next((c for c in text if "\ud800" <= c <= "\udfff"), None)):
            return lone_surrogate(half, key, place)
        texts.append(text)
    return Document(tuple(texts), place)


def parse_laxly(line: bytes, place: TextPlace) -> Any:
    """Return what the standard library reads in a line, or a Rejected."""
    try:
        text = line.rstrip().decode("utf-8")
    except UnicodeDecodeError as error:
        at = error.start
        return Rejected(NOT_UTF8, place, f"byte 0x{line[at]:02x} at column {at + 1}")
    try:
        return json.loads(text, parse_int=_whole_number)
    except json.JSONDecodeError as error:
        return Rejected("not JSON", place, f"{error.msg} at column {error.colno}")
    except RecursionError:
        return Rejected("not JSON", place, "its brackets are nested too deeply")


def _whole_number(digits: str) -> float:
    """Return a number of JSON, also one of more digits than Python turns into an int."""
    try:
        return int(digits)
    except ValueError:
        return float(digits)


def explain_lack(record: dict[str, Any], key: str, place: TextPlace) -> Rejected:
    """Say what a line or row has in place of a text under the key."""
    # The advice is to convert the first value that looks like a chat, or else to take another key.
    cure = ""
    texts = []
    for name, value in record.items():
        cure = cure or chat_cure(name, value)
        if isinstance(value, str):
            texts.append(name)
    if key in record:
        return not_text(key, record[key], place, cure)
    keys = ", ".join(list(record)[:MOST_KEYS]) or "none"
    return Rejected(f"no key {key!r}", place, f"keys: {keys}", cure or choose_key(texts))


def not_text(key: str, value: Any, place: TextPlace, cure: str) -> Rejected:
    """Say what a value is that is no text."""
    reason = f"null under {key!r}" if value is None else f"no text under {key!r}"
    return Rejected(reason, place, type(value).__name__, cure)


def lone_surrogate(half: str, key: str, place: TextPlace) -> Rejected:
    return Rejected(f"lone surrogate under {key!r}", place, f"\\u{ord(half):04x}, half a character")


def chat_cure(key: str, value: Any) -> str:
    """Return what makes a text of a value if it is a list of chat messages, or ""."""
    first = value[0] if isinstance(value, list) and value else None
    if not isinstance(first, dict):
        return ""
    for role, content in MESSAGES:
        if role in first and content in first:
            break
    else:
        return ""
    field = key if key.isidentifier() else json.dumps(key)
    texts = rf"""{{text: [.{field}[] | "\(.{role}): \(.{content})"] | join("\n")}}"""
    return f"{key!r} lists the messages of a chat; make one text of each line first: jq -c {shlex.quote(texts)}"
