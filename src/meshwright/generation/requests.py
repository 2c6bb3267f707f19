"""Requests for text, and what a decoder reports of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from meshwright.base.errors import NON_FINITE, UserError
from meshwright.config import check_values
from meshwright.config.problem import NAMES
from meshwright.config.schema import Sampling
from meshwright.data.tokenizers import Tokenizer
from meshwright.generation.text import TokenText

# an end-of-document token or a stop string; the number of tokens
Finish = Literal["stop", "length"]
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
        top_p_decay, top_p_floor: each token multiplies top_p by the decay, down to the floor.
        presence_penalty, frequency_penalty: subtracted from the logits of tokens that the
            continuation has, once and for each time.
        forbidden_pair: (a, b): token b never follows token a.
        echo: report the prompt's tokens too, with log-probabilities if those are asked for.
        is_alone: the text is read as if no prompt preceded it, as after a chat template. Some
            vocabularies then leave out the space before its first word.
    """

    prompt: list[int]
    options: Sampling = Sampling()
    seed: int = 1234
    stream: int = 0
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    echo: bool = False
    top_p_decay: float = 1.0
    top_p_floor: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    forbidden_pair: tuple[int, int] | None = None
    is_alone: bool = False

    @property
    def longest(self) -> int:
        """The most tokens of the prompt and its continuation."""
        return max(1, len(self.prompt)) + self.options.out_seq_length

    def problem(self) -> str:
        """Return why this request makes no sense, or ""."""
        count = self.options.out_seq_length
        if count < (0 if self.echo else 1):
            return f"max_new_tokens {count} must be above 0"
        # The bounds of the flag begin at 1, and those of a request with echo at 0.
        outside = check_values.out_of_bounds(
            dataclasses.replace(self.options, out_seq_length=count or 1)
        )
        if outside:
            return NAMES.render(outside[0].text)
        if self.logprobs is not None and self.logprobs < 0:
            return f"logprobs {self.logprobs} must be at least 0; leave it out for none"
        if "" in self.stop:
            return "a stop string is empty; leave it out"
        return ""

    def new_text(self, tokenizer: Tokenizer) -> TokenText:
        """Return the text of the continuation, to which its tokens are still to be given."""
        return TokenText(tokenizer, self.stop, () if self.is_alone else self.prompt)


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


class Completion:
    """The continuation of a prompt as its tokens come, without a final end-of-document token.

    Fields:
        text: what is certain of it, without a stop string and what follows that.
        prompt_tokens, prompt_logprobs, prompt_tops: with echo; the first token's logprob is None.
        ended: whether an end-of-document token came.
    """

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float | None] = []
        self.tops: list[Top] = []
        self.prompt_tokens: list[int] = []
        self.prompt_logprobs: list[float | None] = []
        self.prompt_tops: list[Top] = []
        self.text = ""
        self.finish: Finish | None = None
        self.ended = False
        self._eod = tokenizer.eod
        self._stream = request.new_text(tokenizer)

    def add(self, event: Event) -> str:
        """Add a token, and return the text that has become certain."""
        new = ""
        if event.echoed:
            self.prompt_tokens.append(event.token)
            self.prompt_logprobs.append(event.logprob)
            self.prompt_tops.append(event.top)
        elif event.token == self._eod:
            self.ended = True
        else:
            self.tokens.append(event.token)
            self.logprobs.append(event.logprob)
            self.tops.append(event.top)
            new = self._stream.push(event.token)
        self.text += new
        if event.finish:
            self.finish = event.finish
            new += self.close()
        return new

    def close(self) -> str:
        """Return the text still held back; the last token of a request does this too."""
        rest = self._stream.flush()
        self.text += rest
        return rest


def not_finite_error() -> UserError:
    message = "the model's logits are not finite; its weights are damaged, or float16 overflows (try bfloat16)"
    return UserError(message, NON_FINITE)


def text_until_stop(
    tokenizer: Tokenizer, request: Request, tokens: Sequence[int]
) -> tuple[str, bool]:
    """Return the text of a continuation up to a stop string, and whether there is one."""
    stream = request.new_text(tokenizer)
    text = stream.push(*tokens)
    return text + stream.flush(), stream.stopped
