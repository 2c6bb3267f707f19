"""Sizes of grids and blocks. Triton's own functions for these take the host microseconds a call."""

from __future__ import annotations

from typing import NamedTuple


def cdiv(count: int, size: int) -> int:
    """Return how many blocks of a size cover a count."""
    return -(-count // size)


def power_of_2(count: int) -> int:
    """Return the least power of two that is not below a count of at least 1."""
    return 1 << (count - 1).bit_length()


TILE = 1024  # elements that a program of the norm processes at a time, if a row is shorter


class BackwardLaunch(NamedTuple):
    """How the norm's backward kernel runs."""

    warps: int
    programs: int  # on each multiprocessor; each writes one row of partial sums
    stages: int  # rows in flight
    rows: int = 4  # groups that a program processes at least: with fewer, sums outweigh gradients
    registers: int | None = None  # of a thread, where the compiler should use fewer


# By the tile's columns. As compiled for an H200 (sm_90, Triton 3.9) with dropout, a thread takes
# 80, 80, 128 and 128 registers, so that 6, 3, 2 and 1 programs run on a multiprocessor at a time.
BACKWARD = {
    1024: BackwardLaunch(4, 4, 3),
    2048: BackwardLaunch(8, 3, 3),
    4096: BackwardLaunch(8, 2, 3, registers=128),
    8192: BackwardLaunch(16, 1, 2),
}


def norm_tile(width: int) -> tuple[int, int]:
    """Return how many rows a program of the norm takes at a time, and columns, a power of two."""
    block = power_of_2(width)
    return max(1, TILE // block), block


def norm_launch(width: int) -> BackwardLaunch:
    """Return how the norm's backward kernel runs for rows of a width."""
    return BACKWARD[min(max(power_of_2(width), TILE), 8192)]


def norm_programs(width: int, count: int, processors: int) -> int:
    """Return the programs of the norm's backward pass; each writes a row of partial sums."""
    # As many as run at a time, but not so many that summing their rows takes longer.
    launch = norm_launch(width)
    return min(launch.programs * processors, cdiv(count, launch.rows * norm_tile(width)[0]))


# Of sums of rows: the tile, and programs a multiprocessor.
SUM_COLUMNS = 128
SUM_ROWS = 32
SUM_PROGRAMS = 8


def sum_slab(count: int, width: int, processors: int) -> int:
    """Return how many rows of a matrix [count, width] a program sums."""
    # The programs that go side by side already share the work; the rest divide the rows.
    wanted = cdiv(SUM_PROGRAMS * processors, cdiv(width, SUM_COLUMNS))
    return cdiv(cdiv(count, wanted), SUM_ROWS) * SUM_ROWS


def summed_rows(count: int, slab: int) -> int:
    """Return the rows of partial sums of so many rows."""
    return max(1, cdiv(count, max(1, slab)))


# Rows that a program of the activation's backward pass sums: many, or few for more programs.
ACTIVATION_ROWS = 128, 32


def activation_rows(rows: int) -> int:
    """Return how many of the rows a program of the activation's backward pass sums."""
    return ACTIVATION_ROWS[0 if rows >= 8192 else 1]
