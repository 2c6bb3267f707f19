"""Several data sets read as one, in proportion to their weights or one after the other.

The order of a blend is Megatron's, element for element. Hand-written because Megatron's own is C++
that compiles at the first start.
"""

from __future__ import annotations

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
        sources = []
        for part in self.parts:
            sources += part.list_sources() if isinstance(part, OrderedSamples) else [""]
        return list(dict.fromkeys(sources))

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
        # Once more, as Megatron does: a last bit can decide between two data sets.
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

        # The order depends on nothing else.
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
        used = Counter[str]()
        prefixes = [part.prefix for part in self.parts if isinstance(part, OrderedSamples)]
        if len(prefixes) == len(self.parts) and all(prefixes):
            for prefix, count in zip(prefixes, self.count_parts(consumed), strict=True):
                used[prefix] += count
        return used

    def list_epochs(self) -> list[list[Any]]:
        out = []
        for part in self.parts:
            if isinstance(part, OrderedSamples):
                out += part.list_epochs()
        return out


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
        self.parts = [dataset]
        self.first = first

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
    which = storage.array("dataset", size, np.int16)
    number = storage.array("dataset_sample", size, np.int64)
    compiled = compiled_loops(size)
    if compiled is None:
        walk_side_by_side(shares, which, number)
    else:
        compiled.blend_samples(shares, np.zeros(len(shares)), which, number)
    return which, number


def walk_side_by_side(shares: Floats, which: Ints, number: Ints) -> None:
    """Fill `which` and `number`, a hundred times faster than with one choice after the other.

    Two walks that differ a little soon fall into step. So the walk is cut into pieces, walked side
    by side from guessed starts; a piece that does not start where the one before it ended is walked
    again from there, until all fit. The result is exact whatever was guessed: the first piece
    starts right, so it ends right, and so on.
    """
    size = len(which)
    taken = np.zeros(len(shares))
    done = 0
    while done < size:
        # Pieces of equal length; few samples are cut into about as many pieces as each has.
        left = size - done
        rows = min(ROWS, math.isqrt(left - 1) + 1)
        pieces = min(PIECES, -(-left // rows))
        starts = done + rows * np.arange(pieces)

        # The guess: rounded down, and the largest remainders up, so that all are taken.
        exact = shares[:, None] * starts
        begin = np.floor(exact)
        order = (begin - exact).argsort(axis=0, kind="stable")
        places = order.argsort(axis=0)  # each data set's place in that order
        missing = starts - begin.sum(axis=0)
        begin += places < missing
        begin[:, 0] = taken

        # Walk all pieces, and again those that began wrong.
        end = np.empty_like(begin)
        chosen = np.empty((rows, pieces), np.int16)
        numbers = np.empty((rows, pieces), np.int64)
        again = np.arange(pieces)
        while len(again):
            found = walk(shares, starts[again], begin[:, again], rows)
            chosen[:, again], numbers[:, again], end[:, again] = found
            is_wrong = (begin[:, 1:] != end[:, :-1]).any(axis=0)
            again = 1 + np.flatnonzero(is_wrong)
            begin[:, again] = end[:, again - 1]

        # Columns are pieces, so the transpose has the samples in their order.
        to = slice(done, done + chosen.size)
        which[to] = chosen.T.reshape(-1)[:left]
        number[to] = numbers.T.reshape(-1)[:left]
        taken = end[:, -1]
        done = to.stop


def walk(shares: Floats, starts: Ints, taken: Floats, rows: int) -> tuple[Ints, Ints, Floats]:
    """Apply the rule `rows` times from each start; return choices, numbers and counts."""
    chosen = np.empty((rows, len(starts)), np.int16)
    numbers = np.empty((rows, len(starts)), np.int64)
    columns = np.arange(len(starts))
    for row in range(rows):
        behind = shares[:, None] * np.maximum(starts + row, 1) - taken  # [data sets, pieces]
        best = behind.argmax(axis=0)
        now = taken[best, columns]
        chosen[row] = best
        numbers[row] = now
        taken[best, columns] = now + 1
    return chosen, numbers, taken
