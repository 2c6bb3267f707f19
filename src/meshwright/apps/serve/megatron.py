"""Megatron-LM's `PUT /api`: its arguments, and its answer.

Where Megatron passes over an unknown argument it is refused here. The texts end before the end of
document, which Megatron spells out.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.apps.serve import openai
from meshwright.apps.serve.openai import ServedModel
from meshwright.apps.serve.scheduler import QueuedRequest, Scheduler
from meshwright.base.fields import Fields, Refusal
from meshwright.base.python310 import timeout
from meshwright.config.schema import Sampling
from meshwright.data.tokenizers import Tokenizer
from meshwright.generation.beam import BeamOptions, begin_beam_search
from meshwright.generation.requests import Event, Request

OLD_ARGUMENTS = {"max_len": "tokens_to_generate", "sentences": "prompts"}


@dataclass(frozen=True)
class MegatronCall:
    """A checked request."""

    requests: list[Request]
    logprobs: bool
    beam: BeamOptions | None


def read_call(f: Fields, served: ServedModel) -> MegatronCall:
    for old, new in OLD_ARGUMENTS.items():
        if f.take(old) is not None:
            raise Refusal(f"{old} is no longer used; give {new}", old)
    tokenizer = served.model.tokenizer
    logprobs = f.flag("logprobs")
    prompts = encode_prompt_texts(f, served)
    length = f.integer("tokens_to_generate", 64, 0, 2**31 - 1)
    if not length and not logprobs:
        raise Refusal(
            "tokens_to_generate 0 scores the prompts; it needs logprobs true", "tokens_to_generate"
        )
    options, decay, floor = read_options(f, length)
    double = f.flag("stop_on_double_eol")
    single = f.flag("stop_on_eol")
    ends: tuple[str, ...] = ()
    if double or single:
        ends = ("\n\n",) if double else ("\n",)
    pair = None
    if f.flag("prevent_newline_after_colon"):
        pair = openai.encode_text(served, ":")[0], openai.encode_text(served, "\n")[0]
    seed = f.integer("random_seed", -1, -1, 2**63 - 1)
    f.flag("no_log")  # no text is ever logged
    width = f.integer("beam_width", None, 1, openai.MOST_TEXTS)
    stop_token = f.integer("stop_token", tokenizer.eod, 0, served.model.model.vocab - 1)
    penalty = f.number("length_penalty", 1.0, -100, 100)
    f.refuse_rest()
    # Arguments that would have no effect are refused, as unknown ones are.
    if width is None and (stop_token, penalty) != (tokenizer.eod, 1.0):
        raise Refusal("stop_token and length_penalty need beam_width; leave them out", "beam_width")
    if width is not None and (len(prompts) > 1 or logprobs or ends or pair):
        raise Refusal(
            "beam_width takes one prompt, without logprobs and rules for ends of lines",
            "beam_width",
        )
    for prompt in prompts:
        if len(prompt) + length > served.model.seq_length:
            both = f"{len(prompt)} tokens and tokens_to_generate {length}"
            raise Refusal(
                f"this model reads {served.model.seq_length} tokens, but a prompt has {both}",
                "prompts",
            )
    # Without a seed, each call draws one of its own.
    seed = secrets.randbits(31) if seed < 0 else seed
    wanted = 0 if logprobs else None
    first = Request(
        [], options, seed, stop=ends, logprobs=wanted, echo=logprobs, forbidden_pair=pair
    )
    first = replace(first, top_p_decay=decay, top_p_floor=floor)
    each = [replace(first, prompt=prompt, stream=number) for number, prompt in enumerate(prompts)]
    return MegatronCall(
        each, logprobs, None if width is None else BeamOptions(width, penalty, stop_token)
    )


def encode_prompt_texts(f: Fields, served: ServedModel) -> list[list[int]]:
    texts = f.take("prompts")
    bos = f.flag("add_BOS")
    if not isinstance(texts, list) or not texts or not all(isinstance(p, str) for p in texts):
        raise Refusal(f"prompts is required: a list of 1 to {openai.MOST_TEXTS} strings", "prompts")
    if len(texts) > openai.MOST_TEXTS:
        raise Refusal(
            f"there are {len(texts)} prompts; give at most {openai.MOST_TEXTS}", "prompts"
        )
    if not bos and "" in texts:
        raise Refusal("empty prompts need add_BOS true", "prompts")
    tokenizer = served.model.tokenizer
    return [[tokenizer.eod] * bos + openai.encode_text(served, p) for p in texts]


def read_options(f: Fields, length: int) -> tuple[Sampling, float, float]:
    """Return the flags of sampling, and the decay of top_p with its lower end."""
    temperature = f.number("temperature", 1.0, 0, 100)
    top_k = f.integer("top_k", 0, 0, 1000)
    if not temperature:
        raise Refusal(
            "temperature must be above 0; top_k 1 takes the likeliest token", "temperature"
        )
    top_p, decay, bound = (
        f.number(name, 0.0, 0, 1) for name in ("top_p", "top_p_decay", "top_p_bound")
    )
    if top_k and top_p:
        raise Refusal("top_k and top_p cannot be combined; give one", "top_p")
    if decay and not top_p:
        raise Refusal("top_p_decay needs top_p above 0", "top_p_decay")
    if bound and (not decay or bound > top_p):
        raise Refusal("top_p_bound needs top_p_decay, and must be at most top_p", "top_p_bound")
    return (
        Sampling(temperature, top_k=top_k, top_p=top_p, out_seq_length=length),
        decay or 1.0,
        bound,
    )


async def answer_megatron(
    call: MegatronCall, served: ServedModel, scheduler: Scheduler, seconds: float
) -> dict[str, Any]:
    tokenizer = served.model.tokenizer
    if call.beam is not None:
        request = call.requests[0]
        async with timeout(seconds):
            best = await scheduler.call(begin_beam_search(served.model, request, call.beam))
        rows = [request.prompt + text.tokens for text in best]
        scores = [text.score for text in best]
        return {
            "text": list(map(tokenizer.decode, rows)),
            "segments": segments(tokenizer, rows),
            "scores": scores,
        }
    # Without beams the texts are decoded beside those of other requests.
    job = QueuedRequest(call.requests, seconds)
    events: list[list[Event]] = [[] for _ in call.requests]
    with scheduler.generating(job):
        async for row, event in job.events():
            events[row].append(event)
    texts = [
        end_text(request, tokenizer, of_text)
        for request, of_text in zip(call.requests, events, strict=True)
    ]
    # The first token of a text follows nothing.
    logprobs = (
        [[e.logprob for e in text if e.logprob is not None] for text in texts]
        if call.logprobs
        else None
    )
    # An echoed prompt is among the tokens of its text already.
    rows = [
        [*([] if r.echo else r.prompt), *(e.token for e in t)]
        for r, t in zip(call.requests, texts, strict=True)
    ]
    return {
        "text": [tokenizer.decode(ids) for ids in rows],
        "segments": segments(tokenizer, rows),
        "logprobs": logprobs if call.logprobs else None,
    }


def end_text(request: Request, tokenizer: Tokenizer, events: list[Event]) -> list[Event]:
    """Return a text's tokens without the end of document; its line may have ended earlier.

    The decoder ends a text at an empty line inside the continuation; the first of its two ends of
    line may be the prompt's.
    """
    if events and events[-1].finish == "stop" and events[-1].token == tokenizer.eod:
        events = events[:-1]
    # The prompt ends a line, so an empty line needs one more end of line alone.
    is_open = request.stop == ("\n\n",) and tokenizer.decode(request.prompt[-1:]).endswith("\n")
    if not is_open:
        return events
    for n, event in enumerate(events):
        if not event.echoed:  # the first of the continuation
            begins_empty = tokenizer.decode([event.token]).startswith("\n")
            return events[: n + 1] if begins_empty else events
    return events


def segments(tokenizer: Tokenizer, rows: Sequence[list[int]]) -> list[list[str]]:
    return [[tokenizer.decode([i]) for i in ids] for ids in rows]
