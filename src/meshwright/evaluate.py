"""`meshwright evaluate DIR --input FILES`: perplexity and bits per byte of a trained model on text.

Each document is scored by itself: the end-of-document token is put in front, every token of the text is predicted once,
and nothing after it. Longer documents are read in windows of the model's length; a window after the first moves on by
--overlapping-eval tokens and counts only those, so that they have a context. Loss is the mean over tokens, perplexity
its exponential; bits per byte divides the same sum by the bytes of the text, so models with different vocabularies, and
models without one, can be compared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from meshwright import flags
from meshwright.config import Checkpoint, Data, Model, Parallel, Precision, Tokenizer, Training, flag, not_yet
from meshwright.errors import BAD_DATA, DONE, UserError

if TYPE_CHECKING:
    from meshwright.model.gpt import GPT
    from meshwright.tokenizers import Tokenizer as TextTokenizer


@dataclass(frozen=True)
class Evaluate:
    """What is scored."""

    input: list[str] = flag([], "text files, or .jsonl/.json with one document a line")
    json_keys: list[str] = flag(["text"], "keys whose text is read from JSON lines", "--json-key")
    overlapping_eval: int | None = flag(None, "tokens a window moves on (none: half the sequence length)")
    json: bool = flag(False, "print one JSON line instead of a table")


@dataclass(frozen=True)
class EvaluateConfig:
    """Everything an evaluation is made of."""

    evaluate: Evaluate = Evaluate()
    model: Model = Model()
    tokenizer: Tokenizer = Tokenizer()
    data: Data = Data()
    training: Training = Training()
    precision: Precision = Precision()
    parallel: Parallel = Parallel()
    checkpoint: Checkpoint = Checkpoint()

    def problems(self) -> list[str]:
        e = self.evaluate
        out = not_yet(self)
        if not self.checkpoint.load:
            out.append("a checkpoint is needed: `meshwright evaluate DIR` or --load DIR")
        if not e.input:
            out.append("--input is needed: text or JSON-lines files")
        if e.overlapping_eval is not None and e.overlapping_eval < 1:
            out.append(f"--overlapping-eval {e.overlapping_eval} must be above 0")
        return out


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


def main(argv: list[str]) -> int:
    parsed = flags.parse(
        EvaluateConfig, argv, "meshwright evaluate", positional="load", about="Score text with a model."
    )
    if parsed.print_config:
        print(flags.to_toml(parsed.config, parsed.sources))
        return DONE
    c, e = parsed.config, parsed.config.evaluate
    texts = [text for name in e.input for text in read_texts(Path(name), e.json_keys)]
    if not any(texts):
        raise UserError(f"{', '.join(e.input)}: no text to score", BAD_DATA)
    if parsed.dry_run:
        print(f"{len(texts)} documents; nothing was loaded")
        return DONE
    flags.tell(parsed)

    from meshwright.generate import engine
    from meshwright.precision import dtype
    from meshwright.train import pick_device

    def say(line: str) -> None:
        if not e.json:
            print(line, flush=True)

    assert c.checkpoint.load
    device, load = pick_device(c), c.checkpoint.load
    run = engine.load(load, parsed.given, c.tokenizer, dtype(c.precision), device, c.checkpoint.verify, say)
    length = min(c.data.seq_length or run.positions, run.positions)
    stride = e.overlapping_eval or max(1, length // 2)
    s = score(run.model, run.tokenizer, texts, length, min(stride, length), c.training.micro_batch_size or 8)
    values = {
        "step": run.step, "documents": s.documents, "tokens": s.tokens, "bytes": s.bytes, "loss": s.mean,
        "perplexity": s.perplexity, "bits_per_byte": s.bits_per_byte, "sequence_length": length, "stride": stride,
    }  # fmt: skip
    if e.json:
        print(json.dumps(values))
    else:
        for name, value in values.items():
            print(
                f"  {name.replace('_', ' '):16} {value:,.4f}" if isinstance(value, float) else f"  {name:16} {value:,}"
            )
    return DONE


def read_texts(path: Path, keys: list[str]) -> Iterator[str]:
    """The documents of one file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"--input {path}: no such file", BAD_DATA) from None
    except UnicodeDecodeError as error:
        raise UserError(f"--input {path}: byte {error.start} is not UTF-8", BAD_DATA) from None
    if path.suffix not in (".jsonl", ".json"):
        yield text
        return
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)
            values = [document[key] for key in keys]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"--input {path}:{number}: {type(error).__name__}: {error}", BAD_DATA) from None
        for value in values:
            if not isinstance(value, str):
                raise UserError(f"--input {path}:{number}: the value is not a text", BAD_DATA)
            yield value


def score(model: GPT, tokenizer: TextTokenizer, texts: Iterable[str], length: int, stride: int, batch: int) -> Score:
    """Score documents with windows of `length` tokens that move on by `stride`."""
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
            losses = token_losses(model(x.to(device), Where()), y.to(device))
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
    return Score(total, tokens, size, documents)


def windows(n: int, length: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(begin, first counted, end) over n predictions: each is counted once, in a window of at most `length`."""
    end = min(n, length)
    if n:
        yield 0, 0, end
    while end < n:
        first, end = end, min(end + stride, n)
        yield max(0, end - length), first, end


Counts = npt.NDArray[np.float64]


def trigram_bits_per_byte(train: Iterable[bytes], held_out: Iterable[bytes]) -> float:
    """Bits per byte of a byte-trigram model, the baseline that a language model must beat.

    Witten-Bell: a context seen n times with t different followers trusts its own counts with weight n / (n + t), and the
    shorter context otherwise. Documents begin with two zero bytes.
    """
    codes = lambda texts: np.frombuffer(b"".join(b"\0\0" + t for t in texts), np.uint8).astype(np.int32)  # noqa: E731
    x = codes(train)
    trigrams = np.bincount((x[:-2] * 256 + x[1:-1]) * 256 + x[2:], minlength=256**3).reshape(-1, 256)
    bigrams = np.bincount(x[:-1] * 256 + x[1:], minlength=256**2).reshape(-1, 256)
    unigrams = (np.bincount(x, minlength=256) + 1) / (len(x) + 256)

    lower = _interpolate(bigrams, unigrams[None, :])
    bits, size = 0.0, 0
    for document in held_out:
        y = np.frombuffer(b"\0\0" + document, np.uint8).astype(np.int32)
        if len(y) == 2:
            continue
        a, b, c = y[:-2], y[1:-1], y[2:]
        seen = trigrams[a * 256 + b]  # [bytes, 256]
        n, t = seen.sum(1), (seen > 0).sum(1)
        below = lower[b, c]
        own = np.where(n > 0, (seen[np.arange(len(c)), c] + t * below) / np.maximum(n + t, 1), below)
        bits -= float(np.log2(own).sum())
        size += len(document)
    return bits / size


def _interpolate(counts: npt.NDArray[np.int64], lower: Counts) -> Counts:
    n, t = counts.sum(1, keepdims=True), (counts > 0).sum(1, keepdims=True)
    return np.where(n > 0, (counts + t * lower) / np.maximum(n + t, 1), lower)
