"""Read every text of the inputs, one after another, for commands that write no tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from meshwright.base.errors import bad_data
from meshwright.config.text_inputs import TextInputs
from meshwright.data.text.formats import JSONL
from meshwright.data.text.inputs import Input, Inputs, find_inputs
from meshwright.data.text.pieces import cut_inputs
from meshwright.data.text.records import Document, Record, Rejected, options_of


def read_texts(
    given: TextInputs,
    inputs: Inputs | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> Iterator[str]:
    """Yield every text of the inputs; by default, raise for the first bad line.

    Lines that were left out or mended, and files that turn out to hold no text, are added to those
    of `inputs`; `advance` gets the number of bytes that are done.
    """
    inputs = inputs or find_inputs(given)
    is_first = True
    number = done = 0  # the input of the last piece, and what was done of it
    options = options_of(given)
    for piece in cut_inputs(inputs.inputs, given):
        for record in piece.read(options):
            if isinstance(record, Rejected) and record.is_error and given.on_error != "skip":
                raise bad_data(record.complaint(is_first))
            inputs.count(record)
            if isinstance(record, Document):
                is_first = False
                yield from record.texts
        # `piece.done` counts from the beginning of the piece's input.
        if piece.number != number:
            done = 0
        advance(max(piece.done - done, 0))
        number = piece.number
        done = piece.done


def note_passed(inputs: Inputs, given: TextInputs) -> None:
    """Count texts in folders that will be passed over for their content; raise for a named one."""
    # JSON lines and tables are not judged by their content, and a stream is read but once.
    texts = [s for s in inputs.inputs if not (s.is_stream or s.is_table or s.reader == JSONL)]
    is_first = True
    for record in _read(texts, given):
        if isinstance(record, Rejected) and not record.is_error:
            inputs.passed.add(record)
        elif isinstance(record, Rejected) and given.on_error != "skip":
            raise bad_data(record.complaint(is_first))
        is_first = False


def why_nothing(inputs: Inputs, given: TextInputs) -> list[str]:
    """Say what was left out of inputs without any text, and what the first bad line has instead."""
    lines = inputs.left_out(given.on_error, given.encoding)
    # A pipe is read but once.
    readable = [source for source in inputs.inputs if source.bytes]
    for record in _read(readable, given):
        if isinstance(record, Rejected) and record.is_error:
            return [*lines, f"{record.detail}; {record.cure}"] if record.cure else lines
    return lines


def _read(inputs: list[Input], given: TextInputs) -> Iterator[Record]:
    for piece in cut_inputs(inputs, given):
        yield from piece.read(options_of(given))
