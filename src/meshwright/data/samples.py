"""The order of samples: which S + 1 tokens are sample k, as in Megatron, element for element.

Three index arrays make the order. The documents of a split, repeated for as many epochs as needed,
are shuffled (`doc_idx`); the shuffled documents are read as one stream of tokens and cut every S
tokens (`sample_idx`: where each sample begins); the samples are shuffled (`shuffle_idx`). A sample
takes S + 1 tokens: its last is the first of the next one. All is vectorised numpy; where numba is
installed, compiled versions of the loops serve large data.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from meshwright.base.console import say
from meshwright.base.errors import IO, UserError, bad_data
from meshwright.config.grammar import Split
from meshwright.data.files.indexed import Indexed
from meshwright.data.index_cache import IN_MEMORY, Ints, Storage

VERSION = 1  # of the algorithm below: part of the cache's key
BLOCK = 1 << 20
LARGE = 10_000_000  # documents and samples; below this, numpy is done before numba is imported


class Dataset(Protocol):
    """The data that the loader reads. A user's own data set needs these three methods."""

    def __len__(self) -> int: ...

    def __getitem__(self, k: int) -> npt.NDArray[np.int64]:
        """Return S + 1 token ids, or, of a packed set, these and their positions: [2, S + 1]."""
        ...

    def locate(self, k: int, position: int) -> str:
        """Return where a token of sample k comes from, for messages."""
        ...


class OrderedSamples:
    """A data set of this package, which also knows where its samples come from."""

    prefix = ""  # of its pair of files, if there is one

    def list_sources(self) -> list[str]:
        """Return the prefixes of the files that samples come from; "" if from none."""
        return [self.prefix]

    def source_of(self, k: int) -> str:
        """Return the one of these that sample k comes from."""
        return self.prefix

    def count_used(self, consumed: int) -> Counter[str]:
        """Return how many of the first samples come from each data set, by its prefix.

        Empty but for a blend of files; a cyclic order mixes the data sets anew.
        """
        return Counter()

    def list_epochs(self) -> list[list[Any]]:
        """Return for each pair of files its epochs, and whether the last is shuffled apart.

        Empty for other data, and for a blend that changes, whose orders stay what they are.
        """
        return []


class FileSamples(OrderedSamples):
    """The samples of one split of a pair of token files, each made of pieces of documents."""

    def __init__(self, indexed: Indexed, seq_length: int) -> None:
        self.indexed = indexed
        self.prefix = indexed.prefix
        self.seq_length = seq_length

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, k: int) -> npt.NDArray[np.int64]:
        require_sample(k, len(self))
        samples: npt.NDArray[np.int64] = self.read([k])[0]
        return samples

    def read(self, numbers: list[int]) -> npt.NDArray[np.int64]:
        """Return many samples in a third of the time of one by one."""
        raise NotImplementedError

    def pieces(self, k: int) -> list[tuple[int, int, int]]:
        """Return (document, first token, number of tokens) of each part of sample k."""
        raise NotImplementedError

    def locate(self, k: int, position: int) -> str:
        for document, offset, length in self.pieces(k):
            if position < length:
                return f"token {offset + position} of document {document} in {self.prefix}"
            position -= length
        raise IndexError(f"sample {k} has no token {position}")

    def require_whole(self) -> None:
        """Refuse files that were cut short since they were opened: SIGBUS would end a read."""
        for path, mapped in self.indexed.maps.items():
            if mapped.size() < len(mapped):
                raise cut_short(path)


def cut_short(path: str) -> UserError:
    left = os.path.getsize(path)
    advice = "restore the file, and continue from the last checkpoint"
    return UserError(
        f"{path} was cut short while it was in use: {left:,} bytes are left; {advice}", IO
    )


def require_sample(k: int, length: int) -> None:
    if not 0 <= k < length:
        raise IndexError(f"sample {k} of {length}")


def split_bounds(split: Split, n: int, arithmetic: str) -> list[int]:
    """Return the borders of train, validation and test among n documents: 0, a, b, n."""
    total = sum(split.shares)
    parts = [share / total for share in split.shares]
    # Megatron rounds the borders since October 2023, and rounded the parts between them before.
    if arithmetic == "cumulative":
        ends = accumulate(parts, initial=0.0)
        return [round(end * float(n)) for end in ends]
    sizes = [round(part * float(n)) for part in parts]
    bounds = list(accumulate(sizes))
    # What rounding has given too much or too little, which Megatron takes from all borders.
    excess = bounds[-1] - n
    # A border below 0 would take documents from the end.
    return [0] + [max(bound - excess, 0) for bound in bounds]


def compiled_loops(elements: int) -> ModuleType | None:
    """Return the loops that numba compiles; None where numpy is faster or numba is unusable."""
    if elements < LARGE:
        return None
    try:
        from meshwright.data import numba_indices
    # not installed, built for another numpy, or no folder for compiled code
    except (ImportError, RuntimeError):
        return None
    return numba_indices


def build_indices(
    sizes: Ints,
    documents: range,
    tokens: int,
    num_samples: int,
    seq_length: int,
    seed: int,
    cutoff: float,
    storage: Storage = IN_MEMORY,
) -> list[Ints]:
    """Return doc_idx, sample_idx and shuffle_idx; `tokens` is the documents' number of tokens.

    A second thread fills shuffle_idx meanwhile, and shuffles it once the documents are shuffled.
    """
    if tokens == 0:
        raise bad_data(f"documents {documents.start} to {documents.stop} hold no token")
    epochs, last_epoch_separate = epochs_needed(tokens, num_samples, seq_length, cutoff)
    total = (epochs * tokens - 1) // seq_length
    before_last = ((epochs - 1) * tokens - 1) // seq_length
    if epochs == 1:
        say(" > only one epoch required, setting separate_last_epoch to False")
    else:
        last = num_samples - before_last
        per_epoch = (tokens - 1) // seq_length
        say(
            f" > last epoch number of samples ({last}) is {'smaller' if last_epoch_separate else 'larger'} than "
            f"{cutoff:.0%} of number of samples per epoch ({per_epoch}), setting separate_last_epoch to "
            f"{last_epoch_separate}"
        )
    # Each epoch has every document once; a separate last epoch is shuffled on its own.
    places = epochs * len(documents)
    # The same for every split; numpy promises never to change its stream.
    rng = np.random.RandomState(seed)
    compiled = compiled_loops(places + total)

    doc_dtype, row_dtype, shuffle_dtype = index_dtypes(documents.stop, places, total)
    shuffle_idx = storage.array("shuffle", total, shuffle_dtype)
    with ThreadPoolExecutor(1) as thread:
        filled = thread.submit(fill_rows, shuffle_idx.reshape(1, -1), 0)

        # The documents, shuffled.
        start = time.perf_counter()
        doc_idx = storage.array("doc", places, doc_dtype)
        fill_rows(doc_idx.reshape(epochs, -1), documents.start)
        shuffle(rng, doc_idx, places - len(documents) if last_epoch_separate else places, compiled)
        say_elapsed("doc", start)

        # The samples. Both shuffles draw from one stream, so the second waits for the first.
        first = before_last if last_epoch_separate else total
        filled.result()
        shuffled = thread.submit(shuffle, rng, shuffle_idx, first, compiled)
        start = time.perf_counter()
        rows = cut_samples(sizes, documents, doc_idx, total, seq_length, compiled)
        sample_idx = storage.stream("sample", (total + 1, 2), row_dtype, rows)
        say_elapsed("sample", start)

        start = time.perf_counter()
        say(f" > building shuffle index with split [0, {first}) and [{first}, {total}) ...")
        shuffled.result()
        say_elapsed("shuffle", start)
    return [doc_idx, sample_idx, shuffle_idx]


def say_elapsed(index: str, start: float) -> None:
    seconds = time.perf_counter() - start
    # "elasped" is Megatron's own misspelling; people's scripts read these lines.
    say(f" > elasped time to build and save {index}-idx mapping (seconds): {seconds:4f}")


def index_dtypes(documents: int, places: int, samples: int) -> tuple[type[np.integer[Any]], ...]:
    """Return the types of doc_idx, sample_idx and shuffle_idx: Megatron's, or wider ones."""
    return (
        np.int32 if documents <= 2**31 else np.int64,
        np.int32 if places < 2**31 else np.int64,
        np.uint32 if samples < 2**32 - 2 else np.int64,
    )


def fill_rows(x: Ints, first: int) -> None:
    """Fill each row with first, first + 1, ..."""
    # In blocks: one range for a whole row would double the memory.
    for begin in range(0, x.shape[1], BLOCK):
        part = x[:, begin : begin + BLOCK]
        value = first + begin
        end = value + part.shape[1]
        part[:] = np.arange(value, end, dtype=x.dtype)


def shuffle(rng: np.random.RandomState, x: Ints, border: int, compiled: ModuleType | None) -> None:
    """Shuffle the elements before the border, then those behind it."""
    for part in (x[:border], x[border:]):
        if len(part):
            rng.shuffle(part) if compiled is None else compiled.shuffle(rng, part)


def epochs_needed(
    tokens: int, num_samples: int, seq_length: int, cutoff: float
) -> tuple[int, bool]:
    """Return the number of epochs, and whether the last one is shuffled apart from the others.

    It is shuffled apart where only a small part of it is needed, so that its documents don't crowd
    out others.
    """
    # The smallest number of epochs with (epochs x tokens - 1) // S >= num_samples
    epochs = max(1, -(-(num_samples * seq_length + 1) // tokens))
    before_last = ((epochs - 1) * tokens - 1) // seq_length
    per_epoch = (tokens - 1) // seq_length
    last = num_samples - before_last
    return epochs, epochs > 1 and last < int(cutoff * per_epoch)


def cut_samples(
    sizes: Ints,
    documents: range,
    doc_idx: Ints,
    samples: int,
    seq_length: int,
    compiled: ModuleType | None = None,
) -> Iterator[Ints]:
    """Yield blocks of rows: at which place of doc_idx, and token of it, each sample begins."""
    dtype = index_dtypes(0, len(doc_idx), samples)[1]
    done = 1
    # row 0 is (0, 0) even where the first documents are empty, as in Megatron
    yield np.zeros((1, 2), dtype)
    if compiled is None:
        blocks = cut_with_numpy(sizes, documents, doc_idx, samples, seq_length, dtype)
    else:
        blocks = cut_with_numba(compiled, sizes, doc_idx, seq_length, dtype)
    for rows in blocks:
        done += len(rows)
        yield rows
    if done != samples + 1:
        raise bad_data(
            f"the sizes of the .idx give {done - 1:,} samples, its pointers {samples:,}; it is damaged: "
            "`meshwright data verify` says where"
        )


def cut_with_numpy(
    sizes: Ints,
    documents: range,
    doc_idx: Ints,
    samples: int,
    seq_length: int,
    dtype: npt.DTypeLike,
) -> Iterator[Ints]:
    """Yield the rows from sample 1 on.

    Sample k begins at token k x S of the stream: each document's place is repeated as often as
    there are multiples of S inside it.
    """
    # In the file they are not aligned, which would be twice as slow.
    aligned = np.array(sizes[documents.start : documents.stop])
    done = 1
    position = 0
    # Documents that give about BLOCK rows.
    block = max(1, min(BLOCK, BLOCK * len(doc_idx) // (samples + 1)))
    for begin in range(0, len(doc_idx), block):
        lengths = aligned[doc_idx[begin : begin + block] - documents.start]
        ends = position + np.cumsum(lengths, dtype=np.int64)
        # the last sample that begins before each end
        last = np.clip((ends - 1) // seq_length, done - 1, samples)
        places = np.repeat(np.arange(len(lengths), dtype=dtype), np.diff(last, prepend=done - 1))
        rows = np.empty((len(places), 2), dtype)
        begins = ends - lengths
        rows[:, 0] = begin + places
        rows[:, 1] = np.arange(done, done + len(places)) * seq_length - begins[places]
        done += len(places)
        position = int(ends[-1])
        yield rows


def cut_with_numba(
    compiled: ModuleType, sizes: Ints, doc_idx: Ints, seq_length: int, dtype: npt.DTypeLike
) -> Iterator[Ints]:
    place = 0
    offset = seq_length
    rows = np.empty((BLOCK + 1, 2), dtype)
    while place < len(doc_idx):
        made, place, offset = compiled.cut_samples(sizes, doc_idx, place, offset, seq_length, rows)
        yield rows[:made]
