"""What is registered to read and divide texts (group `meshwright.texts`): dumps, sentences.

compat/ registers both. Without it a dump is a text like any other.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from meshwright.base import registry
from meshwright.base.errors import UserError
from meshwright.data.text.records import Bad

# The separator of the documents of a dump; no --document-separator is equal, which is one line.
PAGES = "\n</page>"


@dataclass(frozen=True)
class DumpReader:
    """How MediaWiki dumps are read."""

    begins: re.Pattern[bytes]  # as a dump does
    ends: tuple[re.Pattern[bytes], re.Pattern[bytes]]  # as a page: with its line feed, or at the end too
    # (pages) -> where each article begins, and its text or what is wrong with it
    articles: Callable[[bytes], Iterator[tuple[int, str | Bad]]]


@functools.cache
def dump_reader() -> DumpReader | None:
    found: DumpReader | None = registry.find("texts", "wikipedia-dump")
    return found


def is_dump(start: bytes) -> bool:
    """Return whether a text that begins so is a dump, which something here can read."""
    reader = dump_reader()
    return reader is not None and reader.begins.match(start) is not None


def build_splitter(kind: str, language: str, keeps_newlines: bool) -> Callable[[str], list[str]]:
    """Return what divides a text into sentences, or raise UserError if it lacks the language."""
    build: Callable[[str, str, bool], Callable[[str], list[str]]] | None = registry.find("texts", "sentences")
    if build is None:
        raise UserError("--split-sentences needs compat/, which this installation lacks; leave it out")
    return build(kind, language, keeps_newlines)
