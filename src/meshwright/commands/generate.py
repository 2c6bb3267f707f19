"""`meshwright generate` and tools/generate_samples_gpt.py: samples, continuations, dialogue."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright import console
from meshwright import device as devices
from meshwright.commands import launch
from meshwright.errors import DONE, UserError
from meshwright.files import replacing
from meshwright.generation import prompts as prompt_files
from meshwright.generation.prompts import Prompt
from meshwright.generation.terminal import Terminal, accept_any_text, replace_surrogates
from meshwright.progress import new_bar
from meshwright.ranks.world import World, is_idle
from meshwright.settings import command, flags
from meshwright.settings.grammar import unescape
from meshwright.settings.schema import GenerateConfig

if TYPE_CHECKING:
    from meshwright.generation.engine import LanguageModel


def main(argv: list[str]) -> int:
    return launch.run_rank(argv, lambda words, world: command_line(argv, words, world))


def command_line(argv: list[str], words: list[str], world: World) -> int:
    about, prints = "Write text with a model.", world.rank == 0
    parsed = command.settings(GenerateConfig, words, "generate", about, "load", prints)
    if parsed is None:
        return DONE
    c, t = parsed.config, parsed.config.texts
    if is_idle(world, c.parallel.model_ranks, "generation"):
        return DONE
    if not parsed.dry_run and (status := launch.relaunch(c.parallel, ["generate", *argv])) is not None:
        return status
    prompts = read_prompts(c) if prints else []
    output = t.sample_output_file or f"{t.sample_input_file}.out"
    for flag, path, source in (
        ("--sample-output-file", output, t.sample_input_file),
        ("--output", t.output, t.prompts),
    ):
        if path and source and Path(path).resolve() == Path(source).resolve():
            raise UserError(f"{flag} {path} is the input file; name another file")

    # torch is imported only now, so that a mistake in the flags is reported at once.
    from meshwright.generation import engine, ranks

    is_megatrons = t.num_samples or t.sample_input_file or (t.dialogue == "megatron" and not prompts)
    console.set_stream("stdout" if is_megatrons else "stderr")  # else stdout is for text
    assert c.checkpoint.load
    given = flags.given_settings(parsed)
    if parsed.dry_run:
        fit = engine.open_checked(c.checkpoint.load, given, c.tokenizer)
        print(f"the flags fit step {fit.source.step} in {fit.source.root}; nothing was loaded and nothing written")
        return DONE
    if c.precision.deterministic_mode:
        devices.use_deterministic_algorithms()
    batch = c.training.micro_batch_size or 8
    most = c.sampling.out_seq_length
    advice = f"a smaller --micro-batch-size (now {batch}) or --max-new-tokens (now {most}), or --bf16,"
    with command.explain_out_of_memory(advice):
        return ranks.run_on_ranks(c, given, lambda m: write(c, m, prompts, output))


def read_prompts(c: GenerateConfig) -> list[Prompt]:
    """Return the prompts of the flags and of the files that they name."""
    t = c.texts
    usual = Prompt("", c.sampling, tuple(map(unescape, t.stop)), t.num_return_sequences, t.logprobs)
    if t.prompt is not None:
        return [dataclasses.replace(usual, text=replace_surrogates(t.prompt))]
    if t.sample_input_file:
        text = prompt_files.read_prompt_text(t.sample_input_file, "--sample-input-file")
        return prompt_files.prompts_of_lines(text, usual)
    return prompt_files.read_prompt_file(t.prompts, usual) if t.prompts else []


def write(c: GenerateConfig, m: LanguageModel, prompts: list[Prompt], output: str) -> None:
    """Write text in the mode that the flags ask for."""
    from meshwright.generation import batches, chat, megatron
    from meshwright.generation.dialogue import Dialogue

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
        chat.Chat(m, dialogue, s, tuple(map(unescape, t.stop)), seed, ("stop",)).run()


def write_texts(c: GenerateConfig, m: LanguageModel, prompts: list[Prompt], is_json: bool) -> None:
    """Write the texts of prompts to --output or standard output, with a bar and the speed."""
    from meshwright.generation import batches
    from meshwright.generation.beam import BeamOptions

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
    from meshwright.generation import batches
    from meshwright.generation.decoder import run_request
    from meshwright.generation.requests import Completion
    from meshwright.generation.text import gap

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
