"""Generation from and into files: unconditional samples, and continuations of prompts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from meshwright.errors import BAD_DATA, UserError
from meshwright.generation.engine import LanguageModel
from meshwright.tokenizers import Tokenizer

# Prompts and the number of the first -> each prompt's new tokens, and whether its text ended.
Complete = Callable[[list[list[int]], int], list[tuple[list[int], bool]]]


def write_samples(path: str, count: int, tokenizer: Tokenizer, complete: Complete, batch: int) -> None:
    """Write `count` JSON lines {"text", "length", "finished"}, a micro-batch at a time.

    `length` counts the tokens before the end-of-document one; `finished` is whether that came.
    """
    seconds = []
    with open(path, "w", encoding="utf-8") as out:
        for first in range(0, count, batch):
            start = time.perf_counter()
            for ids, finished in complete([[tokenizer.eod]] * min(batch, count - first), first):
                line = {"text": tokenizer.decode(ids), "length": len(ids), "finished": finished}
                out.write(json.dumps(line, ensure_ascii=False) + "\n")
            out.flush()
            seconds.append(time.perf_counter() - start)
            print(f"Avg s/batch: {sum(seconds) / len(seconds):.3f}", flush=True)
    print(f"wrote {count} samples to {path}")


def write_continuations(
    lines: list[str], source: str, output: str, m: LanguageModel, complete: Complete, batch: int
) -> None:
    """Write the continuation of every line; an empty line is continued as an empty document."""
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            prompts.append(list(m.tokenizer.encode(line)))
        except UserError as error:
            raise UserError(f"--sample-input-file {source}:{number}: {error}", BAD_DATA) from None
    long = [f"line {n} has {len(ids)}" for n, ids in enumerate(prompts, 1) if len(ids) >= m.seq_length]
    if long:
        shown = ", ".join(long[:10]) + f" and {len(long) - 10} more" * (len(long) > 10)
        message = f"{shown} tokens; the model reads {m.seq_length}, shorten these lines"
        raise UserError(f"--sample-input-file {source}: {message}", BAD_DATA)
    with open(output, "w", encoding="utf-8") as out:
        for first in range(0, len(lines), batch):
            done = complete(prompts[first : first + batch], first)
            for line, (ids, _) in zip(lines[first:], done, strict=False):
                out.write(f"\nContext:{line}\n\nMegatron-LM:{m.tokenizer.decode(ids)}\n")
            out.flush()
    print(f"wrote {len(lines)} continuations to {output}")


def read_prompts(path: Path) -> list[str]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"--sample-input-file {path}: no such file", BAD_DATA) from None
    except UnicodeDecodeError as e:
        raise UserError(f"--sample-input-file {path}: byte {e.start} is not UTF-8", BAD_DATA) from None
    if not text.strip():
        raise UserError(f"--sample-input-file {path} is empty; write one prompt per line", BAD_DATA)
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
