"""Write texts for many prompts, in the mode that the flags of `meshwright generate` ask for."""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.base import console
from meshwright.base.errors import BAD_DATA, USAGE, UserError
from meshwright.base.files import replacing
from meshwright.base.progress import progress_bar
from meshwright.config.grammar import unescape
from meshwright.config.problem import SettingsError
from meshwright.config.schema import GenerateConfig
from meshwright.generation import megatron
from meshwright.generation.beam import BeamOptions, BeamText, search_beams
from meshwright.generation.chat import Chat
from meshwright.generation.decoder import run_request, run_requests
from meshwright.generation.dialogue import Dialogue
from meshwright.generation.language_model import LanguageModel
from meshwright.generation.prompts import Prompt, refuse_all
from meshwright.generation.requests import Completion, Request
from meshwright.generation.terminal import Terminal, accept_any_text
from meshwright.generation.text import gap

Advance = Callable[[int], None]  # a bar, by so many texts


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
        if p.seed is not None:
            seed = p.seed
            first = 0
        return [
            Request(self.ids, p.options, seed, stream, p.stop, p.logprobs)
            for stream in range(first, first + p.count)
        ]


def encode_prompts(m: LanguageModel, prompts: Sequence[Prompt], where: str) -> list[PromptTexts]:
    """Return a job for each prompt; list those that the model cannot read."""
    jobs = []
    faults = []
    for number, prompt in enumerate(prompts):
        name = f"{where}, prompt {number + 1}" if len(prompts) > 1 else where
        try:
            ids = list(m.tokenizer.encode(prompt.text))
        except UserError as error:
            faults.append(f"{name}: {error}")
            continue
        if len(ids) >= m.seq_length:
            faults.append(
                f"{name} has {len(ids)} tokens; the model reads {m.seq_length}, give a shorter one"
            )
        jobs.append(PromptTexts(number, prompt, ids))
    # One prompt is that of a flag, several are those of a file.
    refuse_all(faults, BAD_DATA if len(prompts) > 1 else USAGE)
    return jobs


def generate_texts(
    m: LanguageModel,
    jobs: Sequence[PromptTexts],
    seed: int,
    slots: int,
    advance: Advance = lambda texts: None,
) -> Iterator[PromptTexts]:
    """Yield the jobs in their order, with their texts; call `advance` after each text."""
    texts = sum(job.prompt.count for job in jobs)
    lengths = [max(1, len(job.ids)) + job.prompt.options.out_seq_length for job in jobs]
    decoder = m.decoder(max(1, min(slots, texts)), max(lengths, default=1))
    begun: dict[int, Completion] = {}

    def requests() -> Iterator[Request]:
        # The decoder numbers requests as they are taken, so `first` counts along.
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
                advance(1)
            # A later job may be complete before an earlier one, and waits for it.
            while unfinished and unfinished[0].is_complete:
                yield unfinished.popleft()


def search_texts(
    m: LanguageModel,
    jobs: Iterable[PromptTexts],
    beam: BeamOptions,
    advance: Advance,
) -> Iterator[PromptTexts]:
    """Yield the jobs with the best texts of a beam search."""
    for job in jobs:
        # One search finds all texts of a prompt, so any of its requests does; no seed is used.
        request = job.requests(0, 0)[0]
        best = search_beams(m, request, beam)
        job.texts = list(best[: job.prompt.count])
        advance(job.prompt.count)
        yield job


def as_text(m: LanguageModel, job: PromptTexts) -> str:
    """Return each text behind its prompt."""
    return "".join(f"{job.prompt.text}{gap(m.tokenizer)}{text.text}\n" for text in job.texts)


def as_megatron(m: LanguageModel, job: PromptTexts) -> str:
    """Return a text in the form of Megatron-DeepSpeed's script."""
    return "".join(
        f"\nContext:{job.prompt.text}\n\nMegatron-LM:{text.text}\n" for text in job.texts
    )


def as_json(m: LanguageModel, job: PromptTexts) -> str:
    """Return a JSON line for each text."""
    lines = []
    for number, text in enumerate(job.texts):
        row: dict[str, Any] = {"id": job.prompt.id} if job.prompt.id is not None else {}
        row |= {
            "index": job.number,
            "sequence": number,
            "prompt": job.prompt.text,
            "text": text.text,
            "tokens": text.tokens,
            "finish_reason": text.finish,
        }
        if isinstance(text, BeamText):
            row["score"] = text.score
        if job.prompt.logprobs is not None:
            row["logprobs"] = text.logprobs
        # 0 asks for the chosen tokens' alone.
        if job.prompt.logprobs:
            row["top_logprobs"] = [{str(i): p for i, p in top} for top in text.tops]
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    return "".join(lines)


class Speed:
    """Texts, tokens and seconds since its creation."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.texts = 0
        self.tokens = 0

    def count(self, texts: Sequence[Completion]) -> None:
        self.texts += len(texts)
        for text in texts:
            # The end of document was generated too, though it is not among the tokens.
            self.tokens += len(text.tokens) + text.ended

    def line(self) -> str:
        seconds = time.perf_counter() - self.start
        rate = self.tokens / max(seconds, 1e-9)
        plural = "" if self.texts == 1 else "s"
        made = f"{self.texts:,} text{plural}, {self.tokens:,} tokens"
        return f"{made} in {seconds:.1f} s: {rate:,.0f} tokens/s"


def write_output(c: GenerateConfig, m: LanguageModel, prompts: list[Prompt], output: str) -> None:
    """Write samples, continuations of prompts, or a dialogue; `output` is --sample-output-file."""
    t = c.texts
    s = c.sampling
    seed = c.training.seed
    accept_any_text()
    if t.num_samples:
        assert t.genfile
        megatron.write_samples(m, t.genfile, t.num_samples, s, seed, slots_of(c))
    elif t.sample_input_file:
        jobs = encode_prompts(m, prompts, f"--sample-input-file {t.sample_input_file}")
        with open(output, "w", encoding="utf-8") as file:
            for job in generate_texts(m, jobs, seed, slots_of(c)):
                file.write(as_megatron(m, job))
                file.flush()
        print(console.fit(f"wrote {len(jobs)} continuations to {output}"))
    elif prompts:
        is_json = t.json or (t.output or "").endswith(".jsonl")
        # A single text is shown while it is generated, like a dialogue's; all others when complete.
        if t.prompts or is_json or t.output or t.beam_width or t.num_return_sequences > 1:
            write_texts(c, m, prompts, is_json)
        else:
            print_continuation(c, m, prompts[0])
    elif t.dialogue == "megatron":
        megatron.talk(m, s, seed)
    else:
        dialogue = Dialogue(m.tokenizer, None, m.seq_length)
        # Megatron's dialogue ends at a line `stop`, so input that was written for it ends so too.
        chat = Chat(m, dialogue, s, tuple(map(unescape, t.stop)), seed, ("stop",))
        chat.run()
        # An empty pipe is most often a flag that was forgotten.
        if not chat.inputs and not chat.terminal.is_person:
            raise SettingsError(
                "standard input holds no prompt; give {prompt=TEXT} or {prompts=FILE}, or lines to read"
            )


def slots_of(c: GenerateConfig) -> int:
    """Return how many texts advance at once."""
    return int(c.training.micro_batch_size or 8)


def write_texts(c: GenerateConfig, m: LanguageModel, prompts: list[Prompt], is_json: bool) -> None:
    """Write the texts of prompts to --output or standard output, with a bar and the speed."""
    t = c.texts
    where = "--prompt" if t.prompt is not None else f"--prompts {t.prompts}"
    jobs = encode_prompts(m, prompts, where)
    form = as_json if is_json else as_text
    speed = Speed()
    total = sum(p.count for p in prompts)
    with progress_bar("texts", total, "count") as advance, opened(t.output) as write_out:
        if t.beam_width:
            penalty = 1.0 if t.length_penalty is None else t.length_penalty
            done = search_texts(m, jobs, BeamOptions(t.beam_width, penalty), advance)
        else:
            done = generate_texts(m, jobs, c.training.seed, slots_of(c), advance)
        for job in done:
            write_out(form(m, job))
            speed.count(job.texts)
    console.notice(speed.line() + (f"; wrote {t.output}" if t.output else ""))


@contextlib.contextmanager
def opened(path: str | None) -> Iterator[Callable[[str], object]]:
    """Yield a function that writes text to a file, which appears complete, or to stdout."""
    if path is None:
        yield Terminal().write
        return
    with replacing(Path(path), typed=True) as file:
        yield lambda text: file.write(text.encode())


def print_continuation(c: GenerateConfig, m: LanguageModel, prompt: Prompt) -> None:
    """Print a prompt and its continuation while it is generated."""
    (job,) = encode_prompts(m, [prompt], "--prompt")
    (request,) = job.requests(c.training.seed, 0)
    terminal = Terminal()
    speed = Speed()
    text = Completion(m.tokenizer, request)
    terminal.write(prompt.text + gap(m.tokenizer))
    for event in run_request(m, request):
        terminal.write(text.add(event))
    terminal.write("\n")
    speed.count([text])
    if text.finish == "length" and len(text.tokens) < c.sampling.out_seq_length:
        console.notice(f"note: the text ends at the model's sequence length, {m.seq_length} tokens")
    console.notice(speed.line())
