"""Texts for many prompts of unequal lengths; a slot that becomes free takes the next one."""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.errors import BAD_DATA, USAGE, UserError
from meshwright.generation.beam import BeamOptions, BeamText, search_beams
from meshwright.generation.decoder import run_requests
from meshwright.generation.engine import LanguageModel
from meshwright.generation.prompts import Prompt, refuse_all
from meshwright.generation.requests import Completion, Request
from meshwright.generation.text import gap


@dataclass
class PromptTexts:
    """A prompt with its number and tokens, and its texts as they come."""

    number: int
    prompt: Prompt
    ids: list[int]
    texts: list[Completion] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return len(self.texts) == self.prompt.count and all(text.finish for text in self.texts)

    def requests(self, seed: int, first: int) -> list[Request]:
        """Return a request for each text; with a seed of its own a prompt depends on no other."""
        p = self.prompt
        streams = range(p.count) if p.seed is not None else range(first, first + p.count)
        own = seed if p.seed is None else p.seed
        return [Request(self.ids, p.options, own, stream, p.stop, p.logprobs) for stream in streams]


def encode_prompts(m: LanguageModel, prompts: Sequence[Prompt], where: str) -> list[PromptTexts]:
    """Return a job for each prompt; list those that the model cannot read."""
    jobs, faults = [], []
    for number, prompt in enumerate(prompts, 1):
        name = f"{where}, prompt {number}" if len(prompts) > 1 else where
        try:
            ids = list(m.tokenizer.encode(prompt.text))
        except UserError as error:
            faults.append(f"{name}: {error}")
            continue
        if len(ids) >= m.seq_length:
            faults.append(f"{name} has {len(ids)} tokens; the model reads {m.seq_length}, give a shorter one")
        jobs.append(PromptTexts(number - 1, prompt, ids))
    refuse_all(faults, BAD_DATA if len(prompts) > 1 else USAGE)
    return jobs


def generate_texts(
    m: LanguageModel, jobs: Sequence[PromptTexts], seed: int, slots: int, advance: Callable[[], None] = lambda: None
) -> Iterator[PromptTexts]:
    """Yield the jobs in their order, with their texts; call `advance` after each text."""
    longest = max((max(1, len(j.ids)) + j.prompt.options.out_seq_length for j in jobs), default=1)
    decoder = m.decoder(max(1, min(slots, sum(job.prompt.count for job in jobs))), longest)
    begun: dict[int, Completion] = {}

    def requests() -> Iterator[Request]:
        first = 0
        for job in jobs:
            for number, request in enumerate(job.requests(seed, first), first):
                begun[number] = Completion(m.tokenizer, request)
                job.texts.append(begun[number])
                yield request
            first += job.prompt.count

    unfinished = deque(jobs)
    with contextlib.closing(run_requests(decoder, requests())) as events:
        for number, event in events:
            begun[number].add(event)
            if event.finish:
                del begun[number]
                advance()
            while unfinished and unfinished[0].is_complete:
                yield unfinished.popleft()


def search_texts(
    m: LanguageModel, jobs: Iterable[PromptTexts], beam: BeamOptions, advance: Callable[[], None] = lambda: None
) -> Iterator[PromptTexts]:
    """Yield the jobs with the best texts of a beam search."""
    for job in jobs:
        (request, *_) = job.requests(0, 0)
        job.texts = [*search_beams(m, request, beam)[: job.prompt.count]]
        for _ in range(job.prompt.count):
            advance()
        yield job


def as_text(m: LanguageModel, job: PromptTexts) -> str:
    """Return each text behind its prompt."""
    return "".join(f"{job.prompt.text}{gap(m.tokenizer)}{text.text}\n" for text in job.texts)


def as_megatron(m: LanguageModel, job: PromptTexts) -> str:
    """Return a text in the form of Megatron-DeepSpeed's script."""
    return "".join(f"\nContext:{job.prompt.text}\n\nMegatron-LM:{text.text}\n" for text in job.texts)


def as_json(m: LanguageModel, job: PromptTexts) -> str:
    """Return a JSON line for each text."""
    lines = []
    for number, text in enumerate(job.texts):
        row: dict[str, Any] = {"id": job.prompt.id} if job.prompt.id is not None else {}
        row |= {"index": job.number, "sequence": number, "prompt": job.prompt.text, "text": text.text}
        row |= {"tokens": text.tokens, "finish_reason": text.finish}
        if isinstance(text, BeamText):
            row["score"] = text.score
        if job.prompt.logprobs is not None:
            row["logprobs"] = text.logprobs
        if job.prompt.logprobs:
            row["top_logprobs"] = [{str(i): p for i, p in top} for top in text.tops]
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    return "".join(lines)


class Speed:
    """Texts, tokens and seconds since its creation."""

    def __init__(self) -> None:
        self.start, self.texts, self.tokens = time.perf_counter(), 0, 0

    def count(self, texts: Sequence[Completion]) -> None:
        self.texts += len(texts)
        self.tokens += sum(len(text.tokens) + text.ended for text in texts)

    def line(self) -> str:
        seconds = time.perf_counter() - self.start
        rate = self.tokens / max(seconds, 1e-9)
        s = "" if self.texts == 1 else "s"
        return f"{self.texts:,} text{s}, {self.tokens:,} tokens in {seconds:.1f} s: {rate:,.0f} tokens/s"
