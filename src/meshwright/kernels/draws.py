"""Random numbers for the choice of tokens: a hash of (stream, position in the text, token).

Hand-written because a generator's numbers depend on everything drawn before, and on the device.
Integer arithmetic modulo 2^64 is exact, so that each device gives the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(x: int) -> int:
    return x - (x >> 63 << 64)


def _mix_int64(x: Tensor) -> Tensor:
    """Apply splitmix64's finaliser to int64 tensors, whose products wrap around."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * _signed(0x94D049BB133111EB)
    return x ^ (x >> 31 & (1 << 33) - 1)


def uniforms(key: Tensor, position: Tensor, count: int) -> Tensor:
    """Return numbers [B, count] in (0, 1), float64, for the tokens that may take this position."""
    row = _mix_int64(key + position * _signed(0x9E3779B97F4A7C15))[:, None]
    tokens = torch.arange(count, device=key.device) * _signed(0xD1342543DE82EF95)
    return ((_mix_int64(row + tokens) >> 12 & (1 << 52) - 1).double() + 0.5) * 2.0**-52


def gumbel(key: Tensor, position: Tensor, count: int) -> Tensor:
    """Return Gumbel variables [B, count], float64: -log(exponential variable), -log(1 - u)."""
    return -(-(1 - uniforms(key, position, count)).log()).log()
