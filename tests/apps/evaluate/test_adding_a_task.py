"""docs/adding-a-task.md: its task as an installed package, and its column in every view."""

import contextlib
import dataclasses
import json
import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from helpers import read_rows, train_on_texts
from meshwright.__main__ import main
from meshwright.apps.watch.curves import View, curves
from meshwright.base import registry
from meshwright.base.errors import UserError
from meshwright.base.runs.follow import RunTail
from meshwright.config.schema import TokenizerFlags
from meshwright.data.tokenizers import Bytes
from meshwright.generation import language_model
from meshwright.training.tasks import Metric, Task, describe_column, prepare_task

GROUP = f"{registry.PREFIX}tasks"
PAGE = (Path(__file__).parents[3] / "docs" / "adding-a-task.md").read_text()
TEXT = "the cat sat on the mat and the dog sat on the cat. "
COLUMNS = {"choices accuracy": "accuracy", "choices accuracy by byte": "accuracy_by_byte"}
QUESTIONS = [
    {"text": "the cat sat on the", "choices": ["mat", "qqqq", "dog ran"], "answer": 0},
    {"text": "and the dog", "choices": ["zzz", "sat"], "answer": 1},
    {"text": "the cat sat on the mat and the dog sat on", "choices": ["the cat", "x"], "answer": 1},
]
SIZES = "--num-layers=2 --hidden-size=32 --num-attention-heads=4 --seq-length=16 --max-position-embeddings=16"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The page's package, beside the others."""
    [code] = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.S | re.M)
    [entry] = re.findall(r"^```toml\n(.*?)^```", PAGE, flags=re.S | re.M)
    site = tmp_path_factory.mktemp("site")
    (site / "choices.py").write_text(code)
    (site / "choices-1.0.dist-info").mkdir()
    lines = [
        f"{name} = {place}\n"
        for name, place in tomllib.loads(entry)["project"]["entry-points"][GROUP].items()
    ]
    (site / "choices-1.0.dist-info" / "entry_points.txt").write_text(f"[{GROUP}]\n{''.join(lines)}")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        patch.delitem(sys.modules, "choices", raising=False)
        registry._others.cache_clear()
        registry.is_there.cache_clear()
        yield site
        sys.modules.pop("choices", None)
    registry._others.cache_clear()


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    path = tmp_path_factory.mktemp("questions") / "questions.jsonl"
    path.write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS))
    return path


@pytest.fixture(scope="module")
def scored(installed, questions, tmp_path_factory):
    """A run that saves and scores after steps 10 and 20, with what it printed beside it."""
    folder = tmp_path_factory.mktemp("scored")
    flags = [
        *SIZES.split(),
        "--micro-batch-size=8",
        "--lr=1e-2",
        "--train-iters=20",
        "--no-tensorboard",
    ]
    flags += ["--log-interval=10", "--save-interval=10", "--log-format=short"]
    flags += ["--eval-tasks-interval=10", f"--eval-tasks=choices={questions}"]
    with open(folder / "screen.txt", "w") as screen, contextlib.redirect_stdout(screen):
        return train_on_texts(folder, [TEXT] * 50, ["--tokenizer-type=ByteTokenizer"], flags)


@pytest.fixture
def evaluate(scored, questions, capsys):
    def call(*flags):
        capsys.readouterr()
        assert (
            main(
                [
                    "evaluate",
                    str(scored),
                    "--device=cpu",
                    f"--eval-tasks=choices={questions}",
                    *flags,
                ]
            )
            == 0
        )
        return capsys.readouterr().out

    return call


def test_its_measures_are_those_of_a_plain_computation(scored, evaluate):
    m = language_model.load_model(
        str(scored), {}, TokenizerFlags(), torch.float32, torch.device("cpu")
    )
    right = right_by_byte = 0
    for question in QUESTIONS:
        losses = []
        for choice in question["choices"]:
            ids = f"{question['text']} {choice}".encode()[-17:]  # a byte is a token
            with torch.no_grad():
                logits = m.model(torch.tensor([list(ids[:-1])]))[0].log_softmax(-1)
            label = range(len(ids) - 1 - len(choice) - 1, len(ids) - 1)  # with the space
            losses.append(-sum(float(logits[at, ids[at + 1]]) for at in label))
        sizes = [len(choice) for choice in question["choices"]]
        by_byte = [loss / size for loss, size in zip(losses, sizes, strict=True)]
        right += losses.index(min(losses)) == question["answer"]
        right_by_byte += by_byte.index(min(by_byte)) == question["answer"]
    got = json.loads(evaluate("--json"))
    assert got["values"] == {
        "accuracy": right / 3,
        "accuracy_by_byte": right_by_byte / 3,
        "questions": 3,
    }
    assert (got["task"], got["variant"]) == ("choices", "the most likely choice") and right > 0
    assert json.loads(evaluate("--json", "--limit=2"))["values"]["questions"] == 2


def test_its_columns_in_evaluate(evaluate, tmp_path):
    table = evaluate()
    assert " validation results on CHOICES | accuracy: " in table
    assert re.search(r"^  accuracy by byte +[01]\.\d{4}$", table, re.M)
    several = evaluate(
        "--steps=all", f"--picture={tmp_path}/a.svg", f"--results-path={tmp_path}/a.json"
    )
    assert re.search(r"^choices: variant the most likely choice; ", several, re.M)
    assert re.search(r"^ +step +accuracy +accuracy by byte +questions$", several, re.M)
    assert "choices accuracy" in (tmp_path / "a.svg").read_text()
    assert json.loads((tmp_path / "a.json").read_text())[0]["task"] == "choices"


def test_its_columns_in_a_run_and_its_page(scored, installed, capsys):
    rows = read_rows(scored, "scores")
    assert [r["iteration"] for r in rows] == [10, 20]
    for row in rows:
        assert row["scores"] == {column: row["values"][name] for column, name in COLUMNS.items()}
    log = (scored / "log.txt").read_text()
    screen = (scored.parent / "screen.txt").read_text()
    assert f"20  choices: accuracy {rows[-1]['values']['accuracy']:.4f}" in screen
    assert (
        "scores at iteration 10 (the most likely choice):" in log
        and "validation results on CHOICES" in log
    )
    assert main(["report", str(scored)]) == 0
    page = (scored / "report.html").read_text()
    for column, name in COLUMNS.items():
        note = "share of the questions, higher is better"
        assert f'<figcaption>{column} <span class="quiet">{note}</span></figcaption>' in page
        assert re.search(rf"final {column}\b.{{0,40}}{rows[-1]['values'][name]:,.4f}", page, re.S)


def test_its_columns_in_comparisons_and_watch(scored, installed, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(scored, other)
    assert main(["report", str(scored), str(other)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    last = read_rows(scored, "scores")[-1]
    for column, name in COLUMNS.items():
        assert ["final", *column.split(), *[f"{last['values'][name]:.4f}"] * 2] in lines
    tail = RunTail(scored)
    tail.read_new(lambda: None)
    drawn = curves(tail, View())["scores"]
    assert list(drawn) == list(COLUMNS) and drawn["choices accuracy"]["step"] == [10, 20]
    assert drawn["choices accuracy"]["unit"] == "share of the questions, higher is better"


def test_its_name_in_the_help(installed, capsys):
    for command in ("train", "evaluate"):
        with pytest.raises(SystemExit):
            main([command, "--help", "--eval-tasks"])
        assert "choices=FILE" in re.sub(r"\s+", "", capsys.readouterr().out)


def test_a_file_without_a_document_is_refused(installed, tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(
        UserError, match=r"choices=.*a\.jsonl: there is nothing to score; name another file"
    ):
        prepare_task("choices", str(tmp_path / "a.jsonl"), Bytes(), 16)


def test_a_column_of_no_task_has_no_note():
    assert describe_column("lambada accuracy") == "share of the passages, higher is better"
    assert describe_column("lambada speed") == describe_column("hellaswag accuracy") == ""


def test_the_page_explains_every_field():
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", PAGE, re.M)
    explained = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    fields = {field.name for cls in (Task, Metric) for field in dataclasses.fields(cls)}
    assert fields <= explained
