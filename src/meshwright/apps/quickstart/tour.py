"""The way from text to a model, step by step, by the commands that a user types."""

from __future__ import annotations

import itertools
import re
import shlex
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from meshwright.apps.quickstart.plan import VALIDATED, Size
from meshwright.apps.quickstart.shell import LoggedInterval, TrainingLines, call
from meshwright.base.progress import duration
from meshwright.config.text_inputs import TextInputs
from meshwright.data.text.reading import read_texts

COMPARED = 50_000_000  # bytes of text from which the trigram model learns
PROMPT = 40  # characters of a held-out text that a prompt takes, to the end of a word

# The network of Qwen 3, trained with Muon.
NETWORK = "--swiglu --position-embedding-type rope --qk-layernorm --normalization RMSNorm --disable-bias-linear"
RECIPE = "--optimizer muon --muon-momentum 0.9 --adam-beta2 0.98 --weight-decay 0.1 --lr-decay-style linear"
WARMUP = 0.1  # of the steps


def model_flags(size: Size, dropout: float) -> list[str]:
    """Return the flags of a network and of its batch."""
    flags = f"--num-layers {size.layers} --hidden-size {size.hidden}"
    flags += f" --num-attention-heads {size.heads} {NETWORK}"
    if size.table_lr:
        flags += " --untie-embeddings-and-output-weights"
    flags += f" --hidden-dropout {dropout:g} --attention-dropout 0"
    flags += f" --seq-length {size.length} --micro-batch-size {size.batch}"
    return flags.split()


def recipe_flags(size: Size, steps: int) -> list[str]:
    """Return the flags of the optimizer and of a schedule over so many steps."""
    warmup = max(1, int(WARMUP * steps))
    flags = f"{RECIPE} --lr {size.lr:g} --min-lr {size.lr / 100:g}"
    flags += f" --lr-warmup-iters {warmup}"
    if size.table_lr:
        flags += f" --embedding-lr {size.table_lr:g}"
    return f"{flags} --train-iters {steps}".split()


class Tour:
    """The steps in one folder, each a method that returns what the next ones need."""

    def __init__(self, folder: Path, log: str, device: str) -> None:
        self.folder, self.log, self.device = folder, folder / log, device
        self.run = f"{folder}/run"
        self.vocabulary = f"{folder}/tokenizer"
        self.train = f"{folder}/train.jsonl"
        self.held_out = f"{folder}/held_out.jsonl"

    def call(self, *argv: str, **how: Any) -> str:
        return call(self.log, list(argv), **how)

    def learn_vocabulary(self, size: int, source: str | None = None) -> None:
        command = ["train-tokenizer", "--input", source or self.train]
        command += ["--vocab-size", str(size), "--output", self.vocabulary]
        self.call(*command)

    def tokenize(self) -> int:
        """Return the number of tokens to learn from."""
        from meshwright.data.files.indexed import Indexed

        for text in (self.train, self.held_out):
            command = ["preprocess", "--input", text]
            command += ["--output-prefix", text.removesuffix(".jsonl")]
            command += ["--tokenizer", self.vocabulary, "--append-eod"]
            self.call(*command, show=outcome)
        return len(Indexed(token_files(self.train)).tokens)

    def training(self, size: Size, dropout: float, steps: int, *more: str) -> list[str]:
        """Return the command that trains, without a folder to save to."""
        command = ["train", "--train-data-path", token_files(self.train)]
        command += ["--valid-data-path", token_files(self.held_out)]
        command += model_flags(size, dropout)
        command += recipe_flags(size, steps)
        return [*command, *more, "--device", self.device]

    def run_command(self, size: Size, dropout: float, steps: int, *more: str) -> list[str]:
        """Return the command of the run: about 60 log lines, four validations and saves."""
        quarter = str(max(1, steps // 4))
        keep = [
            *("--log-interval", str(max(1, steps // 60))),
            *("--eval-interval", quarter),
            *("--eval-iters", str(max(1, min(VALIDATED, steps // 20)))),
            *("--save-interval", quarter),
            *("--keep-last", "1"),
        ]
        command = self.training(size, dropout, steps, *keep, *more)
        return [*command, "--save", self.run, "--load", self.run]

    def pre_train(
        self, command: list[str], stop: Callable[[LoggedInterval], str | None] | None
    ) -> None:
        self.call(*command, show=TrainingLines(), stop=stop)

    def evaluate(self, parts: int | None = None) -> tuple[float, float]:
        """Print the bits per byte of the model and of the trigram model; return both.

        With `parts`, they are of so many parts of the held-out text, for want of time.
        """
        command = ["evaluate", self.run, "--input", self.held_out]
        if parts is not None:
            print(f"  on the first {parts:,} of the held-out parts, so as to end in time")
            command += ["--limit", str(parts)]
        table = self.call(*command, "--device", self.device)
        # From the table that the user sees: the first figure of this name.
        ours = float(re.findall(r"bits per byte +([\d.]+)", table)[0])
        theirs = compare_with_trigram(ours, Path(self.train), Path(self.held_out), parts)
        return ours, theirs

    def generate(self, prompt: str, length: int, *how: str) -> None:
        argv = ["generate", self.run, "--prompt", prompt, "--max-new-tokens", str(length), *how]
        self.call(*argv, "--device", self.device)

    def end(self, began: float) -> None:
        """Print how long it took since time.perf_counter() was `began`, and what to try next."""
        took = duration(time.perf_counter() - began)
        print(f"\nDone in {took}. The full output of the commands is in {self.log}. Try next:")
        self.try_next()

    def try_next(self) -> None:
        for command in ("chat", "report", "inspect"):
            print(f"  {shlex.join(['meshwright', command, self.run])}")


def token_files(text: str) -> str:
    """Return the prefix of the token files that preprocess makes of a text."""
    return f"{text.removesuffix('.jsonl')}_text_document"


def outcome(line: str) -> str | None:
    """Return what preprocess wrote; Megatron's lines are for scripts."""
    return line if line.startswith("wrote ") else None


def compare_with_trigram(
    ours: float, train: Path, held_out: Path, parts: int | None = None
) -> float:
    """Print the result beside that of a byte-trigram model, the simplest worth a comparison.

    Both are of as many parts of the held-out text, None for all.
    """
    from meshwright.apps.quickstart.trigram import trigram_bits_per_byte

    def encoded(path: Path) -> Iterator[bytes]:
        return (text.encode() for text in read_texts(TextInputs(input=[str(path)])))

    # More text would hardly change its table of trigrams, and takes time to count.
    learnt = first_bytes(encoded(train), COMPARED)
    theirs = trigram_bits_per_byte(learnt, itertools.islice(encoded(held_out), parts))
    verdict = "the trigram is better: this model needs more training"
    if ours < theirs:
        verdict = "the GPT is better"
    print(
        f"  bits per byte: this GPT {ours:.3f}, a byte-trigram model of the same files {theirs:.3f}: {verdict}"
    )
    return theirs


def first_bytes(texts: Iterable[bytes], most: int) -> Iterator[bytes]:
    """Yield texts until they have so many bytes."""
    for text in texts:
        if most <= 0:
            return
        most -= len(text)
        yield text


def prompt_from(held_out: Path) -> str:
    """Return the first words of a held-out text: of a long line, or of the longest one."""
    # The longest line so far, without marks of lists and headings.
    best = ""
    for text in read_texts(TextInputs(input=[str(held_out)])):
        for line in text.splitlines():
            # As the value of --prompt, a text must not begin with a hyphen.
            best = max(best, line.lstrip("-*#> \t").rstrip(), key=len)
            if len(best) >= PROMPT:
                # Up to the end of a word, unless that would leave little.
                words = best[:PROMPT].rsplit(" ", 1)
                return words[0] if len(words[0]) >= PROMPT // 2 else best[: PROMPT // 2]
    return best or "The"
