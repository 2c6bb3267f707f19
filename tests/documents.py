"""What the tests of the documents' commands share: a folder as the documents have it, and sizes made smaller."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Values that make a documented run small; everything else stays as the document has it.
SMALLER = {
    "num-layers": 2,
    "hidden-size": 32,
    "num-attention-heads": 4,
    "seq-length": 32,
    "max-position-embeddings": 32,
    "train-iters": 6,
    "lr-decay-iters": 40,
    "log-interval": 2,
    "save-interval": 4,
    "eval-interval": 3,
    "eval-iters": 1,
}


def smaller(command: str, **more: object) -> str:
    """`more`: other flags' values, with _ for -."""
    for name, value in (SMALLER | {n.replace("_", "-"): v for n, v in more.items()}).items():
        command = re.sub(rf"--{name} +\S+", f"--{name} {value}", command)
    return command


def fill(folder: Path) -> Path:
    """As after the documents' downloads: scripts, a corpus, GPT-2's two vocabulary files (ours are smaller)."""
    from meshwright.tokenizers import train_bpe

    for name in ("pretrain_gpt.py", "tools", "src"):
        (folder / name).symlink_to(ROOT / name)
    texts = [f"Document {n}. The quick brown fox jumps over the lazy dog {n * n} times; 你好。" * 9 for n in range(60)]
    lines = [
        json.dumps({"src": "x", "text": t, "type": "Eng", "id": str(n), "title": "T"}) for n, t in enumerate(texts)
    ]
    for name in ("oscar-1GB.jsonl", "my-corpus.json"):
        (folder / name).write_text("\n".join(lines) + "\n")
    train_bpe(texts, 320, folder / "words")
    (folder / "words/vocab.json").rename(folder / "gpt2-vocab.json")
    (folder / "words/merges.txt").rename(folder / "gpt2-merges.txt")
    return folder


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}


def shell(place: Path, script: str, status: int = 0) -> str:
    done = subprocess.run(["bash", "-c", script], cwd=place, capture_output=True, text=True, env=environment())
    assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def words(place: Path, script: str, program: str) -> list[str]:
    """What `program` is given as arguments in a shell script, which runs nothing."""
    return shell(place, program + """() { printf '%s\\0' "$@"; }\n""" + script).split("\0")[:-1]


def end(processes: list[subprocess.Popen[str]]) -> None:
    """Those that still run, each with all that it has started."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
