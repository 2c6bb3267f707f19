"""What is registered is found: in a clone, in an installation, by us and by other packages."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import error_of
from meshwright.base import registry, version
from meshwright.base.errors import UNAVAILABLE

CACHED = (registry._ours, registry._others)


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """Forget what was found before the test, and what it has found."""
    for cached in CACHED:
        cached.cache_clear()
    yield
    for cached in CACHED:
        cached.cache_clear()


def install(folder: Path, name: str, groups: registry.Groups) -> None:
    """Write the metadata of an installed package."""
    sections = (
        "\n".join(
            [f"[meshwright.{group}]", *(f"{name} = {place}" for name, place in points.items())]
        )
        for group, points in groups.items()
    )
    path = folder / f"{name}-1.0.dist-info" / "entry_points.txt"
    path.parent.mkdir(parents=True)
    path.write_text("[console_scripts]\nx = y:z\n\n" + "\n\n".join(sections) + "\n")


def test_a_clone_and_an_installation_have_the_same(tmp_path, monkeypatch):
    here = registry._ours()
    registry._ours.cache_clear()
    install(tmp_path, "meshwright", here)
    monkeypatch.setattr(registry, "project_text", lambda: "")
    monkeypatch.setattr(registry.sys, "path", [str(tmp_path)])
    assert (
        registry._ours() == here
        and registry.find("commands", "train").__module__ == "meshwright.cli.train"
    )
    assert not registry._others()


def test_all_that_we_register_is_there():
    for group, points in registry._ours().items():
        assert registry.load(group).keys() >= points.keys()


def test_another_packages_entry_comes_last_and_replaces_none_of_ours(tmp_path, monkeypatch):
    install(tmp_path, "another", {"commands": {"train": "json:loads", "Read-json": "json:loads"}})
    monkeypatch.setattr(registry.sys, "path", [*registry.sys.path, str(tmp_path)])
    assert list(registry.entries("commands"))[-1] == "Read-json"
    assert registry.find("commands", "Read-json")("[1]") == [1]
    assert registry.find("commands", "train").__module__ == "meshwright.cli.train"
    assert registry.find("commands", "none") is None


def test_what_was_taken_out_is_not_registered(monkeypatch):
    ours = {
        "commands": {
            "gone": "meshwright.apps.gone.command:main",
            "train": "meshwright.cli.train:main",
        }
    }
    with monkeypatch.context() as patch:
        patch.setattr(registry, "_ours", lambda: ours)
        assert (
            list(registry.entries("commands")) == ["train"]
            and registry.find("commands", "gone") is None
        )


def test_code_without_an_installation_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(version, "PROJECT", tmp_path / "pyproject.toml")
    monkeypatch.setattr(registry.sys, "path", [str(tmp_path)])
    assert "is neither installed nor in a clone" in error_of(
        lambda: registry.find("commands", "train"), UNAVAILABLE
    )


def test_the_page_names_each_group_and_what_an_entry_is():
    page = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
    rows = re.findall(r"^\| `meshwright\.(\w+)` \| (.*) \|$", page, re.M)
    internal = {"parts", "apps"}  # between the core and what comes with it
    assert {group for group, _ in rows} == registry._ours().keys() - internal
    for name in (
        name for _, about in rows for name in re.findall(r"`((?:\w+\.)+[A-Z]\w+)`", about)
    ):
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(f"meshwright.{module}"), attribute), name


def test_an_entry_that_cannot_be_imported_names_its_package(tmp_path, monkeypatch):
    install(tmp_path, "another", {"trackers": {"board": "no_such_package.board:open_board"}})
    monkeypatch.setattr(registry.sys, "path", [*registry.sys.path, str(tmp_path)])
    message = error_of(lambda: registry.load("trackers"), UNAVAILABLE)
    assert (
        "board = no_such_package.board:open_board" in message
        and "mend or uninstall no_such_package" in message
    )
