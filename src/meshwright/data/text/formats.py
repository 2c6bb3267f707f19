"""The formats of files of many documents: how they are divided, and what reads them.

Besides JSON lines and plain text these are dumps, such as those of Wikipedia, which are divided by
marks of their own. Each kind of dumps is registered under the entry point `meshwright.dumps`; a
file of a kind that is not registered is read as what it is besides, plain text.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from meshwright.base import registry
from meshwright.data.text import jsonl, plain
from meshwright.data.text.divide import LINES, Division, Slice, by_separator
from meshwright.data.text.records import ReadOptions, Record, Rejected, too_long

# The names of formats that are no dumps, as a Detected has them.
JSONL = "JSON lines"
TEXT = "plain text"
PAGE = "HTML"


@dataclass(frozen=True)
class TextFormat:
    """A format of files of many documents."""

    # As messages call such files.
    name: str
    # Where documents end.
    division: Division
    # Yields the documents of whole ones, or what is wrong in them.
    documents: Callable[[Slice, ReadOptions], Iterator[Record]]
    # How such a file begins, for dumps.
    begins: re.Pattern[bytes] | None = None
    # What a document that is too long is called, and what to do about it.
    unit: str = ""
    shorten: str = ""

    def read(self, documents: Slice, options: ReadOptions) -> Iterator[Record]:
        """Yield the documents, or what is wrong in them."""
        records = self.documents(documents, options)
        return (
            itertools.chain(records, [self.too_long(documents)]) if documents.lacking else records
        )

    def too_long(self, documents: Slice) -> Rejected:
        is_line = self.name == JSONL
        place = documents.place(documents.stop - documents.first, exactly=is_line)
        return too_long(place, self.unit, self.shorten)


_LINES = TextFormat(JSONL, LINES, jsonl.documents)


@functools.cache
def _text(name: str, separator: str) -> TextFormat:
    shorten = f"divide it: lines {separator!r}, or --document-separator"
    read = plain.page if name == PAGE else plain.documents
    return TextFormat(name, by_separator(separator), read, shorten=shorten)


@functools.cache
def all_dumps() -> dict[str, TextFormat]:
    """Return the kinds of dumps by their names."""
    return {dump.name: dump for dump in registry.load("dumps").values()}


def find(name: str, separator: str) -> TextFormat:
    """Return the format of this name; the separator divides plain text."""
    if name == JSONL:
        return _LINES
    return all_dumps().get(name) or _text(name, separator)


def recognise(start: bytes) -> TextFormat | None:
    """Return the kind of dumps that begins so."""
    return next(
        (dump for dump in all_dumps().values() if dump.begins and dump.begins.match(start)), None
    )


def but_for_dumps(kind: str) -> str:
    """Return what to call files of a kind that are no dumps."""
    names = ", ".join(all_dumps())
    return f"{kind} other than {names}" if names else kind
