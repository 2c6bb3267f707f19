"""The verbs of `meshwright data` that the registry has, and those that it lacks."""

from __future__ import annotations

import pytest

from meshwright.__main__ import main
from meshwright.base import registry
from meshwright.base.errors import USAGE
from meshwright.cli import data
from meshwright.config import completion
from meshwright.config.pages import known_pages

OF_THE_CORE = ["verify", "inspect", "index", "merge"]


@pytest.fixture
def without_apps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the registry find nothing of apps/, as where the folder was deleted."""
    is_there = registry.is_there
    monkeypatch.setattr(
        registry, "is_there", lambda place: ".apps." not in place and is_there(place)
    )


@pytest.mark.usefixtures("without_apps")
def test_verbs_of_apps_are_missing_without_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(data.verbs()) == OF_THE_CORE
    assert main(["data", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "  merge " in shown and "dedup" not in shown
    assert main(["data", "dedup"]) == USAGE
    assert "no verb 'dedup'" in capsys.readouterr().err


@pytest.mark.usefixtures("without_apps")
def test_commands_of_apps_are_neither_explained_nor_completed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages = known_pages()
    assert {"train", "generate", "data merge"} <= pages.keys()
    assert pages.keys().isdisjoint({"plan", "watch", "report", "data dedup"})
    monkeypatch.setattr(completion, "PAGES", pages)
    offered = {words.name for words in completion.words_of_commands()}
    assert "data merge" in offered and offered.isdisjoint({"verify-layout", "sweep", "data plan"})
    assert completion.launched() == ["train", "generate", "chat"]
    assert "--train-iters" in completion.completion_script("bash")
