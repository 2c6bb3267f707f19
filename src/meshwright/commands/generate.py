"""`meshwright generate` and tools/generate_samples_gpt.py: samples, continuations, dialogue."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright import console
from meshwright import device as devices
from meshwright.commands import launch
from meshwright.errors import DONE, USAGE, UserError
from meshwright.launch.world import World, is_idle
from meshwright.settings import command, flags
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
    c, s = parsed.config, parsed.config.sampling
    if is_idle(world, c.parallel.model_ranks, "generation"):
        return DONE
    if not parsed.dry_run and (status := launch.relaunch(c.parallel, ["generate", *argv])) is not None:
        return status

    # torch is imported only now, so that a mistake in the flags is reported at once.
    from meshwright.generation import engine, files, ranks

    lines = files.read_prompts(Path(s.sample_input_file)) if s.sample_input_file and prints else []
    output = s.sample_output_file or f"{s.sample_input_file}.out"
    if s.sample_input_file and Path(output).resolve() == Path(s.sample_input_file).resolve():
        raise UserError(f"--sample-output-file {output} is the input file; name another file")
    console.set_stream("stderr" if s.prompt is not None else "stdout")  # stdout is for text
    assert c.checkpoint.load
    given = flags.given(parsed)
    if parsed.dry_run:
        fit = engine.open_fit(c.checkpoint.load, given, c.tokenizer)
        print(f"the flags fit step {fit.source.step} in {fit.source.root}; nothing was loaded and nothing written")
        return DONE
    if c.precision.deterministic_mode:
        devices.use_deterministic_algorithms()
    batch = c.training.micro_batch_size or 8
    advice = f"a smaller --micro-batch-size (now {batch}) or --max-new-tokens (now {s.out_seq_length}), or --bf16,"
    with command.explain_out_of_memory(advice):
        return ranks.run(c, given, lambda m: write(c, m, lines, output))


def write(c: GenerateConfig, m: LanguageModel, lines: list[str], output: str) -> None:
    """Write text in the mode that the flags ask for."""
    from meshwright.generation import chat, files

    s = c.sampling
    for stream in (sys.stdin, sys.stdout):  # their encoding may lack characters that a model or a terminal sends
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")

    def complete(prompts: list[list[int]], first: int) -> list[tuple[list[int], bool]]:
        return m.complete(prompts, s, c.training.seed, first)

    batch = int(c.training.micro_batch_size or 8)
    if s.num_samples:
        assert s.genfile
        files.write_samples(s.genfile, s.num_samples, m.tokenizer, complete, batch)
    elif s.sample_input_file:
        files.write_continuations(lines, s.sample_input_file, output, m, complete, batch)
    elif s.prompt is not None:
        print_continuation(c, m, chat.replace_surrogates(s.prompt))
    else:
        talk = chat.talk_like_megatron if s.dialogue == "megatron" else chat.talk
        talk(m.tokenizer, lambda ids, number: tokens(c, m, ids, number), m.seq_length)


def tokens(c: GenerateConfig, m: LanguageModel, prompt: list[int], number: int) -> Iterator[int]:
    """Yield the new tokens of one prompt as they come, without the end-of-document one."""
    from meshwright.generation.decoder import stream
    from meshwright.generation.requests import Request

    events = stream(m, Request(prompt, c.sampling, c.training.seed, number))
    return (event.token for event in events if event.token != m.tokenizer.eod)


def print_continuation(c: GenerateConfig, m: LanguageModel, prompt: str) -> None:
    from meshwright.generation import chat
    from meshwright.tokenizers import Null

    ids = m.tokenizer.encode(prompt)
    if len(ids) >= m.seq_length:
        raise UserError(f"--prompt has {len(ids)} tokens; the model reads {m.seq_length}, give a shorter one", USAGE)
    new: list[int] = []
    before = f"{prompt}{' ' * (m.tokenizer.name == Null.name)}"
    chat.print_pieces(before, m.tokenizer, chat.recorded(tokens(c, m, list(ids), 0), new))
    if len(ids) + len(new) == m.seq_length and len(new) < c.sampling.out_seq_length:
        console.notice(f"note: the text ends at the model's sequence length, {m.seq_length} tokens")
