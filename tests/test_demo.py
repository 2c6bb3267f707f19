"""The demo at a small scale; trainings run in their own processes, other commands in this one."""

import contextlib
import dataclasses
import io
import json
import shlex
import subprocess
from pathlib import Path

import pytest

from meshwright.__main__ import main
from meshwright.commands import demo
from meshwright.errors import BAD_DATA, LOCKED, UserError
from meshwright.settings import flags
from meshwright.settings.schema import TrainConfig

SMALL = demo.Scale(
    files=40,
    vocab_size=300,
    model="--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16",
    recipe="--micro-batch-size 4 --lr 1e-2",
    iters=240,
    stop=20,
    log_interval=10,
    prompts=("def",),
    sample=5,
)


class InProcess:
    """Stands in for subprocess.Popen: runs every command but `train` in this process."""

    def __new__(cls, command, **options):
        return subprocess_popen(command, **options) if command[3] == "train" else super().__new__(cls)

    def __init__(self, command, **options):
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(options["stderr"]):
            self.status = main(command[3:])
        self.stdout = io.StringIO(out.getvalue())

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def wait(self):
        return self.status


subprocess_popen = subprocess.Popen


@pytest.mark.whole
def test_tour(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(demo.subprocess, "Popen", InProcess)
    folder = tmp_path / "my demo"  # the commands must be quoted
    assert demo.run(folder, SMALL) == 0
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
        [json.loads(x) for x in (folder / f"{n}.jsonl").read_text().splitlines()] for n in ("train", "held_out")
    )
    assert (len(train), len(held_out)) == (38, 2)
    assert not {d["path"] for d in train} & {d["path"] for d in held_out}

    # The commands it ends with are right, here with what the demo made.
    last = [shlex.split(line)[1:] for line in out.splitlines() if line.startswith("  meshwright ")]
    assert [c[0] for c in last] == ["generate", "report", "inspect", "train"]
    assert main(last[1]) == 0 and main(last[2]) == 0
    c = flags.parse(TrainConfig, last[3][1:], "meshwright train").config
    assert (c.model.num_layers, c.training.global_batch_size, c.checkpoint.load) == (24, 512, "gpt2-345m")


def test_345m_command_and_recipe_are_valid():
    words = shlex.split(demo.GPT2_345M)
    assert words[:2] == ["meshwright", "train"]
    assert flags.parse(TrainConfig, words[2:], "meshwright train").config.precision.bf16
    own = demo.Scale()
    recipe = f"{own.model} {own.recipe} --data-path x --train-iters {own.iters}".split()
    assert not flags.parse(TrainConfig, recipe, "meshwright train").notices


def test_only_its_own_folder(tmp_path, capsys, monkeypatch):
    (tmp_path / "thesis.txt").write_text("three years")
    with pytest.raises(UserError) as caught:
        demo.run(tmp_path, SMALL)
    assert caught.value.status == LOCKED and [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]

    # A demo's folder is started anew; what the user put there stays, and so does the model.
    monkeypatch.setattr(demo, "tour", lambda folder, scale: print("tour"))
    assert demo.run(tmp_path / "demo", SMALL) == 0
    (tmp_path / "demo/run/iter_0000001").mkdir(parents=True)
    (tmp_path / "demo/train.jsonl").write_text("old")
    (tmp_path / "demo/notes.txt").write_text("mine")
    assert demo.run(tmp_path / "demo", SMALL) == 0
    assert sorted(p.name for p in (tmp_path / "demo").iterdir()) == [".lock", demo.MARK, "notes.txt", "run-1"]
    out = capsys.readouterr().out
    assert "starting again" in out and f"its model is kept in {tmp_path}/demo/run-1" in out
    (tmp_path / "demo/run").mkdir()
    assert demo.run(tmp_path / "demo", SMALL) == 0
    assert (tmp_path / "demo/run-1/iter_0000001").is_dir() and (tmp_path / "demo/run-2").is_dir()


def test_collect_is_the_same_each_time_and_leaves_out_what_is_no_text(tmp_path):
    library = tmp_path / "lib"
    for n in range(60):
        (library / "p").mkdir(parents=True, exist_ok=True)
        (library / f"p/m{n}.py").write_text(f"x = {n}\n")
    (library / "latin.py").write_bytes(b"s = '\xe9'\n")
    (library / "empty.py").write_text("\n")
    (library / "test").mkdir()
    (library / "test/test_x.py").write_text("assert 1\n")
    sides = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        demo.collect(library, tmp_path / name, None)
        sides.append([(tmp_path / name / f"{s}.jsonl").read_text() for s in ("train", "held_out")])
    assert sides[0] == sides[1]
    lines = [json.loads(line) for side in sides[0] for line in side.splitlines()]
    assert sorted(d["path"] for d in lines) == sorted(f"p/m{n}.py" for n in range(60))
    with pytest.raises(UserError) as caught:
        demo.collect(tmp_path / "nothing", tmp_path / "a", None)
    assert caught.value.status == BAD_DATA


@pytest.mark.parametrize("ours, verdict", [(0.1, "the GPT is better"), (7.9, "the trigram is better")])
def test_the_verdict_is_honest(tmp_path, capsys, ours, verdict):
    for name in ("train", "held_out"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": "the cat sat on the mat. "}) + "\n")
    demo.compare(ours, tmp_path / "train.jsonl", tmp_path / "held_out.jsonl")
    out = capsys.readouterr().out
    assert verdict in out and f"{ours:.3f}" in out


def test_a_command_that_fails_ends_the_tour_with_its_status(tmp_path, capfd):
    with pytest.raises(UserError, match="no-such-file does not exist") as caught:
        demo.call(
            tmp_path / "log", ["train-tokenizer", "--input", "no-such-file", "--vocab-size", "300", "--output", "x"]
        )
    assert caught.value.status == BAD_DATA


@pytest.mark.whole
def test_ctrl_c_saves_and_prints_how_to_continue(tmp_path, capfd, monkeypatch):
    """Ctrl-C reaches this process, here while it reads a line of the training, which it stops."""

    def interrupt(line):
        if " iteration       10/" in line:
            raise KeyboardInterrupt
        return line

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo.subprocess, "Popen", InProcess)
    monkeypatch.setattr(demo, "shorten", interrupt)
    assert demo.run(Path("demo"), dataclasses.replace(SMALL, iters=100000, stop=90000)) == 130
    printed = capfd.readouterr().out
    assert "to continue the training:   meshwright train --config demo/run/config.toml" in printed
    assert "to restart the demo:        meshwright demo demo" in printed
    saved = int((tmp_path / "demo/run/latest_checkpointed_iteration.txt").read_text())
    assert main(["train", "--config", "demo/run/config.toml", "--exit-interval", "10"]) == 0
    assert saved < int((tmp_path / "demo/run/latest_checkpointed_iteration.txt").read_text()) <= saved + 10
