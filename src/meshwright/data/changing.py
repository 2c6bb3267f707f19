"""A training set whose blend changes on the way: history.py says what, here it becomes samples. And what was used of each."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt

from meshwright.data.blend import Blend, Several
from meshwright.data.history import History
from meshwright.data.loader import Dataset, Samples
from meshwright.data.samples import BLOCK


class Chain(Several):
    """One data set after the other, each in full."""

    def __init__(self, parts: Sequence[Dataset]) -> None:
        self.parts = list(parts)
        self.ends = list(accumulate(len(part) for part in self.parts))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def append(self, part: Dataset) -> None:
        self.parts.append(part)
        self.ends.append(len(self) + len(part))

    def _at(self, k: int) -> tuple[Dataset, int]:
        if not 0 <= k < len(self):
            raise IndexError(f"sample {k} of {len(self)}")
        place = bisect_right(self.ends, k)
        return self.parts[place], k - (self.ends[place - 1] if place else 0)


class From:
    """A data set from one of its samples on."""

    def __init__(self, dataset: Dataset, first: int) -> None:
        self.dataset, self.first = dataset, first

    def __len__(self) -> int:
        return len(self.dataset) - self.first

    def __getitem__(self, k: int) -> npt.NDArray[np.int64]:
        return self.dataset[self.first + k]

    def locate(self, k: int, position: int) -> str:
        return self.dataset.locate(self.first + k, position)


class Changing(Chain):
    """The blends of a history, each for its samples of the run."""

    def __init__(self, blends: Sequence[Blend], names: Sequence[Sequence[str]]) -> None:
        super().__init__(blends)
        self.blends, self.names = list(blends), names


def build(
    history: History,
    size: int,
    consumed: int,
    samples: Callable[[str, int, int], Samples],
    one_epoch: Callable[[str], int],
    folder: Path | None,
) -> Changing:
    """The run's `size` samples. `samples(name, n, more)` builds a data set's order for n samples, `more` added to the seed;
    `one_epoch(name)`: the samples of one of its epochs.

    Data sets that had their last sample among the `consumed` ones are not opened: their files may be gone.
    """
    chains: dict[str, Chain] = {}
    used: dict[str, int] = {}
    blends = []
    steps = [b for b in history.blends if b.begin < size]
    for one, end in zip(steps, [*(b.begin for b in steps[1:]), size], strict=True):
        names = [name for name, _ in one.shares]
        lines = [From(chains.setdefault(name, Chain([])), used.get(name, 0)) for name in names]
        blends.append(Blend(lines, [share for _, share in one.shares], end - one.begin, folder))
        for name, count in zip(names, counted(blends[-1], 0, len(blends[-1])), strict=True):
            used[name] = used.get(name, 0) + count
    read = {
        n for one, end in zip(steps, accumulate(map(len, blends)), strict=True) if end > consumed for n, _ in one.shares
    }
    for name in (n for n in used if n in read):
        chain = chains[name]
        chain.append(samples(name, history.sources[name].samples, 0))
        while (
            len(chain) < used[name]
        ):  # the need has grown: further epochs, each by itself, after the whole of the first order
            chain.append(samples(name, one_epoch(name), len(chain.parts)))
    return Changing(blends, [[history.sources[name].prefix for name, _ in one.shares] for one in steps])


def counted(blend: Blend, begin: int, end: int) -> list[int]:
    """Of each of its data sets, the samples among those from `begin` to `end`."""
    counts = np.zeros(len(blend.parts), np.int64)
    for first in range(begin, end, BLOCK):
        counts += np.bincount(blend.dataset_idx[first : min(first + BLOCK, end)], minlength=len(counts))
    return [int(n) for n in counts]


def used_of_each(dataset: object, consumed: int) -> dict[str, int]:
    """Samples that a run has used of each data set of a blend, by the files' prefix; nothing of what is no blend of files,
    or of a cyclic order, which mixes it anew."""
    out: dict[str, int] = {}
    if isinstance(dataset, Changing):
        begins = [0, *dataset.ends]
        for blend, prefixes, begin in zip(dataset.blends, dataset.names, begins, strict=False):
            for prefix, n in zip(prefixes, counted(blend, 0, max(0, min(consumed - begin, len(blend)))), strict=True):
                out[prefix] = out.get(prefix, 0) + n
    elif isinstance(dataset, Blend) and all(isinstance(part, Samples) for part in dataset.parts):
        for part, n in zip(dataset.parts, counted(dataset, 0, consumed), strict=True):
            assert isinstance(part, Samples)
            out[part.indexed.prefix] = out.get(part.indexed.prefix, 0) + n
    return out
