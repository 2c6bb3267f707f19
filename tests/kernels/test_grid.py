"""Sizes of grids and blocks are Triton's."""

import triton

from meshwright.kernels.grid import cdiv, power_of_2


def test_sizes_are_those_of_triton():
    for n in (1, 2, 3, 4, 5, 63, 64, 65, 1000, 2**31 + 1):
        assert power_of_2(n) == triton.next_power_of_2(n)
        assert [cdiv(n, size) for size in (1, 2, 7, 64)] == [
            triton.cdiv(n, size) for size in (1, 2, 7, 64)
        ]
    assert cdiv(0, 8) == 0
