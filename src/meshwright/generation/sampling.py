"""Choose the next token of many rows from their logits, on the device and without waiting for it.

The random numbers are those of kernels/draws.py, so that a row's text depends on no other row. The
largest of logit + Gumbel variable is token i with probability softmax(logits)[i]; a filter only
removes tokens from this comparison.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.config.schema import Sampling
from meshwright.kernels.draws import gumbel

_LOW = (1 << 64) - 1  # keeps the low 64 bits
INF = float("inf")


class ChoiceParts(NamedTuple):
    """The parts of the choice that some row needs; the others cost nothing."""

    penalised: bool = False
    sampled: bool = False
    filtered: bool = False
    decaying: bool = False  # top_p, with each token
    counting: bool = False  # how often a continuation has each token
    avoiding: bool = False  # pairs of tokens

    @staticmethod
    def of(s: Sampling) -> ChoiceParts:
        sampled = not is_greedy(s)
        return ChoiceParts(
            penalised=s.repetition_penalty != 1,
            sampled=sampled,
            # A filter never removes the likeliest token, so a greedy choice needs none.
            filtered=sampled and bool(s.top_k or s.top_p or s.min_p),
        )

    def __or__(self, other: ChoiceParts) -> ChoiceParts:
        return ChoiceParts(*(a or b for a, b in zip(self, other, strict=True)))


@dataclass
class Controls:
    """The sampling flags of the rows, [B] each; temperature 0 is greedy."""

    temperature: Tensor  # float64, as top_p and min_p
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor  # int64
    key: Tensor  # int64, see `stream_key`


def is_greedy(s: Sampling) -> bool:
    return s.greedy or not s.temperature


def control_numbers(s: Sampling) -> list[float]:
    """Return the flags in the order of Controls."""
    return [0.0 if s.greedy else s.temperature, s.top_p, s.min_p]


def penalise(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Divide the logits [B, V] of tokens in the text by the penalty, or multiply those below 0."""
    by = penalty[:, None].to(logits.dtype)
    penalised = torch.where(logits > 0, logits / by, logits * by)
    return torch.where(seen, penalised, logits)


def penalise_counts(logits: Tensor, counts: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
    """Subtract from the logits [B, V] of tokens that a text has `counts` times, as OpenAI does."""
    by = frequency[:, None] * counts + presence[:, None] * (counts > 0)
    return logits - by.to(logits.dtype)


def apply_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """Shift the maximum to 0, which keeps the probabilities, so that no temperature overflows."""
    return (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]


def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Set the logits [B, V] of tokens that a row's filters remove to -inf; a filter of 0 is off.

    top_k keeps the k largest logits, and those equal to the smallest of them; top_p then the
    smallest set of likeliest tokens whose probability exceeds p, at least one, equals in the order
    of their ids; min_p those of at least this share of the likeliest one's probability.
    """
    vocab = logits.shape[-1]
    # A stable sort leaves equal logits in the order of their ids on every device.
    ordered, ids = logits.sort(stable=True, descending=True)

    # Drop what is below the k-th largest.
    count = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab)
    last = count[:, None] - 1
    drop = ordered < ordered.gather(-1, last)
    probabilities = ordered.masked_fill(drop, -INF).softmax(-1)

    # The token that takes the sum past p stays, so a token is judged by the sum before it.
    p = torch.where(top_p > 0, top_p, INF)
    likelier = probabilities.cumsum(-1) - probabilities
    drop |= likelier > p[:, None]
    # Drop what has less than min_p times the probability of the likeliest token, the first one.
    least = min_p[:, None] * probabilities[:, :1]
    drop |= probabilities < least

    # Go back from the order of probabilities to that of ids.
    drop_by_id = torch.zeros_like(drop).scatter(-1, ids, drop)
    return logits.masked_fill(drop_by_id, -INF)


def stream_key(seed: int, stream: int) -> int:
    """Hash a stream's name to a signed 64-bit number."""
    # The finalizer of splitmix64, which changes half of the bits for neighbouring streams.
    x = (seed * 0x9E3779B97F4A7C15 + stream * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & _LOW
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _LOW
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _LOW
    x ^= x >> 31
    return x - (x >> 63 << 64)


def sample_tokens(logits: Tensor, kind: ChoiceParts, c: Controls, position: Tensor) -> Tensor:
    """Return a token for each row of logits [B, V], float32 or 64; `position` [B] is its place."""
    best = logits.argmax(-1)
    if not kind.sampled:
        return best
    is_sampled = c.temperature > 0
    # Greedy rows of the batch are computed with temperature 1 and dropped at the end.
    temperature = torch.where(is_sampled, c.temperature, 1.0)
    scaled = apply_temperature(logits.double(), temperature)
    if kind.filtered:
        scaled = filter_logits(scaled, c.top_k, c.top_p, c.min_p)
    drawn = (scaled + gumbel(c.key, position, logits.shape[-1])).argmax(-1)
    return torch.where(is_sampled, drawn, best)
