"""Sizes of grids and blocks. Triton's own functions for these take the host microseconds a call."""

from __future__ import annotations


def cdiv(count: int, size: int) -> int:
    """Return how many blocks of a size cover a count."""
    return -(-count // size)


def power_of_2(count: int) -> int:
    """Return the least power of two that is not below a count of at least 1."""
    return 1 << (count - 1).bit_length()
