"""Find the texts in a line of JSON or a row of a table, or say what is wrong with it.

orjson parses a line; the standard library tries what orjson refuses. It is laxer (NaN, a lone
surrogate in a key that is not read), so no line is lost that Megatron would have kept, and its
errors say more.
"""

from __future__ import annotations

import json
from typing import Any

import orjson

Texts = list[str]


class BadLine(Exception):
    """A line that gives no document: `kind` is counted, `detail` belongs to this line."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind} ({detail})" if detail else kind)
        self.kind, self.detail = kind, detail


class PassedFile(BadLine):
    """A file without text: an error if it was named, passed over in a folder or an archive."""

    place = ""


def parse(line: memoryview, keys: list[str]) -> Texts | None:
    """Return the text under each key; None for a blank line."""
    lax = False
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        content = bytes(line)
        if not content.strip():
            return None
        record, lax = parse_laxly(content), True
    if type(record) is not dict:
        raise BadLine("not a JSON object", f"but a {type(record).__name__}; one object a line is needed")
    texts = []
    for key in keys:
        text = record.get(key)
        if type(text) is not str:
            if key not in record:
                raise BadLine(f"no key {key!r}", f"keys: {', '.join(list(record)[:5]) or 'none'}")
            raise BadLine(f"null under {key!r}" if text is None else f"no text under {key!r}", type(text).__name__)
        if lax and (half := next((c for c in text if "\ud800" <= c <= "\udfff"), None)):
            raise BadLine(f"lone surrogate under {key!r}", f"\\u{ord(half):04x}, half a character")
        texts.append(text)
    return texts


def parse_laxly(line: bytes) -> Any:
    try:
        text = line.rstrip().decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadLine("not UTF-8", f"byte 0x{line[error.start]:02x} at column {error.start + 1}") from None
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise BadLine("not JSON", f"{error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, endless brackets
        raise BadLine("not JSON", str(error)) from None


def no_text(row: list[Any], keys: list[str]) -> BadLine:
    key, value = next((key, value) for key, value in zip(keys, row, strict=True) if type(value) is not str)
    if value is None:
        return BadLine(f"null under {key!r}", "NoneType")
    if isinstance(value, UnicodeDecodeError):
        return BadLine("not UTF-8", f"byte 0x{value.object[value.start]:02x} at {value.start} under {key!r}")
    return BadLine(f"no text under {key!r}", type(value).__name__)
