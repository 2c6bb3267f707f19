"""Encode one piece of the input: token ids, lengths, document borders, and what was bad."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.base.errors import UserError
from meshwright.data.text.folders import SkipReport
from meshwright.data.text.pieces import Piece
from meshwright.data.text.records import NOT_UTF8, Document, ReadOptions, Rejected, TextPlace
from meshwright.data.text.splitting import cut_document

Array = npt.NDArray[Any]
Encode = Callable[[str], "Sequence[int] | Array"]


@dataclass
class Encoded:
    """The counts of a piece without its tokens. Lists have one entry per key."""

    lines: int = 0  # of plain texts, too
    documents: int = 0
    bytes: int = 0  # of text and what surrounds it
    sizes: list[Array] = field(default_factory=list)  # int32: tokens of each sequence
    # int64: sequences up to the end of each document
    ends: list[Array] = field(default_factory=list)
    # by reason: how many lines, and the first
    bad: dict[str, tuple[int, TextPlace]] = field(default_factory=dict)
    complaint: str = ""  # about the first error, if it stops the run
    passed: SkipReport = field(default_factory=SkipReport)  # files that hold no text

    def count_bad(self, reason: str, lines: int, place: TextPlace) -> None:
        count, first = self.bad.get(reason, (0, place))
        self.bad[reason] = (count + lines, first)

    def count_rejected(self, rejected: Rejected) -> None:
        if rejected.is_error:
            self.lines += 1
            self.count_bad(rejected.reason, 1, rejected.place)
        else:
            self.passed.add(rejected)


class Encoder:
    """Encode the texts under the keys.

    `sentences` splits a document into sequences; one of more than `longest` characters is cut into
    several documents, of a single key.
    """

    def __init__(
        self,
        encode: Encode,
        eod: int | None,
        options: ReadOptions,
        dtype: npt.DTypeLike,
        sentences: Callable[[str], list[str]] | None = None,
        longest: int | None = None,
    ) -> None:
        self.encode = encode
        self.options = options
        self.dtype = np.dtype(dtype)
        self.longest = longest
        self.sentences = sentences or (lambda text: [text])
        self.end = None if eod is None else np.array([eod], np.uint32)

    def __call__(self, piece: Piece, stop: bool = False) -> tuple[Encoded, list[Array]]:
        """Return counts and each key's tokens; with `stop`, up to the first error."""
        encoded = Encoded()
        columns = [_Column(self.end) for _ in self.options.keys]
        for part in piece.parts:
            size = part.size
            for record in part.read(self.options):
                # A record may be rejected as it is read, or later, if its text cannot be encoded.
                if isinstance(record, Rejected):
                    rejected: Rejected | None = record
                else:
                    rejected = self._add(record, encoded, columns)
                if rejected:
                    encoded.count_rejected(rejected)
                    if stop and rejected.is_error:
                        is_first = not encoded.documents and not piece.begin
                        encoded.complaint = rejected.complaint(is_first)
                        break
                elif not size and isinstance(record, Document):
                    # Rows of a table have another size in its file than their texts.
                    encoded.bytes += sum(len(text.encode()) for text in record.texts)
            encoded.bytes += size
            if encoded.complaint:
                break
        encoded.sizes = [np.array(column.sizes, np.int32) for column in columns]
        encoded.ends = [np.array(column.ends, np.int64) for column in columns]
        # numpy cannot concatenate an empty list of arrays.
        nothing = np.zeros(0, self.dtype)
        tokens = []
        for column in columns:
            parts = [nothing, *column.parts]
            tokens.append(np.concatenate(parts, dtype=self.dtype, casting="unsafe"))
        return encoded, tokens

    def _add(self, document: Document, encoded: Encoded, columns: list[_Column]) -> Rejected | None:
        """Add the tokens of a document to the columns, or return why it has none."""
        # A document that is too long becomes several; it has one key only.
        parts = [document.texts]
        if self.longest is not None:
            parts = [(part,) for part in cut_document(document.texts[0], self.longest)] or parts
        # All texts are encoded before any is added, so that a refused document leaves no trace.
        tokens = []
        try:
            for texts in parts:
                tokens.append([list(map(self.encode, self.sentences(text))) for text in texts])
        except UserError as error:
            return Rejected("refused by the tokenizer", document.place, str(error))
        encoded.lines += document.lines
        if document.repaired:
            encoded.count_bad(NOT_UTF8, document.repaired, document.place)
        for part in tokens:
            for column, sequences in zip(columns, part, strict=True):
                column.add(sequences)
        encoded.documents += len(tokens)
        return None


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
        # The end of document belongs to the last sequence.
        if self.end is not None and len(self.sizes) > before:
            self.parts.append(self.end)
            self.sizes[-1] += 1
        self.ends.append(len(self.sizes))
