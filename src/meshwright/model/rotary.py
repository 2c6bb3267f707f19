"""Rotary embeddings: the angle of each position and pair, and its scaling for long texts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meshwright.config.schema import Model


def rotations(m: Model, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of position x frequency, times YaRN's attention factor."""
    angles = ids.to(dtype) * frequencies(m, ids.device, dtype)
    cos = angles.cos()
    sin = angles.sin()
    # Queries and keys both turn by these, so their products grow by the factor's square.
    factor = m.attention_factor
    if factor == 1.0:
        return cos, sin
    return cos * factor, sin * factor


def frequencies(m: Model, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the frequency of each pair, [rotating / 2]: from 1 to almost 1 / base, then scaled."""
    powers = torch.arange(0, m.rotating, 2, dtype=dtype, device=device) / m.rotating
    plain = 1.0 / m.rotary_base**powers
    if m.rope_scaling == "linear":
        return plain / m.rope_scaling_factor
    if m.rope_scaling == "llama3":
        return _mix(m, plain, _slowness_of_llama3(m, plain))
    if m.rope_scaling == "yarn":
        return _mix(m, plain, _slowness_of_yarn(m, plain))
    return plain


def _mix(m: Model, plain: Tensor, slowness: Tensor) -> Tensor:
    """Keep frequencies of slowness 0, divide those of 1 by the factor, and mix between."""
    return plain * (1 - slowness) + plain / m.rope_scaling_factor * slowness


def _slowness_of_llama3(m: Model, plain: Tensor) -> Tensor:
    """Return 1 for at most `low` turns in the original positions, falling to 0 at `high`."""
    turns = m.original_positions * plain / (2 * math.pi)
    low = m.rope_low_freq_factor
    high = m.rope_high_freq_factor
    fastness = (turns - low) / (high - low)
    return 1 - fastness.clamp(0, 1)


def _slowness_of_yarn(m: Model, plain: Tensor) -> Tensor:
    """Return a ramp over the pairs, as in YaRN (Peng et al. 2023).

    It rises from the pair that turns `beta_fast` times in the original positions to that of
    `beta_slow` turns.
    """

    # Pair i turns positions * base^(-2i / rotating) / (2 pi) times; this solves for i.
    def pair(turns: float) -> float:
        return (
            m.rotating
            * math.log(m.original_positions / (turns * 2 * math.pi))
            / (2 * math.log(m.rotary_base))
        )

    # Bounds and the 0.001 that keeps the ramp from dividing by 0 are those of YaRN's own code.
    first = max(math.floor(pair(m.beta_fast)), 0)
    last = min(math.ceil(pair(m.beta_slow)), m.rotating - 1)
    numbers = torch.arange(len(plain), dtype=plain.dtype, device=plain.device)
    return ((numbers - first) / (last - first or 0.001)).clamp(0, 1)
