"""docs/tutorial.md: run every command and the Python blocks, in order, with smaller sizes."""

import fcntl
import io
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from documents import ROOT, environment, smaller
from helpers import captured_output
from meshwright.__main__ import main
from meshwright.base.errors import DONE, SIGINT

F_SETPIPE_SZ = 1031  # Linux

PAGE = ROOT / "docs" / "tutorial.md"
# Applied to a documented flag where it appears; the other flags stay as documented.
# The steps are so many that a busy machine stops the training before its last one.
SIZES = {
    "num_layers": 2,
    "seq_length": 32,
    "log_interval": 1,
    "eval_interval": 300,
    "train_iters": 600,
}
SIZES |= {
    "eval_iters": 1,
    "lr_warmup_iters": 5,
    "save_interval": 300,
    "vocab_size": 320,
    "max_new_tokens": 8,
}
COMMANDS = {
    "train-tokenizer": "320 ids",
    "preprocess": "Processed 30 documents",
    "data inspect": "The quick brown fox",
    "train": "successfully saved checkpoint at iteration     600 to my-model",
    "report": "my-model/report.html",
    "evaluate": "bits per byte",
    "inspect": "iteration",
    "generate": "Once upon a time",
    "chat": "/undo",
    "convert": "(huggingface)",
}


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)


def commands() -> list[list[str]]:
    """Return the words of each documented command, without `meshwright`."""
    lines = [line for block in blocks("bash") for line in block.replace("\\\n", " ").splitlines()]
    words = [shlex.split(smaller(line, **SIZES)) for line in lines]
    assert all(command[0] == "meshwright" for command in words)
    return [command[1:] for command in words]


def stop_training(words: list[str], step: int, number: signal.Signals) -> None:
    """Start the training and send it the signal after a step."""
    command = ["python", "-m", "meshwright", *words]
    with subprocess.Popen(
        command, bufsize=0, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment()
    ) as p:
        assert p.stdout
        # The warm start passes the signal on. Meanwhile the run waits for the pipe, which has room
        # for a page of its lines and is emptied slowly: its steps would take half a minute.
        fcntl.fcntl(p.stdout, F_SETPIPE_SZ, 4096)
        sent = False
        for line in p.stdout:
            if not sent and re.match(rb" iteration +%d/" % step, line):
                p.send_signal(number)
                sent = True
            if sent:
                time.sleep(0.05)
    assert sent and p.returncode == (SIGINT if number == signal.SIGINT else -number)


@pytest.mark.whole
@pytest.mark.timeout(120)
def test_tutorial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for n in range(30):
        text = (
            f"Document {n}. The quick brown fox jumps over {n * n} lazy dogs, once upon a time.\n"
            * 20
        )
        (tmp_path / "texts" / f"{n}.txt").write_text(text)
    (tmp_path / "held-out.txt").write_text("A quick brown dog. " * 30)

    pending = dict(COMMANDS)
    for words in commands():
        name = " ".join(words[:2]) if words[0] == "data" else words[0]
        if name == "train":
            stop_training(words, 3, signal.SIGINT)
            stop_training(words, 100, signal.SIGKILL)  # far behind the step that was saved
        monkeypatch.setattr("sys.stdin", io.StringIO("Once upon a time\n/help\n"))
        with captured_output() as (out, err):
            assert main(words) == DONE, words
        printed = "\n".join(out + err)
        assert COMMANDS[name] in printed, (words, printed)
        if name == "train":
            assert re.search(r"loading checkpoint from my-model at iteration +\d", printed)
        pending.pop(name, None)
    assert not pending

    transformers, ours = blocks("python")
    exec(transformers, {})
    assert "Once upon a time" in capsys.readouterr().out
    exec(ours, {})
    assert float(capsys.readouterr().out.split()[-1]) > 0  # bits per byte
