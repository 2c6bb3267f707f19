"""`meshwright generate` and tools/generate_samples_gpt.py: samples, continuations, dialogue."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.base import console
from meshwright.base.errors import UserError
from meshwright.cli.reading import ReadingCommand, ReadingTask
from meshwright.config import flags
from meshwright.config.grammar import unescape
from meshwright.config.schema import GenerateConfig
from meshwright.generation.prompts import (
    Prompt,
    prompts_of_lines,
    read_prompt_file,
    read_prompt_text,
)
from meshwright.generation.terminal import replace_surrogates

if TYPE_CHECKING:
    from meshwright.generation.language_model import LanguageModel


def prepare_generate(parsed: flags.Parsed[GenerateConfig], is_rank_0: bool) -> ReadingTask:
    c = parsed.config
    t = c.texts
    prompts = gather_prompts(c) if is_rank_0 else []
    # A file that is read and written at once would be lost.
    output = t.sample_output_file or f"{t.sample_input_file}.out"
    for flag, path, source in (
        ("--sample-output-file", output, t.sample_input_file),
        ("--output", t.output, t.prompts),
    ):
        if path and source and Path(path).resolve() == Path(source).resolve():
            raise UserError(f"{flag} {path} is the input file; name another file")

    def work(m: LanguageModel) -> None:
        from meshwright.generation.batches import write_output

        most = c.sampling.out_seq_length
        if parsed.sources["out_seq_length"] != "default" and most > m.seq_length:
            short = f"the model reads {m.seq_length} tokens, prompt and continuation together"
            console.notice(f"note: {short}; a text ends there, before --max-new-tokens {most}")
        write_output(c, m, prompts, output)

    # Megatron's scripts print their log beside the texts.
    is_megatrons = (
        t.num_samples or t.sample_input_file or (t.dialogue == "megatron" and not prompts)
    )
    batch = c.training.micro_batch_size or 8
    most = c.sampling.out_seq_length
    less = (
        f"a smaller --micro-batch-size (now {batch}) or --max-new-tokens (now {most}), or --bf16,"
    )
    # else stdout is for text
    return ReadingTask(work, less, "stdout" if is_megatrons else "stderr")


def gather_prompts(c: GenerateConfig) -> list[Prompt]:
    """Return the prompts of the flags and of the files that they name."""
    t = c.texts
    # What the flags say holds for each prompt that does not say otherwise.
    usual = Prompt("", c.sampling, tuple(map(unescape, t.stop)), t.num_return_sequences, t.logprobs)
    if t.prompt is not None:
        return [dataclasses.replace(usual, text=replace_surrogates(t.prompt))]
    if t.sample_input_file:
        text = read_prompt_text(t.sample_input_file, "--sample-input-file")
        return prompts_of_lines(text, usual)
    return read_prompt_file(t.prompts, usual) if t.prompts else []


main = ReadingCommand(
    "generate", GenerateConfig, "Write text with a model.", "generation", prepare_generate
).main
