"""Scores of token windows, and the perplexity and bits per byte of documents made of them.

Every measure makes `Window`s and adds up what `score_windows` returns for each: its loss, and how
many of its labels are the likeliest token. A `Scorer` runs the model, in whatever layout that is.

A document is scored alone: every token is predicted once, the first after an end of document. A
long document is read in windows; each after the first starts `stride` tokens later and counts only
the new ones, so that they have a context. Bits per byte compares different vocabularies.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.base.errors import BAD_DATA, NON_FINITE, UserError, bad_data
from meshwright.base.storage import copies
from meshwright.config.data_paths import path_sets
from meshwright.config.problem import SettingsError
from meshwright.training.tasks import Window

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.config.schema import Data
    from meshwright.data.tokenizers import Tokenizer
    from meshwright.parallel.window_scores import Scorer, WindowBatch

AT_ONCE = 64  # full micro-batches whose windows are sorted by length and given to a scorer together
WIDTH = 16  # few widths are few variants of a kernel


def score_windows(
    scorer: Scorer, windows: Iterable[Window], length: int, batch: int, fixed: bool = False, ranges: int = 0
) -> Iterator[Tensor]:
    """Yield [n, 2 + ranges], what the scorer returns for each window in order, some at a time.

    A micro-batch has `batch` windows of `length` predictions, or more shorter ones; windows are
    sorted by length, because a row is padded to the longest, in steps of WIDTH. With `fixed` every
    micro-batch is [batch, length], for a network that runs no other shape.
    """
    waiting = iter(windows)
    while portion := list(itertools.islice(waiting, AT_ONCE * batch)):
        order = sorted(range(len(portion)), key=lambda i: -len(portion[i].tokens))
        batches, at = [], 0
        while at < len(order):
            longest = max(1, len(portion[order[at]].tokens) - 1)
            width = length if fixed else min(length, -(-longest // WIDTH) * WIDTH)
            count = batch * length // width
            rows = make_rows([portion[i] for i in order[at : at + count]], count if fixed else 0, width)
            batches.append(rows._replace(ranges=ranges))
            at += count
        values = scorer(batches)[: len(portion)]  # after these come the rows that fill the last micro-batch
        ordered = values.new_empty(values.shape)
        ordered[order] = values
        yield ordered


def make_rows(windows: list[Window], at_least: int, width: int) -> WindowBatch:
    """Return a micro-batch of these windows, and of empty rows if they are fewer than asked for."""
    import torch

    from meshwright.parallel.window_scores import WindowBatch

    tokens, labels = (torch.zeros(max(len(windows), at_least), width, dtype=torch.int64) for _ in range(2))
    counted = torch.zeros(tokens.shape, dtype=torch.bool)
    for row, (ids, first) in enumerate(windows):
        window, n = torch.as_tensor(ids, dtype=torch.int64), len(ids) - 1
        tokens[row, :n], labels[row, :n], counted[row, first:n] = window[:-1], window[1:], True
    return WindowBatch(tokens, labels, counted)


# Documents


@dataclass(frozen=True, repr=False)
class Score:
    """Sums over all documents, and the measures made of them."""

    total_loss: float  # nats
    tokens: int
    bytes: int
    documents: int
    by_position: dict[str, float] = field(default_factory=dict)  # nats per token by ranges of places in a window

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

    def __repr__(self) -> str:
        measures = (f"{name}={getattr(self, name):.4f}" for name in ("loss", "perplexity", "bits_per_byte"))
        counts = (f"{name}={getattr(self, name):,}" for name in ("documents", "tokens", "bytes"))
        return f"Score({', '.join((*measures, *counts))})"


def score_texts(
    scorer: Scorer, tokenizer: Tokenizer, texts: Iterable[str], length: int, stride: int, batch: int
) -> Score:
    """Score documents in windows of `length` tokens that advance by `stride` <= `length`."""
    return score_documents(scorer, tokenizer.eod, encode_documents(tokenizer, texts), length, stride, batch)


def encode_documents(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[tuple[Sequence[int], int]]:
    """Yield tokens and bytes of documents."""
    return ((tokenizer.encode(text), len(text.encode())) for text in texts)


def read_token_files(
    d: Data, tokenizer: Tokenizer, divided: bool, limit: int | None = None
) -> tuple[Iterator[tuple[list[int], int]], int]:
    """Return the documents of --data-path, or of --split's validation part, and their number.

    A document is its tokens and the number of its bytes; `limit` is the most documents.
    """
    from meshwright.data.files.indexed import Indexed, check_vocabulary
    from meshwright.data.samples import split_bounds

    parts: list[tuple[Indexed, range]] = []
    for source in path_sets(d)[0].sources:
        copies.prepare_tokens(source.prefix)
        for missing in (f"{source.prefix}{end}" for end in (".idx", ".bin")):
            if not Path(missing).exists():
                raise SettingsError(f"{{data_path={source.prefix}}}: there is no {missing}", BAD_DATA)
        indexed = Indexed(source.prefix)
        check_vocabulary(indexed, tokenizer.size)
        count = len(indexed.doc_idx) - 1
        bounds = split_bounds(d.split, count, d.split_arithmetic)[1:3] if divided else (0, count)
        parts.append((indexed, range(*bounds)))

    def read() -> Iterator[tuple[list[int], int]]:
        for indexed, document in ((indexed, document) for indexed, part in parts for document in part):
            ids = indexed.document(document).tolist()
            while ids and ids[-1] == tokenizer.eod:  # of --append-eod
                ids.pop()
            yield ids, len(tokenizer.decode_bytes(ids))

    count = sum(len(part) for _, part in parts)
    return itertools.islice(read(), limit), min(count, limit or count)


def score_documents(
    scorer: Scorer, eod: int, documents: Iterable[tuple[Sequence[int], int]], length: int, stride: int, batch: int
) -> Score:
    """Score documents given as their tokens, without an end, and their number of bytes."""
    from meshwright.model.loss import first_positions, range_names

    tokens = size = number = 0
    names, borders = range_names(length), [*first_positions(length), length]
    counts, nats = [0] * len(names), [0.0] * len(names)

    def read() -> Iterator[Window]:
        nonlocal tokens, size, number
        for own, bytes_of_text in documents:
            ids = [eod, *own]
            number, tokens, size = number + 1, tokens + len(ids) - 1, size + bytes_of_text
            for window in document_windows(ids, length, stride):
                for i, (begin, end) in enumerate(itertools.pairwise(borders)):
                    counts[i] += max(min(len(window.tokens) - 1, end) - max(window.first, begin), 0)
                yield window

    totals = []
    for values in score_windows(scorer, read(), length, batch, ranges=len(names)):
        totals.append(float(values[:, 0].sum()))
        nats = [a + b for a, b in zip(nats, values[:, 2:].sum(0).tolist(), strict=True)]
    total = math.fsum(totals)
    if not tokens:
        raise bad_data("there is no text to score")
    require_finite(total)
    by_position = {name: loss / count for name, loss, count in zip(names, nats, counts, strict=True) if count}
    return Score(total, tokens, size, number, by_position)


def document_windows(ids: Sequence[int], length: int, stride: int) -> Iterator[Window]:
    for begin, first, end in window_spans(len(ids) - 1, length, stride):
        yield Window(ids[begin : end + 1], first - begin)


def require_finite(value: float, what: str = "the loss") -> None:
    if not math.isfinite(value):
        why = "the model's weights are damaged, or float16 overflows (try bfloat16)"
        raise UserError(f"{what} is not finite; {why}", NON_FINITE)


def window_spans(n: int, length: int, stride: int, at_multiples: bool = False) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, first counted, end) over n predictions: each counted once, in <= `length`.

    The last window begins as early as `length` allows, or, with `at_multiples` (as in Megatron's
    and transformers' evaluations), where a full one would: at a multiple of the stride.
    """
    end = min(n, length)
    if n:
        yield 0, 0, end
    while end < n:
        first, end = end, min(end + stride, n)
        yield first + stride - length if at_multiples else max(0, end - length), first, end
