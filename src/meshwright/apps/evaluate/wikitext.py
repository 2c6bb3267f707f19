"""WikiText-103: the perplexity of one long text, per token and per word of the original file.

The file is split into words, with spaces before punctuation and marks such as ` @-@ ` inside words.
A GPT was trained on ordinary text, so the marks are undone first; the perplexity is then adjusted
to the number of the original words, which makes different vocabularies comparable.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from meshwright.base.errors import bad_data
from meshwright.data.windows import Window, window_spans
from meshwright.training.tasks import Metric, Scored, Task, TaskFile

if TYPE_CHECKING:
    from meshwright.data.tokenizers import Tokenizer

# Patterns and their replacements, applied in this order; a pattern may span lines. All tables are
# those of Megatron's evaluation, with whose numbers ours are compared, slips such as `/' [0-9]/`
# included.
WIKITEXT_MARKS = [
    (r"s '", "s'"),
    (r"/' [0-9]/", "/'[0-9]/"),
    *((f" @{mark}@ ", mark) for mark in "-,"),
    (r" @\.@ ", "."),
    *((f" {re.escape(mark)} ", f"{mark} ") for mark in ":;.!?,"),
    (r"\(\s*([^\)]*?)\s*\)", r"(\1)"),
    (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    (r"{\s*([^}]*?)\s*}", r"{\1}"),
    (r'"\s*([^"]*?)\s*"', r'"\1"'),
    (r"'\s*([^']*?)\s*'", r"'\1'"),
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
]
PENN_TREEBANK = [
    (" '", "'"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" n't", "n't"),
    (" N ", "1 "),
    (r"\$ 1", "$1"),
    ("# 1", "#1"),
]
TABLES: dict[str, list[tuple[str, str]]] = {
    "ptb": PENN_TREEBANK,
    "wiki": WIKITEXT_MARKS,
    "lambada": [],
}


def pick_table(path: str) -> str:
    """Return the table that Megatron picks by a path, and WikiText's if it would find none."""
    return next((name for name in TABLES if name in path), "wiki")


def detokenize(text: str, table: str) -> str:
    for pattern, replacement in TABLES[table]:
        text = re.sub(pattern, replacement, text)
    return text


def read_text(path: str) -> list[str]:
    try:
        # Ends of lines stay as they are, since bytes and words of the file are counted.
        with open(path, encoding="utf-8", newline="") as file:
            return [file.read()]
    except UnicodeDecodeError as e:
        raise bad_data(
            f"{path} is not UTF-8 (byte 0x{e.object[e.start]:02x} at {e.start})"
        ) from None


def cut_text(text: str, tokenizer: Tokenizer, file: TaskFile) -> list[Window]:
    table = pick_table(file.path)
    ids = list(tokenizer.encode(detokenize(text, table)))
    words = count_words(text)
    if len(ids) < 2 or words < 2:
        raise bad_data(
            f"{file.path} has {words} words and {len(ids)} tokens; there is nothing to predict"
        )
    # Windows begin at multiples of the stride, as Megatron's do, and each counts its new tokens.
    spans = window_spans(len(ids) - 1, file.length, file.stride, at_multiples=True)
    return [Window(ids[begin : end + 1], first - begin) for begin, first, end in spans]


def count_words(text: str) -> int:
    return len(text.strip().split(" "))


def measure_text(scored: Scored[str]) -> dict[str, float]:
    [text] = scored.documents
    total = float(scored.nats.sum())
    predictions = int(scored.counted.sum())
    words = count_words(text)
    loss = total / predictions
    # The first token and the first word are not predicted. Adjusted, the loss is one of a word.
    ratio = predictions / (words - 1)
    return {
        "loss": loss,
        # Megatron's limit, beyond which no model is compared.
        "perplexity": math.exp(min(20.0, loss)),
        "adjusted_perplexity": math.exp(min(20.0, loss * ratio)),
        "bits_per_byte": total / math.log(2) / len(text.encode()),
        "tokens": predictions + 1,
        "words": words,
        "token_ratio": ratio,
    }


def describe_wikitext(file: TaskFile) -> str:
    windows = f"windows of {file.length} tokens that advance by {file.stride}"
    return f"{pick_table(file.path)} detokenizer, {windows}"


def megatrons_words(values: dict[str, float]) -> str:
    """Return Megatron's words for the result."""
    return (
        f"avg loss: {values['loss']:.4E} | ppl: {values['perplexity']:.4E} | "
        f"adjusted ppl: {values['adjusted_perplexity']:.4E} | token ratio: {values['token_ratio']} |"
    )


WIKITEXT = Task(
    name="wikitext",
    title="WIKITEXT103",
    metrics=(
        Metric("adjusted_perplexity", "of a word of the original file", "lower"),
        Metric("perplexity", "of a token", "lower"),
    ),
    read=read_text,
    cut=cut_text,
    measure=measure_text,
    describe=describe_wikitext,
    words=megatrons_words,
    stride=32,  # the default of Megatron's --overlapping-eval
    no_limit="WikiText is one text",
    megatron="WIKITEXT103",
    source="""wiki.test.tokens of WikiText, https://wikitext.smerity.com/wikitext-103-v1.zip
  SHA-256 242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590""",
)
