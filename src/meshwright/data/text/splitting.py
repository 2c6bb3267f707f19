"""Split documents: into sentences, and those that are too long for training and validation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from meshwright.base import registry
from meshwright.base.errors import UNAVAILABLE, UserError

BORDER = re.compile(r"\n\s*\n|\n")  # where a document may be cut


def cut_document(text: str, longest: int) -> Iterator[str]:
    """Cut a long document at the ends of paragraphs, or else of lines; a blank rest is dropped."""
    begin = 0
    while len(text) - begin > longest:
        borders = [
            m.end()
            for m in BORDER.finditer(text, begin + longest // 2, begin + longest)
            if len(m[0]) > 1
        ]
        end = (
            borders[-1] if borders else text.rfind("\n", begin + longest // 2, begin + longest) + 1
        )
        end = end or begin + longest
        yield text[begin:end]
        begin = end
    if text[begin:].strip():
        yield text[begin:]


def build_splitter(splitter: str, language: str, keep_newlines: bool) -> Callable[[str], list[str]]:
    """Return a function that splits a text into sentences; refuse one that is not registered.

    With `keep_newlines`, white space stays with the sentence before it: joined, they are the text.
    """
    build = registry.find("splitters", splitter)
    if build is None:
        raise UserError(
            f"--split-sentences: there is no splitter {splitter!r}: {registry.LACKING}", UNAVAILABLE
        )
    split: Callable[[str], list[str]] = build(language, keep_newlines)
    return split
