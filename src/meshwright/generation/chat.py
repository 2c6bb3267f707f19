"""A dialogue in the terminal: read a prompt, print its continuation while it is generated."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator

from meshwright.errors import UserError
from meshwright.generation.stream import pieces
from meshwright.tokenizers import Null, Tokenizer

Continue = Callable[[list[int], int], Iterator[int]]  # prompt, number of the answer -> tokens


def talk(tokenizer: Tokenizer, continue_: Continue, seq_length: int) -> None:
    """Continue each line that is typed, until a line is `stop` or the input ends (Ctrl-D).

    Ctrl-C ends a continuation early.
    """
    answers = 0
    if sys.stdin.isatty():
        print("Type the beginning of a text; stop or Ctrl-D ends, Ctrl-C cuts a continuation short.")
    while (prompt := ask("> ")) is not None:
        ids = encode(tokenizer, prompt) if prompt.strip() else None
        if ids is None:
            continue
        if len(ids) >= seq_length:
            print(f"this has {len(ids)} tokens; the model reads {seq_length}, give a shorter beginning")
            continue
        try:
            print_pieces(f"{prompt}{' ' * (tokenizer.name == Null.name)}", tokenizer, continue_(ids, answers))
        except KeyboardInterrupt:
            print(" ...")
        answers += 1


def talk_like_megatron(tokenizer: Tokenizer, continue_: Continue, seq_length: int) -> None:
    """Hold the dialogue of Megatron-DeepSpeed's generate_samples_gpt.py, in its words."""
    # Only a person at a terminal gets a cleared screen and has to press Enter.
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    answers = 0
    while (prompt := ask("\nContext prompt (stop to exit) >>> ")) is not None:
        if not prompt.strip():
            print("Prompt should not be empty!")
            continue
        if (ids := encode(tokenizer, prompt)) is None:
            continue
        if len(ids) >= max(seq_length // 2, 2):
            print(f"\nContext length {len(ids)} \nPlease give smaller context (half of the sequence length)!")
            continue
        if is_terminal:
            print("\033[2J\033[H", end="")
        print_pieces(f"\nContext: {prompt}\n\nMegatron-LM: ", tokenizer, continue_(ids, answers))
        answers += 1
        if is_terminal:
            try:
                input("\nPress Enter to continue >>>")
            except EOFError:
                return


def ask(question: str) -> str | None:
    """Return the line that is typed, or None at `stop` or the end of the input."""
    try:
        prompt = replace_surrogates(input(question))
    except EOFError:
        print()
        return None
    return None if prompt.strip() == "stop" else prompt


def encode(tokenizer: Tokenizer, prompt: str) -> list[int] | None:
    """Return ids, or None after printing why not: a typing mistake must not end the dialogue."""
    try:
        return list(tokenizer.encode(prompt))
    except UserError as error:
        print(error)
        return None


def print_pieces(before: str, tokenizer: Tokenizer, ids: Iterable[int]) -> None:
    print(before, end="", flush=True)
    for text in pieces(tokenizer, ids):
        print(text, end="", flush=True)
    print()


def recorded(ids: Iterable[int], into: list[int]) -> Iterator[int]:
    """Yield ids and append each to a list."""
    for i in ids:
        into.append(i)
        yield i


def replace_surrogates(text: str) -> str:
    """Replace the surrogates that stand for bytes of a command line that are not UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
