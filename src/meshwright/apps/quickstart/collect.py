"""Read any text, hold out a part of it, and write both parts as JSON lines."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.base.errors import BAD_DATA, UserError, bad_data
from meshwright.base.files import replacing
from meshwright.config.text_inputs import TextInputs
from meshwright.data.text import limits
from meshwright.data.text.divide import LINES, Slice, read_range
from meshwright.data.text.formats import TEXT
from meshwright.data.text.inputs import find_inputs
from meshwright.data.text.pieces import FileRange, Piece, cut_inputs
from meshwright.data.text.reading import why_nothing
from meshwright.data.text.records import (
    NOT_UTF8,
    Document,
    ReadOptions,
    Rejected,
    options_of,
    shown,
)
from meshwright.data.text.splitting import cut_document

HELD_OUT = 0.05  # share of the bytes that is held out
MOST_HELD_OUT = 200_000  # bytes that are held out at most
MOST_UNDECODED = 0.1  # share of the bytes in other encodings, above which nothing is learnt
SAMPLE_BYTES = 50_000_000  # bytes from which a vocabulary is learnt
LEAST_BYTES = 20_000  # bytes of text from which something can be learnt
BLANK = "without text"  # the kind of a line whose text is white space alone
LONGEST_PART, SHORTEST_PART = 1 << 16, 1 << 11  # bytes of a part that a long document is cut into


@dataclass(frozen=True)
class CollectedText:
    """Facts about the collected text; sizes in bytes of UTF-8."""

    documents: int  # before long ones are cut into parts
    train_bytes: int
    held_out_bytes: int
    wide: float = 0.0  # bytes beyond the first of each character, as a share
    sample: str | None = None  # a file with a part of the text, enough for a vocabulary
    is_sample: bool = False  # the input has more than was read
    train_parts: int = 0
    held_out_parts: int = 0
    archives: Mapping[str, int] = field(default_factory=dict)  # the number of documents from each

    def describe(self) -> str:
        """Return the numbers of documents, parts and bytes."""
        archives = ""
        if self.archives:
            count = len(self.archives)
            names = ", ".join(list(self.archives)[:3]) + ", ..." * (count > 3)
            archives = f"{count:,} archive{'s' if count > 1 else ''} ({names})"

        parts = self.train_parts + self.held_out_parts
        if self.is_sample:  # how many documents there are is not known
            number = "more text than can be read in the time"
            if archives:
                number += f", some from {archives}"
            number += f"; a sample of {parts:,} parts"
        else:
            number = f"{self.documents:,} document{'s' if self.documents != 1 else ''}"
            if archives:
                number += f", {sum(self.archives.values()):,} of them from {archives}"
            if parts > self.documents:
                number += f", cut into {parts:,} parts"

        learnt = f"{self.train_parts:,} to learn from ({self.train_bytes:,} bytes)"
        held_out = f"{self.held_out_parts:,} held out ({self.held_out_bytes:,} bytes)"
        return f"{number}: {learnt}, {held_out}"


def fraction(text: str) -> float:
    """Return a number in [0, 1) that depends on the text alone."""
    # By a hash: the same text is drawn or held out again, wherever it stands.
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


class LineRange(FileRange):
    """The text between these bytes of a file, to whole lines: a longer document is cut there."""

    def slice(self, options: ReadOptions) -> Slice:
        return read_range(self.path, self.begin, self.end, LINES, self.is_named)


def by_lines(piece: Piece) -> Piece:
    """Return a piece of plain text that reads no further than its last line."""
    parts = []
    for part in piece.parts:
        if isinstance(part, FileRange) and part.reader == TEXT:
            parts.append(LineRange(**vars(part)))
    return dataclasses.replace(piece, parts=tuple(parts)) if parts else piece


class InputDocuments:
    """The documents of the inputs; if they exceed `limit` bytes, a sample spread over them.

    A sample is drawn in two steps: pieces, which alone are read, and of them parts of documents. So
    many pieces are read that the longest document is among them even if there is no other.
    """

    def __init__(self, settings: TextInputs, limit: float) -> None:
        self.settings = settings
        self.limit = limit
        self.inputs = find_inputs(settings)
        self.bytes = self.inputs.bytes  # on disk
        self.undecoded = 0  # bytes of files that were passed over for their encoding
        self.guess = ""  # the encoding that the first of these seems to be in
        self.is_sample = False
        self.archives = Counter[str]()  # the number of documents from each

    def __iter__(self) -> Iterator[str]:
        # Two shares: of the pieces that are read, and of all text that is yielded.
        size = max(self.bytes, 1)
        share = self.limit / size  # of the text that is yielded
        read = max(self.limit, limits.LONGEST) / size  # of the pieces that are read
        options = options_of(self.settings)
        characters, is_empty = 0, True
        for piece in cut_inputs(self.inputs.inputs, self.settings):
            name = f"{piece.number} {piece.begin}"
            if fraction(name) >= read:
                self.is_sample = True
                continue
            records = (by_lines(piece) if share < 1 else piece).read(options)
            for number, record in enumerate(records):
                self.inputs.count(record)
                if isinstance(record, Rejected):
                    self.note_undecoded(record)
                    continue
                for text in record.texts:
                    is_empty = False
                    if not text.strip():
                        self.note_blank(record)
                        continue
                    if record.place.path.startswith(f"{piece.path}:"):  # a member of an archive
                        self.archives[os.path.basename(piece.path)] += 1
                    for part in self._draw(text, f"{name} {number}", share / min(read, 1)):
                        characters += len(part)
                        yield part
            if characters > 1.5 * self.limit:  # a compressed input holds more than its size says
                self.is_sample = True
                return

        # All has been read: was there anything to learn from?
        if is_empty:
            reasons = "; ".join(why_nothing(self.inputs, self.settings)) or "all of it is blank"
            raise bad_data(f"{' '.join(map(shown, self.settings.input))} holds no text; {reasons}")
        if self.undecoded > MOST_UNDECODED * self.bytes:
            raise bad_data(self._too_much_undecoded())

    def _draw(self, text: str, place: str, share: float) -> Iterator[str]:
        """Yield a share of a document's parts, and no more than the limit."""
        # A document longer than the limit gives a part of itself alone.
        share = min(share, self.limit / len(text))
        if share >= 1:
            yield text
            return
        self.is_sample = True
        longest = int(min(LONGEST_PART, max(SHORTEST_PART, self.limit // 100)))
        for number, part in enumerate(cut_document(text, longest)):
            if fraction(f"{place} {number}") < share:
                yield part

    def _too_much_undecoded(self) -> str:
        """Say how much of the text is in another encoding, and what reads it or leaves it out."""
        passed = self.inputs.passed
        read = ""
        if self.guess:
            flags = dataclasses.replace(self.settings, input=[], encoding=self.guess).words()
            command = shlex.join(["meshwright", "quickstart", *self.settings.input, *flags])
            read = f"read them by `{command}`, "
        names = [os.path.basename(name.rpartition(":")[0]) for name in passed.names]
        return (
            f"{self.undecoded:,} of {self.bytes:,} bytes are in another encoding; {passed.line()}\n"
            f"  {read}convert them with iconv, or leave them out: --exclude {shlex.join(names)}"
        )

    def note_blank(self, document: Document) -> None:
        """Count a text of white space, with the place of the first."""
        bad = self.inputs.bad
        bad.count(BLANK, 1, "" if BLANK in bad else str(document.place))

    def note_undecoded(self, rejected: Rejected) -> None:
        """Note the size of a file that is passed over for its encoding; raise for a named text."""
        if rejected.reason != NOT_UTF8:
            return
        if not rejected.is_error:
            self.undecoded += rejected.bytes
            self.guess = self.guess or rejected.charset
        elif rejected.bytes and self.settings.on_error == "stop":
            raise bad_data(rejected.complaint())

    def left_out(self) -> list[str]:
        return self.inputs.left_out(self.settings.on_error, self.settings.encoding)


def border(parts: list[str], share: float) -> float:
    """Return the fraction below which parts have this share of the characters, or one part has."""
    # From the lowest fraction on, until so many characters are below.
    fractions = sorted((fraction(part), len(part)) for part in parts)
    wanted = share * sum(size for _, size in fractions)
    for position, size in fractions:
        wanted -= size
        if wanted <= 0:
            return math.nextafter(position, 1)
    return 0.0


def collect(documents: Iterable[str], folder: Path, expected: float = 0) -> CollectedText:
    """Write train.jsonl and held_out.jsonl, and of a large text sample.jsonl for the vocabulary.

    A small text, or a single long one, is cut into a hundred parts or more, so that the held-out
    ones lie everywhere in it. Which ones are held out depends on their text alone; at least one of
    the first parts is. `expected` bytes of text are estimated.
    """
    # The beginning, which is all of a small text, decides how parts are cut and held out.
    first = list[str]()
    characters = 0
    rest = iter(documents)
    for text in rest:
        first.append(text)
        characters += len(text)
        if characters > 100 * LONGEST_PART:
            break
    # About a hundred parts of what there is, within bounds.
    longest = min(LONGEST_PART, max(SHORTEST_PART, characters // 100))
    expected = max(characters, expected)
    held_out = min(HELD_OUT, MOST_HELD_OUT / max(expected, 1))
    beginning = [part for text in first for part in cut_document(text, longest)]
    if characters <= 100 * LONGEST_PART:  # all of it is here
        held_out = border(beginning, held_out)
    least = min(map(fraction, beginning), default=0.0)  # chance alone may hold out none
    sampled = SAMPLE_BYTES / expected if expected > 2 * SAMPLE_BYTES else 0

    # Write all parts, to learn from (0) or held out (1).
    sizes = [0, 0]
    parts = [0, 0]
    count = 0
    wide = 0
    names = ["train.jsonl", "held_out.jsonl"]
    if sampled:
        names.append("sample.jsonl")
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(replacing(folder / name)) for name in names]
        for text in itertools.chain(first, rest):
            count += 1
            for part in cut_document(text, longest):
                position = fraction(part)
                size = len(part.encode("utf-8", "replace"))
                # The part's hash alone says which side it is on, and whether the sample has it.
                side = int(position < held_out or position == least)
                line = json.dumps({"text": part}).encode() + b"\n"
                files[side].write(line)
                if position > 1 - sampled:
                    files[2].write(line)
                sizes[side] += size
                parts[side] += 1
                # Each character has one byte and those beyond it.
                wide += size - len(part)

    # Texts that nothing can be learnt from are refused before a vocabulary is made of them.
    if sum(sizes) < LEAST_BYTES:
        raise UserError(
            f"{sum(sizes):,} bytes of text are too few to learn from; "
            f"give at least {LEAST_BYTES:,}, better some millions",
            BAD_DATA,
        )
    if not parts[0]:
        alike = "the text is a single short part"
        if parts[1] > 1:
            alike = "all parts of the text are the same"
        raise UserError(f"{alike}, so none can be held out; give other text", BAD_DATA)
    return CollectedText(
        documents=count,
        train_bytes=sizes[0],
        held_out_bytes=sizes[1],
        wide=wide / sum(sizes),
        sample=str(folder / names[2]) if sampled else None,
        train_parts=parts[0],
        held_out_parts=parts[1],
    )
