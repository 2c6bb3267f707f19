"""Several data sets read as one, in proportion to their weights, in Megatron's order, element for element.

Hand-written because Megatron's own is C++ that compiles at the first start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from meshwright.console import say
from meshwright.data.index_cache import Ints, Room, cached_indices
from meshwright.data.samples import BLOCK, compiled

if TYPE_CHECKING:
    from meshwright.data.loader import Dataset

VERSION = 1  # of the order: part of the cache's key
ROWS = PIECES = 2048  # samples of a piece, and pieces that are walked side by side
Floats = npt.NDArray[np.float64]


class Several:
    """Samples that are those of other data sets."""

    def _at(self, k: int) -> tuple[Dataset, int]:
        """Which one's, and their number there."""
        raise NotImplementedError

    def __getitem__(self, k: int) -> npt.NDArray[np.int64]:
        part, number = self._at(k)
        return part[number]

    def locate(self, k: int, position: int) -> str:
        part, number = self._at(k)
        return part.locate(number, position)


class Blend(Several):
    """`size` samples out of `parts`; `weights` add up to 1 but for rounding."""

    def __init__(
        self, parts: Sequence[Dataset], weights: Sequence[float], size: int, cache_dir: str | Path | None = None
    ) -> None:
        self.parts = parts
        shares = np.array(weights, dtype=np.float64)
        shares /= shares.sum()  # once more, as Megatron does: a last bit can decide between two data sets

        def build(room: Room) -> list[Ints]:
            start = perf_counter()
            say(" > building indices for blendable datasets ...")
            which, number = order(shares, size, room)
            counts = sum(np.bincount(which[k : k + BLOCK], minlength=len(parts)) for k in range(0, size, BLOCK))
            say(" > sample ratios:")
            for d, count in enumerate(np.atleast_1d(counts).tolist()):
                say(f"   dataset {d}, input: {shares[d]:g}, achieved: {count / size:g}")
            say(f"> elapsed time for building blendable dataset indices: {perf_counter() - start:.2f} (sec)")
            return [which, number]

        key = {"version": VERSION, "weights": shares.tolist(), "samples": size}  # nothing else decides
        self.dataset_idx, self.sample_idx = cached_indices(cache_dir, key, ("dataset", "dataset_sample"), build)
        say(f"> size of blendable dataset: {size} samples")

    def __len__(self) -> int:
        return len(self.dataset_idx)

    def _at(self, k: int) -> tuple[Dataset, int]:
        if not 0 <= k < len(self):
            raise IndexError(f"sample {k} of {len(self)}")
        return self.parts[self.dataset_idx[k]], int(self.sample_idx[k])


def normalised(weights: Sequence[float]) -> list[float]:
    """Added from left to right: Python's own sum() rounds otherwise since 3.12."""
    *_, total = accumulate(weights)
    return [weight / total for weight in weights]


def samples_needed(size: int, share: float) -> int:
    """Megatron's half percent more than the share of one data set."""
    return math.ceil(size * share * 1.005)


def order(shares: Floats, size: int, room: Room | None = None) -> tuple[Ints, Ints]:
    """For each sample the data set, int16, and the number of the sample in it, int64.

    Sample i is the next one of the data set that is furthest behind, the d of the largest share_d x max(i, 1) -
    taken_d, the first of equals; float64 as in Megatron, so that ties fall alike.
    """
    room = room or Room()
    which, number = room.array("dataset", size, np.int16), room.array("dataset_sample", size, np.int64)
    fast = compiled(size)
    if fast is None:
        walk_side_by_side(shares, which, number)
    else:
        fast.blend(shares, np.zeros(len(shares)), 0, which, number)
    return which, number


def walk_side_by_side(shares: Floats, which: Ints, number: Ints) -> None:
    """Each choice depends on all before it, yet two walks that differ a little soon fall into step. So the walk is cut
    into pieces, walked side by side from guessed starts; a piece that does not start where the one before ended is walked
    again from there, until all fit. What fits is the rule's walk, whatever was guessed: the first piece starts right, so
    it ends right. A second pass over some of the pieces is usual, and a hundred times faster than one choice after the
    other.
    """
    size, taken, done = len(which), np.zeros(len(shares)), 0
    while done < size:
        left = size - done
        rows = min(ROWS, math.isqrt(left - 1) + 1)
        starts = done + rows * np.arange(min(PIECES, -(-left // rows)))
        exact = shares[:, None] * starts  # the guess: rounded down, and the largest remainders up
        begin = np.floor(exact)
        places = (begin - exact).argsort(axis=0, kind="stable").argsort(axis=0)
        begin += places < starts - begin.sum(axis=0)
        begin[:, 0] = taken
        end = np.empty_like(begin)
        chosen, numbers = np.empty((rows, len(starts)), np.int16), np.empty((rows, len(starts)), np.int64)
        again = np.arange(len(starts))
        while len(again):
            chosen[:, again], numbers[:, again], end[:, again] = walk(shares, starts[again], begin[:, again], rows)
            again = 1 + np.flatnonzero((begin[:, 1:] != end[:, :-1]).any(axis=0))
            begin[:, again] = end[:, again - 1]
        which[done : done + chosen.size] = chosen.T.reshape(-1)[:left]
        number[done : done + chosen.size] = numbers.T.reshape(-1)[:left]
        taken, done = end[:, -1], done + chosen.size


def walk(shares: Floats, starts: Ints, taken: Floats, rows: int) -> tuple[Ints, Ints, Floats]:
    """The rule itself, `rows` times from each of the starts."""
    chosen, numbers = np.empty((rows, len(starts)), np.int16), np.empty((rows, len(starts)), np.int64)
    columns = np.arange(len(starts))
    for row in range(rows):
        behind = shares[:, None] * np.maximum(starts + row, 1) - taken  # [data sets, pieces]
        chosen[row] = best = behind.argmax(axis=0)
        numbers[row] = now = taken[best, columns]
        taken[best, columns] = now + 1
    return chosen, numbers, taken
