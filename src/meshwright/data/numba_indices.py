"""The loops of index building, compiled by numba, which may be absent.

They give the same results as the numpy beside each call, in less time. numba keeps compiled code
in files, so only the first process waits for it. This module is imported through
`samples.compiled_loops`, and only for large data: the import takes longer than numpy does for a
million samples.

numpy's shuffle draws one place, swaps, draws the next, and waits for memory at each swap. Here
places are drawn a batch at a time, so that the processor can work on many swaps at once. (Explicit
prefetches were measured too: they add nothing.)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

# The Mersenne twister's state, and the distance of the words that it mixes.
WORDS = 624
MIDDLE = 397
BATCH = 512
Ints = npt.NDArray[np.integer[Any]]


def shuffle(rng: np.random.RandomState, x: Ints) -> None:
    """Do what rng.shuffle(x) does: the same order, and the same state of rng afterwards."""
    state: Any = rng.get_state(legacy=False)
    own = state["state"]
    own["pos"] = _shuffle(x, own["key"], own["pos"])
    rng.set_state(state)


@njit(cache=True, nogil=True)
def _twist(key: Any) -> None:
    """Advance to the next 624 words of state."""
    one = np.uint32(1)
    for k in range(WORDS):
        # Join the highest bit of a word and the other bits of the next one.
        high = key[k] & np.uint32(0x80000000)
        low = key[(k + 1) % WORDS] & np.uint32(0x7FFFFFFF)
        y = high | low
        odd = np.uint32(0x9908B0DF) * (y & one)
        far = key[(k + MIDDLE) % WORDS]
        key[k] = far ^ (y >> one) ^ odd


@njit(cache=True, nogil=True)
def _temper(key: Any, words: Any) -> None:
    """Compute the random numbers that the state stands for."""
    for k in range(WORDS):
        y = key[k]
        y ^= y >> np.uint32(11)
        y ^= (y << np.uint32(7)) & np.uint32(0x9D2C5680)
        y ^= (y << np.uint32(15)) & np.uint32(0xEFC60000)
        words[k] = y ^ (y >> np.uint32(18))


@njit(cache=True, nogil=True)
def draw_numbers(key: Any, words: Any, at: int, i: Any, out: Any) -> int:
    """Draw random numbers up to i, up to i - 1, ..., one for each place of `out` but the last.

    The last place takes rejected numbers. As in numpy, a number is cut to the bits of the limit and
    drawn again while it is above it; above 32 bits two words make one number.
    """
    done: Any = 0
    count = len(out) - 1
    while done < count and i > 0xFFFFFFFF:
        mask = (1 << 33) - 1
        while mask < i:
            mask = 2 * mask + 1
        high = np.uint64(0)
        for _ in range(2):
            if at == WORDS:
                _twist(key)
                _temper(key, words)
                at = 0
            high = (high << np.uint64(32)) | np.uint64(words[at])
            at += 1
        j = np.int64(high & np.uint64(mask))
        out[done] = j
        if j <= i:
            done += 1
            i -= 1
    while done < count:
        mask = 1
        while mask < i:
            mask = 2 * mask + 1
        # above it, the mask stays and there are places left
        low = max(mask >> 1, i - (count - done))
        while i > low:
            if at == WORDS:
                _twist(key)
                _temper(key, words)
                at = 0
            stop = min(WORDS, at + i - low)
            # without a branch: it would be mispredicted in every third case
            for k in range(at, stop):
                j = np.int64(words[k]) & mask
                out[done] = j
                taken = np.int64(j <= i)
                done += taken
                i -= taken
            at = stop
    return at


@njit(cache=True, nogil=True)
def _shuffle(x: Any, key: Any, at: int) -> int:
    words = np.empty(WORDS, np.uint32)
    _temper(key, words)
    places = np.empty(BATCH + 1, np.int64)
    i = len(x) - 1
    while i > 0:
        count = min(BATCH, i)
        at = draw_numbers(key, words, at, i, places[: count + 1])
        for k in range(count):
            j = places[k]
            swapped = x[j]
            x[j] = x[i]
            x[i] = swapped
            i -= 1
    return at


@njit(cache=True, nogil=True)
def cut_samples(
    sizes: Any, doc_idx: Any, place: Any, offset: Any, seq_length: int, rows: Any
) -> tuple[int, int, int]:
    """Fill rows from a place on; return their number, and place and offset for the next call.

    The next sample begins `offset` tokens after that document's start, possibly behind its end.
    The last of `rows` is never filled: a row is written first and counted afterwards, which
    needs no branch that could be mispredicted.
    """
    near = np.empty(BATCH, np.int64)  # sizes, fetched side by side
    done: Any = 0
    full = len(rows) - 1
    while place < len(doc_idx):
        count = min(BATCH, len(doc_idx) - place)
        for k in range(count):
            near[k] = sizes[doc_idx[place + k]]
        for k in range(count):
            size = near[k]
            if done < full:
                rows[done, 0] = place + k
                rows[done, 1] = offset
                begins = np.int64(offset < size)
                done += begins
                offset += begins * seq_length
            while offset < size:
                if done == full:
                    return done, place + k, offset
                rows[done, 0] = place + k
                rows[done, 1] = offset
                done += 1
                offset += seq_length
            offset -= size
        place += count
    return done, place, offset


@njit(cache=True, nogil=True)
def blend_samples(shares: Any, taken: Any, which: Any, number: Any) -> None:
    """Fill in the samples by the rule of blend.blend_order."""
    for row in range(len(which)):
        i = float(max(row, 1))
        best: Any = 0
        most = shares[0] * i - taken[0]
        for d in range(1, len(shares)):
            behind = shares[d] * i - taken[d]
            if behind > most:
                best = d
                most = behind
        which[row] = best
        number[row] = np.int64(taken[best])
        taken[best] += 1.0
