"""Dumps: files of many documents whose own marks divide them, such as those of Wikipedia.

Each kind is registered under the entry point `meshwright.dumps`. A file of a kind that is not
registered is read as what it is besides, plain text.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from meshwright.base import registry
from meshwright.data.text.records import Reading, Unit


@dataclass(frozen=True)
class Dump:
    """A kind of dumps, and how its documents are found and read."""

    # As messages call such files.
    name: str
    # Stands for it where a text has a --document-separator, which is one line; this is none.
    separator: str
    # How such a file begins.
    begins: re.Pattern[bytes]
    # The end of a document: with the line feed behind it, and also at the end of the file.
    ends: tuple[re.Pattern[bytes], re.Pattern[bytes]]
    # (bytes from the beginning of a document to the end of one, how to read them) -> the documents,
    # or what is wrong in them, and where each begins.
    documents: Callable[[bytes, Reading], Iterator[tuple[int, Unit]]]


@functools.cache
def all_dumps() -> dict[str, Dump]:
    """Return the kinds by their separators."""
    return {dump.separator: dump for dump in registry.load("dumps").values()}


def with_separator(separator: str) -> Dump | None:
    """Return the kind that a separator stands for; None for that of a text."""
    return all_dumps().get(separator)


def recognise(start: bytes) -> Dump | None:
    """Return the kind of a file by its first bytes."""
    return next((dump for dump in all_dumps().values() if dump.begins.match(start)), None)


def but_for_dumps(kind: str) -> str:
    """Return what to call files of a kind that are no dumps."""
    names = ", ".join(dump.name for dump in all_dumps().values())
    return f"{kind} other than {names}" if names else kind
