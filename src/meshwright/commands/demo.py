"""`meshwright demo [DIR]`: `meshwright quickstart` on a text that every machine has.

The text is the source of Python's standard library. The model is small enough for two cores and
three minutes, and predicts unseen text better than a byte-trigram model of the same text. Half-way
it is stopped and resumed.
"""

from __future__ import annotations

import contextlib
import hashlib
import shlex
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import BAD_DATA, DONE, SIGINT, UserError
from meshwright.quickstart.plan import SIZES, Size
from meshwright.quickstart.shell import LoggedInterval, step
from meshwright.settings import flags
from meshwright.settings.fields import flag

MARK = ".meshwright-demo"  # the file that marks a folder as a demo's
# Tests, tables of character codes, help texts and installed packages: not the library's own code.
LEFT_OUT = {"test", "tests", "idle_test", "idlelib", "encodings", "pydoc_data", "site-packages", "dist-packages"}

GPT2_345M = (
    "meshwright train --preset gpt2-345m --bf16 --data-path my-corpus_text_document --vocab-file gpt2-vocab.json "
    "--merge-file gpt2-merges.txt --split 949,50,1 --save gpt2-345m --load gpt2-345m --save-interval 1000"
)


@dataclass(frozen=True)
class Scale:
    """The size of the demo; its test runs a smaller one."""

    files: int | None = None  # number of files of the library; None: all
    vocab_size: int = 4096
    model: Size = SIZES[0]
    steps: int = 1000
    stop: int = 500  # SIGTERM follows the first log line from this step on
    prompts: tuple[str, ...] = ("def __init__(self,", "class Error(", "for name in")
    sample: int = 64  # tokens


@dataclass(frozen=True)
class DemoConfig:
    """Settings of `meshwright demo`."""

    dir: Path = flag(Path("demo"), "folder that the demo writes (default: demo)", positional=True)


def main(argv: list[str]) -> int:
    about = "Train and use a small model on this machine, in three to five minutes."
    return run_demo(flags.parse_settings(DemoConfig, argv, "meshwright demo", about=about).config.dir)


def run_demo(folder: Path, scale: Scale | None = None) -> int:
    """Run all steps; return 130 after Ctrl-C."""
    from meshwright.checkpoint import owner
    from meshwright.quickstart import folder as folders

    folders.claim_folder(folder, MARK, "demo")
    with owner.lock_folder(folder):
        folders.clear_folder(folder, "demo")
        try:
            tour(folder, scale or Scale())
        except KeyboardInterrupt:
            print("\nstopped", flush=True)
            settings = folder / "run" / "config.toml"
            if (folder / "run" / "latest_checkpointed_iteration.txt").is_file():
                print(f"to continue the training:   meshwright train --config {shlex.quote(str(settings))}")
            print(f"to restart the demo:        meshwright demo {shlex.quote(str(folder))}")
            return SIGINT
    return DONE


def tour(folder: Path, scale: Scale) -> None:
    from meshwright.quickstart.collect import collect
    from meshwright.quickstart.tour import Tour

    began = time.perf_counter()
    t = Tour(folder, "demo.log", "cpu")

    with step("1. Collect a corpus: the source text of Python's standard library"):
        text = collect(library(Path(sysconfig.get_path("stdlib")), scale.files), folder)
        print(f"  train.jsonl: {text.train_bytes:,} bytes; held_out.jsonl: {text.held_out_bytes:,} bytes")
    with step(f"2. Learn a vocabulary of {scale.vocab_size:,} words and parts of words"):
        t.learn_vocabulary(scale.vocab_size)
    with step("3. Turn the text into token numbers"):
        t.tokenize()

    command = t.run_command(scale.model, 0, scale.steps)

    def stop(at: LoggedInterval) -> str | None:
        reason = "SIGTERM, as a cluster's scheduler sends it: the training saves and ends"
        return reason if at.iteration >= scale.stop else None

    with step("4. Pre-train a GPT on the CPU, and stop it half-way"):
        t.pre_train(command, stop)
    with step("5. Resume: the same command continues from the checkpoint"):
        t.pre_train(command)
        print(f"  plots of the run: {t.run}/report.html")
    with step("6. Evaluate on text that the model has never seen"):
        t.evaluate()
    with step("7. Let it write Python: it will not run yet, but words, brackets and indentation look right"):
        for prompt in scale.prompts:
            t.generate(prompt, scale.sample, "--temperature", "0.8", "--top_p", "0.9")

    t.end(began)
    print("  meshwright quickstart FOLDER     the same with your own text")
    print(f"The real thing, GPT-2 345M on one GPU, once `meshwright preprocess` has read your text:\n  {GPT2_345M}")


def library(folder: Path, most: int | None) -> Iterator[str]:
    """Yield the text of the library's files, in an order by hash."""
    names = [p.relative_to(folder).as_posix() for p in folder.rglob("*.py")]
    names = [name for name in names if not LEFT_OUT & set(name.split("/"))]
    if len(names) < 20:
        shortage = f"{folder} has {len(names)} usable .py files, but 20 are needed"
        raise UserError(f"{shortage}; use a full installation of Python", BAD_DATA)
    for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())[:most]:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            yield (folder / name).read_text(encoding="utf-8")
