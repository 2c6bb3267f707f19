"""Write text in the mode that the flags of `meshwright generate` ask for."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from meshwright import console
from meshwright.files import replacing
from meshwright.generation import batches, megatron
from meshwright.generation.beam import BeamOptions
from meshwright.generation.chat import Chat
from meshwright.generation.decoder import run_request
from meshwright.generation.dialogue import Dialogue
from meshwright.generation.engine import LanguageModel
from meshwright.generation.prompts import Prompt
from meshwright.generation.requests import Completion
from meshwright.generation.terminal import Terminal, accept_any_text
from meshwright.generation.text import gap
from meshwright.progress import new_bar
from meshwright.settings.grammar import unescape
from meshwright.settings.schema import GenerateConfig


def write_output(c: GenerateConfig, m: LanguageModel, prompts: list[Prompt], output: str) -> None:
    """Write samples, continuations of prompts, or a dialogue; `output` is --sample-output-file."""
    t, s, seed = c.texts, c.sampling, c.training.seed
    accept_any_text()
    batch = int(c.training.micro_batch_size or 8)
    if t.num_samples:
        assert t.genfile
        megatron.write_samples(m, t.genfile, t.num_samples, s, seed, batch)
    elif t.sample_input_file:
        jobs = batches.encode_prompts(m, prompts, f"--sample-input-file {t.sample_input_file}")
        with open(output, "w", encoding="utf-8") as file:
            for job in batches.generate_texts(m, jobs, seed, batch):
                file.write(batches.as_megatron(m, job))
                file.flush()
        print(f"wrote {len(jobs)} continuations to {output}")
    elif prompts:
        is_json = t.json or (t.output or "").endswith(".jsonl")
        if t.prompts or is_json or t.output or t.beam_width or t.num_return_sequences > 1:
            write_texts(c, m, prompts, is_json)
        else:
            print_continuation(c, m, prompts[0])
    elif t.dialogue == "megatron":
        megatron.talk(m, s, seed)
    else:
        dialogue = Dialogue(m.tokenizer, None, m.seq_length)
        Chat(m, dialogue, s, tuple(map(unescape, t.stop)), seed, ("stop",)).run()


def write_texts(c: GenerateConfig, m: LanguageModel, prompts: list[Prompt], is_json: bool) -> None:
    """Write the texts of prompts to --output or standard output, with a bar and the speed."""
    t = c.texts
    where = "--prompt" if t.prompt is not None else f"--prompts {t.prompts}"
    jobs = batches.encode_prompts(m, prompts, where)
    form = batches.as_json if is_json else batches.as_text
    speed = batches.Speed()
    with bar(sum(p.count for p in prompts)) as advance, opened(t.output) as write_out:
        if t.beam_width:
            done = batches.search_texts(
                m, jobs, BeamOptions(t.beam_width, 1.0 if t.length_penalty is None else t.length_penalty), advance
            )
        else:
            done = batches.generate_texts(m, jobs, c.training.seed, int(c.training.micro_batch_size or 8), advance)
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
    with replacing(Path(path)) as file:
        yield lambda text: file.write(text.encode())


@contextlib.contextmanager
def bar(total: int) -> Iterator[Callable[[], None]]:
    """Show a bar of texts on a terminal; yield a function that advances it by one."""
    if not sys.stderr.isatty() or total < 2:
        yield lambda: None
        return
    progress, task = new_bar("texts", "bar", "count", "left", total=total)
    with progress:
        yield lambda: progress.advance(task)


def print_continuation(c: GenerateConfig, m: LanguageModel, prompt: Prompt) -> None:
    """Print a prompt and its continuation while it is generated."""
    (job,) = batches.encode_prompts(m, [prompt], "--prompt")
    (request,) = job.requests(c.training.seed, 0)
    terminal, speed, text = Terminal(), batches.Speed(), Completion(m.tokenizer, request)
    terminal.write(prompt.text + gap(m.tokenizer))
    for event in run_request(m, request):
        terminal.write(text.add(event))
    terminal.write("\n")
    speed.count([text])
    if text.finish == "length" and len(text.tokens) < c.sampling.out_seq_length:
        console.notice(f"note: the text ends at the model's sequence length, {m.seq_length} tokens")
    console.notice(speed.line())
