"""Token files to samples: which S + 1 tokens are sample k, in Megatron's order, element for element.

Three index arrays make the order. The documents of a split, repeated for as many epochs as are needed, are shuffled
(`doc_idx`); the shuffled documents are read as one stream of tokens and cut every S tokens (`sample_idx`: where each
sample begins); the samples are shuffled (`shuffle_idx`). A sample takes S + 1 tokens, its last being the next one's
first. Everything is vectorised numpy, so nothing compiles; with the extra `fast`, numba's twins of it serve large data.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import numpy as np

from meshwright.console import say
from meshwright.data.index_cache import Ints, Room
from meshwright.errors import BAD_DATA, UserError
from meshwright.settings.grammar import split_shares

VERSION = 1  # of the algorithm below: part of the cache's key
BLOCK = 1 << 20
LARGE = 10_000_000  # documents and samples; below, numpy is done before numba is imported


def split_bounds(split: str, n: int, arithmetic: str) -> list[int]:
    """Borders of train, validation and test among n documents: 0, a, b, n."""
    shares = split_shares(split)
    parts = [share / sum(shares) for share in shares]
    if arithmetic == "cumulative":
        sums = [0.0]
        for part in parts:
            sums.append(sums[-1] + part)
        return [int(round(c * float(n))) for c in sums]
    bounds = [0]
    for part in parts:
        bounds.append(bounds[-1] + int(round(part * float(n))))
    surplus = bounds[-1] - n
    return [0] + [max(bound - surplus, 0) for bound in bounds[1:]]  # below 0 would take documents from the end


def compiled(elements: int) -> ModuleType | None:
    """numba's twins of the loops over so many elements, where they are worth their import and can be had."""
    if elements < LARGE:
        return None
    try:
        from meshwright.data import fast
    except (ImportError, RuntimeError):  # not installed, or made for another numpy; no folder for what it compiles
        return None
    return fast


def build_indices(
    sizes: Ints,
    documents: range,
    tokens: int,
    num_samples: int,
    seq_length: int,
    seed: int,
    cutoff: float,
    room: Room | None = None,
) -> list[Ints]:
    """doc_idx, sample_idx and shuffle_idx; `tokens` are those of the documents.

    A second thread fills and shuffles the samples beside the rest, as soon as the documents have had their random numbers.
    """
    room = room or Room()
    if tokens == 0:
        raise UserError(f"documents {documents.start} to {documents.stop} hold no token", BAD_DATA)
    epochs, apart = epochs_needed(tokens, num_samples, seq_length, cutoff)
    total = (epochs * tokens - 1) // seq_length
    before_last = ((epochs - 1) * tokens - 1) // seq_length
    if epochs == 1:
        say(" > only one epoch required, setting separate_last_epoch to False")
    else:
        last, per_epoch = num_samples - before_last, (tokens - 1) // seq_length
        say(
            f" > last epoch number of samples ({last}) is {'smaller' if apart else 'larger'} than {cutoff:.0%} of "
            f"number of samples per epoch ({per_epoch}), setting separate_last_epoch to {apart}"
        )
    places = epochs * len(documents)
    rng = np.random.RandomState(seed)  # the same for every split; its stream is frozen by numpy's promise
    fast = compiled(places + total)

    doc_dtype, row_dtype, shuffle_dtype = dtypes(documents.stop, places, total)
    shuffle_idx = room.array("shuffle", total, shuffle_dtype)
    with ThreadPoolExecutor(1) as beside:
        ready = beside.submit(fill, shuffle_idx.reshape(1, -1), 0)

        # "elasped" is Megatron's own misspelling: its log is what people's scripts read.
        start = time.perf_counter()
        doc_idx = room.array("doc", places, doc_dtype)
        fill(doc_idx.reshape(epochs, -1), documents.start)
        shuffle(rng, doc_idx, places - len(documents) if apart else places, fast)
        say(f" > elasped time to build and save doc-idx mapping (seconds): {time.perf_counter() - start:4f}")

        first = before_last if apart else total
        ready.result()
        ready = beside.submit(shuffle, rng, shuffle_idx, first, fast)
        start = time.perf_counter()
        if fast is None:  # numpy is twice as slow where numbers lie off their alignment, as in the file
            mine = np.array(sizes[documents.start : documents.stop])
            rows = cut(mine, doc_idx, documents.start, total, seq_length)
        else:
            rows = cut_fast(sizes, doc_idx, total, seq_length)
        sample_idx = room.stream("sample", (total + 1, 2), row_dtype, rows)
        say(f" > elasped time to build and save sample-idx mapping (seconds): {time.perf_counter() - start:4f}")

        start = time.perf_counter()
        say(f" > building shuffle index with split [0, {first}) and [{first}, {total}) ...")
        ready.result()
        say(f" > elasped time to build and save shuffle-idx mapping (seconds): {time.perf_counter() - start:4f}")
    return [doc_idx, sample_idx, shuffle_idx]


def dtypes(documents: int, places: int, samples: int) -> tuple[type[np.integer[Any]], ...]:
    """Of doc_idx, sample_idx and shuffle_idx: Megatron's, and wider where it ends with more than 31 bits of documents."""
    return (
        np.int32 if documents <= 2**31 else np.int64,
        np.int32 if places < 2**31 else np.int64,
        np.uint32 if samples < 2**32 - 2 else np.int64,
    )


def fill(x: Ints, first: int) -> None:
    """first, first + 1, ... in each row."""
    for begin in range(0, x.shape[1], BLOCK):
        part = x[:, begin : begin + BLOCK]
        part[:] = np.arange(first + begin, first + begin + part.shape[1], dtype=x.dtype)


def shuffle(rng: np.random.RandomState, x: Ints, border: int, fast: ModuleType | None) -> None:
    """What lies before the border, then what lies behind it."""
    for part in (x[:border], x[border:]):
        if len(part):
            rng.shuffle(part) if fast is None else fast.shuffle(rng, part)


def epochs_needed(tokens: int, num_samples: int, seq_length: int, cutoff: float) -> tuple[int, bool]:
    """How often the documents are repeated, and whether the last epoch is shuffled by itself, so that documents of a barely
    begun one don't crowd out others. The order of all samples follows from these two."""
    # The smallest number of epochs with (epochs x tokens - 1) // S >= num_samples
    epochs = max(1, -(-(num_samples * seq_length + 1) // tokens))
    before_last = ((epochs - 1) * tokens - 1) // seq_length
    return epochs, epochs > 1 and num_samples - before_last < int(cutoff * ((tokens - 1) // seq_length))


def cut(sizes: Ints, doc_idx: Ints, first: int, samples: int, seq_length: int) -> Iterator[Ints]:
    """Row k: in which place of doc_idx, and at which token of that document, sample k begins; in blocks of rows.

    `sizes` are those of the documents from number `first` on. Sample k begins at token k x S of the stream. Counting the
    multiples of S inside each document and repeating the document's place as often gives many rows at once; documents are
    taken in blocks, so memory stays bounded.
    """
    _, dtype, _ = dtypes(0, len(doc_idx), samples)
    yield np.zeros((1, 2), dtype)  # row 0 is (0, 0) even where the first documents are empty, as in Megatron's walk
    done, position = 1, 0
    block = max(1, min(BLOCK, BLOCK * len(doc_idx) // (samples + 1)))  # of documents, about BLOCK rows
    for begin in range(0, len(doc_idx), block):
        lengths = sizes[doc_idx[begin : begin + block] - first]
        ends = position + np.cumsum(lengths, dtype=np.int64)
        last = np.clip((ends - 1) // seq_length, done - 1, samples)  # the last sample that begins before each end
        places = np.repeat(np.arange(len(lengths), dtype=dtype), np.diff(last, prepend=done - 1))
        rows = np.empty((len(places), 2), dtype)
        rows[:, 0] = begin + places
        rows[:, 1] = np.arange(done, done + len(places)) * seq_length - (ends - lengths)[places]
        done, position = done + len(places), int(ends[-1])
        yield rows
    whole(done, samples)


def cut_fast(sizes: Ints, doc_idx: Ints, samples: int, seq_length: int) -> Iterator[Ints]:
    """The same, by numba."""
    from meshwright.data import fast

    _, dtype, _ = dtypes(0, len(doc_idx), samples)
    yield np.zeros((1, 2), dtype)
    done, place, offset = 1, 0, seq_length
    rows = np.empty((BLOCK + 1, 2), dtype)
    while place < len(doc_idx):
        made, place, offset = fast.cut(sizes, doc_idx, place, offset, seq_length, rows)
        done += made
        yield rows[:made]
    whole(done, samples)


def whole(done: int, samples: int) -> None:
    """Sizes and pointers of the .idx tell different stories where this fails."""
    if done != samples + 1:
        raise UserError(
            f"the sizes of the .idx give {done - 1:,} samples, its pointers {samples:,}: it is damaged; "
            "`meshwright data verify` tells where",
            BAD_DATA,
        )
