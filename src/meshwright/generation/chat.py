"""A dialogue in the terminal: a prompt is read, its continuation appears while it is generated."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Callable, Iterable, Iterator

from meshwright.errors import UserError
from meshwright.tokenizers import Tokenizer

Continue = Callable[[list[int], int], Iterator[int]]  # prompt, number of the answer -> tokens


def talk(tokenizer: Tokenizer, continue_: Continue, longest: int) -> None:
    """Ask until the whole line is `stop`, or the input ends (Ctrl-D)."""
    person = sys.stdin.isatty() and sys.stdout.isatty()  # a program gets no cleared screen and need not press Enter
    answers = 0
    while True:
        try:
            prompt = clean(input("\nContext prompt (stop to exit) >>> "))
        except EOFError:
            print()
            return
        if prompt.strip() == "stop":
            return
        if not prompt.strip():
            print("Prompt should not be empty!")
            continue
        try:
            ids = tokenizer.encode(prompt)
        except UserError as error:  # a slip of the fingers must not end the dialogue
            print(error)
            continue
        if len(ids) >= max(longest // 2, 2):
            print(f"\nContext length {len(ids)} \nPlease give smaller context (half of the sequence length)!")
            continue
        if person:
            print("\033[2J\033[H", end="")
        print(f"\nContext: {prompt}\n\nMegatron-LM: ", end="", flush=True)
        for text in pieces(tokenizer, continue_(ids, answers)):
            print(text, end="", flush=True)
        print()
        answers += 1
        if person:
            try:
                input("\nPress Enter to continue >>>")
            except EOFError:
                return


def pieces(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """Text as it comes; a character whose bytes are spread over several tokens waits until it is whole.

    All tokens are decoded each time, since some vocabularies write a token in another way at the start of a text.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    all_ids: list[int] = []
    told = 0
    for i in ids:
        all_ids.append(i)
        raw = tokenizer.decode_bytes(all_ids)
        if not raw.endswith(b"\xef\xbf\xbd"):  # the replacement character: a library that decodes to text did not wait
            yield decoder.decode(raw[told:])
            told = len(raw)
    yield decoder.decode(tokenizer.decode_bytes(all_ids)[told:], final=True)


def clean(text: str) -> str:
    """What a terminal or a command line gave, without the half characters that stand for bytes that are not UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
