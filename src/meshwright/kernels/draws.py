"""Random numbers for the choice of tokens: a hash of (stream, position in the text, token).

Hand-written because a generator's numbers depend on everything drawn before, and on the device.
Integer arithmetic modulo 2^64 is exact, so that each device gives the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(x: int) -> int:
    """Return the int64 that has the bits of a number of 64 bits."""
    return x - (x >> 63 << 64)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift int64 tensors to the right as if they had no sign."""
    return x >> bits & (1 << 64 - bits) - 1


def _mix_int64(x: Tensor) -> Tensor:
    """Apply splitmix64's finaliser to int64 tensors, whose products wrap around."""
    x = x ^ _shift(x, 30)
    x = x * _signed(0xBF58476D1CE4E5B9)
    x = x ^ _shift(x, 27)
    x = x * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def uniforms(key: Tensor, position: Tensor, count: int) -> Tensor:
    """Return numbers [B, count] in (0, 1), float64, for the tokens that may take this position."""
    row = _mix_int64(key + position * _signed(0x9E3779B97F4A7C15))
    tokens = torch.arange(count, device=key.device)
    tokens = tokens * _signed(0xD1342543DE82EF95)
    bits = _mix_int64(row[:, None] + tokens)
    # The middle of one of 2^52 intervals, which float64 holds exactly: never 0 nor 1.
    middle = _shift(bits, 12).double() + 0.5
    return middle * 2.0**-52


def gumbel(key: Tensor, position: Tensor, count: int) -> Tensor:
    """Return Gumbel variables [B, count], float64: -log(e) of exponential ones, e = -log(1 - u)."""
    exponential = -(1 - uniforms(key, position, count)).log()
    return -exponential.log()
