"""A dialogue in the terminal: a prompt is read, its continuation appears while it is generated."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Callable, Iterator

from meshwright.tokenizers import Tokenizer

Continue = Callable[[list[int], int], Iterator[int]]  # prompt, number of the answer -> tokens


def talk(tokenizer: Tokenizer, continue_: Continue, longest: int) -> None:
    """Ask until the whole line is `stop`, or the input ends (Ctrl-D)."""
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    answers = 0
    while True:
        try:
            prompt = input("\nContext prompt (stop to exit) >>> ")
        except EOFError:
            print()
            return
        if prompt.strip() == "stop":
            return
        if not prompt.strip():
            print("Prompt should not be empty!")
            continue
        ids = tokenizer.encode(prompt)
        if len(ids) >= longest // 2:
            print(f"\nContext length {len(ids)} \nPlease give smaller context (half of the sequence length)!")
            continue
        if interactive:
            print("\033[2J\033[H", end="")
        print(f"\nContext: {prompt}\n\nMegatron-LM: ", end="", flush=True)
        for text in pieces(tokenizer, continue_(ids, answers)):
            print(text, end="", flush=True)
        print()
        answers += 1
        if interactive:
            try:
                input("\nPress Enter to continue >>>")
            except EOFError:
                return


def pieces(tokenizer: Tokenizer, ids: Iterator[int]) -> Iterator[str]:
    """Text as it comes; a character whose bytes are spread over several tokens waits until it is whole."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for i in ids:
        yield decoder.decode(tokenizer.decode_bytes([i]))
    yield decoder.decode(b"", final=True)
