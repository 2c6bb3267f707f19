"""--split-sentences: the splitters that are registered under `meshwright.splitters`."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.base import registry
from meshwright.base.errors import UNAVAILABLE, UserError


def build_splitter(splitter: str, language: str, keep_newlines: bool) -> Callable[[str], list[str]]:
    """Return a function that splits a text into sentences; refuse a splitter that is missing.

    With `keep_newlines`, white space stays with the sentence before it: joined, they are the text.
    """
    build = registry.find("splitters", splitter)
    if build is None:
        raise UserError(f"--split-sentences: there is no splitter {splitter!r}: {registry.LACKING}", UNAVAILABLE)
    split: Callable[[str], list[str]] = build(language, keep_newlines)
    return split
