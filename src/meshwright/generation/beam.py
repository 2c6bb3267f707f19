"""Beam search: the likeliest texts that keeping a few candidates at each step finds.

Hand-written because transformers' search runs only transformers' models. The rules are its rules
with `early_stopping=False`: a text's score is the sum of its tokens' log-probabilities, divided by
their number (an end of document counts) to the power of the length penalty; a text is finished if
it ends while among the best `width` candidates; and the search ends when `width` texts are finished
and the best candidate's score, at its present length, is not above the worst of theirs.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.base import device as devices
from meshwright.base.errors import UserError
from meshwright.generation.language_model import LanguageModel
from meshwright.generation.requests import Completion, Request, not_finite_error, text_until_stop
from meshwright.kernels.references import upcast
from meshwright.model.cache import Cache, ContinuedTexts
from meshwright.model.positions import Positions


@dataclass(frozen=True)
class BeamOptions:
    """A search's size: candidates that are kept, and the power of a text's length in its score."""

    width: int
    length_penalty: float = 1.0
    stop_token: int | None = None  # ends a text; none: the end of document


class BeamText(Completion):
    """A text of a search; the best one has the highest score."""

    score = 0.0


@dataclass(frozen=True)
class Candidate:
    """A text that may go on, with the sum and the list of its tokens' log-probabilities."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    total: float = 0.0

    def extend(self, token: int, total: float) -> Candidate:
        return Candidate((*self.tokens, token), (*self.logprobs, total - self.total), total)

    def score(self, penalty: float) -> float:
        return float(self.total / len(self.tokens) ** penalty)


def search_beams(m: LanguageModel, request: Request, beam: BeamOptions) -> list[BeamText]:
    """Return the `beam.width` best continuations of a prompt, the best first, or fewer.

    The request's sampling flags are not used, except its number of tokens.
    """
    searching = begin_beam_search(m, request, beam)
    while True:
        try:
            next(searching)
        except StopIteration as end:
            texts: list[BeamText] = end.value
            return texts


def begin_beam_search(
    m: LanguageModel, request: Request, beam: BeamOptions
) -> Generator[None, None, list[BeamText]]:
    """Yield after each step of a search, and return what `search_beams` does."""
    tokenizer = m.tokenizer
    prompt = request.prompt or [tokenizer.eod]
    eod = tokenizer.eod if beam.stop_token is None else beam.stop_token
    width = beam.width
    if width < 1:
        raise UserError(f"a beam width of {width} is too small; give 1 or more")
    if len(prompt) >= m.seq_length:
        raise UserError(
            f"the prompt has {len(prompt)} tokens; the model reads {m.seq_length}, shorten the prompt"
        )
    most = min(request.options.out_seq_length, m.seq_length - len(prompt))

    def has_ended(c: Candidate) -> bool:
        if len(c.tokens) == most or c.tokens[-1] == eod:
            return True
        return bool(request.stop) and text_until_stop(tokenizer, request, c.tokens)[1]

    done: list[tuple[float, Candidate]] = []
    running = [Candidate()]
    steps = _Steps(m, Cache(width, len(prompt) + most))
    logits = steps.read([prompt])
    while True:
        # An end of document takes at most one extension of each candidate, so that of twice as
        # many as are kept enough go on.
        goes_on: list[tuple[int, Candidate]] = []
        for rank, (row, candidate) in enumerate(_best(logits, running, 2 * width)):
            if not has_ended(candidate):
                goes_on.append((row, candidate))
            elif rank < width:
                # A text that ends further behind is dropped, as transformers does.
                done.append((candidate.score(beam.length_penalty), candidate))
        goes_on = goes_on[:width]
        # A stable sort: of equal scores the text that was finished first stays.
        done = sorted(done, key=lambda pair: -pair[0])[:width]
        if not goes_on:
            break
        best_running = goes_on[0][1].score(beam.length_penalty)
        if len(done) == width and best_running <= done[-1][0]:
            break
        running = [candidate for _, candidate in goes_on]
        yield
        logits = steps.advance([row for row, _ in goes_on], running)
    return [_finished(m, request, eod, score, candidate) for score, candidate in done]


def _best(logits: Tensor, running: list[Candidate], count: int) -> Iterator[tuple[int, Candidate]]:
    """Yield the likeliest extensions of the candidates, each with the number of what it extends."""
    # float64, so that sums of long texts keep the order of their last tokens
    totals = [[c.total] for c in running]
    before = torch.tensor(totals, dtype=torch.float64, device=logits.device)
    logprobs = upcast(logits).log_softmax(-1)
    totals_by_token = (logprobs + before).flatten()
    most = min(count, len(totals_by_token))
    values, flat_ids = totals_by_token.topk(most)
    if not values[0].isfinite():
        raise not_finite_error()
    vocab = logits.shape[-1]
    for total, flat_id in zip(values.tolist(), flat_ids.tolist(), strict=True):
        row, token = divmod(flat_id, vocab)
        # With few candidates and a small vocabulary, impossible extensions may be among the best.
        if total > float("-inf"):
            yield row, running[row].extend(token, total)


def _finished(m: LanguageModel, request: Request, eod: int, score: float, c: Candidate) -> BeamText:
    out = BeamText(m.tokenizer, request)
    out.tokens = list(c.tokens)
    out.logprobs = list(c.logprobs)
    out.ended = c.tokens[-1] == eod
    if out.ended:
        # It counted for the score, but is no part of the text.
        out.tokens.pop()
        out.logprobs.pop()
    out.text, stopped = text_until_stop(m.tokenizer, request, out.tokens)
    out.score = score
    out.finish = "stop" if out.ended or stopped else "length"
    return out


class _Steps:
    """The model's passes over the prompt and over the candidates, which share one cache."""

    def __init__(self, m: LanguageModel, cache: Cache) -> None:
        self.m = m
        self.cache = cache
        self.used = 0

    @torch.inference_mode()
    def advance(self, rows: list[int], running: list[Candidate]) -> Tensor:
        """Return the logits [B, V] behind candidates, of which the i-th continues `rows[i]`."""
        self.m.rearrange(self.cache, self._send(rows), self.used)
        return self.read([[c.tokens[-1]] for c in running])

    @torch.inference_mode()
    def read(self, tokens: list[list[int]]) -> Tensor:
        """Return the logits [B, V] behind the prompt or the next tokens."""
        before = self.used
        self.used += len(tokens[0])
        slots = self._send(list(range(len(tokens))))
        seen = self.used if before else 0
        where = Positions(
            cached=ContinuedTexts(self.cache, slots, torch.full_like(slots, before), seen)
        )
        logits = self.m.forward(self._send(tokens), where, last_only=True)
        # The rows that pad the vocabulary to a multiple are no tokens.
        return logits[:, -1, : self.m.model.vocab]

    def _send(self, x: list[int] | list[list[int]]) -> Tensor:
        return devices.send(torch.tensor(x), self.m.device)
