"""Choose the next token from logits: greedy, temperature, top-k, top-p.

The random number of a token is drawn on the CPU, so that a seed gives equal text on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.errors import NON_FINITE, UserError
from meshwright.settings.schema import Sampling


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Shift the maximum to 0, which keeps the probabilities, so that no temperature overflows."""
    return (logits - logits.max()) / temperature


def top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the k largest logits, and those equal to the smallest of them."""
    if k >= logits.shape[-1]:
        return logits
    return logits.masked_fill(logits < logits.topk(k).values[..., -1:], float("-inf"))


def top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the smallest set of likeliest tokens whose probability exceeds p, at least one."""
    ordered, where = logits.sort(descending=True, stable=True)
    probabilities = ordered.softmax(-1)
    drop = probabilities.cumsum(-1) - probabilities > p  # the tokens before it already exceed p
    return logits.masked_fill(torch.zeros_like(drop).scatter(-1, where, drop), float("-inf"))


def draw(logits: Tensor, uniform: float) -> int:
    """Return the token on whose share of [0, 1) the number falls; probability 0 has no share."""
    passed = logits.double().softmax(-1).cumsum(-1)
    token = (passed <= uniform * passed[-1]).sum()
    return int(token.minimum(passed.argmax()))  # rounding may take the number to the very end


def choose(logits: Tensor, s: Sampling, generator: torch.Generator) -> int:
    """Return one token from a row of logits [V]; a call that samples uses the generator once."""
    logits = logits.float()
    if not logits.max().isfinite():  # also NaN, and -inf everywhere
        raise UserError(
            "the model's logits are not finite; its weights are damaged, or --fp16 overflows (try --bf16)", NON_FINITE
        )
    if s.greedy or not s.temperature:
        return int(logits.argmax())
    logits = apply_temperature(logits, s.temperature)
    if s.top_k:
        logits = top_k(logits, s.top_k)
    if s.top_p:
        logits = top_p(logits, s.top_p)
    return draw(logits, torch.rand((), dtype=torch.float64, generator=generator).item())


def generator(seed: int, sample: int) -> torch.Generator:
    """Return a sample's own stream of random numbers: its text does not depend on batching."""
    return torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + sample * 0xBF58476D1CE4E5B9) & 0x7FFFFFFFFFFFFFFF)
