"""Without apps/ and compat/, the core makes a model of text, resumes, uses and exports it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import free_port
from meshwright.base.errors import USAGE

pytestmark = [pytest.mark.whole, pytest.mark.timeout(180)]
ROOT = Path(__file__).parents[1]
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --micro-batch-size 2"
)
STEPS = "--global-batch-size 8 --lr 1e-2 --eval-iters 1 --eval-interval 4 --log-interval 1"


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone in which only the core is left."""
    clone = tmp_path_factory.mktemp("core")
    ignored = shutil.ignore_patterns("apps", "compat", "*.egg-info")
    shutil.copytree(ROOT / "src", clone / "src", ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", clone)
    lines = (
        f"the {a} {b} sits on the {c}."
        for a in ("old", "new")
        for b in ("cat", "dog", "owl")
        for c in ("mat", "log")
    )
    texts = [" ".join([line] * 30) for line in lines] * 10
    (clone / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return clone


RUN = """
import shlex, sys
from meshwright.__main__ import main
for line in sys.argv[1:]:
    print(main(shlex.split(line)), "is the status of", line)
"""


def run(clone: Path, *commands: str) -> str:
    """Run commands there, in one process, and return what they printed with each exit status."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MESHWRIGHT_")
    }
    environment |= {"PYTHONPATH": str(clone / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", RUN, *commands],
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
    )
    out = done.stdout + done.stderr
    assert done.returncode == 0, out[-5000:]
    return out


def test_text_to_a_model_that_is_exported(core: Path) -> None:
    training = f"train {MODEL} {STEPS} --data-path text_text_document --tokenizer words --save run --load run"
    ranks = f"launch --nproc-per-node 1 --master-port {free_port()}"
    commands = (
        "train-tokenizer --input text.jsonl --vocab-size 300 --output words",
        "preprocess --input text.jsonl --output-prefix text --tokenizer words --append-eod",
        f"{ranks} {training} --train-iters 4",
        f"{training} --train-iters 8 --override-opt_param-scheduler",
        "generate run --prompt 'the old cat sits' --max-new-tokens 4",
        "convert run exported --to huggingface",
        "inspect run",
    )
    out = run(core, *commands)
    assert out.count("0 is the status of") == len(commands), out[-5000:]
    assert out.count("iteration        4/       4") == out.count("iteration        8/       8") == 1
    assert "iteration        4/       8" not in out
    assert "the old cat sits" in out
    assert "GPT" in (core / "exported/config.json").read_text()


def test_what_is_not_there_is_not_listed(core: Path) -> None:
    help_, rest = run(core, "help", "plan", "completion bash").split("0 is the status of help")
    commands = {line[7:].split()[0].strip(",") for line in help_.splitlines()[1:] if line[7:]}
    assert {"train", "preprocess", "generate"} <= commands
    assert not {"plan", "serve", "quickstart", "evaluate", "bench"} & commands
    assert f"{USAGE} is the status of plan" in rest
    assert "no command 'plan'" in rest
    assert "complete" in rest.partition("status of plan")[2]
