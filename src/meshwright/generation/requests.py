"""Requests for text, and what a decoder reports of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from meshwright.settings.schema import Sampling

Finish = Literal["stop", "length"]  # an end-of-document token or a stop string; the number of tokens
Top = list[tuple[int, float]]  # the likeliest tokens with their log-probabilities, the best first


@dataclass(frozen=True)
class Request:
    """A prompt and how to continue it.

    Fields:
        prompt: token ids; an empty prompt begins a document.
        options: the flags of sampling, of which `out_seq_length` may be 0 with `echo`.
        seed, stream: name the row's random numbers, which depend on nothing else but the position.
        stop: strings that end the text and do not belong to it.
        logprobs: None, or k >= 0 for the chosen token's log-probability and the k likeliest tokens.
        decay, least: after each token top_p is multiplied by the one, down to the other.
        avoid: (a, b): token b never follows token a.
        echo: report the prompt's tokens too, with log-probabilities if those are asked for.
    """

    prompt: list[int]
    options: Sampling = Sampling()
    seed: int = 1234
    stream: int = 0
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    echo: bool = False
    decay: float = 1.0
    least: float = 0.0
    avoid: tuple[int, int] | None = None


@dataclass(frozen=True)
class Event:
    """One token of a request.

    Log-probabilities are the model's own, before penalty, temperature and filters; a text's first
    token has none. The last event has `finish`; with "stop" its token is the end of document, or
    completes a stop string.
    """

    id: int
    token: int
    logprob: float | None = None
    top: Top = field(default_factory=list)
    finish: Finish | None = None
    echoed: bool = False  # a token of the prompt


@dataclass
class Completion:
    """The continuation of a prompt, without a final end-of-document token."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    tops: list[Top] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)  # with echo; so are the next two
    prompt_logprobs: list[float | None] = field(default_factory=list)  # the first token's is None
    prompt_tops: list[Top] = field(default_factory=list)
    text: str = ""  # without what follows a stop string
    finish: Finish = "length"
    ended: bool = False  # by an end-of-document token

    def add(self, event: Event, eod: int) -> None:
        self.finish = event.finish or self.finish
        if not event.echoed and event.token == eod:
            self.ended = True
            return
        echoed = self.prompt_tokens, self.prompt_logprobs, self.prompt_tops
        tokens, logprobs, tops = echoed if event.echoed else (self.tokens, self.logprobs, self.tops)
        tokens.append(event.token)
        logprobs.append(event.logprob)
        tops.append(event.top)


def cut(text: str, stop: Sequence[str]) -> str:
    """Return the text before the first stop string."""
    return text[: min([at for s in stop if (at := text.find(s)) >= 0], default=len(text))]
