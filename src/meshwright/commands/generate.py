"""`meshwright generate` and the documents' tools/generate_samples_gpt.py: samples, continuations, a dialogue."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright import console
from meshwright import device as devices
from meshwright.console import notice
from meshwright.errors import BAD_DATA, DONE, USAGE, UserError
from meshwright.launch.world import is_first_process
from meshwright.settings import command
from meshwright.settings.schema import GenerateConfig

if TYPE_CHECKING:
    import torch

    from meshwright.generation import engine
    from meshwright.tokenizers import Tokenizer

Complete = Callable[[list[list[int]], int], list[tuple[list[int], bool]]]  # prompts, number of the first


def main(argv: list[str]) -> int:
    if not is_first_process("generation"):
        return DONE
    parsed = command.settings(GenerateConfig, argv, "generate", "Write text with a model.", "load")
    if parsed is None:
        return DONE
    c, s = parsed.config, parsed.config.sampling
    lines = read_prompts(Path(s.sample_input_file)) if s.sample_input_file else []
    output = s.sample_output_file or f"{s.sample_input_file}.out"
    if s.sample_input_file and Path(output).resolve() == Path(s.sample_input_file).resolve():
        raise UserError(f"--sample-output-file {output} is the input: its prompts would be lost")

    # torch only now: a mistake in the flags is told at once
    from meshwright.device import use_deterministic_algorithms
    from meshwright.generation import engine
    from meshwright.optim.loss_scale import dtype_of

    console.set_stream("stderr" if s.prompt is not None else "stdout")  # stdout is for text
    assert c.checkpoint.load
    given = engine.given(parsed)
    if parsed.dry_run:
        found = engine.find(c.checkpoint.load, given, c.tokenizer)
        print(f"the flags fit step {found.source.step} in {found.source.root}; nothing was loaded and nothing written")
        return DONE
    if c.precision.deterministic_mode:
        use_deterministic_algorithms()
    device = devices.pick(c.parallel.device)
    batch = c.training.micro_batch_size or 8
    less = f"a smaller --micro-batch-size (now {batch}) or --out-seq-length (now {s.out_seq_length}), or --bf16,"
    with command.telling_memory(less):
        run = engine.load(c.checkpoint.load, given, c.tokenizer, dtype_of(c.precision), device)
        write(c, run, lines, output)
    return DONE


def write(c: GenerateConfig, run: engine.Run, lines: list[str], output: str) -> None:
    """The text, in the mode that the flags ask for."""
    from meshwright.generation import chat, engine, sampling
    from meshwright.tokenizers import Null

    s = c.sampling
    eod = run.tokenizer.eod

    def options(prompts: list[list[int]], first: int) -> engine.Options:
        """The row `i` of these prompts has the sample number `first + i`, which alone seeds its random numbers."""
        streams = [sampling.generator(c.training.seed, first + row) for row in range(len(prompts))]

        def choose(row: int, logits: torch.Tensor) -> int:
            return sampling.choose(logits, s, streams[row])

        return [p or [eod] for p in prompts], s.out_seq_length, run.length, eod, choose, not s.recompute

    def one(prompt: list[int], number: int) -> Iterator[int]:
        """The new tokens of one prompt as they come."""
        return (i for (i,) in engine.decode(run.model, *options([prompt], number)) if i is not None and i != eod)

    def complete(prompts: list[list[int]], first: int) -> list[tuple[list[int], bool]]:
        return engine.complete(run.model, *options(prompts, first))

    for stream in (sys.stdin, sys.stdout):  # a model may write, and a terminal send, what its encoding does not have
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    batch = int(c.training.micro_batch_size or 8)
    if s.num_samples:
        assert s.genfile
        unconditional(s.genfile, s.num_samples, run.tokenizer, complete, batch)
    elif s.sample_input_file:
        from_file(lines, s.sample_input_file, output, run.tokenizer, complete, batch, run.length)
    elif s.prompt is not None:
        prompt = chat.clean(s.prompt)
        ids = run.tokenizer.encode(prompt)
        if len(ids) >= run.length:
            raise UserError(
                f"--prompt has {len(ids)} tokens, the model reads {run.length}: nothing could follow", USAGE
            )
        print(prompt, end=" " if run.tokenizer.name == Null.name else "")
        new = 0

        def counted() -> Iterator[int]:
            nonlocal new
            for token in one(ids, 0):
                new += 1
                yield token

        for text in chat.pieces(run.tokenizer, counted()):
            print(text, end="", flush=True)
        print()
        if len(ids) + new == run.length and new < s.out_seq_length:
            notice(f"note: the text ends where the model does, after {run.length} tokens")
    else:
        chat.talk(run.tokenizer, one, run.length)


def unconditional(genfile: str, n: int, tokenizer: Tokenizer, complete: Complete, batch: int) -> None:
    """Exactly n JSON lines {"text", "length", "finished"}, a micro-batch at a time.

    `length` counts the generated tokens before the end-of-document one, `finished` says that it came.
    """
    took = []
    with open(genfile, "w", encoding="utf-8") as out:
        for first in range(0, n, batch):
            start = time.perf_counter()
            for ids, finished in complete([[tokenizer.eod]] * min(batch, n - first), first):
                line = {"text": tokenizer.decode(ids), "length": len(ids), "finished": finished}
                out.write(json.dumps(line, ensure_ascii=False) + "\n")
            out.flush()
            took.append(time.perf_counter() - start)
            print(f"Avg s/batch: {sum(took) / len(took):.3f}", flush=True)
    print(f"wrote {n} samples to {genfile}")


def from_file(
    lines: list[str], name: str, output: str, tokenizer: Tokenizer, complete: Complete, batch: int, longest: int
) -> None:
    """The continuation of every line; an empty line is continued as an empty document."""
    prompts = []
    for number, line in enumerate(lines, 1):
        with naming(f"--sample-input-file {name}:{number}"):
            prompts.append(tokenizer.encode(line))
    long = [f"line {n} has {len(ids)}" for n, ids in enumerate(prompts, 1) if len(ids) >= longest]
    if long:
        shown = ", ".join(long[:10]) + f" and {len(long) - 10} more" * (len(long) > 10)
        raise UserError(
            f"--sample-input-file {name}: {shown} tokens; the model reads {longest}, so nothing could follow", BAD_DATA
        )
    with open(output, "w", encoding="utf-8") as out:
        for first in range(0, len(lines), batch):
            done = complete(prompts[first : first + batch], first)
            for line, (ids, _) in zip(lines[first:], done, strict=False):
                out.write(f"\nContext:{line}\n\nMegatron-LM:{tokenizer.decode(ids)}\n")
            out.flush()
    print(f"wrote {len(lines)} continuations to {output}")


def read_prompts(path: Path) -> list[str]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"--sample-input-file {path}: no such file", BAD_DATA) from None
    except UnicodeDecodeError as e:
        raise UserError(f"--sample-input-file {path}: byte {e.start} is not UTF-8", BAD_DATA) from None
    lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    if not text.strip():
        raise UserError(f"--sample-input-file {path} is empty: one prompt a line", BAD_DATA)
    return lines


@contextlib.contextmanager
def naming(where: str) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}", BAD_DATA) from None
