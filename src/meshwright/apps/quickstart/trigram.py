"""A byte-trigram model: the baseline that a language model must beat."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.base.errors import bad_data

Integers = npt.NDArray[Any]
Reals = npt.NDArray[np.float64]

_SYMBOLS = 257  # the bytes, and the border of a document


def trigram_bits_per_byte(train: Iterable[bytes], held_out: Iterable[bytes]) -> float:
    """Train on some documents and return the bits per byte of others.

    Witten-Bell smoothing: a context seen n times with t different followers weighs its own counts
    by n / (n + t) and the shorter context by the rest; the shortest adds one to each count. A
    document begins with two border symbols, which are never predicted.
    """
    # Count: each byte alone, after one symbol [257, 256], and after two [257^2, 256].
    a, b, c = _trigrams(train)
    unigrams = (np.bincount(c, minlength=256) + 1) / (len(c) + 256)

    trust, counts = _witten_bell(b, c, _SYMBOLS)
    weights = trust / np.maximum(counts.sum(1), 1)
    bigrams = (1 - trust)[:, None] * unigrams + weights[:, None] * counts

    context = a * _SYMBOLS + b
    trust, counts = _witten_bell(context, c, _SYMBOLS**2)
    seen = np.maximum(counts.sum(1), 1)

    # Score. The table of all trigrams is not divided as a whole: most are never asked for.
    a, b, c = _trigrams(held_out)
    if not len(c):
        raise bad_data("no held-out bytes to score")
    context = a * _SYMBOLS + b
    weight = trust[context]
    shorter = (1 - weight) * bigrams[b, c]
    p = shorter + weight * counts[context, c] / seen[context]
    return float(-np.log2(p).mean())


def _trigrams(documents: Iterable[bytes]) -> tuple[Integers, Integers, Integers]:
    """Return each byte with the two symbols before it, over all documents."""
    border = np.full(2, 256, np.int32)
    parts = [border]
    for document in documents:
        parts += [border, np.frombuffer(document, np.uint8).astype(np.int32)]
    x = np.concatenate(parts)
    # Borders are 256, so what is below is a byte, with two symbols before it.
    bytes_at = np.flatnonzero(x[2:] < 256)
    return x[bytes_at], x[bytes_at + 1], x[bytes_at + 2]


def _witten_bell(context: Integers, byte: Integers, contexts: int) -> tuple[Reals, Integers]:
    """Return n / (n + t) for each context, 0 if unseen, and the counts [contexts, 256]."""
    pairs = context * 256 + byte
    counts = np.bincount(pairs, minlength=contexts * 256).reshape(contexts, 256)
    n = counts.sum(1)
    t = np.count_nonzero(counts, axis=1)
    return n / np.maximum(n + t, 1), counts
