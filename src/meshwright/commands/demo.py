"""`meshwright demo [DIR]`: from text to a trained model, by the commands that a user types.

The corpus is Python's standard library, which every machine has. The model is small enough for two
cores and two minutes, and predicts unseen files better than a byte-trigram model of the same text.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import BAD_DATA, DONE, LOCKED, SIGINT, SIGTERM, UNEXPECTED, UserError
from meshwright.settings import flags
from meshwright.settings.schema import flag

MARK = ".meshwright-demo"  # the file that marks a folder as a demo's
# Names in it that a new demo may remove.
OURS = """train.jsonl held_out.jsonl tokenizer train_text_document.bin train_text_document.idx
    train_text_document.tokenizer train_text_document.origin.json index-cache run demo.log"""
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
    # The lowest held-out bits per byte of a dozen settings that take the same time. Three things
    # helped most: small batches, because the text is read less than once; initial weights larger
    # than GPT-2's, because the model is narrow; and a vocabulary that is not small.
    model: str = "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128"
    recipe: str = (
        "--micro-batch-size 8 --lr 4e-3 --min-lr 4e-5 --lr-warmup-iters 50 --adam-beta2 0.98 --init-method-std 0.05"
    )
    iters: int = 1200
    stop: int = 600  # SIGTERM follows the first log line from this iteration on
    log_interval: int = 50
    prompts: tuple[str, ...] = ("def __init__(self,", "class Error(", "for name in")
    sample: int = 64  # tokens


@dataclass(frozen=True)
class DemoConfig:
    """Settings of `meshwright demo`."""

    dir: Path = flag(Path("demo"), "folder that the demo writes (default: demo)", positional=True)


def main(argv: list[str]) -> int:
    about = "Train and use a small model on this machine, in three to five minutes."
    return run(flags.parse(DemoConfig, argv, "meshwright demo", about=about).config.dir)


def run(folder: Path, scale: Scale | None = None) -> int:
    """Run all steps; return 130 after Ctrl-C."""
    from meshwright.checkpoint import publish

    take(folder)
    with publish.lock(folder):
        clear(folder)
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
    began = time.perf_counter()
    train, held_out, prefix, trained = (f"{folder}/{n}" for n in ("train.jsonl", "held_out.jsonl", "train", "run"))
    vocabulary = f"{folder}/tokenizer"
    files = ["--vocab-file", f"{vocabulary}/vocab.json", "--merge-file", f"{vocabulary}/merges.txt"]
    log = folder / "demo.log"

    with step("1. Collect a corpus: the source text of Python's standard library"):
        collect(Path(sysconfig.get_path("stdlib")), folder, scale.files)

    with step(f"2. Learn a vocabulary of {scale.vocab_size:,} words and parts of words"):
        call(log, ["train-tokenizer", "--input", train, "--vocab-size", str(scale.vocab_size), "--output", vocabulary])

    with step("3. Turn the text into token numbers"):
        call(log, ["preprocess", "--input", train, "--output-prefix", prefix, *files, "--append-eod"])

    command = ["train", "--data-path", f"{prefix}_text_document", *files, "--save", trained, "--load", trained]
    command += f"""--split 95,5,0 {scale.model} --hidden-dropout 0 --attention-dropout 0 {scale.recipe}
        --lr-decay-style cosine --weight-decay 0.1 --train-iters {scale.iters} --log-interval {scale.log_interval}
        --eval-interval {scale.iters // 4} --eval-iters 20 --device cpu""".split()
    with step("4. Pre-train a GPT on the CPU, and stop it half-way"):
        call(log, command, shorten, stop=scale.stop)
    with step("5. Resume: the same command continues from the checkpoint"):
        call(log, command, shorten)
        print(f"  plots of the run: {trained}/report.html")

    with step("6. Evaluate on files the model has never seen"):
        table = call(log, ["evaluate", trained, "--input", held_out])
        compare(float(re.findall(r"bits per byte +([\d.]+)", table)[0]), Path(train), Path(held_out))

    with step("7. Let it write Python: it will not run yet, but words, brackets and indentation look right"):
        for prompt in scale.prompts:
            how = ["--out-seq-length", str(scale.sample), "--temperature", "0.8", "--top_p", "0.9"]
            call(log, ["generate", trained, "--prompt", prompt, *how])

    minutes, seconds = divmod(round(time.perf_counter() - began), 60)
    print(f"\nDone in {minutes} min {seconds} s. The full output of the commands is in {log}. Try next:")
    for words in (["generate", "--interactive", trained], ["report", trained], ["inspect", trained]):
        print(f"  {shlex.join(['meshwright', *words])}")
    print(f"The real thing, GPT-2 345M on one GPU, once `meshwright preprocess` has read your text:\n  {GPT2_345M}")


def take(folder: Path) -> None:
    """Make the folder, or check that an earlier demo made it."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARK).is_file():
        raise UserError(
            f"{folder} is not empty, and no demo made it; name another folder, `meshwright demo DIR`", LOCKED
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()


def clear(folder: Path) -> None:
    """Remove only what an earlier demo made; keep its model, which may be trained further."""
    from meshwright.checkpoint import publish

    left = [folder / name for name in OURS.split() if (folder / name).exists()]
    if left:
        print(f"{folder} holds an earlier demo; starting again")
    for path in left:
        if path.name == "run":
            number = 1
            while (aside := folder / f"run-{number}").exists():
                number += 1
            with publish.lock(path):  # someone may be training there
                path.rename(aside)
            print(f"its model is kept in {aside}")
        else:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def collect(library: Path, folder: Path, most: int | None) -> None:
    """Write the library's files as JSON lines, in an order by hash; hold out one in twenty."""
    texts = {}
    for path in library.rglob("*.py"):
        name = path.relative_to(library).as_posix()
        if not LEFT_OUT & set(name.split("/")):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                texts[name] = path.read_text(encoding="utf-8")
    names = sorted((n for n in texts if texts[n].strip()), key=lambda n: hashlib.sha256(n.encode()).digest())[:most]
    border = len(names) // 20
    if not border:
        shortage = f"{library} has {len(names)} usable .py files, but 20 are needed"
        raise UserError(f"{shortage}; use a full installation of Python", BAD_DATA)
    for side, part in (("held_out", names[:border]), ("train", names[border:])):
        lines = (json.dumps({"text": texts[name], "path": name}) + "\n" for name in part)
        (folder / f"{side}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"  {side}.jsonl: {len(part)} files, {sum(len(texts[n].encode()) for n in part):,} bytes")


def call(log: Path, argv: list[str], show: Callable[[str], str | None] = str, stop: int | None = None) -> str:
    """Run `meshwright ARGV` in a process, as a shell would, and return what it printed on stdout.

    `show` turns each line into what the user sees, or None. After a log line of iteration `stop` or
    later, the process gets SIGTERM.
    """
    print(f"$ {shlex.join(['meshwright', *argv])}", flush=True)
    printed, expected = "", SIGTERM if stop else DONE
    with (
        open(log, "a", encoding="utf-8", buffering=1) as everything,
        subprocess.Popen(
            [sys.executable, "-m", "meshwright", *argv],
            stdout=subprocess.PIPE,
            stderr=everything,
            encoding="utf-8",
            errors="replace",
            env=environment(),
            process_group=0,
        ) as child,
    ):
        assert child.stdout
        try:
            for line in child.stdout:
                printed += line
                everything.write(line)
                if (shown := show(line.rstrip("\n"))) is not None:
                    print(f"  {shown}", flush=True)
                at = re.match(r" iteration +(\d+)/", line)
                if stop and at and int(at[1]) >= stop:
                    print("  -> SIGTERM, as a cluster's scheduler sends it: the training saves and ends", flush=True)
                    child.send_signal(signal.SIGTERM)
                    stop = None  # a second one would end it immediately
            status = child.wait()
        except BaseException:  # Ctrl-C reaches only this process; the child, in its own group, saves first
            child.send_signal(signal.SIGINT)
            try:
                child.wait()
            finally:
                child.kill()
            raise
    if status != expected:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:])
        message = f"`meshwright {argv[0]}` ended with exit status {status}; the end of {log}:\n{tail}"
        raise UserError(message, status if status > 0 else UNEXPECTED)
    return printed


def environment() -> dict[str, str]:
    """Return the environment of a command: at most eight threads, which is enough here."""
    few = {"OMP_NUM_THREADS": "8"} if (os.cpu_count() or 1) > 8 else {}
    return {**few, **os.environ, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}


def shorten(line: str) -> str | None:
    """Return the part of a training's log line that a newcomer wants to see, or None."""
    if at := re.match(r" iteration +(\d+)/ +(\d+) .*lm loss: (\S+) .*tokens per second: (\d+) .*ETA: (\S+)", line):
        return f"iteration {at[1]:>5} of {at[2]}   loss {float(at[3]):.3f}   {int(at[4]):,} tokens/s   {at[5]} left"
    if at := re.match(r" validation loss at (.*?) \| lm loss value: (\S+) ", line):
        return f"validation loss at {at[1]}: {float(at[2]):.3f}"
    return line.strip() if "successfully" in line or line.startswith("exiting") else None


def compare(ours: float, train: Path, held_out: Path) -> None:
    """Print the result beside that of a byte-trigram model, the simplest worth a comparison."""
    from meshwright.data.prepare.text import read_texts
    from meshwright.evaluation.trigram import trigram_bits_per_byte

    texts = ([t.encode() for t in read_texts([str(path)], ["text"])] for path in (train, held_out))
    theirs = trigram_bits_per_byte(*texts)
    verdict = "the GPT is better" if ours < theirs else "the trigram is better: this model needs more training"
    print(f"  bits per byte: this GPT {ours:.3f}, a byte-trigram model of the same files {theirs:.3f}: {verdict}")


@contextlib.contextmanager
def step(title: str) -> Iterator[None]:
    print(f"\n{title}", flush=True)
    start = time.perf_counter()
    yield
    print(f"  ({time.perf_counter() - start:.1f} s)", flush=True)
