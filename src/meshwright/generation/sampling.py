"""Choosing the next token from logits: greedy, temperature, top-k, top-p. Pure functions.

The one random number a token needs is drawn on the CPU, so that a seed gives the same text on every device; sorting and
summing 50,000 probabilities stays where the logits are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.errors import NON_FINITE, UserError
from meshwright.settings.schema import Sampling


def temper(logits: Tensor, temperature: float) -> Tensor:
    """The largest becomes 0 first: the probabilities are the same, and no temperature overflows."""
    return (logits - logits.max()) / temperature


def top_k(logits: Tensor, k: int) -> Tensor:
    """Only the k largest stay; equal ones at the border stay too."""
    if k >= logits.shape[-1]:
        return logits
    return logits.masked_fill(logits < logits.topk(k).values[..., -1:], float("-inf"))


def top_p(logits: Tensor, p: float) -> Tensor:
    """The smallest set of likeliest tokens whose probability passes p; the first always stays."""
    ordered, where = logits.sort(descending=True, stable=True)
    probabilities = ordered.softmax(-1)
    drop = probabilities.cumsum(-1) - probabilities > p  # what comes before already passes p
    return logits.masked_fill(torch.zeros_like(drop).scatter(-1, where, drop), float("-inf"))


def draw(logits: Tensor, uniform: float) -> int:
    """The token on whose share of [0, 1) the number falls; one of probability 0 has no share."""
    passed = logits.double().softmax(-1).cumsum(-1)
    token = (passed <= uniform * passed[-1]).sum()
    return int(token.minimum(passed.argmax()))  # rounding may take the number to the very end


def choose(logits: Tensor, s: Sampling, generator: torch.Generator) -> int:
    """One token from one row of logits; the generator is used once for each call that samples."""
    logits = logits.float()
    if not logits.max().isfinite():  # also NaN, and -inf everywhere
        raise UserError(
            "the model's logits are not finite: its weights are damaged, or --fp16 overflows (try --bf16)", NON_FINITE
        )
    if s.greedy:
        return int(logits.argmax())
    logits = temper(logits, s.temperature)
    if s.top_k:
        logits = top_k(logits, s.top_k)
    if s.top_p:
        logits = top_p(logits, s.top_p)
    return draw(logits, torch.rand((), dtype=torch.float64, generator=generator).item())


def generator(seed: int, sample: int) -> torch.Generator:
    """One stream for each sample, so that its text does not depend on how samples are batched."""
    return torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + sample * 0xBF58476D1CE4E5B9) & 0x7FFFFFFFFFFFFFFF)
