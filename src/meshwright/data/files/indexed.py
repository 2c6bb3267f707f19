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

A sequence is a document unless documents were cut into sentences. Hand-written because Megatron's
library neither checks a file before use nor writes it atomically.
"""

from __future__ import annotations

import bisect
import mmap
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from meshwright import files
from meshwright.errors import UserError, bad_data
from meshwright.settings.hints import near_path

MAGIC = b"MMIDIDX\x00\x00"
LEGACY_MAGIC = b"TNTIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
CODES: dict[int, type[np.integer[Any]]] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
BLOCK = 1 << 20  # array elements read at a time, so that checks of a large file need little memory
FULL = 1 << 22  # up to so many sequences or documents, opening checks all: some hundredths of a second
PROBES, PROBE = 64, 1 << 12  # in a larger file: places, spread evenly, and elements checked at each


class FileColumn:
    """One array of a file, read piece by piece.

    Through a memory map, each page that is touched makes megabytes around it resident.
    """

    def __init__(self, file: BinaryIO, dtype: npt.DTypeLike, count: int, offset: int = 0) -> None:
        self.file, self.dtype, self.count, self.offset = file, np.dtype(dtype), count, offset

    def __len__(self) -> int:
        return self.count

    def read(self, start: int, stop: int) -> npt.NDArray[np.integer[Any]]:
        start, stop = min(start, self.count), min(stop, self.count)
        self.file.seek(self.offset + start * self.dtype.itemsize)
        return np.fromfile(self.file, self.dtype, max(stop - start, 0))


class Index:
    """An open .idx with a checked header, and its three arrays, of which nothing is read yet."""

    def __init__(self, prefix: str, idx: BinaryIO) -> None:
        self.prefix = prefix
        idx.seek(0)
        n, m = self._read_header(idx.read(HEADER.size), os.fstat(idx.fileno()).st_size)
        self.sizes = FileColumn(idx, "<i4", n, HEADER.size)
        self.pointers = FileColumn(idx, "<i8", n, HEADER.size + 4 * n)
        self.borders = FileColumn(idx, "<i8", m, HEADER.size + 12 * n)

    def _read_header(self, start: bytes, length: int) -> tuple[int, int]:
        if start[:8] == LEGACY_MAGIC:
            words = "has the older `lazy`/`cached` format, which cannot be read yet; preprocess the text again"
            raise bad_data(f"{self.prefix}.idx {words}")
        if length < HEADER.size:
            raise damaged(self.prefix, f"{length} bytes are less than the header's {HEADER.size}")
        magic, version, code, n, m = HEADER.unpack(start)
        if magic != MAGIC:
            raise bad_data(f"{self.prefix}.idx is not a token index: it starts with {magic!r}")
        if version != 1:
            raise bad_data(f"{self.prefix}.idx has version {version}; version 1 can be read")
        if code not in CODES:
            known = ", ".join(f"{c} {np.dtype(d).name}" for c, d in CODES.items())
            raise damaged(self.prefix, f"token type code {code} is not one of {known}")
        self.dtype = np.dtype(CODES[code]).newbyteorder("<")
        expected = HEADER.size + 12 * n + 8 * m
        if length == expected + n and n:
            words = "is multimodal (a mode for each sequence), which cannot be read yet"
            raise bad_data(f"{self.prefix}.idx {words}")
        if length != expected:
            raise damaged(self.prefix, f"{length:,} bytes, but {n:,} sequences and {m:,} documents need {expected:,}")
        return n, m


class Indexed:
    """A pair of files as read-only memory maps; one that is inconsistent is refused here.

    Unless `in_full`, a large one is checked in some places, so that 1e8 documents open immediately.
    Pointers are running sums: where a length was changed, the pointers after it are wrong, and
    where a piece was lost, the files' sizes are.
    """

    def __init__(self, prefix: str | Path, in_full: bool = False) -> None:
        self.prefix = str(prefix)
        idx = map_file(f"{self.prefix}.idx")
        with open(f"{self.prefix}.idx", "rb") as file:
            index = Index(self.prefix, file)
            self.dtype = index.dtype
            self.sizes, self.pointers, self.doc_idx = (
                np.frombuffer(idx, column.dtype, len(column), column.offset)
                for column in (index.sizes, index.pointers, index.borders)
            )
            for first, stop in ranges_to_check(len(self.sizes), in_full):
                self._check_sequences(index.sizes, index.pointers, first, stop)
            self._check_ends()
            for first, stop in ranges_to_check(len(self.doc_idx), in_full):
                self._check_documents(index.borders.read(first, stop + 1))
        self.tokens = np.frombuffer(map_file(f"{self.prefix}.bin"), self.dtype)

    def __len__(self) -> int:
        return len(self.sizes)

    def tokens_of(self, first: int, stop: int) -> int:
        """Return the number of tokens in sequences [first, stop), without a look at each."""
        begin, end = (int(self.pointers[i]) if i < len(self) else self.tokens.nbytes for i in (first, max(first, stop)))
        return (end - begin) // self.dtype.itemsize

    def sequence_at(self, token: int) -> int:
        """Return the sequence that holds this token of the file."""
        # numpy's search would first copy all pointers, which are unaligned in the file.
        return bisect.bisect_right(self.pointers, token * self.dtype.itemsize) - 1

    def _check_sequences(self, sizes: FileColumn, pointers: FileColumn, first: int, stop: int) -> None:
        """Refuse a pointer that is not the one before it plus the bytes of that sequence."""
        before = max(first - 1, 0)
        lengths, begins = sizes.read(before, stop).astype(np.int64), pointers.read(before, stop)
        if lengths.min() < 0:
            raise damaged(self.prefix, f"sequence {before + int(lengths.argmin()):,} has a size below 0")
        lengths *= self.dtype.itemsize
        wrong = np.flatnonzero(begins[1:] != begins[0] + np.cumsum(lengths[:-1]))
        if first == 0 and begins[0] != 0:
            wrong = np.array([-1])
        if len(wrong):
            raise damaged(
                self.prefix, f"the pointer of sequence {before + 1 + int(wrong[0]):,} is not the sum before it"
            )

    def _check_ends(self) -> None:
        """Refuse a document index or a .bin that does not end with the last sequence."""
        if not len(self.doc_idx) or self.doc_idx[0] != 0 or self.doc_idx[-1] != len(self.sizes):
            raise damaged(self.prefix, f"the document index does not run from 0 to the {len(self.sizes):,} sequences")
        expected = int(self.pointers[-1]) + int(self.sizes[-1]) * self.dtype.itemsize if len(self) else 0
        path = f"{self.prefix}.bin"
        try:
            actual = os.path.getsize(path)
        except OSError as error:
            raise bad_data(f"{path} cannot be read: {error.strerror}") from None
        if actual != expected:
            raise bad_data(
                f"{path} has {actual:,} bytes, but its .idx describes {expected:,}: one of the two is cut short or "
                "belongs to other data; preprocess again"
            )

    def _check_documents(self, ends: npt.NDArray[np.integer[Any]]) -> None:
        if np.any(np.diff(ends) < 0) or ends.min() < 0 or ends.max() > len(self):
            raise damaged(self.prefix, "the document index goes backwards")


def damaged(prefix: str, what: str) -> UserError:
    return bad_data(f"{prefix}.idx is damaged: {what}; preprocess again")


def ranges_to_check(length: int, in_full: bool) -> list[tuple[int, int]]:
    """Return the ranges to check: all, in blocks, or some."""
    if in_full or length <= FULL:
        return [(first, min(first + BLOCK, length)) for first in range(0, length, BLOCK)]
    return [(first, min(first + PROBE, length)) for first in probes(length)]


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


def check_vocabulary(indexed: Indexed, vocab_size: int) -> None:
    """Refuse data of another vocabulary early, by some of its ids; the loader checks all."""
    with open(f"{indexed.prefix}.bin", "rb") as file:
        ids = FileColumn(file, indexed.dtype, len(indexed.tokens))
        for start in probes(len(ids)):
            tokens = ids.read(start, start + PROBE)
            wrong = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
            if len(wrong):
                at = start + int(wrong[0])
                raise bad_data(
                    f"{indexed.prefix}.bin has id {indexed.tokens[at]} in document {indexed.sequence_at(at)}, but the "
                    f"tokenizer's ids are 0 ... {vocab_size - 1}; the data was made with another tokenizer"
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
