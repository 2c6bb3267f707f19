"""Turn streamed tokens into text, holding back incomplete characters and possible stop strings."""

from __future__ import annotations

import codecs
import os
from collections.abc import Sequence

from meshwright.data.tokenizers import Null, Tokenizer

REPLACEMENT = "\ufffd"  # stands for bytes that are no character


class TokenText:
    """The text of tokens as they come, up to a stop string.

    `push` returns the text that is certain: a character of several tokens waits until it is
    complete, and the beginning of a stop string until it is known to go on otherwise. Some
    vocabularies write a token differently at the beginning of a text; `before` are the tokens that
    precede it.

    Fields:
        stopped: whether a stop string came.
        decoded: number of characters so far, with those that are held back.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), before: Sequence[int] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self.stop = [s for s in stop if s]
        self.stopped = False
        self.decoded = 0
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        # The tokens of the last piece, and those after it; between bare ids stands `gap`.
        self._window = [] if gap(tokenizer) else list(before[-1:])
        # bytes of the window that were decoded
        self._done = len(tokenizer.decode_bytes(self._window))
        self._held = ""  # text that may become a stop string

    def begin_of(self, token: int) -> int:
        """Return the character of the text in which the next token begins; call before `push`."""
        pending, _ = self._characters.getstate()
        before, after = (
            (pending + self.tokenizer.decode_bytes(window)[self._done :]).decode("utf-8", "replace")
            for window in (self._window, [*self._window, token])
        )
        # Both are what is not certain yet. A token that completes a character, or goes on in it,
        # begins in that; one that does not leaves U+FFFD before itself.
        kept = len(os.path.commonprefix([before, after]))
        is_within = before.endswith(REPLACEMENT) and kept == len(after)
        return self.decoded + kept - is_within

    def push(self, *tokens: int) -> str:
        self._window += tokens
        raw = self.tokenizer.decode_bytes(self._window)
        # A library that decodes to text puts U+FFFD for an incomplete character.
        if raw.endswith(REPLACEMENT.encode()):
            return ""
        text = self._characters.decode(raw[self._done :])
        # The last token stays, so that the next one is decoded as behind another.
        del self._window[:-1]
        self._done = len(self.tokenizer.decode_bytes(self._window))
        return self._release(text)

    def flush(self) -> str:
        """Return the text still held back; call at the end."""
        raw = self.tokenizer.decode_bytes(self._window)
        rest = self._characters.decode(raw[self._done :], final=True)
        self._done = len(raw)
        text = self._release(rest) + self._held
        self._held = ""
        return text

    def _release(self, text: str) -> str:
        """Return the text so far up to a stop string, or to what may become one."""
        self.decoded += len(text)
        if self.stopped:
            return ""
        text = self._held + text
        ends = [text.find(s) for s in self.stop if s in text]
        if ends:
            self.stopped = True
            self._held = ""
            return text[: min(ends)]
        held = 0
        for s in self.stop:
            for n in range(1, len(s)):
                if text.endswith(s[:n]):
                    held = max(held, n)
        certain = len(text) - held
        self._held = text[certain:]
        return text[:certain]


def gap(tokenizer: Tokenizer) -> str:
    """Return what stands between a prompt and its continuation: a space between bare ids."""
    return " " if tokenizer.name == Null.name else ""
