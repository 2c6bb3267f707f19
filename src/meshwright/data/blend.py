"""Several data sets read as one, in proportion to their weights or one after the other.

The order of a blend is Megatron's, element for element. Hand-written because Megatron's own is C++
that compiles at the first start.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.base.console import say
from meshwright.base.errors import UserError
from meshwright.data.index_cache import IN_MEMORY, Ints, Storage, cached_indices
from meshwright.data.samples import BLOCK, Dataset, OrderedSamples, compiled_loops, require_sample

VERSION = 1  # of the order: part of the cache's key
MOST_PARTS = 2**15 - 1  # the order keeps their numbers in 16 bits, as Megatron's does
ROWS = PIECES = 2048  # samples of a piece, and pieces that are walked side by side
Floats = npt.NDArray[np.float64]


class Composite(OrderedSamples):
    """A data set whose samples are those of other data sets."""

    parts: Sequence[Dataset]

    def resolve(self, k: int) -> tuple[Dataset, int]:
        """Return the data set that holds sample k, and the sample's number there."""
        raise NotImplementedError

    def list_sources(self) -> list[str]:
        sources = [
            part.list_sources() if isinstance(part, OrderedSamples) else [""] for part in self.parts
        ]
        return list(dict.fromkeys(itertools.chain.from_iterable(sources)))

    def source_of(self, k: int) -> str:
        part, number = self.resolve(k)
        return part.source_of(number) if isinstance(part, OrderedSamples) else ""

    def __getitem__(self, k: int) -> npt.NDArray[np.int64]:
        part, number = self.resolve(k)
        return part[number]

    def locate(self, k: int, position: int) -> str:
        part, number = self.resolve(k)
        return part.locate(number, position)


class Blend(Composite):
    """`size` samples out of `parts`; `weights` add up to 1 up to rounding."""

    def __init__(
        self,
        parts: Sequence[Dataset],
        weights: Sequence[float],
        size: int,
        cache_dir: str | Path | None = None,
    ) -> None:
        if len(parts) > MOST_PARTS:
            raise UserError(
                f"a blend of {len(parts):,} data sets; at most {MOST_PARTS:,} can be numbered: merge some"
            )
        self.parts = parts
        shares = np.array(weights, dtype=np.float64)
        # once more, as Megatron does: a last bit can decide between two data sets
        shares /= shares.sum()

        def build(storage: Storage) -> list[Ints]:
            start = perf_counter()
            say(" > building indices for blendable datasets ...")
            which, number = blend_order(shares, size, storage)
            say(" > sample ratios:")
            for d, count in enumerate(count_parts(which, len(parts))):
                say(f"   dataset {d}, input: {shares[d]:g}, achieved: {count / size:g}")
            say(
                f"> elapsed time for building blendable dataset indices: {perf_counter() - start:.2f} (sec)"
            )
            return [which, number]

        # the order depends on nothing else
        key = {"version": VERSION, "weights": shares.tolist(), "samples": size}
        self.dataset_idx, self.sample_idx = cached_indices(
            cache_dir, key, ("dataset", "dataset_sample"), build
        )
        say(f"> size of blendable dataset: {size} samples")

    def __len__(self) -> int:
        return len(self.dataset_idx)

    def resolve(self, k: int) -> tuple[Dataset, int]:
        require_sample(k, len(self))
        return self.parts[self.dataset_idx[k]], int(self.sample_idx[k])

    def count_parts(self, end: int) -> list[int]:
        """Return how many of the first `end` samples come from each part."""
        return count_parts(self.dataset_idx[: max(end, 0)], len(self.parts))

    def count_used(self, consumed: int) -> Counter[str]:
        used, prefixes = (
            Counter[str](),
            [part.prefix for part in self.parts if isinstance(part, OrderedSamples)],
        )
        if len(prefixes) == len(self.parts) and all(prefixes):
            for prefix, count in zip(prefixes, self.count_parts(consumed), strict=True):
                used[prefix] += count
        return used

    def list_epochs(self) -> list[list[Any]]:
        return [
            epochs
            for part in self.parts
            if isinstance(part, OrderedSamples)
            for epochs in part.list_epochs()
        ]


def count_parts(which: Ints, parts: int) -> list[int]:
    counts = np.zeros(parts, np.int64)
    for begin in range(0, len(which), BLOCK):
        counts += np.bincount(which[begin : begin + BLOCK], minlength=parts)
    return list(map(int, counts))


class Chain(Composite):
    """One data set after the other, each in full."""

    def __init__(self, parts: Sequence[Dataset]) -> None:
        self.parts: list[Dataset] = list(parts)
        self.ends = list(accumulate(len(part) for part in self.parts))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def append(self, part: Dataset) -> None:
        self.ends.append(len(self) + len(part))
        self.parts.append(part)

    def resolve(self, k: int) -> tuple[Dataset, int]:
        require_sample(k, len(self))
        n = bisect_right(self.ends, k)
        return self.parts[n], k - (self.ends[n - 1] if n else 0)


class Remainder(Composite):
    """A data set from one of its samples on."""

    def __init__(self, dataset: Dataset, first: int) -> None:
        self.parts, self.first = [dataset], first

    def __len__(self) -> int:
        return len(self.parts[0]) - self.first

    def resolve(self, k: int) -> tuple[Dataset, int]:
        return self.parts[0], self.first + k


def normalise(weights: Sequence[float]) -> list[float]:
    """Divide by the sum, added from left to right: since Python 3.12 sum() rounds differently."""
    *_, total = accumulate(weights)
    return [weight / total for weight in weights]


def samples_needed(size: int, share: float) -> int:
    """Return the share of one data set and half a percent more, as in Megatron."""
    return math.ceil(size * share * 1.005)


def blend_order(shares: Floats, size: int, storage: Storage = IN_MEMORY) -> tuple[Ints, Ints]:
    """Return for each sample its data set, int16, and its number there, int64.

    Sample i is the next one of the data set that is furthest behind, the d of the largest share_d x
    max(i, 1) - taken_d, and the first of equals; float64 as in Megatron, so that ties fall alike.
    """
    which, number = (
        storage.array("dataset", size, np.int16),
        storage.array("dataset_sample", size, np.int64),
    )
    compiled = compiled_loops(size)
    if compiled is None:
        walk_side_by_side(shares, which, number)
    else:
        compiled.blend_samples(shares, np.zeros(len(shares)), 0, which, number)
    return which, number


def walk_side_by_side(shares: Floats, which: Ints, number: Ints) -> None:
    """Fill `which` and `number`, a hundred times faster than with one choice after the other.

    Two walks that differ a little soon fall into step. So the walk is cut into pieces, walked side
    by side from guessed starts; a piece that does not start where the one before it ended is walked
    again from there, until all fit. The result is exact whatever was guessed: the first piece
    starts right, so it ends right, and so on.
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
        chosen, numbers = (
            np.empty((rows, len(starts)), np.int16),
            np.empty((rows, len(starts)), np.int64),
        )
        again = np.arange(len(starts))
        while len(again):
            chosen[:, again], numbers[:, again], end[:, again] = walk(
                shares, starts[again], begin[:, again], rows
            )
            again = 1 + np.flatnonzero((begin[:, 1:] != end[:, :-1]).any(axis=0))
            begin[:, again] = end[:, again - 1]
        which[done : done + chosen.size] = chosen.T.reshape(-1)[:left]
        number[done : done + chosen.size] = numbers.T.reshape(-1)[:left]
        taken, done = end[:, -1], done + chosen.size


def walk(shares: Floats, starts: Ints, taken: Floats, rows: int) -> tuple[Ints, Ints, Floats]:
    """Apply the rule `rows` times from each start; return choices, numbers and counts."""
    chosen, numbers = (
        np.empty((rows, len(starts)), np.int16),
        np.empty((rows, len(starts)), np.int64),
    )
    columns = np.arange(len(starts))
    for row in range(rows):
        behind = shares[:, None] * np.maximum(starts + row, 1) - taken  # [data sets, pieces]
        chosen[row] = best = behind.argmax(axis=0)
        numbers[row] = now = taken[best, columns]
        taken[best, columns] = now + 1
    return chosen, numbers, taken
