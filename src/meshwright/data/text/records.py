"""Find the texts in a line of JSON or a row of a table, or say what is wrong with it.

orjson parses a line; the standard library tries what orjson refuses. It is laxer (NaN, a lone
surrogate in a key that is not read), so no line is lost that Megatron would have kept, and its
errors say more.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from typing import Any, NamedTuple

import orjson

LONGEST = 1 << 28  # bytes of a line or of a text; longer ones count as bad
TOO_LONG = b"\xff too long"  # stands for such a line
BAD_ROW = b"\xff bad row: "  # begins a line that says what is wrong with a row: its kind and detail as JSON


NOT_UTF8, BINARY = "not UTF-8", "binary"  # kinds of what is bad
MOST_KEYS = 10  # so many are named
MESSAGES = (("role", "content"), ("from", "value"))  # keys of a message in a list of them


class Bad(NamedTuple):
    """Why a line, row or text gives no document: `kind` is counted, `detail` is its own."""

    kind: str
    detail: str = ""
    is_passed: bool = False  # a file that holds no text is passed over in a folder or an archive
    place: str = ""  # of a file that is passed over
    byte: int | None = None  # of the file
    size: int = 0  # bytes of a text that is passed over
    cure: str = ""  # what to do, if it is not `advice`'s usual
    guess: str = ""  # the encoding that a text which is not UTF-8 seems to be in

    def __str__(self) -> str:
        kind = self.kind if self.byte is None else f"{self.kind} at byte {self.byte:,}"
        return f"{kind} ({self.detail})" if self.detail else kind


class Prose(list[str]):
    """The texts of a document of plain text, whose lines count."""


class Mended(list[str]):
    """The texts of a unit in which U+FFFD replaces bad bytes, in so many lines `of` all."""

    def __init__(self, texts: Iterable[str], lines: int = 1, of: int = 1) -> None:
        super().__init__(texts)
        self.lines, self.of = lines, of


Unit = list[str] | Bad | None  # the text under each key of a line, row or text; None if it is blank


def lines_in(unit: Unit) -> int:
    """Return the number of lines of a unit: of JSON lines and tables one each."""
    if unit is None or isinstance(unit, Bad):
        return int(unit is not None and not unit.is_passed)
    if isinstance(unit, Mended):
        return unit.of
    return unit[0].count("\n") + (not unit[0].endswith("\n")) if isinstance(unit, Prose) else 1


class Reading(NamedTuple):
    """How texts are read, of the flags of TextInputs."""

    separator: str = ""  # line between the documents of a text
    encoding: str = ""
    on_error: str = "stop"


def parse_line(line: memoryview, keys: list[str]) -> Unit:
    """Return the text under each key, what is wrong, or None for a blank line."""
    if line == TOO_LONG:
        return Bad(f"longer than {LONGEST:,} bytes")
    is_lax = False
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        content = bytes(line)
        if not content.strip():
            return None
        if content.startswith(BAD_ROW):
            return Bad(*orjson.loads(content.removeprefix(BAD_ROW)))
        record, is_lax = parse_laxly(content), True
        if isinstance(record, Bad):
            return record
    if type(record) is not dict:
        return Bad("not a JSON object", f"but a {type(record).__name__}; one object a line is needed")
    texts = []
    for key in keys:
        text = record.get(key)
        if type(text) is not str:
            return explain_lack(record, key)
        if is_lax and (half := next((c for c in text if "\ud800" <= c <= "\udfff"), None)):
            return Bad(f"lone surrogate under {key!r}", f"\\u{ord(half):04x}, half a character")
        texts.append(text)
    return texts


def explain_lack(record: dict[str, Any], key: str) -> Bad:
    """Say what a line has in place of a text under the key."""
    cure = next((cure for name, value in record.items() if (cure := chat_cure(name, value))), "")
    if key in record:
        value = record[key]
        return Bad(
            f"null under {key!r}" if value is None else f"no text under {key!r}", type(value).__name__, cure=cure
        )
    cure = cure or choose_key(name for name, value in record.items() if isinstance(value, str))
    return Bad(f"no key {key!r}", f"keys: {', '.join(list(record)[:MOST_KEYS]) or 'none'}", cure=cure)


def chat_cure(key: str, value: Any) -> str:
    """Return what makes a text of a value if it is a list of chat messages, or ""."""
    first = value[0] if isinstance(value, list) and value else None
    names = next((names for names in MESSAGES if isinstance(first, dict) and first.keys() >= set(names)), None)
    if names is None:
        return ""
    message = r'"\(.{}): \(.{})"'.format(*names)
    texts = rf"""{{text: [.{key if key.isidentifier() else json.dumps(key)}[] | {message}] | join("\n")}}"""
    return f"{key!r} lists the messages of a chat; make one text of each line first: jq -c {shlex.quote(texts)}"


def choose_key(names: Iterable[str]) -> str:
    """Return how one of these keys or columns is chosen, "" if there are none."""
    texts = ", ".join(list(names)[:MOST_KEYS])
    return f"choose one of text with --json-keys ({texts})" if texts else ""


def parse_laxly(line: bytes) -> Any:
    """Return what the standard library reads in a line, or a Bad."""
    try:
        text = line.rstrip().decode("utf-8")
    except UnicodeDecodeError as error:
        return Bad(NOT_UTF8, f"byte 0x{line[error.start]:02x} at column {error.start + 1}")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        return Bad("not JSON", f"{error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, endless brackets
        return Bad("not JSON", str(error))


LEAVE_OUT = "leave such lines out with --on-error skip"


def advice(bad: Bad, is_first: bool) -> str:
    """Return what to do about a bad line, also for plain text that is named like JSON lines."""
    if bad.kind == BINARY:
        return "; such a file holds no text: leave it out with --exclude, or all such files with --on-error skip"
    if bad.cure and bad.kind == NOT_UTF8:
        return f"; {bad.cure}"
    if bad.cure and is_first:
        return f"; {bad.cure}, or {LEAVE_OUT}"
    if bad.kind == NOT_UTF8:
        return f"; mend the line, put U+FFFD for such bytes with --on-error replace, or {LEAVE_OUT}"
    hint = '; in a file of this name one {"text": "..."} a line is expected; plain text is called .txt'
    return f"{hint if is_first and bad.kind == 'not JSON' else ''}; mend the line, or {LEAVE_OUT}"


def check_row(row: list[Any], keys: list[str], on_error: str) -> Unit:
    """Return the texts of a row of a table, or what is wrong with the first that is none."""
    if on_error == "replace" and any(isinstance(value, UnicodeDecodeError) for value in row):
        texts = [
            value.object.decode("utf-8", "replace") if isinstance(value, UnicodeDecodeError) else value for value in row
        ]
        unit = check_row(texts, keys, "stop")
        return Mended(unit) if isinstance(unit, list) else unit
    for key, value in zip(keys, row, strict=True):
        if value is None:
            return Bad(f"null under {key!r}", "NoneType")
        if isinstance(value, UnicodeDecodeError):
            return Bad(NOT_UTF8, f"byte 0x{value.object[value.start]:02x} at {value.start} under {key!r}")
        if type(value) is not str:
            return Bad(f"no text under {key!r}", type(value).__name__)
    return row
