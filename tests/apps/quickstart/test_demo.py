"""The demo at a small scale; trainings run in their own processes, other commands in this one."""

import json
import shlex
from pathlib import Path

import pytest

from in_process import InProcess
from meshwright.__main__ import main
from meshwright.apps.quickstart import demo, own_text, plan, shell, start
from meshwright.apps.quickstart.plan import Size
from meshwright.apps.quickstart.tour import compare_with_trigram
from meshwright.base.errors import BAD_DATA, UserError
from meshwright.config import flags
from meshwright.config.schema import TrainConfig


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A standard library of 30 small files, and a model to match."""
    folder = tmp_path / "lib/python3"
    for name in (*(f"p/m{n}.py" for n in range(30)), "test/test_x.py", "site-packages/y.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(
            "".join(f"def {name[-6:-3]}{n}(self):\n    return {n}\n\n" for n in range(40))
        )
    (folder / "p/notes.txt").write_text("no Python")
    monkeypatch.setattr(demo.sysconfig, "get_path", lambda name: str(folder))
    monkeypatch.setattr(plan, "SIZES", [Size(1, 16, 2, 16, 4, 1e-2)])
    monkeypatch.setattr(shell.subprocess, "Popen", InProcess)
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.mark.long  # test_own_text.py has a whole tour
def test_tour(library, tmp_path, capfd):
    argv = ["demo", "my demo", "--minutes", "0.05", "--device", "cpu"]
    assert main(argv) == 0
    out = capfd.readouterr().out
    for n in (1, 2, 3, 5, 6, 7):
        assert f"\n{n}. " in out
    folder = tmp_path / "my demo"
    assert "bits per byte: this GPT" in out and "report.html" in out
    assert out.count("$ meshwright generate ") == 3 and "\n  for name in" in out
    texts = [
        json.loads(x)["text"]
        for n in ("train", "held_out")
        for x in (folder / f"{n}.jsonl").read_text().splitlines()
    ]
    assert len(texts) >= 30 and not any("test_x" in text or "no Python" in text for text in texts)

    # The commands it ends with are right, here with what the demo made.
    last = [shlex.split(line)[1:] for line in out.splitlines() if line.startswith("  meshwright ")]
    assert [c[0] for c in last] == ["chat", "report", "inspect", "convert", "quickstart", "train"]
    assert main(last[1]) == 0 and main(last[2]) == 0
    c = flags.parse_settings(TrainConfig, last[-1][1:], "meshwright train").config
    assert (c.model.num_layers, c.training.global_batch_size, c.checkpoint.load) == (
        24,
        512,
        "gpt2-345m",
    )
    assert main(argv) == 0 and "already done" in capfd.readouterr().out


def test_ctrl_c_says_how_to_go_on(library, capsys, monkeypatch):
    """The same command, quoted for a shell, goes on with what is done."""
    argv = ["demo", "my demo", "--minutes", "0.05", "--device", "cpu"]

    def interrupt(tour, documents, progress, *more):
        progress.finish("text")
        raise KeyboardInterrupt

    monkeypatch.setattr(start, "make_model", interrupt)
    assert main(argv) == 130
    again = shlex.split(capsys.readouterr().out.splitlines()[-1].split("to go on:")[1])
    assert again == ["meshwright", *argv]
    monkeypatch.setattr(start, "make_model", lambda *given: None)
    assert main(argv) == 0
    assert "an unfinished demo of this text; going on" in capsys.readouterr().out


def test_345m_command_is_valid():
    words = shlex.split(demo.GPT2_345M)
    assert words[:2] == ["meshwright", "train"]
    assert flags.parse_settings(TrainConfig, words[2:], "meshwright train").config.precision.bf16


def test_it_adapts_to_the_machine_as_quickstart_does(library, monkeypatch):
    """It takes quickstart's way, from the trial on, with a text and prompts of its own."""
    made = []
    monkeypatch.setattr(start, "make_model", lambda *given: made.append(given))
    assert main(["demo", "--minutes", "7", "--device", "cpu"]) == 0
    tour, documents, _, deadline, showing = made[0]
    assert (
        tour.device == "cpu"
        and deadline.minutes == 7
        and showing.resumes
        and len(list(documents)) == 30
    )


@pytest.mark.parametrize("steps, begun, stops", [(100, False, True), (100, True, False)])
def test_it_stops_half_way_once(tmp_path, monkeypatch, steps, begun, stops):
    class Stub:
        run, commands = str(tmp_path), []

        def pre_train(self, command, stop=None):
            self.commands.append(command)
            if stop:
                assert stop(shell.LoggedInterval(steps // 2 - 1, steps, 0.1, 9)) is None
                assert "SIGTERM" in stop(shell.LoggedInterval(steps // 2, steps, 0.1, 9))

    if begun:
        (tmp_path / "metrics.jsonl").write_text('{"event": "step", "iteration": 60, "ms": 9}\n')
    progress = own_text.TourProgress(tmp_path / "progress", {})
    progress.done["plan"] = {"command": ["train", "--train-iters", str(steps)]}
    stub = Stub()
    stub.commands = []
    own_text.train_in_time(stub, progress, own_text.Deadline(4), own_text.Showing(resumes=True))
    assert stub.commands == [["train", "--train-iters", "100"]] * (2 if stops else 1)


def test_a_python_without_its_library(library, capsys):
    for n in range(12):
        (library / f"p/m{n}.py").unlink()
    assert main(["demo", "--device", "cpu"]) == BAD_DATA and not Path("demo").exists()
    assert "has 18 usable .py files, but 20 are needed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "ours, verdict", [(0.1, "the GPT is better"), (7.9, "the trigram is better")]
)
def test_the_verdict_is_honest(tmp_path, capsys, ours, verdict):
    for name in ("train", "held_out"):
        (tmp_path / f"{name}.jsonl").write_text(
            json.dumps({"text": "the cat sat on the mat. "}) + "\n"
        )
    compare_with_trigram(ours, tmp_path / "train.jsonl", tmp_path / "held_out.jsonl")
    out = capsys.readouterr().out
    assert verdict in out and f"{ours:.3f}" in out


def test_a_command_that_fails_ends_the_tour_with_its_status(tmp_path, capfd):
    with pytest.raises(UserError, match="no-such-file does not exist") as caught:
        shell.call(
            tmp_path / "log",
            ["train-tokenizer", "--input", "no-such-file", "--vocab-size", "300", "--output", "x"],
        )
    assert caught.value.status == BAD_DATA
