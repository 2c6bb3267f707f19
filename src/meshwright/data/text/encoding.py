"""Encode one piece of the input: token ids, lengths, document borders, and what was bad."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.base.errors import UserError
from meshwright.data.text.documents import cut_document
from meshwright.data.text.folders import PassedOver
from meshwright.data.text.pieces import Piece
from meshwright.data.text.records import NOT_UTF8, Bad, Mended, advice, lines_in

Array = npt.NDArray[Any]
Encode = Callable[[str], "Sequence[int] | Array"]


@dataclass
class Encoded:
    """The counts of a piece without its tokens. Lists have one entry per key."""

    lines: int = 0  # of plain texts, too
    documents: int = 0
    bytes: int = 0  # of text and what surrounds it
    sizes: list[Array] = field(default_factory=list)  # int32: tokens of each sequence
    ends: list[Array] = field(default_factory=list)  # int64: sequences up to the end of each document
    bad: dict[str, tuple[int, int]] = field(default_factory=dict)  # kind: how many, and number of the first unit
    first_bad: str = ""  # message; none for lines that were mended
    passed: PassedOver = field(default_factory=PassedOver)  # files that hold no text, by kind

    def count(self, kind: str, unit: int, lines: int = 1) -> None:
        count, first = self.bad.pop(kind, (0, unit))
        self.bad[kind] = (count + lines, first)  # the last one


class Encoder:
    """Encode the texts under the keys.

    `sentences` splits a document into sequences; one of more than `longest` characters is cut into
    several documents, of a single key.
    """

    def __init__(
        self,
        encode: Encode,
        eod: int | None,
        keys: list[str],
        dtype: npt.DTypeLike,
        sentences: Callable[[str], list[str]] | None = None,
        longest: int | None = None,
    ) -> None:
        self.encode, self.keys, self.dtype, self.longest = encode, keys, np.dtype(dtype), longest
        self.sentences = sentences or (lambda text: [text])
        self.end = None if eod is None else np.array([eod], np.uint32)

    def __call__(self, piece: Piece, stop: bool = False) -> tuple[Encoded, list[Array]]:
        """Return counts and each key's tokens; with `stop`, up to the first bad line."""
        encoded, columns = Encoded(), [_Column(self.end) for _ in self.keys]
        for number, unit in enumerate(piece.units(self.keys)):
            encoded.lines += lines_in(unit)
            if unit is None:
                continue
            documents = unit if isinstance(unit, Bad) else self._encode(unit)
            if isinstance(documents, Bad):
                if documents.is_passed:
                    encoded.passed.note_unit(documents)
                    continue
                encoded.count(documents.kind, number)
                hint = advice(documents, not encoded.documents and not piece.begin)
                encoded.first_bad = encoded.first_bad or f"{documents}{hint}"
                if stop:
                    break
                continue
            if isinstance(unit, Mended):
                encoded.count(NOT_UTF8, number, unit.lines)
            for document in documents:
                for column, sequences in zip(columns, document, strict=True):
                    column.add(sequences)
            encoded.documents += len(documents)
            if not piece.size and isinstance(unit, list):  # rows of a table, whose size in the file is another
                encoded.bytes += sum(len(text) if text.isascii() else len(text.encode()) for text in unit)
        encoded.bytes = encoded.bytes or piece.size
        encoded.sizes = [np.array(column.sizes, np.int32) for column in columns]
        encoded.ends = [np.array(column.ends, np.int64) for column in columns]
        nothing = np.zeros(0, self.dtype)
        return encoded, [np.concatenate([nothing, *c.parts], dtype=self.dtype, casting="unsafe") for c in columns]

    def _encode(self, texts: list[str]) -> list[list[list[Sequence[int] | Array]]] | Bad:
        """Return the documents that a unit gives, one unless it is too long."""
        documents = [texts]
        if self.longest is not None:
            documents = [[part] for part in cut_document(texts[0], self.longest)] or [texts]
        try:
            return [[list(map(self.encode, self.sentences(text))) for text in document] for document in documents]
        except UserError as error:
            return Bad("refused by the tokenizer", str(error))


class _Column:
    """The sequences under one key."""

    def __init__(self, end: Array | None) -> None:
        self.end = end
        self.parts: list[Sequence[int] | Array] = []
        self.sizes: list[int] = []
        self.ends: list[int] = []

    def add(self, sequences: list[Sequence[int] | Array]) -> None:
        """Append a document.

        As in Megatron-LM, a document without tokens has no sequence, only an entry in the document
        index, so that the files of several keys stay aligned (bigscience's tool drops it there).
        """
        before = len(self.sizes)
        for ids in sequences:
            if len(ids):
                self.parts.append(ids)
                self.sizes.append(len(ids))
        if self.end is not None and len(self.sizes) > before:
            self.parts.append(self.end)
            self.sizes[-1] += 1
        self.ends.append(len(self.sizes))
