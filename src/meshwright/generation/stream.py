"""Text from tokens as they come: whole characters only, and nothing of a string that ends it."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence

from meshwright.tokenizers import Null, Tokenizer


class TextStream:
    """Decodes one text token by token.

    `push` returns the text that is certain: a character of several tokens waits until it is
    complete, and the beginning of a stop string until it is known to go on otherwise. Some
    vocabularies write a token differently at the beginning of a text; `before` are the tokens that
    precede it.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), before: Sequence[int] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, [s for s in stop if s]
        self.stopped = False  # whether a stop string came
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        # The tokens of the last piece, and those after it; between bare ids stands `gap`.
        self._window = [] if gap(tokenizer) else list(before[-1:])
        self._done = len(tokenizer.decode_bytes(self._window))  # bytes of the window that were decoded
        self._held = ""

    def push(self, token: int) -> str:
        self._window.append(token)
        raw = self.tokenizer.decode_bytes(self._window)
        # A library that decodes to text puts U+FFFD for an incomplete character.
        if raw.endswith(b"\xef\xbf\xbd"):
            return ""
        text = self._characters.decode(raw[self._done :])
        del self._window[:-1]
        self._done = len(self.tokenizer.decode_bytes(self._window))
        return self._release(text)

    def finish(self) -> str:
        """Return what waits at the end of the text."""
        rest = self.tokenizer.decode_bytes(self._window)[self._done :]
        text = self._release(self._characters.decode(rest, final=True))
        held, self._held = self._held, ""
        return text + held

    def _release(self, text: str) -> str:
        """Return the text so far up to a stop string, or to what may become one."""
        if self.stopped:
            return ""
        text = self._held + text
        found = [at for s in self.stop if (at := text.find(s)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        held = max((n for s in self.stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def pieces(
    tokenizer: Tokenizer, ids: Iterable[int], stop: Sequence[str] = (), before: Sequence[int] = ()
) -> Iterator[str]:
    """Yield the text of each token as it comes, and what waits at the end."""
    stream = TextStream(tokenizer, stop, before)
    for token in ids:
        yield stream.push(token)
    yield stream.finish()


def text_of(tokenizer: Tokenizer, ids: Iterable[int], stop: Sequence[str] = (), before: Sequence[int] = ()) -> str:
    """Return the whole text, up to the first stop string."""
    return "".join(pieces(tokenizer, ids, stop, before))


def gap(tokenizer: Tokenizer) -> str:
    """Return what stands between a prompt and its continuation: a space between bare ids."""
    return " " if tokenizer.name == Null.name else ""
