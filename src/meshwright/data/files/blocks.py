"""The arrays of an .idx of any size, read in blocks: the pages of a memory map count as memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from meshwright.data.files.indexed import BLOCK, Column, Indexed, columns, map_file

Ints = npt.NDArray[np.integer[Any]]


class Header(Indexed):
    """An open .idx with a checked header."""

    def __init__(self, prefix: str, idx: BinaryIO) -> None:
        self.prefix = prefix
        self.lengths, self.begins, self.borders = columns(idx, *self._read_header(map_file(f"{prefix}.idx")))


def blocks(column: Column) -> Iterator[tuple[int, Ints]]:
    """Yield the first place of each block, and its values."""
    for start in range(0, len(column), BLOCK):
        yield start, column.read(start, start + BLOCK)


def document_ends(header: Header) -> Iterator[Ints]:
    """Yield blocks of the ends, in tokens, of the documents that have a token."""
    itemsize, n, previous = header.dtype.itemsize, len(header.lengths), 0
    for start in range(1, len(header.borders), BLOCK):
        borders = header.borders.read(start, start + BLOCK)
        done = 0
        while done < len(borders):
            first = int(borders[done])
            stop = done + int(np.searchsorted(borders[done:], first + BLOCK))
            last = int(borders[stop - 1])
            pointers = header.begins.read(first, last + 1) // itemsize
            if last == n:
                final = [header.begins.read(n - 1, n) // itemsize + header.lengths.read(n - 1, n)] if n else [[0]]
                pointers = np.concatenate([pointers, *final])
            ends = pointers[borders[done:stop] - first]
            kept = ends[np.diff(ends, prepend=previous) > 0]
            previous = int(ends[-1])
            done = stop
            yield kept
