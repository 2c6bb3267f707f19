"""The dialogue of Megatron-DeepSpeed's generate_samples_gpt.py, in its words."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from meshwright.errors import UserError
from meshwright.generation.stream import pieces
from meshwright.generation.terminal import replace_surrogates
from meshwright.tokenizers import Tokenizer

Continue = Callable[[list[int], int], Iterator[int]]  # prompt, number of the answer -> tokens


def talk(tokenizer: Tokenizer, continue_: Continue, seq_length: int) -> None:
    """Continue each line that is typed, until a line is `stop` or the input ends (Ctrl-D)."""
    # Only a person at a terminal gets a cleared screen and has to press Enter.
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    answers = 0
    while (prompt := ask("\nContext prompt (stop to exit) >>> ")) is not None:
        if not prompt.strip():
            print("Prompt should not be empty!")
            continue
        try:
            ids = list(tokenizer.encode(prompt))
        except UserError as error:  # a typing mistake must not end the dialogue
            print(error)
            continue
        if len(ids) >= max(seq_length // 2, 2):
            print(f"\nContext length {len(ids)} \nPlease give smaller context (half of the sequence length)!")
            continue
        if is_terminal:
            print("\033[2J\033[H", end="")
        print(f"\nContext: {prompt}\n\nMegatron-LM: ", end="", flush=True)
        for text in pieces(tokenizer, continue_(ids, answers)):
            print(text, end="", flush=True)
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
