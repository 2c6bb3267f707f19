"""Encode one piece of the input: token ids, lengths, document borders, and what was bad."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.data.prepare.folders import PassedOver
from meshwright.data.prepare.records import PassedFile
from meshwright.data.prepare.text import BadLine, Piece, expected_format, units
from meshwright.errors import UserError

Array = npt.NDArray[Any]
Encode = Callable[[str], "Sequence[int] | Array"]


@dataclass
class Encoded:
    """The counts of a piece without its tokens. Lists have one entry per key."""

    units: int = 0  # lines, rows or texts
    documents: int = 0
    bytes: int = 0  # of text and what surrounds it
    sizes: list[Array] = field(default_factory=list)  # int32: tokens of each sequence
    ends: list[Array] = field(default_factory=list)  # int64: sequences up to the end of each document
    bad: dict[str, tuple[int, int]] = field(default_factory=dict)  # kind: how many, and number of the first
    first_bad: str = ""  # message
    passed: PassedOver = field(default_factory=PassedOver)  # files that hold no text, by kind


class Encoder:
    """Encode the texts under the keys. `sentences` splits a document into sequences."""

    def __init__(
        self,
        encode: Encode,
        eod: int | None,
        keys: list[str],
        dtype: npt.DTypeLike,
        sentences: Callable[[str], list[str]] | None = None,
    ) -> None:
        self.encode, self.keys, self.dtype, self.sentences = encode, keys, np.dtype(dtype), sentences
        self.end = None if eod is None else np.array([eod], np.uint32)

    def __call__(self, piece: Piece, stop: bool = False) -> tuple[Encoded, list[Array]]:
        """Return counts and each key's tokens; with `stop`, up to the first bad line."""
        encoded, out = Encoded(), [_Column() for _ in self.keys]
        for number, texts in enumerate(units(piece, self.keys)):
            encoded.units += 1
            if texts is None:
                continue
            if isinstance(texts, PassedFile):
                encoded.passed.note(texts.kind, texts.place)
                continue
            try:
                if isinstance(texts, BadLine):
                    raise texts
                documents = [self._document(text) for text in texts]
            except BadLine as bad:
                count, first = encoded.bad.get(bad.kind, (0, number))
                encoded.bad[bad.kind] = (count + 1, first)
                hint = expected_format(bad, not encoded.documents and not piece.begin)
                encoded.first_bad = encoded.first_bad or f"{bad}{hint}"
                if stop:
                    break
                continue
            for column, document in zip(out, documents, strict=True):
                column.add(document, self.end)
            encoded.documents += 1
            if piece.kind in ("parquet", "arrow"):
                encoded.bytes += sum(map(len, texts))
        encoded.bytes = encoded.bytes or _bytes_of(piece)
        encoded.sizes = [np.array(column.sizes, np.int32) for column in out]
        encoded.ends = [np.array(column.ends, np.int64) for column in out]
        nothing = np.zeros(0, self.dtype)
        return encoded, [np.concatenate([nothing, *c.parts], dtype=self.dtype, casting="unsafe") for c in out]

    def _document(self, text: str) -> list[Sequence[int] | Array]:
        try:
            if self.sentences is None:
                return [self.encode(text)]
            return [self.encode(sentence) for sentence in self.sentences(text)]
        except UserError as error:
            raise BadLine("refused by the tokenizer", str(error)) from None


class _Column:
    """The sequences under one key."""

    def __init__(self) -> None:
        self.parts: list[Sequence[int] | Array] = []
        self.sizes: list[int] = []
        self.ends: list[int] = []

    def add(self, sequences: list[Sequence[int] | Array], end: Array | None) -> None:
        """Append a document.

        As in Megatron-LM, a document without tokens has no sequence, only an entry in the document
        index, so that the files of several keys stay aligned (bigscience's tool drops it there).
        """
        before = len(self.sizes)
        for ids in sequences:
            if len(ids):
                self.parts.append(ids)
                self.sizes.append(len(ids))
        if end is not None and len(self.sizes) > before:
            self.parts.append(end)
            self.sizes[-1] += 1
        self.ends.append(len(self.sizes))


def _bytes_of(piece: Piece) -> int:
    if piece.kind == "lines":
        return len(piece.content)
    if piece.kind == "texts":
        return sum(len(content) for _, content in piece.content if isinstance(content, bytes))
    return piece.end - piece.begin if piece.kind in ("place", "text", "files") else 0
