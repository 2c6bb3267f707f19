"""The command blocks of the five documents, and which test runs each.

`blocks/*.txt` hold them word for word, except that a package index's address reads INDEX.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

FOLDER = Path(__file__).with_name("blocks")
T = TypeVar("T", bound=Callable[..., None])

# Block -> the tests that run it, filled by `covers` when the test modules are imported.
TESTS: dict[str, list[str]] = {}

# Blocks that run nothing, and what a test shows in their place.
NOTHING_TO_RUN = {
    "megatron-deepspeed/edits-of-the-source": "the scripts run unedited",
    "megatron-deepspeed/edit-pretrain": "it opens an editor",
    "megatron-deepspeed/edit-generate": "it opens an editor",
    "megatron-deepspeed/edit-interactive": "it opens an editor",
    "ascend-gpt2/edits-of-the-source": "the scripts run unedited",
}


def every_block() -> dict[str, str]:
    """Return document/title -> text."""
    out = {}
    for path in sorted(FOLDER.glob("*.txt")):
        _, *parts = re.split(r"^==== (.*)\n", path.read_text(encoding="utf-8"), flags=re.M)
        for title, text in zip(parts[::2], parts[1::2], strict=True):
            out[f"{path.stem}/{title}"] = text.strip("\n") + "\n"
    return out


def block(name: str) -> str:
    return every_block()[name]


def covers(*names: str) -> Callable[[T], T]:
    """Record that a test runs these blocks."""

    def mark(test: T) -> T:
        for name in names:
            assert name in every_block(), name
            TESTS.setdefault(name, []).append(test.__name__)
        return pytest.mark.whole(test)

    return mark
