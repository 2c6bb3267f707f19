"""One process reads the pickles of all tests of a file; to start one takes longer than to read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from meshwright.checkpoint.pickle import pickles


@pytest.fixture(scope="module", autouse=True)
def reader() -> Iterator[None]:
    with pickles.READ.kept():
        yield
