"""What is registered is found: in a clone, in an installation, by us and by other packages."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest

from helpers import error_of
from meshwright.base import registry, version
from meshwright.base.errors import UNAVAILABLE


CACHED = (registry.entries, registry._ours)


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """Forget what was found before the test, and what it has found."""
    for cached in CACHED:
        cached.cache_clear()
    yield
    for cached in CACHED:
        cached.cache_clear()


def test_a_clone_and_an_installation_have_the_same(monkeypatch):
    here = registry._ours()
    registry._ours.cache_clear()
    monkeypatch.setattr(registry, "project_text", lambda: "")
    points = [EntryPoint(n, v, f"meshwright.{group}") for group, some in here.items() for n, v in some.items()]
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: SimpleNamespace(entry_points=points))
    assert registry._ours() == here and registry.find("commands", "train").__module__ == "meshwright.cli.train"


def test_all_that_we_register_is_there():
    for group, points in registry._ours().items():
        assert registry.load(group).keys() >= points.keys()


def test_another_packages_entry_comes_last_and_replaces_none_of_ours(monkeypatch):
    points = [EntryPoint(n, "json:loads", "meshwright.commands") for n in ("train", "read-json")]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    assert list(registry.entries("commands"))[-1] == "read-json"
    assert registry.find("commands", "read-json")("[1]") == [1]
    assert registry.find("commands", "train").__module__ == "meshwright.cli.train"
    assert registry.find("commands", "none") is None


def test_what_was_taken_out_is_not_registered(monkeypatch):
    ours = {"commands": {"gone": "meshwright.apps.gone.command:main", "train": "meshwright.cli.train:main"}}
    monkeypatch.setattr(registry, "_ours", lambda: ours)
    assert list(registry.entries("commands")) == ["train"] and registry.find("commands", "gone") is None


def test_code_without_an_installation_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(version, "PROJECT", tmp_path / "pyproject.toml")

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    assert "is neither installed nor in a clone" in error_of(lambda: registry.find("commands", "train"), UNAVAILABLE)
