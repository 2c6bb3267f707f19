"""Every command block of the documents has a test."""

from __future__ import annotations

import importlib
from pathlib import Path

from blocks import NOTHING_TO_RUN, TESTS, every_block


def test_every_block_has_a_test() -> None:
    for path in Path(__file__).parent.glob("test_*.py"):
        importlib.import_module(path.stem)
    known = every_block()
    assert set(NOTHING_TO_RUN) <= set(known) and not set(NOTHING_TO_RUN) & set(TESTS)
    assert [name for name in known if name not in {*TESTS, *NOTHING_TO_RUN}] == []
