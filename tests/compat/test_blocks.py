"""Every command block of the documents has a test; `pytest -s` prints the list."""

from __future__ import annotations

import importlib
from pathlib import Path

from blocks import NOTHING_TO_RUN, TESTS, every_block


def test_every_block_has_a_test() -> None:
    for path in Path(__file__).parent.glob("test_*.py"):
        importlib.import_module(path.stem)
    known = every_block()
    assert set(NOTHING_TO_RUN) <= set(known) and not set(NOTHING_TO_RUN) & set(TESTS)
    states = {
        name: ", ".join(TESTS.get(name, ())) or NOTHING_TO_RUN.get(name, "MISSING")
        for name in known
    }
    print("\n" + "\n".join(f"{name:45} {state}" for name, state in states.items()))
    missing = [name for name, state in states.items() if state == "MISSING"]
    print(f"{len(known) - len(missing)} of {len(known)} blocks")
    assert not missing
