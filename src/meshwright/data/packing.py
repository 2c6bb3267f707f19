"""Whole documents packed into samples: best fit, the largest first.

A document of at most S + 1 tokens is a piece; a longer one is cut into pieces of S + 1, each of
which begins with the last token of the one before, and a rest. So every token but the first of a
document is predicted once. Documents of one token, which predict nothing, are left out. Pieces go
to bins of S + 1 places: the longest first, each into the bin with the least room that suffices, and
of equals into the one that has had that room for the longest time.

Documents are shuffled first, and packed in windows, which bounds memory. What is packed together
is the same in every epoch; the order of the samples is another one. Neither depends on the number
of samples, so a longer run continues the order of a shorter one.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from meshwright.base.console import say
from meshwright.base.errors import bad_data
from meshwright.data.files.indexed import Indexed, fingerprint
from meshwright.data.index_cache import IN_MEMORY, Ints, Storage, cached_indices
from meshwright.data.samples import (
    BLOCK,
    FileSamples,
    compiled_loops,
    fill_rows,
    require_sample,
    shuffle,
)

VERSION = 1  # of the algorithm below: part of the cache's key
WINDOW = 1 << 20  # pieces that are packed together, more or less


class Packed(FileSamples):
    """The samples of one split of a pair of token files, each made of whole documents.

    A sample is [2, S + 1]: token ids and their positions in their piece. Padding is id 0 at
    position 0, so each place of it is a piece of its own.
    """

    def __init__(
        self,
        indexed: Indexed,
        documents: range,
        num_samples: int,
        seq_length: int,
        seed: int,
        cache_dir: str | Path | None = None,
    ) -> None:
        super().__init__(indexed, seq_length)
        self.piece_idx, self.bin_idx = pack_files(indexed, documents, seq_length, seed, cache_dir)
        bins = len(self.bin_idx) - 1
        self.epochs = max(1, -(-num_samples // bins))

        # Each epoch has the same bins, in an order of its own.
        # it depends on nothing else
        key = {"version": VERSION, "packed": bins, "epochs": self.epochs, "seed": seed}

        def build(storage: Storage) -> list[Ints]:
            dtype = np.uint32 if bins < 2**32 else np.int64
            order = storage.array("shuffle", bins * self.epochs, dtype)
            rows = order.reshape(self.epochs, bins)
            fill_rows(rows, 0)
            for epoch, row in enumerate(rows):
                shuffle(np.random.RandomState([seed, epoch]), row, bins, compiled_loops(bins))
            return [order]

        (self.shuffle_idx,) = cached_indices(cache_dir, key, ("shuffle",), build)
        share = count_predicted(indexed.sizes, documents) / (bins * seq_length)
        say(
            f"    packed {len(self.piece_idx)} pieces of documents; the samples are {share:.2%} full"
        )
        say(f"    total number of samples: {len(self)}")
        say(f"    total number of epochs: {self.epochs}")

    def __len__(self) -> int:
        return len(self.shuffle_idx)

    def read(self, numbers: list[int]) -> npt.NDArray[np.int64]:
        """Return [samples, 2, S + 1]."""
        self.require_whole()
        indexed = self.indexed
        copies = []
        out = np.zeros((len(numbers), 2, self.seq_length + 1), np.int64)
        for row, k in enumerate(numbers):
            at = 0
            for document, offset, length in self.pieces(k):
                begin = indexed.begin(document) + offset
                copies.append((row, at, begin, length))
                at += length

        # All that is needed is fetched together, before the first copy.
        if indexed.is_sparse:
            indexed.need((begin, begin + length) for _, _, begin, length in copies)
        positions = np.arange(self.seq_length + 1)
        for row, at, begin, length in copies:
            out[row, 0, at : at + length] = indexed.tokens[begin : begin + length]
            out[row, 1, at : at + length] = positions[:length]
        return out

    def pieces(self, k: int) -> list[tuple[int, int, int]]:
        require_sample(k, len(self))
        # Sample k is one bin; its pieces are rows of (document, first token).
        j = int(self.shuffle_idx[k])
        begin, end = self.bin_idx[j : j + 2]
        documents, offsets = self.piece_idx[begin:end].T
        # A piece is the rest of the document, as far as it fits.
        left = self.indexed.sizes[documents] - offsets
        lengths = np.minimum(left, self.seq_length + 1)
        return list(
            zip(
                documents.tolist(),
                offsets.tolist(),
                lengths.tolist(),
                strict=True,
            )
        )


def pack_files(
    indexed: Indexed, documents: range, seq_length: int, seed: int, cache_dir: str | Path | None
) -> list[Ints]:
    """Return the packing of some documents, from the cache if it is there.

    Rows of the first array are (document, first token); the second says where each bin's begin.
    """
    key = {"version": VERSION, "data": fingerprint(indexed.prefix), "packing": "best-fit"}
    key |= {"first": documents.start, "end": documents.stop, "seq_length": seq_length, "seed": seed}

    def build(storage: Storage) -> list[Ints]:
        start = time.perf_counter()
        if not count_predicted(indexed.sizes, documents):
            where = f"{indexed.prefix}: documents {documents.start} to {documents.stop}"
            raise bad_data(
                f"{where} have one token each or none, so nothing can be packed; leave them out"
            )
        arrays = pack_documents(indexed.sizes, documents, seq_length, seed, storage)
        say(f" > elapsed time to pack documents (seconds): {time.perf_counter() - start:4f}")
        return arrays

    return cached_indices(cache_dir, key, ("piece", "bin"), build)


def count_predicted(sizes: Ints, documents: range) -> int:
    """Return the tokens that have one before them in their document."""
    total = 0
    for begin in range(documents.start, documents.stop, BLOCK):
        part = sizes[begin : min(begin + BLOCK, documents.stop)]
        total += int(np.maximum(part - 1, 0).sum(dtype=np.int64))
    return total


def pack_documents(
    sizes: Ints,
    documents: range,
    seq_length: int,
    seed: int,
    storage: Storage = IN_MEMORY,
    window: int = WINDOW,
) -> list[Ints]:
    """Return the pieces in the order of their bins, and where each bin's begin."""
    # The order in which documents are packed.
    order: Ints = np.empty(len(documents), np.int32 if documents.stop <= 2**31 else np.int64)
    fill_rows(order.reshape(1, -1), documents.start)
    shuffle(np.random.RandomState(seed), order, len(order), compiled_loops(len(order)))

    # How many pieces there will be; the sizes are copied, as those in the file are not aligned.
    predicted = np.array(sizes[documents.start : documents.stop])
    np.maximum(predicted - 1, 0, out=predicted)
    total = 0
    for begin in range(0, len(predicted), BLOCK):
        total += int(count_pieces(predicted[begin : begin + BLOCK], seq_length).sum())

    # Window after window; the number of bins is known at the end.
    counts: list[Ints] = []

    def pack_windows() -> Iterator[Ints]:
        for part in cut_windows(order, predicted, documents.start, seq_length, window):
            rows, lengths = cut_pieces(part, predicted[part - documents.start], seq_length)
            if len(rows):
                arranged, count = fill_bins(lengths, seq_length + 1)
                counts.append(count)
                yield rows[arranged]

    piece_idx = storage.stream("piece", (total, 2), order.dtype, pack_windows())
    bins = storage.array("bin", sum(map(len, counts)) + 1, np.int64)
    bins[0] = 0
    np.cumsum(np.concatenate(counts), out=bins[1:])
    return [piece_idx, bins]


def count_pieces(predicted: Ints, seq_length: int) -> Ints:
    """Return the number of pieces of each document, rounded up."""
    return -(-predicted // seq_length)


def cut_windows(
    order: Ints, predicted: Ints, first: int, seq_length: int, window: int
) -> Iterator[Ints]:
    """Yield stretches of the documents; each gives about `window` pieces, or is one document."""
    for begin in range(0, len(order), window):
        part = order[begin : begin + window]
        counts = count_pieces(predicted[part - first], seq_length)
        pieces = np.cumsum(counts, dtype=np.int64)
        limits = np.arange(window, int(pieces[-1]), window)
        for stretch in np.split(part, np.searchsorted(pieces, limits)):
            if len(stretch):
                yield stretch


def cut_pieces(documents: Ints, predicted: Ints, seq_length: int) -> tuple[Ints, Ints]:
    """Return the pieces of some documents as (document, first token), and the tokens of each."""
    counts = count_pieces(predicted, seq_length)
    firsts = np.cumsum(counts) - counts  # number of each document's first piece
    numbers = np.arange(counts.sum()) - np.repeat(firsts, counts)  # within the document
    # Neighbouring pieces share a token: one predicts it, the next one begins with it.
    offsets = numbers * seq_length
    each = np.repeat(documents, counts)
    rows = np.stack((each, offsets.astype(documents.dtype)), axis=1)
    left = np.repeat(predicted, counts) - offsets
    return rows, np.minimum(left, seq_length) + 1


def fill_bins(lengths: Ints, capacity: int) -> tuple[Ints, Ints]:
    """Put pieces into bins; return them in the order of bins, and how many are in each.

    Pieces of one length go into bins of one room in groups, which makes it fast: a group is
    (first bin, bins, pieces in each).
    """
    # The longest pieces first; numpy sorts 16 bits by radix, which is faster.
    rest_type = np.uint16 if capacity < 2**16 else np.int64
    order = np.argsort((capacity - lengths).astype(rest_type), kind="stable")
    waiting: dict[int, deque[tuple[int, int]]] = defaultdict(deque)  # by room: (first bin, bins)
    rooms: list[int] = []  # for which bins wait, in ascending order
    groups = list[tuple[int, int, int]]()
    bins = 0
    counts = np.bincount(lengths, minlength=capacity + 1)
    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            # The least room that suffices, or new bins; a bin takes `each` of these pieces.
            at = bisect_left(rooms, length)
            room = rooms[at] if at < len(rooms) else capacity
            each = min(room // length, left)
            if at < len(rooms):
                # The bins that have waited longest; those that stay keep their turn.
                first, available = waiting[room].popleft()
                number = min(left // each, available)
                if number < available:
                    waiting[room].appendleft((first + number, available - number))
                elif not waiting[room]:
                    del rooms[at]
            else:
                first = bins
                number = left // each
                bins += number
            groups.append((first, number, each))
            left -= number * each

            # With room left, they wait for shorter pieces.
            if rest := room - each * length:
                if not waiting[rest]:
                    insort(rooms, rest)
                waiting[rest].append((first, number))
    # The bin of each piece, in the order in which the pieces were put in.
    firsts, numbers, each_of = np.array(groups, np.int64).T
    pieces = numbers * each_of
    within = np.arange(len(lengths)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    bin_of = np.repeat(firsts, pieces) + within // np.repeat(each_of, pieces)
    return order[np.argsort(bin_of, kind="stable")], np.bincount(bin_of, minlength=bins)
