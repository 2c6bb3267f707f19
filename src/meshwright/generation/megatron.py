"""The modes of Megatron-DeepSpeed's generate_samples_gpt.py, in its words."""

from __future__ import annotations

import json
import sys
import time

from meshwright.base.console import fit
from meshwright.base.errors import UserError
from meshwright.config.schema import Sampling
from meshwright.generation.decoder import complete, run_request
from meshwright.generation.language_model import LanguageModel
from meshwright.generation.requests import Completion, Request
from meshwright.generation.terminal import replace_surrogates


def write_samples(
    m: LanguageModel, path: str, count: int, options: Sampling, seed: int, batch: int
) -> None:
    """Write `count` JSON lines {"text", "length", "finished"}, a micro-batch at a time.

    `length` counts the tokens before the end-of-document one; `finished` is whether that came.
    """
    seconds = []
    with open(path, "w", encoding="utf-8") as out:
        for first in range(0, count, batch):
            start = time.perf_counter()
            requests = [
                Request([], options, seed, number)
                for number in range(first, min(first + batch, count))
            ]
            for text in complete(m, requests, batch):
                line = {"text": text.text, "length": len(text.tokens), "finished": text.ended}
                out.write(json.dumps(line, ensure_ascii=False) + "\n")
            out.flush()
            seconds.append(time.perf_counter() - start)
            print(f"Avg s/batch: {sum(seconds) / len(seconds):.3f}", flush=True)
    print(fit(f"wrote {count} samples to {path}"))


def talk(m: LanguageModel, options: Sampling, seed: int) -> None:
    """Continue each line that is typed, until a line is `stop` or the input ends (Ctrl-D)."""
    # Only a person at a terminal gets a cleared screen and has to press Enter.
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    answers = 0
    while (prompt := ask("\nContext prompt (stop to exit) >>> ")) is not None:
        if not prompt.strip():
            print("Prompt should not be empty!")
            continue
        try:
            ids = list(m.tokenizer.encode(prompt))
        except UserError as error:  # a typing mistake must not end the dialogue
            print(error)
            continue
        if len(ids) >= max(m.seq_length // 2, 2):
            print(
                f"\nContext length {len(ids)} \nPlease give smaller context (half of the sequence length)!"
            )
            continue
        if is_terminal:
            print("\033[2J\033[H", end="")
        print(f"\nContext: {prompt}\n\nMegatron-LM: ", end="", flush=True)
        request = Request(ids, options, seed, answers)
        text = Completion(m.tokenizer, request)
        for event in run_request(m, request):
            print(text.add(event), end="", flush=True)
        print()
        answers += 1
        if is_terminal and ask("\nPress Enter to continue >>>", "") is None:
            return


def ask(question: str, end: str = "stop") -> str | None:
    """Return the line that is typed, or None at the word `end` or the end of the input."""
    try:
        line = replace_surrogates(input(question))
    except EOFError:
        print()
        return None
    return None if end and line.strip() == end else line
