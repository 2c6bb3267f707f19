"""A page without pictures, for tests of its words."""

import pytest


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the pictures out of pages: they take most of their time."""
    for module in ("page", "compare"):
        monkeypatch.setattr(f"meshwright.apps.report.{module}.plots", lambda given: [])
