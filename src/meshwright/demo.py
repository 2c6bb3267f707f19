"""`meshwright demo [DIR]`: from text to a trained, talking model on this machine, each step by the command a user types.

The corpus is one that every machine has, the source text of Python's standard library. The model is small enough for two
cores and two minutes, and still predicts files it never saw better than a byte-trigram model of the same text.
"""

from __future__ import annotations

import argparse
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

from meshwright.errors import BAD_DATA, DONE, LOCKED, SIGINT, SIGTERM, UserError

MARK = ".meshwright-demo"  # says that the folder is ours to start anew in
OURS = ["train.jsonl", "held_out.jsonl", "tokenizer", "train_text_document.bin", "train_text_document.idx", "index-cache",
        "run", "demo.log"]  # fmt: skip
# Tests, tables of character codes, one file of help texts: not what a reader of Python would call its code.
LEFT_OUT = {"test", "tests", "idle_test", "idlelib", "encodings", "pydoc_data", "site-packages", "dist-packages"}
HELD_OUT = 13 / 256  # share of the files

GPT2_345M = (
    "meshwright train --preset gpt2-345m --bf16 --data-path my-corpus_text_document --vocab-file gpt2-vocab.json "
    "--merge-file gpt2-merges.txt --split 949,50,1 --save gpt2-345m --load gpt2-345m --save-interval 1000"
)


@dataclass(frozen=True)
class Scale:
    """How large the demo is; the tests run a smaller one."""

    files: int | None = None  # of the library, in alphabetical order (none: all)
    vocab_size: int = 2048
    model: str = "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128"
    # Chosen by held-out bits per byte after 90 s on two cores; small batches win while data is read less than once.
    recipe: str = (
        "--micro-batch-size 8 --lr 4e-3 --min-lr 4e-5 --lr-warmup-iters 50 --adam-beta2 0.98 --weight-decay 0.1"
    )
    iters: int = 1800
    stop: int = 900  # about where the training is interrupted
    report: int = 50  # iterations between lines
    sample: int = 64  # tokens of each sample


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("meshwright demo", allow_abbrev=False, description="A tour in three minutes.")
    parser.add_argument("dir", nargs="?", type=Path, default=Path("demo"), metavar="DIR", help="default: demo")
    return run(parser.parse_args(argv).dir)


def run(folder: Path, scale: Scale | None = None) -> int:
    """The tour; 130 after Ctrl-C."""
    from meshwright.checkpoint import store

    scale = scale or Scale()
    take(folder)
    with store.lock(folder):
        clear(folder)
        try:
            tour(folder, scale)
        except KeyboardInterrupt:
            print("\nstopped", flush=True)
            if (folder / "run" / "latest_checkpointed_iteration.txt").is_file():
                print(f"the training goes on with:   meshwright train --config {quoted(folder / 'run/config.toml')}")
            print(f"the demo starts anew with:   meshwright demo {quoted(folder)}")
            return SIGINT
    return DONE


def tour(folder: Path, scale: Scale) -> None:
    began = time.perf_counter()
    train, held_out, words, trained = (str(folder / n) for n in ("train.jsonl", "held_out.jsonl", "tokenizer", "run"))
    vocabulary = ["--vocab-file", f"{words}/vocab.json", "--merge-file", f"{words}/merges.txt"]
    log = folder / "demo.log"

    with step("1. Collect a corpus: the source text of Python's standard library"):
        collect(Path(sysconfig.get_path("stdlib")), folder, scale.files)

    with step(f"2. Learn a vocabulary of {scale.vocab_size:,} byte pairs"):
        call(log, ["train-tokenizer", "--input", train, "--vocab-size", str(scale.vocab_size), "--output", words])

    with step("3. Turn the text into token numbers"):
        prefix = str(folder / "train")
        call(log, ["preprocess", "--input", train, "--output-prefix", prefix, *vocabulary, "--append-eod"],
             lambda line: line if line.startswith("wrote") else None)  # fmt: skip

    with step("4. Pre-train a GPT on the CPU, and stop it half-way"):
        command = [
            "train", "--data-path", f"{prefix}_text_document", *vocabulary, "--split", "95,5,0",
            *scale.model.split(), "--hidden-dropout", "0", "--attention-dropout", "0", *scale.recipe.split(),
            "--lr-decay-style", "cosine", "--train-iters", str(scale.iters), "--log-interval", str(scale.report),
            "--eval-interval", str(scale.iters // 4), "--eval-iters", "20", "--device", "cpu",
            "--save", trained, "--load", trained,
        ]  # fmt: skip
        call(log, command, shorten, stop=scale.stop)
    with step("5. Go on: the same command continues from the checkpoint"):
        call(log, command, shorten)
        print(f"  pictures of the run: {folder / 'run' / 'report.html'}")

    with step("6. Evaluate on files the model has never seen"):
        table = call(log, ["evaluate", trained, "--input", held_out])
        compare(float(re.findall(r"bits per byte +([\d.]+)", table)[0]), Path(train), Path(held_out))

    with step("7. Let it write Python: not yet to be run, but see the words and the indentation"):
        for prompt in ("import", "def", "class"):
            call(log, ["generate", trained, "--prompt", prompt, "--out-seq-length", str(scale.sample),
                       "--temperature", "0.8", "--top_k", "40"])  # fmt: skip

    minutes, seconds = divmod(round(time.perf_counter() - began), 60)
    print(
        f"\nDone in {minutes} min {seconds} s. Everything is in {folder}; what the commands said, in {log}. To try next:"
    )
    run_dir = quoted(Path(trained))
    print(
        f"  meshwright generate --interactive {run_dir}\n  meshwright report {run_dir}\n  meshwright inspect {run_dir}"
    )
    print(f"The real thing, GPT-2 345M on one GPU, once `meshwright preprocess` has read your text:\n  {GPT2_345M}")


def take(folder: Path) -> None:
    """Make the folder, or make sure that it is an earlier demo's."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARK).is_file():
        raise UserError(
            f"{folder} is not empty, and no demo made it: name another folder, `meshwright demo DIR`", LOCKED
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()


def clear(folder: Path) -> None:
    """Remove what an earlier demo left, and nothing else."""
    from meshwright.checkpoint import store

    left = [folder / name for name in OURS if (folder / name).exists()]
    if left:
        print(f"{folder} holds an earlier demo: starting anew")
    for path in left:
        with store.lock(path) if path.name == "run" else contextlib.nullcontext():  # someone may still train there
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def collect(library: Path, folder: Path, most: int | None) -> None:
    """The library's files as JSON lines; a hash of its path says on which side a file lies, so it is the same each time."""
    names = sorted(p.relative_to(library).as_posix() for p in library.rglob("*.py"))
    names = [n for n in names if not LEFT_OUT & set(n.split("/"))][:most]
    files, size = {"train": 0, "held_out": 0}, {"train": 0, "held_out": 0}
    with open(folder / "train.jsonl", "w") as train, open(folder / "held_out.jsonl", "w") as held_out:
        for name in names:
            try:
                text = (library / name).read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue
            if text.strip():
                side = "held_out" if hashlib.sha256(name.encode()).digest()[0] < HELD_OUT * 256 else "train"
                out = held_out if side == "held_out" else train
                out.write(json.dumps({"text": text, "path": name}) + "\n")
                files[side], size[side] = files[side] + 1, size[side] + len(text.encode())
    if not files["train"] or not files["held_out"]:
        raise UserError(
            f"{library} has too little Python source ({len(names)} files): is this a full Python?", BAD_DATA
        )
    print(f"  {files['train']} files, {size['train']:,} bytes, to train on; "
          f"{files['held_out']} files, {size['held_out']:,} bytes, held out")  # fmt: skip


def call(log: Path, argv: list[str], show: Callable[[str], str | None] = str, stop: int | None = None) -> str:
    """Run `meshwright ARGV` in a process of its own, as a shell would; SIGTERM once its log has reached iteration `stop`."""
    print(f"$ meshwright {shlex.join(argv)}", flush=True)
    said, sent = [], False
    with (
        open(log, "a", encoding="utf-8", buffering=1) as everything,
        subprocess.Popen(
            [sys.executable, "-m", "meshwright", *argv], stdout=subprocess.PIPE, stderr=everything, encoding="utf-8",
            errors="replace", env=environment(), process_group=0,
        ) as child,
    ):  # fmt: skip
        assert child.stdout
        try:
            for line in child.stdout:
                said.append(line)
                everything.write(line)
                shown = show(line.rstrip("\n"))
                if shown is not None:
                    print(f"  {shown}", flush=True)
                reached = re.match(r" iteration +(\d+)/", line)
                if stop and not sent and reached and int(reached[1]) >= stop:
                    print("  -> SIGTERM, as a cluster sends it: the training saves and leaves", flush=True)
                    child.send_signal(signal.SIGTERM)
                    sent = True
            status = child.wait()
        except BaseException:  # Ctrl-C reaches us alone, the child has its own process group: it may save, then we go
            child.send_signal(signal.SIGINT)
            try:
                child.wait()
            finally:
                child.kill()
            raise
    if status != (SIGTERM if stop else DONE):
        tail = "".join(log.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)[-5:])
        raise UserError(f"`meshwright {argv[0]}` ended with exit status {status}; the end of {log}:\n{tail}", status)
    return "".join(said)


def environment() -> dict[str, str]:
    """Threads that sleep while they wait: spinning ones, the default, cost nine tenths of the speed on a busy machine.

    More than eight only wait for each other in a model this small.
    """
    few = {"OMP_NUM_THREADS": "8"} if (os.cpu_count() or 1) > 8 else {}
    return {"OMP_WAIT_POLICY": "PASSIVE", **few, **os.environ, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}


def shorten(line: str) -> str | None:
    """Of the training's log, what a newcomer wants to see."""
    at = re.match(r" iteration +(\d+)/ +(\d+) .*lm loss: (\S+) .*tokens per second: (\d+) .*ETA: (\S+)", line)
    if at:
        return f"iteration {at[1]:>5} of {at[2]}   loss {float(at[3]):.3f}   {int(at[4]):,} tokens/s   {at[5]} left"
    at = re.match(r" validation loss at (.*?) \| lm loss value: (\S+) ", line)
    if at:
        return f"validation at {at[1]}: loss {float(at[2]):.3f}"
    return line.strip() if "successfully" in line or line.startswith("exiting") else None


def compare(ours: float, train: Path, held_out: Path) -> None:
    """The model beside the simplest one that is worth a comparison."""
    from meshwright.data.preprocess import read_texts
    from meshwright.evaluate import trigram_bits_per_byte

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


def quoted(path: Path) -> str:
    return shlex.quote(str(path))
