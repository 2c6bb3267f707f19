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
from meshwright.kernels.references import upcast

SMALLEST_TOP_P = 1e-12  # of a top_p that decays: 0 would be all tokens
# Rows of SlotState.numbers. The first three are those of `sampling.control_numbers`.
TEMPERATURE, TOP_P, MIN_P, TOP_P_DECAY, TOP_P_FLOOR, REPETITION, PRESENCE, FREQUENCY = range(8)


def numbers_of(request: Request) -> list[float]:
    """Return the floats of a request, in the order of the rows of SlotState.numbers."""
    return [
        *sampling.control_numbers(request.options),
        request.top_p_decay,
        max(request.top_p_floor, SMALLEST_TOP_P),
        request.options.repetition_penalty,
        request.presence_penalty,
        request.frequency_penalty,
    ]


@dataclass
class DecoderRow:
    """A request and what the host knows of it."""

    id: int
    request: Request
    prompt: list[int]
    left: int  # tokens that are still to be computed
    count: int  # tokens that are to be reported
    kind: ChoiceParts
    text: TokenText | None  # with stop strings
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
        self.vocab = vocab
        self.device = device
        self.token, self.used, self.limit, self.top_k, self.key = torch.zeros(
            5, slots + 1, dtype=torch.int64
        ).to(device)
        # a token, and the one that may not follow it
        self.avoid = torch.full((2, slots + 1), -1).to(device)
        # The rows are named by the constants above, such as TOP_P.
        self.numbers = torch.zeros(8, slots + 1, dtype=torch.float64, device=device)
        self.active = torch.zeros(slots + 1, dtype=torch.bool, device=device)
        # [slots + 1, vocab] each, made when a penalty first needs it: which tokens a text has, and
        # how often its continuation has each.
        self.seen: Tensor | None = None
        self.counts: Tensor | None = None

    @property
    def rows(self) -> TextState:
        return TextState(self.token, self.used, self.limit, self.active)

    @property
    def draws(self) -> Draws:
        return Draws(self.numbers[TEMPERATURE], self.key)

    def admit(self, rows: list[DecoderRow]) -> None:
        """Describe new rows, whose prompts will be read next."""
        # All rows go to the device in two copies, one of integers and one of floats.
        words = torch.tensor([self.words_of(row) for row in rows])
        columns = devices.send(words.T.contiguous(), self.device)
        slots, used, limit, top_k, key, token, *pairs = columns
        self.used[slots] = used
        self.limit[slots] = limit
        self.top_k[slots] = top_k
        self.key[slots] = key
        self.token[slots] = token
        self.avoid[:, slots] = torch.stack(pairs)
        numbers = torch.tensor([numbers_of(row.request) for row in rows], dtype=torch.float64)
        self.numbers[:, slots] = devices.send(numbers.T, self.device)
        self.active[slots] = limit > used

        # A table of slots x vocabulary is made only once a request has a penalty that reads it.
        table = len(self.token), self.vocab
        if self.seen is None and any(row.kind.penalised for row in rows):
            self.seen = torch.zeros(table, dtype=torch.bool, device=self.device)
        if self.counts is None and any(row.kind.counting for row in rows):
            self.counts = torch.zeros(table, dtype=torch.int32, device=self.device)
        # A slot still has the tokens of the request that had it before.
        if self.counts is not None:
            self.counts[slots] = 0
        if self.seen is not None:
            self.seen[slots] = False
            for row in rows:
                self.seen[row.slot, self.send(row.prompt)] = True

    def words_of(self, row: DecoderRow) -> list[int]:
        """Return the integers of a row, in the order in which `admit` takes them apart."""
        request = row.request
        length = len(row.prompt)
        return [
            row.slot,
            length,
            length + row.count,
            request.options.top_k,
            sampling.stream_key(request.seed, request.stream),
            row.prompt[-1],
            *(request.forbidden_pair or (-1, -1)),
        ]

    def controls(self, slots: Tensor) -> Controls:
        temperature, top_p, min_p = self.numbers[: MIN_P + 1, slots]
        return Controls(temperature, top_p, min_p, self.top_k[slots], self.key[slots])

    def send(self, x: list[int] | list[list[int]]) -> Tensor:
        return devices.send(torch.tensor(x), self.device)


@dataclass
class Outputs:
    """The tokens that a pass has chosen, [B], and log-probabilities, [B] and [B, k], if wanted."""

    tokens: Tensor
    logprobs: Tensor | None = None
    values: Tensor | None = None
    ids: Tensor | None = None

    def of_row(self, i: int, k: int | None) -> tuple[float | None, Top]:
        """Return row i's log-probability and its k likeliest tokens."""
        # Other rows of the pass may have asked for log-probabilities, or for more tokens.
        if k is None or self.logprobs is None:
            return None, []
        assert self.values is not None and self.ids is not None
        ids = self.ids[i, :k].tolist()
        values = self.values[i, :k].tolist()
        top = list(zip(ids, values, strict=True))
        return float(self.logprobs[i]), top


def score_tokens(logits: Tensor, tokens: Tensor, k: int) -> Outputs:
    """Return the tokens' log-probabilities and the k likeliest tokens of logits [B, V]."""
    logprobs = upcast(logits).log_softmax(-1)
    # A vocabulary may have fewer tokens than are asked for.
    most = min(k, logprobs.shape[-1])
    values, ids = logprobs.topk(most, -1)
    own = logprobs.gather(-1, tokens[:, None])
    own = own.squeeze(1)
    return Outputs(tokens, own, values, ids)


def choose_next(
    s: SlotState, slots: Tensor, logits: Tensor, kind: ChoiceParts, k: int, eod: int
) -> Outputs:
    """Choose the next token of the slots' rows, and begin each row's next step.

    With k >= 0 return log-probabilities too. Nothing here waits for the device, so that it can be
    captured.
    """
    logits = upcast(logits)
    active = s.active[slots]
    position = s.used[slots]

    # Choose. The log-probabilities below are the model's own, of `logits`.
    allowed = penalise_rows(s, slots, logits, kind)
    new = sampling.sample_tokens(allowed, kind, s.controls(slots), position)
    # amax is not finite if there is a NaN, nor if all are -inf; single -inf are allowed.
    is_finite = logits.amax(-1).isfinite()
    outputs = Outputs(new) if k < 0 else score_tokens(logits, new, k)

    # Begin the next step.
    s.token[slots] = new
    if s.seen is not None:
        # True alone would be copied from the host
        s.seen[slots, new] = torch.ones_like(new, dtype=torch.bool)
    if kind.counting and s.counts is not None:
        s.counts[slots, new] += 1
    if kind.decaying:
        top_p = s.numbers[TOP_P, slots]
        decay = s.numbers[TOP_P_DECAY, slots]
        decayed = torch.maximum(top_p * decay, s.numbers[TOP_P_FLOOR, slots])
        # A row that does not decay keeps its top_p, which is off at 0 and must not be raised.
        s.numbers[TOP_P, slots] = torch.where(decay < 1, decayed, top_p)
    has_room = position + 1 < s.limit[slots]
    s.active[slots] = active & is_finite & (new != eod) & has_room

    # Instead of a token, BAD says that its logits were not finite, and NONE that its row had ended.
    reported = torch.where(is_finite, new, BAD)
    outputs.tokens = torch.where(active, reported, NONE)
    return outputs


def penalise_rows(s: SlotState, slots: Tensor, logits: Tensor, kind: ChoiceParts) -> Tensor:
    """Return the logits [B, V] after forbidden pairs and penalties, as far as a row has them."""
    if kind.avoiding:
        # A row's pair of tokens (last, never) says that the second must not follow the first.
        last, never = s.avoid[:, slots].unsqueeze(2)
        tokens = torch.arange(s.vocab, device=logits.device)
        follows_last = s.token[slots, None] == last
        is_forbidden = (tokens == never) & follows_last
        logits = logits.masked_fill(is_forbidden, float("-inf"))
    if kind.penalised and s.seen is not None:
        penalty = s.numbers[REPETITION, slots]
        logits = sampling.penalise(logits, s.seen[slots], penalty)
    if kind.counting and s.counts is not None:
        presence = s.numbers[PRESENCE, slots]
        frequency = s.numbers[FREQUENCY, slots]
        logits = sampling.penalise_counts(logits, s.counts[slots], presence, frequency)
    return logits
