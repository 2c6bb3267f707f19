"""The demo at a small scale; trainings run in their own processes, other commands in this one."""

import dataclasses
import json
import shlex
from pathlib import Path

import pytest

from in_process import InProcess
from meshwright.__main__ import main
from meshwright.commands import demo
from meshwright.errors import BAD_DATA, LOCKED, UserError
from meshwright.quickstart import shell, tour
from meshwright.quickstart.plan import Size
from meshwright.quickstart.tour import Tour, compare_with_trigram
from meshwright.settings import flags
from meshwright.settings.schema import TrainConfig

SMALL = demo.Scale(
    files=40, vocab_size=300, model=Size(1, 16, 2, 16, 4, 1e-2), steps=240, stop=20, prompts=("def",), sample=5
)


@pytest.mark.whole
def test_tour(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(shell.subprocess, "Popen", InProcess)
    folder = tmp_path / "my demo"  # the commands must be quoted
    assert demo.run_demo(folder, SMALL) == 0
    out = capfd.readouterr().out
    for n in range(1, 8):
        assert f"\n{n}. " in out
    assert out.count("\n  (") == 7 and out.count("$ meshwright train ") == 2 and "SIGTERM" in out
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    ends = [(r["reason"], r["status"], r["iteration"]) for r in rows if r["event"] == "end"]
    assert ends[0][:2] == ("SIGTERM", 143) and 20 <= ends[0][2] < 240
    assert ends[1:] == [("all iterations done", 0, 240)]
    assert [r["iteration"] for r in rows if r["event"] == "step"] == list(range(1, 241))
    assert "bits per byte: this GPT" in out and "the trigram is better" in out
    assert (folder / "run/report.html").stat().st_size > 1000 and "report.html" in out
    assert out.count("$ meshwright generate ") == 1 and "\n  def" in out
    train, held_out = (
        {json.loads(x)["text"] for x in (folder / f"{n}.jsonl").read_text().splitlines()} for n in ("train", "held_out")
    )
    assert train and held_out and not train & held_out

    # The commands it ends with are right, here with what the demo made.
    last = [shlex.split(line)[1:] for line in out.splitlines() if line.startswith("  meshwright ")]
    assert [c[0] for c in last] == ["chat", "report", "inspect", "quickstart", "train"]
    assert main(last[1]) == 0 and main(last[2]) == 0
    c = flags.parse_settings(TrainConfig, last[4][1:], "meshwright train").config
    assert (c.model.num_layers, c.training.global_batch_size, c.checkpoint.load) == (24, 512, "gpt2-345m")


def test_345m_command_and_recipe_are_valid():
    words = shlex.split(demo.GPT2_345M)
    assert words[:2] == ["meshwright", "train"]
    assert flags.parse_settings(TrainConfig, words[2:], "meshwright train").config.precision.bf16
    own = demo.Scale()
    command = Tour(Path("x"), "log", "cpu").run_command(own.model, 0, own.steps)
    assert not flags.parse_settings(TrainConfig, command[1:], "meshwright train").notices


def test_only_its_own_folder(tmp_path, capsys, monkeypatch):
    (tmp_path / "thesis.txt").write_text("three years")
    with pytest.raises(UserError) as caught:
        demo.run_demo(tmp_path, SMALL)
    assert caught.value.status == LOCKED and [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]

    # A demo's folder is started anew; what the user put there stays, and so does the model.
    monkeypatch.setattr(demo, "tour", lambda folder, scale: print("tour"))
    assert demo.run_demo(tmp_path / "demo", SMALL) == 0
    (tmp_path / "demo/run/iter_0000001").mkdir(parents=True)
    (tmp_path / "demo/train.jsonl").write_text("old")
    (tmp_path / "demo/notes.txt").write_text("mine")
    assert demo.run_demo(tmp_path / "demo", SMALL) == 0
    assert sorted(p.name for p in (tmp_path / "demo").iterdir()) == [".lock", demo.MARK, "notes.txt", "run-1"]
    out = capsys.readouterr().out
    assert "starting again" in out and f"its model is kept in {tmp_path}/demo/run-1" in out
    (tmp_path / "demo/run").mkdir()
    assert demo.run_demo(tmp_path / "demo", SMALL) == 0
    assert (tmp_path / "demo/run-1/iter_0000001").is_dir() and (tmp_path / "demo/run-2").is_dir()


def test_the_library_is_read_in_the_same_order_and_without_what_is_no_text(tmp_path):
    folder = tmp_path / "lib"
    for n in range(60):
        (folder / "p").mkdir(parents=True, exist_ok=True)
        (folder / f"p/m{n}.py").write_text(f"x = {n}\n")
    (folder / "latin.py").write_bytes(b"s = '\xe9'\n")
    (folder / "test").mkdir()
    (folder / "test/test_x.py").write_text("assert 1\n")
    texts = list(demo.library(folder, None))
    assert sorted(texts) == sorted(f"x = {n}\n" for n in range(60))
    assert texts == list(demo.library(folder, None)) != sorted(texts)
    with pytest.raises(UserError) as caught:
        list(demo.library(tmp_path / "nothing", None))
    assert caught.value.status == BAD_DATA


@pytest.mark.parametrize("ours, verdict", [(0.1, "the GPT is better"), (7.9, "the trigram is better")])
def test_the_verdict_is_honest(tmp_path, capsys, ours, verdict):
    for name in ("train", "held_out"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": "the cat sat on the mat. "}) + "\n")
    compare_with_trigram(ours, tmp_path / "train.jsonl", tmp_path / "held_out.jsonl")
    out = capsys.readouterr().out
    assert verdict in out and f"{ours:.3f}" in out


def test_a_command_that_fails_ends_the_tour_with_its_status(tmp_path, capfd):
    with pytest.raises(UserError, match="no-such-file does not exist") as caught:
        shell.call(
            tmp_path / "log", ["train-tokenizer", "--input", "no-such-file", "--vocab-size", "300", "--output", "x"]
        )
    assert caught.value.status == BAD_DATA


@pytest.mark.whole
def test_ctrl_c_saves_and_prints_how_to_continue(tmp_path, capfd, monkeypatch):
    """Ctrl-C reaches this process, here while it reads a line of the training, which it stops."""

    def interrupt(line):
        if " iteration      100/" in line:
            raise KeyboardInterrupt
        return line

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shell.subprocess, "Popen", InProcess)
    monkeypatch.setattr(tour, "shorten_line", interrupt)
    assert demo.run_demo(Path("demo"), dataclasses.replace(SMALL, steps=2000, stop=1900)) == 130
    printed = capfd.readouterr().out
    assert "to continue the training:   meshwright train --config demo/run/config.toml" in printed
    assert "to restart the demo:        meshwright demo demo" in printed
    saved = int((tmp_path / "demo/run/latest_checkpointed_iteration.txt").read_text())
    assert main(["train", "--config", "demo/run/config.toml", "--exit-interval", "10"]) == 0
    assert saved < int((tmp_path / "demo/run/latest_checkpointed_iteration.txt").read_text()) <= saved + 10
