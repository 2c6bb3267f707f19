"""OneFlow-GPT's program: `meshwright train` with that program's defaults (defaults.toml)."""

import contextlib
import os
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2] / "src"))  # runs from a clone too, without an install

from meshwright.__main__ import main  # noqa: E402
from meshwright.base.errors import SIGINT  # noqa: E402


def defaults(argv: list[str]) -> list[str]:
    """Return the flags before those that are given, which win."""
    out = ["--config", str(HERE / "defaults.toml")]
    words = [part for word in argv for part in word.split("=", 1)]
    data = [
        word
        for name, word in zip(words, words[1:], strict=False)
        if name in ("--dataset", "--data-path")
    ]
    with contextlib.suppress(ModuleNotFoundError):  # numpy; `main` says so
        from meshwright.data.tokenizers import find_of_data

        if not any("vocab-" in word or "tokenizer" in word for word in argv) and not find_of_data(
            data
        ):
            # token files that do not say whose ids they hold: GPT-2's
            out += ["--vocab-size", "50257"]
    if "--micro-batch-size" not in words and "--num-accumulation-steps" not in words:
        out += ["--num-accumulation-steps", "1"]
    return [*out, "--nvidia-smi-at", "10"] if shutil.which("nvidia-smi") else out


def train() -> int:
    argv = sys.argv[1:]
    status = main(["train", *defaults(argv), *argv])
    if status == SIGINT and os.environ.get("RANK", "0") == "0":
        print("interrupted")
    return status


if __name__ == "__main__":
    sys.exit(train())
