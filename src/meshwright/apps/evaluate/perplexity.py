"""The perplexity and bits per byte of documents: every token of each counts once (data/windows.py).

Bits per byte compares different vocabularies.
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
from meshwright.config.problem import SettingsError, stated
from meshwright.data.windows import Window, document_windows

if TYPE_CHECKING:
    from meshwright.config.schema import Data
    from meshwright.data.tokenizers import Tokenizer
    from meshwright.parallel.window_losses import Scorer


MEASURES = ("loss", "perplexity", "bits_per_byte")
COUNTS = ("documents", "tokens", "bytes")


@dataclass(frozen=True, repr=False)
class Score:
    """Sums over all documents, and the measures made of them."""

    total_loss: float  # nats
    tokens: int
    bytes: int
    documents: int
    # Nats per token by ranges of positions in a window.
    by_position: dict[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.total_loss / self.tokens

    @property
    def perplexity(self) -> float:
        # The exponential of more is beyond float64.
        return math.exp(min(self.loss, 700))

    @property
    def bits_per_byte(self) -> float:
        return self.total_loss / math.log(2) / self.bytes

    def __repr__(self) -> str:
        parts = [f"{name}={getattr(self, name):.4f}" for name in MEASURES]
        parts += [f"{name}={getattr(self, name):,}" for name in COUNTS]
        return f"Score({', '.join(parts)})"


def score_texts(
    scorer: Scorer, tokenizer: Tokenizer, texts: Iterable[str], length: int, stride: int, batch: int
) -> Score:
    """Score documents in windows of `length` tokens that advance by `stride` <= `length`."""
    documents = encode_documents(tokenizer, texts)
    return score_documents(scorer, tokenizer.eod, documents, length, stride, batch)


def encode_documents(
    tokenizer: Tokenizer, texts: Iterable[str]
) -> Iterator[tuple[Sequence[int], int]]:
    """Yield tokens and bytes of documents."""
    return ((tokenizer.encode(text), len(text.encode())) for text in texts)


def read_token_files(
    d: Data, tokenizer: Tokenizer, divided: bool, limit: int | None
) -> tuple[Iterator[tuple[list[int], int]], int]:
    """Return the documents of --data-path, or of --split's validation part, and their number.

    A document is its tokens and the number of its bytes; `limit` is the most documents.
    """
    from meshwright.data import tokenizers
    from meshwright.data.files.indexed import Indexed, check_vocabulary
    from meshwright.data.samples import split_bounds

    parts: list[tuple[Indexed, range]] = []
    for source in path_sets(d)[0].sources:
        copies.prepare_tokens(source.prefix)
        for ending in (".idx", ".bin"):
            file = f"{source.prefix}{ending}"
            if not Path(file).exists():
                raise SettingsError(f"{{data_path={source.prefix}}}: there is no {file}", BAD_DATA)
        indexed = Indexed(source.prefix)
        check_vocabulary(indexed, tokenizer.size)
        if kept := tokenizers.find_of_data([source.prefix]):
            cure = "preprocess the text with the model's, or give the text itself to --input"
            tokenizers.require_of_data(tokenizer, kept, "the model has", cure)
        # Documents, or those of the validation part, as a training would divide them.
        documents = len(indexed.doc_idx) - 1
        chosen = range(documents)
        if divided:
            begin, end = split_bounds(d.split, documents, d.split_arithmetic)[1:3]
            chosen = range(begin, end)
        if not chosen and documents:
            text = f"{stated(d, 'split')} leaves none of the {documents:,} documents of {source.prefix} for validation"
            raise SettingsError(
                f"{text}; raise its second share, or leave it out to score all", BAD_DATA
            )
        parts.append((indexed, chosen))

    def read() -> Iterator[tuple[list[int], int]]:
        for indexed, chosen in parts:
            for document in chosen:
                ids = indexed.document(document).tolist()
                # The ends of documents that --append-eod wrote are no text.
                while ids and ids[-1] == tokenizer.eod:
                    ids.pop()
                yield ids, len(tokenizer.decode_bytes(ids))

    count = sum(len(chosen) for _, chosen in parts)
    return itertools.islice(read(), limit), min(count, limit or count)


def score_documents(
    scorer: Scorer,
    eod: int,
    documents: Iterable[tuple[Sequence[int], int]],
    length: int,
    stride: int,
    batch: int,
) -> Score:
    """Score documents given as their tokens, without an end, and their number of bytes."""
    from meshwright.model.loss import first_positions, range_names
    from meshwright.parallel.window_losses import score_windows

    tokens = size = number = 0
    names = range_names(length)
    borders = [*first_positions(length), length]
    counts, nats = [0] * len(names), [0.0] * len(names)  # by range of positions

    def read() -> Iterator[Window]:
        nonlocal tokens, size, number
        for own, bytes_of_text in documents:
            # An end of document comes first, so that the first token is predicted too.
            ids = [eod, *own]
            number += 1
            tokens += len(own)
            size += bytes_of_text
            for window in document_windows(ids, length, stride):
                # How many of the predictions that count lie in each range.
                last = len(window.tokens) - 1
                for i, (begin, end) in enumerate(itertools.pairwise(borders)):
                    counts[i] += max(min(last, end) - max(window.first, begin), 0)
                yield window

    totals = []
    for values in score_windows(scorer, read(), length, batch, ranges=len(names)):
        totals.append(float(values[:, 0].sum()))
        # The first column of the scores is the sum, the second the hits, then sums by range.
        nats = [a + b for a, b in zip(nats, values[:, 2:].sum(0).tolist(), strict=True)]
    # The exact sum: a plain one would round once more for each batch.
    total = math.fsum(totals)
    if not tokens:
        raise bad_data("there is no text to score")
    require_finite(total)
    # Short documents reach no later range.
    by_position = {}
    for name, loss, count in zip(names, nats, counts, strict=True):
        if count:
            by_position[name] = loss / count
    return Score(total, tokens, size, number, by_position)


def require_finite(value: float, what: str = "the loss") -> None:
    if not math.isfinite(value):
        why = "the model's weights are damaged, or float16 overflows (try bfloat16)"
        raise UserError(f"{what} is not finite; {why}", NON_FINITE)
