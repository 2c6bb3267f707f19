"""A server that the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from sites import Site, site  # noqa: E402


@pytest.fixture(scope="module")
def fake() -> Iterator[Site]:
    with site() as running:
        yield running
