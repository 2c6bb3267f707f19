"""Rows of a decoder: what the host knows of them, and what their next step needs on the device."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.base import device as devices
from meshwright.generation import sampling
from meshwright.generation.requests import Request, Top
from meshwright.generation.sampling import ChoiceParts, Controls
from meshwright.generation.text import TokenText
from meshwright.kernels.decode import BAD, NONE, Draws, TextState
from meshwright.kernels.twins import upcast

SMALLEST_TOP_P = 1e-12  # of a top_p that decays: 0 would be all tokens


@dataclass
class DecoderRow:
    """A request and what the host knows of it."""

    id: int
    request: Request
    prompt: list[int]
    left: int  # tokens that are still to be computed
    count: int  # tokens that are to be reported
    kind: ChoiceParts
    text: TokenText | None = None  # with stop strings
    slot: int = -1
    tokens: list[int] = field(default_factory=list)  # reported
    is_done: bool = False

    @property
    def length(self) -> int:
        """Tokens of the text as far as it is computed."""
        return len(self.prompt) + self.count - self.left


class SlotState:
    """A step's view of the slots, [slots + 1] each; the last one belongs to nobody, for padding."""

    def __init__(self, slots: int, vocab: int, device: torch.device) -> None:
        self.vocab, self.device = vocab, device
        self.token, self.used, self.limit, self.top_k, self.key = torch.zeros(
            5, slots + 1, dtype=torch.int64
        ).to(device)
        # a token, and the one that may not follow it
        self.avoid = torch.full((2, slots + 1), -1).to(device)
        self.numbers = torch.zeros(8, slots + 1, dtype=torch.float64, device=device)
        self.active = torch.zeros(slots + 1, dtype=torch.bool, device=device)
        # [slots + 1, vocab], if a penalty needs it: tokens of texts; how often a new part has each.
        self.seen: Tensor | None = None
        self.counts: Tensor | None = None

    @property
    def rows(self) -> TextState:
        return TextState(self.token, self.used, self.limit, self.active)

    @property
    def draws(self) -> Draws:
        return Draws(self.numbers[0], self.key)

    def admit(self, rows: list[DecoderRow]) -> None:
        """Describe new rows, whose prompts will be read next."""
        words, numbers = [], []
        for r in rows:
            name = sampling.stream_key(r.request.seed, r.request.stream)
            length, pair = len(r.prompt), r.request.forbidden_pair or (-1, -1)
            words.append(
                [
                    r.slot,
                    length,
                    length + r.count,
                    r.request.options.top_k,
                    name,
                    r.prompt[-1],
                    *pair,
                ]
            )
            decay, floor = r.request.top_p_decay, max(r.request.top_p_floor, SMALLEST_TOP_P)
            penalties = (
                r.request.options.repetition_penalty,
                r.request.presence_penalty,
                r.request.frequency_penalty,
            )
            numbers.append([*sampling.control_numbers(r.request.options), decay, floor, *penalties])
        slots, used, limit, top_k, key, token, *pairs = self.send(
            torch.tensor(words).T.contiguous()
        )
        self.used[slots], self.limit[slots], self.top_k[slots], self.key[slots] = (
            used,
            limit,
            top_k,
            key,
        )
        self.token[slots], self.avoid[:, slots] = token, torch.stack(pairs)
        self.numbers[:, slots] = self.send(torch.tensor(numbers, dtype=torch.float64).T)
        self.active[slots] = limit > used
        if any(r.kind.penalised for r in rows) and self.seen is None:
            self.seen = torch.zeros(
                len(self.token), self.vocab, dtype=torch.bool, device=self.device
            )
        if any(r.kind.counting for r in rows) and self.counts is None:
            self.counts = torch.zeros(
                len(self.token), self.vocab, dtype=torch.int32, device=self.device
            )
        if self.counts is not None:
            self.counts[slots] = 0
        if self.seen is not None:
            self.seen[slots] = False
            for r in rows:
                self.seen[r.slot, self.send(torch.tensor(r.prompt))] = True

    def controls(self, slots: Tensor) -> Controls:
        temperature, top_p, min_p = self.numbers[:3, slots]
        return Controls(temperature, top_p, min_p, self.top_k[slots], self.key[slots])

    def send(self, x: Tensor) -> Tensor:
        return devices.send(x, self.device)


@dataclass
class Outputs:
    """The tokens that a pass has chosen, [B], and log-probabilities, [B] and [B, k], if wanted."""

    tokens: Tensor
    logprobs: Tensor | None = None
    values: Tensor | None = None
    ids: Tensor | None = None

    def of_row(self, i: int, k: int | None) -> tuple[float | None, Top]:
        """Return row i's log-probability and its k likeliest tokens."""
        if k is None or self.logprobs is None:
            return None, []
        assert self.values is not None and self.ids is not None
        return float(self.logprobs[i]), list(
            zip(self.ids[i, :k].tolist(), self.values[i, :k].tolist(), strict=True)
        )


def score_tokens(logits: Tensor, tokens: Tensor, k: int) -> Outputs:
    """Return the tokens' log-probabilities and the k likeliest tokens of logits [B, V]."""
    logprobs = upcast(logits).log_softmax(-1)
    values, ids = logprobs.topk(min(k, logprobs.shape[-1]), -1)
    return Outputs(tokens, logprobs.gather(-1, tokens[:, None])[:, 0], values, ids)


def choose_next(
    s: SlotState, slots: Tensor, logits: Tensor, kind: ChoiceParts, k: int, eod: int
) -> Outputs:
    """Choose the next token of the slots' rows, and begin each row's next step.

    With k >= 0 return log-probabilities too. Nothing here waits for the device, so that it can be
    captured.
    """
    logits, active, position = upcast(logits), s.active[slots], s.used[slots]
    allowed = logits
    if kind.avoiding:
        last, never = s.avoid[:, slots]
        places = torch.arange(s.vocab, device=logits.device) == never[:, None]
        allowed = logits.masked_fill(places & (s.token[slots] == last)[:, None], float("-inf"))
    if kind.penalised and s.seen is not None:
        allowed = sampling.penalise(allowed, s.seen[slots], s.numbers[5, slots])
    if kind.counting and s.counts is not None:
        allowed = sampling.penalise_counts(allowed, s.counts[slots], *s.numbers[6:, slots])
    new = sampling.sample_tokens(allowed, kind, s.controls(slots), position)
    if kind.counting and s.counts is not None:
        s.counts[slots, new] += 1
    if kind.decaying:
        top_p, decay, least = s.numbers[1, slots], *s.numbers[3:5, slots]
        s.numbers[1, slots] = torch.where(decay < 1, torch.maximum(top_p * decay, least), top_p)
    is_finite = logits.amax(-1).isfinite()  # not if there is a NaN, nor if all are -inf
    outputs = Outputs(new) if k < 0 else score_tokens(logits, new, k)
    s.token[slots] = new
    if s.seen is not None:
        # True alone would be copied from the host
        s.seen[slots, new] = torch.ones_like(new, dtype=torch.bool)
    s.active[slots] = active & is_finite & (new != eod) & (position + 1 < s.limit[slots])
    outputs.tokens = torch.where(active, torch.where(is_finite, new, BAD), NONE)
    return outputs
