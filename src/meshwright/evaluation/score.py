"""Perplexity and bits per byte of a language model on documents.

Each document is scored alone: every token is predicted once, the first after an end of document. A
long document is read in windows; each after the first starts `stride` tokens later and counts only
the new ones, so that they have a context. Bits per byte compares different vocabularies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.errors import BAD_DATA, NON_FINITE, UserError
from meshwright.settings.data_paths import path_sets

if TYPE_CHECKING:
    from meshwright.model.gpt import GPT
    from meshwright.settings.schema import Data
    from meshwright.tokenizers import Tokenizer


@dataclass(frozen=True)
class Score:
    """Sums over all documents, and the measures made of them."""

    total_loss: float  # nats
    tokens: int
    bytes: int
    documents: int

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.total_loss / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700))

    @property
    def bits_per_byte(self) -> float:
        return self.total_loss / math.log(2) / self.bytes


def score(model: GPT, tokenizer: Tokenizer, texts: Iterable[str], length: int, stride: int, batch: int) -> Score:
    """Score documents in windows of `length` tokens that advance by `stride` <= `length`."""
    documents = ((tokenizer.encode(text), len(text.encode())) for text in texts)
    return score_ids(model, tokenizer.eod, documents, length, stride, batch)


def read_token_files(d: Data, tokenizer: Tokenizer, divided: bool) -> Iterator[tuple[list[int], int]]:
    """Yield tokens and bytes of the documents of --data-path, or of --split's validation part."""
    from meshwright.data.format.indexed import Indexed, check_vocabulary
    from meshwright.data.samples import split_bounds

    for source in path_sets(d)[0].sources:
        for missing in (f"{source.prefix}{end}" for end in (".idx", ".bin")):
            if not Path(missing).exists():
                raise UserError(f"--data-path {source.prefix}: there is no {missing}", BAD_DATA)
        indexed = Indexed(source.prefix)
        check_vocabulary(indexed, tokenizer.size)
        count = len(indexed.doc_idx) - 1
        bounds = split_bounds(d.split, count, d.split_arithmetic)[1:3] if divided else (0, count)
        for document in range(*bounds):
            first, stop = (
                int(indexed.pointers[i]) if i < len(indexed) else indexed.tokens.nbytes
                for i in indexed.doc_idx[document : document + 2]
            )
            size = indexed.dtype.itemsize
            ids = indexed.tokens[first // size : stop // size].tolist()
            while ids and ids[-1] == tokenizer.eod:  # of --append-eod
                ids.pop()
            yield ids, len(tokenizer.decode_bytes(ids))


def score_ids(
    model: GPT, eod: int, documents: Iterable[tuple[Sequence[int], int]], length: int, stride: int, batch: int
) -> Score:
    """Score documents given as their tokens, without an end, and their number of bytes."""
    import torch

    from meshwright.model.attention import Where
    from meshwright.model.loss import token_losses

    device = model.wte.weight.device
    model.eval()
    tokens = size = number = 0
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

    for own, bytes_of_text in documents:
        ids = [eod, *own]
        number, tokens, size = number + 1, tokens + len(ids) - 1, size + bytes_of_text
        for begin, first, end in windows(len(ids) - 1, length, stride):
            waiting.append((ids[begin:end], ids[begin + 1 : end + 1], first - begin))
            if len(waiting) == batch:
                total += flush()
    if waiting:
        total += flush()
    if not tokens:
        raise UserError("there is no text to score", BAD_DATA)
    if not math.isfinite(total):
        why = "the model's weights are damaged, or --fp16 overflows (try --bf16)"
        raise UserError(f"the loss is not finite; {why}", NON_FINITE)
    return Score(total, tokens, size, number)


def windows(n: int, length: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, first counted, end) over n predictions: each counted once, in <= `length`."""
    end = min(n, length)
    if n:
        yield 0, 0, end
    while end < n:
        first, end = end, min(end + stride, n)
        yield max(0, end - length), first, end
