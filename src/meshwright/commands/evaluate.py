"""`meshwright evaluate DIR --input FILES`: perplexity and bits per byte of a trained model on text.

Each document is scored by itself: the end-of-document token is put in front, every token of the text is predicted once,
and nothing after it. Longer documents are read in windows of the model's length; a window after the first moves on by
--overlapping-eval tokens and counts only those, so that they have a context. Loss is the mean over tokens, perplexity
its exponential; bits per byte divides the same sum by the bytes of the text, so models with different vocabularies, and
models without one, can be compared.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from meshwright import console
from meshwright import device as devices
from meshwright.data.prepare.inputs import find_inputs
from meshwright.data.prepare.text import read_texts as read_documents
from meshwright.errors import BAD_DATA, DONE, NON_FINITE, UserError
from meshwright.launch.world import is_first_process
from meshwright.settings import checks, command
from meshwright.settings.schema import READING, Checkpoint, Data, Model, Parallel, Precision, Tokenizer, Training, flag

if TYPE_CHECKING:
    from meshwright.model.gpt import GPT
    from meshwright.tokenizers import Tokenizer as TextTokenizer


@dataclass(frozen=True)
class Evaluate:
    """Text to score."""

    input: list[str] = flag([], "text files, or .jsonl/.json files with one document per line")
    json_keys: list[str] = flag(["text"], "keys whose text is read from JSON lines", "--json-key")
    overlapping_eval: int | None = flag(
        None, "tokens by which a window advances (none: half the sequence length)", bound="above 0"
    )
    json: bool = flag(False, "print one line of JSON instead of a table")


@dataclass(frozen=True)
class EvaluateConfig:
    """Settings of `meshwright evaluate`."""

    evaluate: Evaluate = Evaluate()
    model: Model = Model()
    tokenizer: Tokenizer = Tokenizer()
    data: Data = Data()
    training: Training = Training()
    precision: Precision = Precision()
    parallel: Parallel = Parallel()
    checkpoint: Checkpoint = Checkpoint()

    USES: ClassVar[frozenset[str]] = frozenset(
        {f.name for group in (Evaluate, Tokenizer) for f in dataclasses.fields(group)} | READING
    )

    def problems(self) -> list[str]:
        out = checks.reading_problems(self, "evaluate")
        return out if self.evaluate.input else [*out, "--input is needed: text or JSON-lines files"]


@dataclass(frozen=True)
class Score:
    """Sums over all documents."""

    loss: float  # nats
    tokens: int
    bytes: int
    documents: int

    @property
    def mean(self) -> float:
        return self.loss / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.mean, 700))

    @property
    def bits_per_byte(self) -> float:
        return self.loss / math.log(2) / self.bytes


ABOUT = "Score text with a model. Every token counts, a document's first one too: it follows an end of document."


def main(argv: list[str]) -> int:
    if not is_first_process("evaluation"):
        return DONE
    parsed = command.settings(EvaluateConfig, argv, "evaluate", ABOUT, "load")
    if parsed is None:
        return DONE
    c, e = parsed.config, parsed.config.evaluate
    texts = [text for name in find_inputs(e.input) for text in read_texts(Path(name), e.json_keys)]
    if not any(texts):
        raise UserError(f"{', '.join(e.input)}: no text to score", BAD_DATA)

    from meshwright.generation import engine
    from meshwright.optim.loss_scale import dtype_of

    console.set_stream(None if e.json else "stdout")
    assert c.checkpoint.load
    load, given = c.checkpoint.load, engine.given(parsed)
    if parsed.dry_run:
        found = engine.find(load, given, c.tokenizer)
        print(
            f"{len(texts)} documents; the flags fit step {found.source.step} in {found.source.root}; nothing was loaded"
        )
        return DONE
    device = devices.pick(c.parallel.device)
    batch = int(c.training.micro_batch_size or 8)
    with command.telling_memory(f"a smaller --micro-batch-size (now {batch}) or --seq-length, or --bf16,"):
        run = engine.load(load, given, c.tokenizer, dtype_of(c.precision), device)
        length = run.length
        stride = min(e.overlapping_eval or max(1, length // 2), length)
        s = score(run.model, run.tokenizer, texts, length, stride, batch)
    values = {
        "step": run.step,
        "documents": s.documents,
        "tokens": s.tokens,
        "bytes": s.bytes,
        "loss": s.mean,
        "perplexity": s.perplexity,
        "bits_per_byte": s.bits_per_byte,
        "sequence_length": length,
        "stride": stride,
    }
    if e.json:
        print(json.dumps(values))
    else:
        for name, value in values.items():
            print(f"  {name.replace('_', ' '):16}", f"{value:,.4f}" if isinstance(value, float) else f"{value:,}")
    return DONE


def read_texts(path: Path, keys: list[str]) -> Iterator[str]:
    """The documents of one file; `-` is the standard input as one text."""
    if str(path) == "-":
        yield sys.stdin.read()
        return
    if path.suffix in (".jsonl", ".json"):
        yield from read_documents([str(path)], keys)
        return
    try:
        yield path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"--input {path}: byte {error.start} is not UTF-8", BAD_DATA) from None


def score(model: GPT, tokenizer: TextTokenizer, texts: Iterable[str], length: int, stride: int, batch: int) -> Score:
    """Score documents with windows of `length` tokens that move on by `stride`; `length` is at least `stride`."""
    import torch

    from meshwright.model.attention import Where
    from meshwright.model.loss import token_losses

    device = model.wte.weight.device
    model.eval()
    tokens = size = documents = 0
    total = 0.0
    waiting: list[tuple[list[int], list[int], int]] = []

    def flush() -> float:
        longest = max(len(x) for x, _, _ in waiting)
        x, y = (torch.zeros(len(waiting), longest, dtype=torch.int64) for _ in range(2))
        counted = torch.zeros(len(waiting), longest, dtype=torch.float64)
        for row, (inputs, labels, first) in enumerate(waiting):
            x[row, : len(inputs)], y[row, : len(labels)] = torch.tensor(inputs), torch.tensor(labels)
            counted[row, first : len(labels)] = 1
        waiting.clear()
        with torch.inference_mode():
            losses = token_losses(model(x.to(device), Where()), y.to(device), model.vocab)
        return float((losses.double().cpu() * counted).sum())

    for text in texts:
        ids = [tokenizer.eod, *tokenizer.encode(text)]
        documents, tokens, size = documents + 1, tokens + len(ids) - 1, size + len(text.encode())
        for begin, first, end in windows(len(ids) - 1, length, stride):
            waiting.append((ids[begin:end], ids[begin + 1 : end + 1], first - begin))
            if len(waiting) == batch:
                total += flush()
    if waiting:
        total += flush()
    if not math.isfinite(total):
        raise UserError(
            "the loss is not finite: the model's weights are damaged, or --fp16 overflows (try --bf16)", NON_FINITE
        )
    return Score(total, tokens, size, documents)


def windows(n: int, length: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(begin, first counted, end) over n predictions: each is counted once, in a window of at most `length`."""
    end = min(n, length)
    if n:
        yield 0, 0, end
    while end < n:
        first, end = end, min(end + stride, n)
        yield max(0, end - length), first, end


Integers = npt.NDArray[Any]
Reals = npt.NDArray[np.float64]


def trigram_bits_per_byte(train: Iterable[bytes], held_out: Iterable[bytes]) -> float:
    """Bits per byte of a byte-trigram model, the baseline that a language model must beat.

    Witten-Bell: a context seen n times with t different followers trusts its own counts with weight n / (n + t), and the
    shorter context otherwise; the shortest adds one to each count. Documents begin with two border symbols, which are
    given and never predicted, as the language model's end-of-document token is.
    """
    a, b, c = _trigrams(train)
    unigrams = (np.bincount(c, minlength=256) + 1) / (len(c) + 256)  # [256]
    trust, counts = _witten_bell(b, c, _SYMBOLS)
    bigrams = (1 - trust)[:, None] * unigrams + (trust / np.maximum(counts.sum(1), 1))[:, None] * counts  # [257, 256]
    trust, counts = _witten_bell(a * _SYMBOLS + b, c, _SYMBOLS**2)
    seen = np.maximum(counts.sum(1), 1)

    a, b, c = _trigrams(held_out)
    if not len(c):
        raise UserError("no held-out bytes to score", BAD_DATA)
    context = a * _SYMBOLS + b
    p = (1 - trust[context]) * bigrams[b, c] + trust[context] * counts[context, c] / seen[context]
    return float(-np.log2(p).mean())


_SYMBOLS = 257  # the bytes, and the border of a document


def _trigrams(documents: Iterable[bytes]) -> tuple[Integers, Integers, Integers]:
    """Every byte with the two symbols before it, documents one after the other."""
    border = np.full(2, 256, np.int32)
    parts = [part for d in documents for part in (border, np.frombuffer(d, np.uint8).astype(np.int32))]
    x = np.concatenate([border, *parts])
    bytes_at = np.flatnonzero(x[2:] < 256)
    return x[bytes_at], x[bytes_at + 1], x[bytes_at + 2]


def _witten_bell(context: Integers, byte: Integers, contexts: int) -> tuple[Reals, Integers]:
    """n / (n + t) of each context, 0 if unseen, and the counts [contexts, 256]."""
    counts = np.bincount(context * 256 + byte, minlength=contexts * 256).reshape(contexts, 256)
    n, t = counts.sum(1), np.count_nonzero(counts, axis=1)
    return n / np.maximum(n + t, 1), counts
