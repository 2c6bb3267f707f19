"""torch's caching allocator for GPUs, in numbers: the memory that it reserves for given tensors.

It takes segments from the driver and cuts them into blocks: 2 MiB for tensors of at most 1 MiB,
20 MiB for those below 10 MiB, and for larger ones their size in multiples of 2 MiB. A tensor gets
the smallest free block of its stream that it fits into. Free neighbours become one block; a segment
goes back to the driver only when the cache is emptied.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

MIB = 1 << 20
MAIN = 0  # number of the stream on which a step computes
SMALL, MEDIUM = MIB, 10 * MIB  # bytes of tensors in small segments, and of those in medium ones
SMALL_SEGMENT = 2 * MIB
MEDIUM_SEGMENT = 20 * MIB
STEP = 2 * MIB
LEAST = 512  # bytes of a block, of which each is a multiple


class MemoryEvent(NamedTuple):
    """Memory that is allocated or freed."""

    key: int  # names the memory
    size: int  # bytes; negative if they are freed
    kind: str
    stream: int


def rounded(size: int) -> int:
    """Return the bytes that torch's allocator takes for so many."""
    return -(-size // LEAST) * LEAST


class Slab:
    """A block of a segment, free or taken."""

    __slots__ = ("after", "at", "before", "is_free", "size")

    def __init__(self, at: int, size: int) -> None:
        self.at = at
        self.size = size
        self.is_free = False
        self.before: Slab | None = None
        self.after: Slab | None = None


Pool = tuple[int, bool]  # a stream, and whether its tensors are small


class CachingAllocator:
    """Segments and blocks; `begin_pool` starts a pool of CUDA graphs."""

    def __init__(self) -> None:
        self.reserved = self.most = self.end = 0
        self.free: defaultdict[Pool, list[tuple[int, int, Slab]]] = defaultdict(list)
        self.taken: dict[int, tuple[Slab, Pool]] = {}

    def run(self, events: Iterable[MemoryEvent]) -> None:
        """Allocate (sizes above 0) and free what keys name; what is left at the end is freed."""
        left = dict[int, None]()
        for key, size, _, stream in events:
            if size > 0:
                self.allocate(key, size, stream)
                left[key] = None
            elif size < 0:
                self.release(key)
                del left[key]
        for key in left:
            self.release(key)

    def allocate(self, key: int, size: int, stream: int = MAIN) -> None:
        is_small = size <= SMALL
        pool = stream, is_small
        free = self.free[pool]
        # The smallest free block that is large enough, at the lowest place; no block is at -1.
        place = bisect.bisect_left(free, (size, -1))
        slab = free.pop(place)[2] if place < len(free) else self.new_segment(size)
        # What a small tensor leaves of a block is used again; of a large one only more than 1 MiB.
        rest = slab.size - size
        if rest >= LEAST if is_small else rest > SMALL:
            other = Slab(slab.at + size, rest)
            other.before = slab
            other.after = slab.after
            slab.after = other
            slab.size = size
            if other.after is not None:
                other.after.before = other
            self.put(other, pool)
        slab.is_free = False
        self.taken[key] = slab, pool

    def new_segment(self, size: int) -> Slab:
        if size <= SMALL:
            taken = SMALL_SEGMENT
        elif size < MEDIUM:
            taken = MEDIUM_SEGMENT
        else:
            taken = -(-size // STEP) * STEP
        self.reserved += taken
        self.most = max(self.most, self.reserved)
        at = self.end
        self.end = self.end + taken
        return Slab(at, taken)

    def put(self, slab: Slab, pool: Pool) -> None:
        slab.is_free = True
        bisect.insort(self.free[pool], (slab.size, slab.at, slab))

    def take_out(self, slab: Slab, pool: Pool) -> None:
        free = self.free[pool]
        del free[bisect.bisect_left(free, (slab.size, slab.at))]

    def release(self, key: int) -> None:
        slab, pool = self.taken.pop(key)
        # Free neighbours become one block with it, first the one behind, then the one before.
        if (after := slab.after) is not None and after.is_free:
            self.take_out(after, pool)
            slab.size += after.size
            slab.after = after.after
            if slab.after is not None:
                slab.after.before = slab
        if (before := slab.before) is not None and before.is_free:
            self.take_out(before, pool)
            before.size += slab.size
            before.after = slab.after
            if before.after is not None:
                before.after.before = before
            slab = before
        self.put(slab, pool)

    def empty_cache(self) -> None:
        """Give segments without tensors back."""
        for pool, free in self.free.items():
            kept = []
            for entry in free:
                size, _, slab = entry
                # A block without neighbours is a whole segment.
                if slab.before is None and slab.after is None:
                    self.reserved -= size
                else:
                    kept.append(entry)
            self.free[pool] = kept

    def begin_pool(self) -> None:
        """Take new segments from here on, as the capture of a graph does."""
        self.free = defaultdict(list)
