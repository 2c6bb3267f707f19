"""The arrays of an .idx, read from front to back in blocks, so that no file is too large: mapped pages count as memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from meshwright.data.indexed import BLOCK, HEADER, Column

Ints = npt.NDArray[np.integer[Any]]


@dataclass
class Header:
    """The token type and the three arrays."""

    dtype: np.dtype[Any]
    sizes: Column
    pointers: Column
    borders: Column

    @classmethod
    def of(cls, idx: BinaryIO, dtype: np.dtype[Any], n: int, m: int) -> Header:
        """Of an open .idx with n lengths and m document borders."""
        sizes, pointers = Column(idx, "<i4", n, HEADER.size), Column(idx, "<i8", n, HEADER.size + 4 * n)
        return cls(dtype, sizes, pointers, Column(idx, "<i8", m, HEADER.size + 12 * n))


def blocks(column: Column) -> Iterator[tuple[int, Ints]]:
    """Where each block begins, and its values."""
    for start in range(0, len(column), BLOCK):
        yield start, column.read(start, start + BLOCK)


def document_ends(header: Header) -> Iterator[Ints]:
    """Where each document that has a token ends, in tokens, in order."""
    itemsize, n = header.dtype.itemsize, len(header.sizes)
    previous = 0
    for start in range(1, len(header.borders), BLOCK):
        borders = header.borders.read(start, start + BLOCK)
        done = 0
        while done < len(borders):
            first = int(borders[done])
            stop = done + int(np.searchsorted(borders[done:], first + BLOCK))
            last = int(borders[stop - 1])
            pointers = header.pointers.read(first, last + 1) // itemsize
            if last == n:
                final = (
                    int(header.pointers.read(n - 1, n)[0]) // itemsize + int(header.sizes.read(n - 1, n)[0]) if n else 0
                )
                pointers = np.append(pointers, final)
            ends = pointers[borders[done:stop] - first]
            kept = ends[np.diff(ends, prepend=previous) > 0]
            previous = int(ends[-1])
            done = stop
            yield kept


def sequence_of(header: Header, token: int) -> int:
    """The sequence that holds this token: a binary search in the file."""
    low, high = 0, len(header.pointers)
    while high - low > 1:
        middle = (low + high) // 2
        if int(header.pointers.read(middle, middle + 1)[0]) <= token * header.dtype.itemsize:
            low = middle
        else:
            high = middle
    return low
