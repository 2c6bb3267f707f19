"""Megatron's token files, byte for byte.

`.bin` holds the ids back to back, `.idx` says where each sequence lies.

    .idx, little-endian:  9 bytes   magic
                          uint64    version, 1
                          uint8     code of the token type
                          uint64    n, number of sequences
                          uint64    m, length of the document index
                          int32[n]  sizes: tokens of each sequence
                          int64[n]  pointers: its byte offset in .bin
                          int64[m]  document index: 0, then the sequences up to each document's end

The older format, which Megatron calls `lazy` or `cached` by how it reads it, has the same `.bin`.
It is read, and never written:

    .idx, little-endian:  8 bytes     magic
                          uint64      version, 1
                          uint64      code of the token type
                          uint64      bytes of a token
                          uint64      n, number of sequences
                          uint64      number of sizes; n, as a sequence has one dimension
                          uint64      m, length of the document index
                          int64[n+1]  the sizes before each sequence: 0, 1, 2 ... n
                          int64[n+1]  offsets: tokens before each sequence, and all tokens
                          int64[n]    sizes: tokens of each sequence
                          int64[m]    document index, as above

A sequence is a document unless documents were cut into sentences. Hand-written because Megatron's
library neither checks a file before use nor writes it atomically.
"""

from __future__ import annotations

import bisect
import mmap
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from meshwright.base import files
from meshwright.base.errors import UserError, bad_data
from meshwright.base.hints import near_path
from meshwright.base.storage import copies

Ints = npt.NDArray[np.integer[Any]]

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
OLDER_MAGIC = b"TNTIDX\x00\x00"
OLDER_HEADER = struct.Struct("<8s6Q")
# A length in the newer format is an int32; a longer sequence of the older one could not be merged.
LONGEST = np.iinfo(np.int32).max
CODES: dict[int, type[np.integer[Any]]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}
BLOCK = 1 << 20  # array elements read at a time, so that checks of a large file need little memory
# up to so many sequences or documents, opening checks all: some hundredths of a second
FULL = 1 << 22
# In a larger file: places, spread evenly, and elements checked at each.
PROBES = 64
PROBE = 1 << 12


class FileColumn:
    """One array of a file, read piece by piece.

    Through a memory map, each page that is touched makes megabytes around it resident.
    """

    def __init__(self, file: BinaryIO, dtype: npt.DTypeLike, count: int, offset: int = 0) -> None:
        self.file = file
        self.dtype = np.dtype(dtype)
        self.count = count
        self.offset = offset

    def __len__(self) -> int:
        return self.count

    def read(self, start: int, stop: int) -> Ints:
        # Clipped: beyond the last element the file goes on with the next column.
        start = min(start, self.count)
        stop = min(stop, self.count)
        count = max(stop - start, 0)
        self.file.seek(self.offset + start * self.dtype.itemsize)
        return np.fromfile(self.file, self.dtype, count)

    def blocks(self) -> Iterator[tuple[int, Ints]]:
        """Yield the number of the first element of each block, and the block."""
        for start in range(0, self.count, BLOCK):
            yield start, self.read(start, start + BLOCK)


def columns_after(
    header: int, file: BinaryIO, arrays: Iterable[tuple[str, int]]
) -> list[FileColumn]:
    """Return arrays of these types and lengths, which follow a header and each other."""
    columns = []
    offset = header
    for dtype, count in arrays:
        column = FileColumn(file, dtype, count, offset)
        columns.append(column)
        offset += count * column.dtype.itemsize
    return columns


class Tally:
    """The number of wrong elements, and the first of them."""

    def __init__(self) -> None:
        self.count = 0
        self.first = -1

    def add(self, start: int, wrong: npt.NDArray[np.bool_]) -> None:
        numbers = np.flatnonzero(wrong)
        if len(numbers):
            self.first = self.first if self.count else start + int(numbers[0])
            self.count += len(numbers)

    def describe(self, kind: str, does: str, plural: str) -> list[str]:
        more = f" (and {self.count - 1:,} more {plural} so)" if self.count > 1 else ""
        return [f"{kind} {self.first:,} {does}{more}"] if self.count else []


class Index:
    """An open .idx with a checked header, and its arrays, of which nothing is read yet."""

    def __init__(self, prefix: str, idx: BinaryIO) -> None:
        self.prefix = prefix
        idx.seek(0)
        start = idx.read(OLDER_HEADER.size)
        length = os.fstat(idx.fileno()).st_size
        self.is_older = start.startswith(OLDER_MAGIC)
        if self.is_older:
            n, m = self._read_older_header(start, length)
            lengths = (n + 1, n + 1, n, m)
            columns = columns_after(OLDER_HEADER.size, idx, [("<i8", length) for length in lengths])
            self.dimensions, self.offsets, self.sizes, self.borders = columns
            # The last offset is the end of the last sequence.
            self.pointers = FileColumn(idx, "<i8", n, self.offsets.offset)
        else:
            n, m = self._read_header(start[: HEADER.size], length)
            columns = columns_after(HEADER.size, idx, [("<i4", n), ("<i8", n), ("<i8", m)])
            self.sizes, self.pointers, self.borders = columns

    @property
    def format(self) -> str:
        """Megatron's word for it, as in --data-impl."""
        return "lazy/cached" if self.is_older else "mmap"

    @property
    def pointers_per_token(self) -> int:
        """What a token adds to a pointer: they count bytes, in the older format tokens."""
        return 1 if self.is_older else self.dtype.itemsize

    def _read_header(self, start: bytes, length: int) -> tuple[int, int]:
        path = f"{self.prefix}.idx"
        if length < HEADER.size:
            raise damaged(self.prefix, f"{length} bytes are less than the header's {HEADER.size}")
        magic, version, code, n, m = HEADER.unpack(start)
        if magic != MAGIC:
            raise bad_data(f"{path} is not a token index: it starts with {magic!r}")
        self._check_kind(version, code)
        expected = HEADER.size + 12 * n + 8 * m
        # A multimodal file has one more byte for each sequence.
        if length == expected + n and n:
            raise bad_data(
                f"{path} is multimodal (a mode for each sequence), which cannot be read yet"
            )
        self._check_length(length, expected, n, m)
        return n, m

    def _read_older_header(self, start: bytes, length: int) -> tuple[int, int]:
        if length < OLDER_HEADER.size:
            wrong = f"{length} bytes are less than the header's {OLDER_HEADER.size}"
            raise damaged(self.prefix, wrong)
        _, version, code, itemsize, n, sizes, m = OLDER_HEADER.unpack(start)
        self._check_kind(version, code)
        if itemsize != self.dtype.itemsize:
            kind = f"tokens of {itemsize:,} bytes, but {self.dtype.name} has {self.dtype.itemsize}"
            raise damaged(self.prefix, kind)
        if sizes != n:
            raise damaged(self.prefix, f"{n:,} sequences have {sizes:,} sizes, not one each")
        self._check_length(length, OLDER_HEADER.size + 16 * (n + 1) + 8 * n + 8 * m, n, m)
        return n, m

    def _check_kind(self, version: int, code: int) -> None:
        """Check the version and the type of tokens, and keep the type."""
        if version != 1:
            raise bad_data(f"{self.prefix}.idx has version {version}; version 1 can be read")
        if code not in CODES:
            codes = ", ".join(f"{c} {np.dtype(d).name}" for c, d in CODES.items())
            raise damaged(self.prefix, f"token type code {code} is not one of {codes}")
        self.dtype = np.dtype(CODES[code]).newbyteorder("<")

    def _check_length(self, length: int, expected: int, n: int, m: int) -> None:
        if length != expected:
            raise damaged(
                self.prefix,
                f"{length:,} bytes, but {n:,} sequences and {m:,} documents need {expected:,}",
            )

    def faults(self, in_full: bool = True) -> Iterator[str]:
        """Yield what is wrong with the arrays; unless `in_full`, large ones are checked in places.

        Pointers are running sums: where a length was changed, the next pointer is wrong.
        """
        n = len(self.sizes)
        m = len(self.borders)
        per_token = self.pointers_per_token
        negative = Tally()
        long = Tally()
        astray = Tally()
        misplaced = Tally()
        # Sequences: each range is read with the element before it, which says where it begins.
        for first, stop in ranges_to_check(n, in_full):
            before = max(first - 1, 0)
            lengths = self.sizes.read(before, stop).astype(np.int64)
            begins = self.pointers.read(before, stop)
            sums = (begins + lengths * per_token)[:-1]
            if not first:
                # Nothing is before sequence 0.
                sums = np.append(0, sums)
            negative.add(first, lengths[first - before :] < 0)
            long.add(first, lengths[first - before :] > LONGEST)
            astray.add(first, begins[first - before :] != sums)

        # Documents, in the same way.
        for first, stop in ranges_to_check(m, in_full):
            borders = self.borders.read(max(first - 1, 0), stop)
            steps = np.diff(borders) if first else np.diff(borders, prepend=0)
            ends = borders[len(borders) - len(steps) :]
            misplaced.add(first, (steps < 0) | (ends > n))
        yield from negative.describe("sequence", "has a length below 0", "have")
        yield from long.describe("sequence", f"has a length above {LONGEST:,}", "have")
        yield from astray.describe(
            "sequence", "has a pointer that is not the sum of the lengths before it", "have"
        )
        yield from misplaced.describe(
            "document border", "lies before the one before it or beyond the sequences", "do"
        )
        if self.is_older:
            yield from self._faults_of_older(in_full)
        # The borders as a whole; -1 where there is none, which is wrong too.
        begin = int(self.borders.read(0, 1)[0]) if m else -1
        end = int(self.borders.read(m - 1, m)[0]) if m else 0
        if (begin, end) != (0, n):
            yield f"the document borders run from {begin:,} to {end:,}, not from 0 to the {n:,} sequences"

    def _faults_of_older(self, in_full: bool) -> Iterator[str]:
        """Yield what is wrong with what the older format has besides."""
        n = len(self.sizes)
        other = Tally()
        for first, stop in ranges_to_check(n + 1, in_full):
            other.add(first, self.dimensions.read(first, stop) != np.arange(first, stop))
        yield from other.describe("sequence", "does not have one dimension", "do not have")
        end = int(self.offsets.read(n, n + 1)[0])
        if end != self.described_tokens:
            yield f"the last offset is {end:,}, but the sequences have {self.described_tokens:,} tokens"

    @property
    def described_bytes(self) -> int:
        """The length of the .bin, by the last pointer and length."""
        n = len(self.sizes)
        if not n:
            return 0
        pointer = int(self.pointers.read(n - 1, n)[0])
        end = pointer + int(self.sizes.read(n - 1, n)[0]) * self.pointers_per_token
        return end * (self.dtype.itemsize // self.pointers_per_token)

    @property
    def described_tokens(self) -> int:
        return self.described_bytes // self.dtype.itemsize

    def length_fault(self, actual: int) -> str:
        """Return what is wrong with a .bin of this length, or ""."""
        described = self.described_bytes
        if actual == described:
            return ""
        why = "one of the two is cut short or belongs to other data"
        return (
            f"{self.prefix}.bin has {actual:,} bytes, but its .idx describes {described:,}: {why}"
        )

    def document_ends(self) -> Iterator[Ints]:
        """Yield blocks of the ends, in tokens, of the documents that have a token."""
        per_token = self.pointers_per_token
        n = len(self.sizes)
        previous = 0
        for start in range(1, len(self.borders), BLOCK):
            borders = self.borders.read(start, start + BLOCK)
            done = 0
            while done < len(borders):
                # As many documents as lie within BLOCK sequences, which bounds the memory.
                first = int(borders[done])
                stop = done + int(np.searchsorted(borders[done:], first + BLOCK))
                last = int(borders[stop - 1])
                begins = self.pointers.read(first, last + 1) // per_token
                # No sequence begins at the end of the file.
                if last == n:
                    begins = np.append(begins, self.described_tokens)
                ends = begins[borders[done:stop] - first]
                # A document without a token ends where the one before it does.
                yield ends[np.diff(ends, prepend=previous) > 0]
                previous = int(ends[-1])
                done = stop


class Indexed:
    """A pair of files as read-only memory maps; one that is inconsistent is refused here.

    Unless `in_full`, a large one is checked in some places, so that 1e8 documents open immediately.
    Where a piece was lost, the files' sizes are wrong.
    """

    def __init__(self, prefix: str | Path, in_full: bool = False) -> None:
        self.prefix = str(prefix)
        # Opened before the files are mapped: `need` then sees if they are replaced meanwhile.
        self.copy = copies.sparse_copy(f"{self.prefix}.bin")
        self.is_sparse = self.copy is not None
        idx_path = f"{self.prefix}.idx"
        bin_path = f"{self.prefix}.bin"
        idx = map_file(idx_path)
        tokens = map_file(bin_path)

        # Checked through the file and not through the map, whose pages would stay resident.
        with open(idx_path, "rb") as file:
            index = Index(self.prefix, file)
            if fault := next(index.faults(in_full), ""):
                raise damaged(self.prefix, fault)
            if fault := index.length_fault(len(tokens)):
                raise bad_data(f"{fault}; preprocess again")

        # Views of the maps; nothing is copied.
        self.dtype = index.dtype
        self.format = index.format
        self.pointers_per_token = index.pointers_per_token
        self.sizes, self.pointers, self.doc_idx = (
            np.frombuffer(idx, column.dtype, len(column), column.offset)
            for column in (index.sizes, index.pointers, index.borders)
        )
        self.tokens = np.frombuffer(tokens, self.dtype)
        both = {idx_path: idx, bin_path: tokens}
        self.maps = {path: mapped for path, mapped in both.items() if isinstance(mapped, mmap.mmap)}

    def __len__(self) -> int:
        return len(self.sizes)

    def need(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Bring ranges of tokens here if the files are at an address; call this before a read."""
        if self.copy is not None:
            size = self.dtype.itemsize
            self.copy.need((begin * size, end * size) for begin, end in ranges)

    def tokens_of(self, first: int, stop: int) -> int:
        """Return the number of tokens in sequences [first, stop), without a look at each."""
        if stop <= first:
            return 0
        return self.begin(stop) - self.begin(first)

    def begin(self, sequence: int) -> int:
        """Return the token of the .bin at which a sequence begins, or the last one ends."""
        if sequence < len(self):
            return int(self.pointers[sequence]) // self.pointers_per_token
        return len(self.tokens)

    def document(self, number: int) -> Ints:
        first, end = self.doc_idx[number : number + 2].tolist()
        start = self.tokens_of(0, first)
        stop = start + self.tokens_of(first, end)
        self.need([(start, stop)])
        return self.tokens[start:stop]

    def sequence_at(self, token: int) -> int:
        """Return the sequence that holds this token of the file."""
        # numpy's search would first copy all pointers, which are unaligned in the file.
        return bisect.bisect_right(self.pointers, token * self.pointers_per_token) - 1


def damaged(prefix: str, what: str) -> UserError:
    return bad_data(f"{prefix}.idx is damaged: {what}; preprocess again")


def ranges_to_check(length: int, in_full: bool) -> list[tuple[int, int]]:
    """Return the ranges to check: all, in blocks, or some."""
    if in_full or length <= FULL:
        size = BLOCK
        begins: Iterable[int] = range(0, length, BLOCK)
    else:
        size = PROBE
        begins = probes(length)
    return [(first, min(first + size, length)) for first in begins]


def probes(length: int) -> list[int]:
    """Return where probes begin, spread evenly from the first element to the last."""
    last = max(length - PROBE, 0)
    return sorted({last * n // (PROBES - 1) for n in range(PROBES)})


def fingerprint(prefix: str | Path) -> str:
    """Return a hash of both files' sizes and of 16 blocks of the .idx, never of times.

    The pointers are running sums, so a changed length shows in every later block.
    """
    sizes = [os.path.getsize(f"{prefix}{ending}") for ending in (".idx", ".bin")]
    return files.sample(f"{prefix}.idx", 1 << 16, 16, repr(sizes).encode())


def content_sample(prefix: str | Path) -> str:
    """Return a hash of 16 blocks of the .bin, which tells it from others of the same lengths."""
    path = f"{prefix}.bin"
    size = 1 << 14
    count = 16
    ranges = files.sample_ranges(os.path.getsize(path), size, count)
    copies.need(path, ranges)
    return files.sample(path, size, count)


def check_vocabulary(indexed: Indexed, vocab_size: int) -> None:
    """Refuse data of another vocabulary early, by some of its ids; the loader checks all."""
    with open(f"{indexed.prefix}.bin", "rb") as file:
        ids = FileColumn(file, indexed.dtype, len(indexed.tokens))
        starts = probes(len(ids))
        indexed.need((start, start + PROBE) for start in starts)
        for start in starts:
            tokens = ids.read(start, start + PROBE)
            wrong = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
            if not len(wrong):
                continue
            token = start + int(wrong[0])
            raise bad_data(
                f"{indexed.prefix}.bin has id {indexed.tokens[token]} in document {indexed.sequence_at(token)}, "
                f"but the tokenizer's ids are 0 ... {vocab_size - 1}; the data was made with another tokenizer"
            )


def map_file(path: str) -> bytes | mmap.mmap:
    try:
        with open(path, "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return b""  # nothing cannot be mapped
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        advice = "; --data-path is the prefix of a .bin and .idx written by `meshwright preprocess`, such as "
        hint = near_path(os.path.splitext(path)[0], ".idx") or f"{advice}my-gpt2_text_document"
        raise bad_data(f"{path} does not exist{hint}") from None
    except OSError as error:
        raise bad_data(f"{path} cannot be read: {error.strerror}") from None
