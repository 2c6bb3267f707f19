"""Texts as windows of tokens: what a network reads at once, and which of its predictions count.

A document is scored alone: every token is predicted once, the first after an end of document. A
long document is read in windows; each after the first starts `stride` tokens later and counts only
the new ones, so that they have a context.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Window(NamedTuple):
    """Inputs and, one place on, their labels; predictions before number `first` do not count."""

    tokens: Sequence[int]
    first: int = 0

    @property
    def counted(self) -> int:
        """How many predictions count."""
        return len(self.tokens) - 1 - self.first


def label_window(context: Sequence[int], label: Sequence[int], length: int) -> Window:
    """Return a window that counts the label alone; one of more predictions loses its beginning."""
    # `length` predictions need `length` + 1 tokens. Context is cut off before any of the label.
    ids = [*context, *label][-length - 1 :]
    return Window(ids, max(len(ids) - 1 - len(label), 0))


def document_windows(ids: Sequence[int], length: int, stride: int) -> Iterator[Window]:
    for begin, first, end in window_spans(len(ids) - 1, length, stride):
        yield Window(ids[begin : end + 1], first - begin)


def window_spans(
    n: int, length: int, stride: int, at_multiples: bool = False
) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, first counted, end) over n predictions: each counted once, in <= `length`.

    The last window begins as early as `length` allows, or, with `at_multiples` (as in Megatron's
    and transformers' evaluations), where a full one would: at a multiple of the stride.
    """
    # All predictions of the first window count.
    end = min(n, length)
    if n:
        yield 0, 0, end
    while end < n:
        first = end
        end = min(end + stride, n)
        yield first + stride - length if at_multiples else max(0, end - length), first, end
