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
    ignored = shutil.ignore_patterns("apps", "compat", "__pycache__", "*.egg-info")
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


def run(clone: Path, *argv: str, status: int = 0) -> str:
    """Run a command there, and return what it printed."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MESHWRIGHT_")
    }
    environment |= {"PYTHONPATH": str(clone / "src"), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "meshwright", *argv]
    done = subprocess.run(words, cwd=clone, env=environment, capture_output=True, text=True)
    assert done.returncode == status, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def test_text_to_a_model_that_is_exported(core: Path) -> None:
    run(
        core, "train-tokenizer", "--input", "text.jsonl", "--vocab-size", "300", "--output", "words"
    )
    run(
        core,
        "preprocess",
        "--input",
        "text.jsonl",
        "--output-prefix",
        "text",
        "--tokenizer",
        "words",
        "--append-eod",
    )
    training = f"train {MODEL} {STEPS} --data-path text_text_document --tokenizer words --save run --load run".split()
    ranks = ["launch", "--nproc-per-node", "2", "--master-port", str(free_port())]
    assert "iteration        4/       4" in run(core, *ranks, *training, "--train-iters", "4")
    more = ["--override-opt_param-scheduler"]
    resumed = run(core, *training, "--train-iters", "8", *more)  # on one rank
    assert "iteration        8/       8" in resumed and "iteration        4/" not in resumed
    assert "sits" in run(
        core, "generate", "run", "--prompt", "the old cat sits", "--max-new-tokens", "4"
    )
    run(core, "convert", "run", "exported", "--to", "huggingface")
    assert (core / "exported/config.json").exists() and "GPT" in (
        core / "exported/config.json"
    ).read_text()
    run(core, "inspect", "run")


def test_what_is_not_there_is_not_listed(core: Path) -> None:
    commands = {line[7:].split()[0].strip(",") for line in run(core, "help").splitlines()[1:]}
    assert {"train", "preprocess", "generate"} <= commands
    assert not {"plan", "serve", "quickstart", "evaluate", "bench"} & commands
    assert "no command 'plan'" in run(core, "plan", status=USAGE)
    assert "complete" in run(core, "completion", "bash")
