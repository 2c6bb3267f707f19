"""The one stream that all readers give: documents, and why something is none.

A reader yields a `Document` or a `Rejected` for each line of JSON, row of a table, text or article,
in the order of the input, and nothing else. Blank lines and blank texts give neither.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from meshwright.config.text_inputs import TextInputs
from meshwright.data.text import limits

# Reasons that are looked for.
NOT_UTF8 = "not UTF-8"
BINARY = "binary"
EMPTY = "empty"
CUT_SHORT = "input cut short"
LEAVE_OUT = "leave such lines out with --on-error skip"
# So many keys or columns are named.
MOST_KEYS = 10


class ReadOptions(NamedTuple):
    """How texts are read, of the flags of TextInputs."""

    keys: tuple[str, ...] = ("text",)
    separator: str = ""  # line between the documents of a text
    encoding: str = ""
    on_error: str = "stop"


def options_of(given: TextInputs) -> ReadOptions:
    return ReadOptions(
        tuple(dict.fromkeys(given.json_keys)),
        given.document_separator,
        given.encoding,
        given.on_error,
    )


# Every document makes one of each of these two. A frozen or a named tuple takes twice the time.
@dataclass(slots=True)
class TextPlace:
    """Where a document is: in a file, or on a line or in a row of it.

    A worker that reads a range of a file does not know how many lines precede it. It gives the byte
    `after` which it counts, and the lines before are counted when the place is printed.
    """

    path: str
    number: int = 0  # of the line or row, from 1; 0: the whole file
    unit: Literal["line", "row"] = "line"
    after: int = 0
    note: str = ""

    def __str__(self) -> str:
        path = shown(self.path)
        note = f" ({self.note})" if self.note else ""
        if not self.number:
            return path + note
        if self.unit == "row":
            return f"{path}: row {self.number}{note}"
        before = count_lines(self.path, self.after) if self.after else 0
        return f"{path}:{before + self.number}{note}"


@dataclass(slots=True)
class Document:
    """A document: the text under each key."""

    texts: tuple[str, ...]
    place: TextPlace
    lines: int = 1  # of JSON and rows of tables one each
    repaired: int = 0  # lines in which U+FFFD replaces bad bytes


class Rejected(NamedTuple):
    """Why a line, row, text or file gives no document: `reason` is counted, `detail` is its own."""

    reason: str
    place: TextPlace
    detail: str = ""
    cure: str = ""  # what to do, if it is not the usual
    # False: a file that holds no text is passed over in a folder or an archive
    is_error: bool = True
    byte: int | None = None  # of the file, at which it is wrong
    bytes: int = 0  # of a text that is rejected as a whole
    charset: str = ""  # which a text that is not UTF-8 seems to have

    def __str__(self) -> str:
        reason = self.reason if self.byte is None else f"{self.reason} at byte {self.byte:,}"
        return f"{reason} ({self.detail})" if self.detail else reason

    def advice(self, is_first: bool) -> str:
        """Return what to do; the first of all may be of a file that is named like another kind."""
        if self.reason == CUT_SHORT:
            return f"fetch it again, or keep its undamaged part and {LEAVE_OUT}"
        if self.reason == BINARY:
            return "such a file holds no text: leave it out with --exclude, or all such files with --on-error skip"
        if self.cure and self.reason == NOT_UTF8:
            return self.cure
        if self.cure and is_first:
            return f"{self.cure}, or {LEAVE_OUT}"
        if self.reason == NOT_UTF8:
            return (
                f"mend the line, put U+FFFD for such bytes with --on-error replace, or {LEAVE_OUT}"
            )
        hint = ""
        if is_first and self.reason == "not JSON":
            hint = 'in a file of this name one {"text": "..."} a line is expected; plain text is called .txt; '
        return f"{hint}mend the line, or {LEAVE_OUT}"

    def complaint(self, is_first: bool = False) -> str:
        """Say where it is, what is wrong and what to do."""
        if self.reason == CUT_SHORT:
            what = f"{shown(self.place.path)} is cut short or damaged ({self.detail})"
        else:
            what = f"{self.place}: {self}"
        return f"{what}; {self.advice(is_first)}"


Record = Document | Rejected


def cut_short(path: str, error: Exception) -> Rejected:
    """Return what stands at the end of an input whose rest cannot be read."""
    why = str(error) or type(error).__name__
    return Rejected(CUT_SHORT, TextPlace(path, note=why), why)


def too_long(place: TextPlace, unit: str = "", cure: str = "") -> Rejected:
    return Rejected(f"{unit}longer than {limits.LONGEST:,} bytes", place, cure)


def choose_key(names: Iterable[str]) -> str:
    """Return how one of these keys or columns is chosen, "" if there are none."""
    texts = ", ".join(list(names)[:MOST_KEYS])
    return f"choose one of text with --json-keys ({texts})" if texts else ""


def shown(path: str) -> str:
    """Return a path that can be printed: control characters and invalid UTF-8 are escaped."""
    return path if path.isprintable() else path.encode("unicode_escape").decode()


def named(path: str) -> str:
    """Return what an error calls an input, however the command that reads it was given it."""
    return "the standard input" if path == "-" else shown(path)


def count_lines(path: str, end: int) -> int:
    """Return how many lines end before this byte."""
    lines = 0
    with open(path, "rb") as file:
        for at in range(0, end, limits.PIECE):
            lines += file.read(min(limits.PIECE, end - at)).count(b"\n")
    return lines
