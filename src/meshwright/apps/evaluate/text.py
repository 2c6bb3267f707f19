"""Any text: the perplexity and bits per byte of each document of a file, or of a folder's files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.apps.evaluate.perplexity import Score
from meshwright.base.errors import bad_data
from meshwright.config.text_inputs import TextInputs
from meshwright.data.windows import Window, document_windows
from meshwright.training.tasks import Metric, Scored, Task, TaskFile

if TYPE_CHECKING:
    from meshwright.data.tokenizers import Tokenizer


def read_documents(path: str) -> Iterator[str]:
    from meshwright.data.text.reading import read_texts

    is_empty = True
    # An empty text has no token to score.
    for text in filter(None, read_texts(TextInputs(input=[path]))):
        is_empty = False
        yield text
    if is_empty:
        raise bad_data(f"text={path}: no text to score")


def cut_document(text: str, tokenizer: Tokenizer, file: TaskFile) -> list[Window]:
    ids = [tokenizer.eod, *tokenizer.encode(text)]
    return list(document_windows(ids, file.length, file.stride))


def measure_documents(scored: Scored[str]) -> dict[str, float]:
    size = sum(len(text.encode()) for text in scored.documents)
    count = len(scored.documents)
    # The same measures as of text that is given by --input.
    score = Score(float(scored.nats.sum()), int(scored.counted.sum()), size, count)
    return {
        "loss": score.loss,
        "perplexity": score.perplexity,
        "bits_per_byte": score.bits_per_byte,
        "documents": count,
        "tokens": score.tokens,
        "bytes": size,
    }


def describe_text(file: TaskFile) -> str:
    return f"each document alone, windows of {file.length} tokens that advance by {file.stride}"


TEXT = Task(
    name="text",
    title="TEXT",
    metrics=(
        Metric("bits_per_byte", "bits for a byte of the text", "lower"),
        Metric("perplexity", "of a token", "lower"),
    ),
    read=read_documents,
    cut=cut_document,
    measure=measure_documents,
    describe=describe_text,
    takes_folders=True,
)
