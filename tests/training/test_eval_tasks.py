"""Scores of --eval-tasks during a training: their values, and that they change nothing else."""

import json
import math
import time

import pytest
import torch

from helpers import printed_losses, read_rows, train_on_texts
from meshwright.__main__ import main
from meshwright.apps.report.page import page
from meshwright.base.runs.history import read_history
from meshwright.config.schema import TokenizerFlags
from meshwright.generation import language_model
from meshwright.parallel.window_losses import plain_scorer
from meshwright.training.hooks import eval_tasks
from meshwright.training.tasks import prepare_task

TEXT = "the cat sat on the mat and the dog sat on the cat. "
FLAGS = (
    "--num-layers=2 --hidden-size=32 --num-attention-heads=4 --seq-length=16 --max-position-embeddings=16 "
    "--micro-batch-size=4 --lr=1e-2 --train-iters=12 --hidden-dropout=0.1 --no-tensorboard --log-interval=4 "
    "--save-interval=6 --params-dtype=float64 --eval-tasks-interval=4"
).split()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Small files in the formats of the real ones, and the value of --eval-tasks."""
    folder = tmp_path_factory.mktemp("tasks")
    examples = [{"text": TEXT[:n].strip()} for n in (8, 15, 19, 27, 33, 51)]
    (folder / "lambada.jsonl").write_text("".join(json.dumps(e) + "\n" for e in examples))
    (folder / "wiki.tokens").write_text(
        " \n = The Cat = \n \n the cat sat , and the dog @-@ cat sat . \n" * 3
    )
    (folder / "plain.txt").write_text(TEXT)
    names = {"lambada": "lambada.jsonl", "wikitext": "wiki.tokens", "text": "plain.txt"}
    return ",".join(f"{name}={folder / file}" for name, file in names.items())


@pytest.fixture(scope="module")
def scored(tmp_path_factory, files):
    """A run with scores every 4 of its 12 steps."""
    folder = tmp_path_factory.mktemp("scored")
    return train_on_texts(
        folder, [TEXT] * 50, ["--tokenizer-type=ByteTokenizer"], [*FLAGS, f"--eval-tasks={files}"]
    )


@pytest.mark.flag("eval_tasks eval_tasks_interval")
def test_scores_are_those_of_the_saved_weights(scored, files):
    rows = read_rows(scored, "scores")
    assert [(r["iteration"], r["task"]) for r in rows] == [
        (i, name) for i in (4, 8, 12) for name in ("lambada", "wikitext", "text")
    ]
    m = language_model.load_model(
        str(scored), {}, TokenizerFlags(), torch.float64, torch.device("cpu")
    )
    for row in rows[-3:]:
        task = prepare_task(row["task"], row["file"], m.tokenizer, 16, 8)
        want = task.score(plain_scorer(m.model), 16, 8)
        assert row["values"] == pytest.approx(want, rel=1e-9)
        assert row["scores"] == task.columns(row["values"]) and len(row["scores"]) == 2
        assert (row["variant"], row["sha256"]) == (task.variant, task.file.sha256)
    assert rows[2]["values"]["bits_per_byte"] > rows[-1]["values"]["bits_per_byte"]  # it learns
    shown = (scored / "log.txt").read_text()
    assert (
        "scores at iteration 8 (not strict: the last token; another file than OpenAI's):" in shown
    )
    assert (
        " validation results on LAMBADA | number correct: " in shown
        and " results on WIKITEXT103 | avg" in shown
    )


def test_a_resumed_run_scores_as_one_that_was_not_stopped(scored, tmp_path, files):
    stopping = [*FLAGS, f"--eval-tasks={files}", "--exit-interval=6"]
    folder = train_on_texts(tmp_path, [TEXT] * 50, ["--tokenizer-type=ByteTokenizer"], stopping)
    assert {i for scores in read_history(folder).scores.values() for i in scores} == {4}
    assert main(["train", "--config", str(folder / "config.toml")]) == 0
    assert printed_losses(folder) == printed_losses(scored)
    assert read_history(folder).scores == read_history(scored).scores


@pytest.mark.long
def test_the_page_draws_the_scores(scored):
    history = read_history(scored)
    assert list(history.scores)[::2] == [
        "lambada accuracy",
        "wikitext adjusted perplexity",
        "text bits per byte",
    ]
    text, last = page(scored, history, {}, time.time()), history.scores["text bits per byte"][12]
    assert text.count("<figcaption>wikitext adjusted perplexity") == 1
    assert f"{last:.4f}" in text and "final text bits per byte" in text


def test_default_interval(scored, tmp_path, files):
    """The scores' tokens are 0.5 % of the run's, of which each costs three times as much."""
    flags = [f for f in FLAGS if "interval" not in f]
    folder = train_on_texts(
        tmp_path, [TEXT] * 50, ["--tokenizer-type=ByteTokenizer"], [*flags, f"--eval-tasks={files}"]
    )
    # only at the end
    assert {i for scores in read_history(folder).scores.values() for i in scores} == {12}
    [interval] = [
        line
        for line in (folder / "log.txt").read_text().splitlines()
        if " > --eval-tasks: " in line
    ]
    m = language_model.load_model(
        str(scored), {}, TokenizerFlags(), torch.float64, torch.device("cpu")
    )
    made = [
        prepare_task(name, path, m.tokenizer, 16, 8)
        for name, path in (one.split("=") for one in files.split(","))
    ]
    fed = sum(len(w.tokens) - 1 for task in made for w in task.windows)
    every = int(interval.split("every ")[1].split()[0].replace(",", ""))
    assert fed / (3 * every * 4 * 16) <= 0.005 < fed / (3 * every * 4 * 16) * 2.5
    assert math.log10(every / int(str(every)[0])) % 1 == 0 and str(every)[0] in "125"


def train(folder, files, *more):
    flags = [f for f in FLAGS if "--eval-tasks" not in f]
    return train_on_texts(
        folder,
        [TEXT] * 50,
        ["--tokenizer-type=ByteTokenizer"],
        [*flags, f"--eval-tasks={files}", *more],
    )


@pytest.mark.long
def test_scores_beside_the_run(scored, files, tmp_path):
    """The process's scores are those of the step loop; its snapshot does not stay."""
    folder = train(tmp_path, files, "--eval-tasks-device=cpu", "--eval-tasks-interval=12")
    mine, others = (read_rows(f, "scores")[-3:] for f in (folder, scored))
    assert [r["task"] for r in mine] == ["lambada", "wikitext", "text"]
    for a, b in zip(mine, others, strict=True):
        assert a["values"] == pytest.approx(b["values"], rel=1e-9) and a["variant"] == b["variant"]
        assert a["iteration"] == 12
    assert printed_losses(folder) == printed_losses(scored)
    assert not (folder / eval_tasks.SNAPSHOTS).exists()


@pytest.mark.flag("eval_tasks_device")
def test_a_process_that_is_late_or_fails_is_reported(files, tmp_path, monkeypatch):
    """It is not waited for while steps are left, and its failure ends nothing."""
    late = """
import pathlib, sys, time
log = pathlib.Path(sys.argv[3]).parents[1] / "metrics.jsonl"
while '"step", "attempt": 1, "iteration": 12,' not in log.read_text():
    time.sleep(0.01)
sys.exit("no luck")
"""
    monkeypatch.setattr(eval_tasks, "BESIDE", late)
    folder = train(tmp_path, files, "--eval-tasks-device=cpu", "--eval-tasks-interval=4")
    log = (folder / "log.txt").read_text()
    assert (
        "step 4 is still being scored on cpu, so step 8 is not; raise --eval-tasks-interval" in log
    )
    assert "WARNING: --eval-tasks: no scores of step 4 (exit status 1): no luck" in log
    assert (
        "no scores of step 12" in log
        and read_rows(folder, "scores") == []
        and len(read_rows(folder)) == 12
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--eval-tasks=lambada"], "'lambada' is not NAME=FILE"),
        (
            ["--eval-tasks=hellaswag=a"],
            "with one of the names lambada, lambada-strict, wikitext, text",
        ),
        (["--eval-tasks=text=a,text=b"], "text is given twice"),
        (["--eval-tasks=text=a", "--eval-tasks-device=cpu"], "give --run-dir or --save"),
        (
            ["--eval-tasks=lambada=none.jsonl", "--tokenizer=byte", "--mock-data"],
            "lambada=none.jsonl: no such file",
        ),
    ],
)
def test_bad_flags(flags, message, capsys):
    base = [f for f in FLAGS if "eval-tasks" not in f and "save" not in f]
    mock = ["--vocab-size=64", "--mock-data"] * ("--mock-data" not in flags)
    assert main(["train", *base, "--device=cpu", *mock, *flags]) in (2, 65)
    assert message in capsys.readouterr().err


def test_without_eval_tasks_their_flags_are_noted(tmp_path, capsys):
    main(["train", *FLAGS, "--device=cpu", "--mock-data", "--vocab-size=64", "--dry-run"])
    assert "--eval-tasks-interval has no effect without --eval-tasks" in capsys.readouterr().err


def test_losses_are_those_of_a_run_without(scored, tmp_path):
    """Also of one that was stopped and resumed between two scores."""
    without = train_on_texts(tmp_path, [TEXT] * 50, ["--tokenizer-type=ByteTokenizer"], FLAGS[:-1])
    assert printed_losses(without) == printed_losses(scored)
