"""What a run does without, or refuses, in an installation without apps; and a stranger's parts."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace

import pytest

import meshwright
from helpers import TINY_FLAGS, read_rows
from meshwright.__main__ import main
from meshwright.apps.evaluate.text import TEXT
from meshwright.base import registry
from meshwright.base.errors import UNAVAILABLE, UserError
from meshwright.config.grammar import EvalTasks
from meshwright.training import forecast
from meshwright.training.state import folder
from meshwright.training.tasks import Metric, find_task

SHORT = [*TINY_FLAGS, "--train-iters", "2", "--log-format", "short"]


@pytest.fixture
def register(monkeypatch):
    """Return a function that replaces all entries of a group."""

    def replace(group: str, **entries: str) -> None:
        all_of = registry.entries
        found = {name.replace("_", "-"): place for name, place in entries.items()}
        ours = registry._ours() | {group: found}
        monkeypatch.setattr(registry, "_ours", lambda: ours)
        monkeypatch.setattr(
            registry, "entries", lambda other: found if other == group else all_of(other)
        )

    return replace


def test_ours_are_registered():
    assert list(registry.entries("parts")) == ["plan", "report", "verify-layout"]
    assert {"lambada", "lambada-strict", "wikitext", "text"} <= set(registry.entries("tasks"))
    assert all(callable(part) for part in registry.load("parts").values())
    assert {name: task.name for name, task in registry.load("tasks").items()} == {
        name: name for name in registry.entries("tasks")
    }


def test_a_run_without_parts(register, tmp_path, capsys):
    """It has no page and no forecast, and says so nowhere."""
    register("parts")
    register("commands", train="meshwright.cli.train:main", chat="meshwright.cli.chat:main")
    assert forecast.find_forecast() is None and folder.find_page() is None
    assert main(["train", *SHORT, "--save", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    assert (
        "(log.txt)" in printed
        and "report.html" not in printed
        and "meshwright report" not in printed
    )
    assert not (tmp_path / "run" / "report.html").exists() and read_rows(tmp_path / "run", "end")
    assert main(["train", *SHORT, "--dry-run"]) == 0
    assert "plan on" not in capsys.readouterr().out
    assert main(["train", *SHORT, "--dry-run", "--world-size", "2", "--rank", "1"]) == 0
    printed = capsys.readouterr().out
    assert "rank 1 of 2" in printed and "by the plan" not in printed


def test_what_was_asked_for_is_refused(register, capsys):
    register("parts")
    register("tasks")
    assert main(["train", *SHORT, "--verify-layout", "2"]) == UNAVAILABLE
    assert (
        "--verify-layout cannot compare layouts: this installation lacks" in capsys.readouterr().err
    )
    assert main(["train", *SHORT, "--eval-tasks", "text=a.txt"]) == 2
    assert "there is no task: this installation lacks the part for it" in capsys.readouterr().err


def test_an_installation_without_evaluate(monkeypatch):
    registry.load("commands")  # errors look through the settings of all commands
    monkeypatch.setitem(sys.modules, "meshwright.apps.evaluate.perplexity", None)
    with pytest.raises(
        UserError, match="evaluate.. has nothing to score with: this installation lacks"
    ):
        meshwright.evaluate(SimpleNamespace(), ["text"])
    with pytest.raises(AttributeError, match="meshwright.Score is of apps/"):
        meshwright.__getattr__("Score")


class Strange:
    """A stranger's plan, page and task."""

    def verdict(self, config, vocabulary, ranks_here):
        return False, f"no room for {vocabulary} ids"

    def describe_long_step(self, flops):
        return "a strange step"


def draw(run_dir):
    (run_dir / "report.html").write_text("strange")


STRANGE = dataclasses.replace(
    TEXT,
    name="strange",
    title="STRANGE",
    metrics=(Metric("loss", "nats", "lower"),),
    words=lambda values: "a line",
)


@pytest.mark.pictures
def test_a_strangers_parts(register, tmp_path, capsys):
    register("parts", plan=f"{__name__}:Strange", report=f"{__name__}:draw")
    assert main(["train", *SHORT, "--save", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr()
    assert (
        "WARNING: a strange step" in printed.out
        and (tmp_path / "run" / "report.html").read_text() == "strange"
    )
    assert main(["train", *SHORT, "--dry-run"]) == 2
    assert "no room for " in capsys.readouterr().out


def test_a_strangers_task(register, tmp_path, capsys):
    register("tasks", strange=f"{__name__}:STRANGE", other=f"{__name__}:STRANGE")
    (tmp_path / "a.txt").write_text("the cat sat on the mat")
    EvalTasks.read(f"strange={tmp_path}/a.txt").check()
    with pytest.raises(ValueError, match="one of the names strange, other"):
        EvalTasks.read("lambada=FILE").check()
    words = [word for word in SHORT[:-2] if not word.startswith("--vocab-size")] + [
        "--tokenizer-type",
        "ByteTokenizer",
    ]
    assert (
        main(
            [
                "train",
                *words,
                "--save",
                str(tmp_path / "run"),
                "--eval-tasks",
                f"strange={tmp_path}/a.txt",
            ]
        )
        == 0
    )
    [row] = read_rows(tmp_path / "run", "scores")
    assert row["task"] == "strange" and row["scores"] == {"strange loss": row["values"]["loss"]}
    assert "validation results on STRANGE | a line" in capsys.readouterr().out
    with pytest.raises(
        UserError, match="other in the group meshwright.tasks is no record of a task of this name"
    ):
        find_task("other")  # a record has one name
    with pytest.raises(UserError, match="there is no task missing; install"):
        find_task("missing")
