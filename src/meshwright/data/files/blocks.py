"""The arrays of an .idx of any size, read in blocks: the pages of a memory map count as memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.data.files.indexed import BLOCK, FileColumn, Index

Ints = npt.NDArray[np.integer[Any]]


def blocks(column: FileColumn) -> Iterator[tuple[int, Ints]]:
    """Yield the first place of each block, and its values."""
    for start in range(0, len(column), BLOCK):
        yield start, column.read(start, start + BLOCK)


def document_ends(index: Index) -> Iterator[Ints]:
    """Yield blocks of the ends, in tokens, of the documents that have a token."""
    itemsize, n, previous = index.dtype.itemsize, len(index.sizes), 0
    for start in range(1, len(index.borders), BLOCK):
        borders = index.borders.read(start, start + BLOCK)
        done = 0
        while done < len(borders):
            first = int(borders[done])
            stop = done + int(np.searchsorted(borders[done:], first + BLOCK))
            last = int(borders[stop - 1])
            pointers = index.pointers.read(first, last + 1) // itemsize
            if last == n:
                final = [index.pointers.read(n - 1, n) // itemsize + index.sizes.read(n - 1, n)] if n else [[0]]
                pointers = np.concatenate([pointers, *final])
            ends = pointers[borders[done:stop] - first]
            kept = ends[np.diff(ends, prepend=previous) > 0]
            previous = int(ends[-1])
            done = stop
            yield kept
