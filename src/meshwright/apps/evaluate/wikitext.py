"""WikiText-103: the perplexity of one long text, per token and per word of the original file.

The file is split into words, with spaces before punctuation and marks such as ` @-@ ` inside words.
A GPT was trained on ordinary text, so the marks are undone first; the perplexity is then adjusted
to the number of the original words, which makes different vocabularies comparable.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from meshwright.apps.evaluate import score
from meshwright.base.errors import bad_data
from meshwright.training.tasks import Window

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.data.tokenizers import Tokenizer

# What is replaced by what, in this order; a pattern may span lines. All tables are those of
# Megatron's evaluation, with whose numbers ours are compared.
WIKITEXT = [
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
TABLES: dict[str, list[tuple[str, str]]] = {"ptb": PENN_TREEBANK, "wiki": WIKITEXT, "lambada": []}


def pick_table(path: str) -> str:
    """Return the table that Megatron picks by a path, and WikiText's if it would find none."""
    return next((name for name in TABLES if name in path), "wiki")


def detokenize(text: str, table: str) -> str:
    for pattern, replacement in TABLES[table]:
        text = re.sub(pattern, replacement, text)
    return text


def wikitext_windows(
    tokenizer: Tokenizer, path: str, length: int, stride: int
) -> tuple[list[Window], Callable[[Tensor], dict[str, float]]]:
    """Return the windows of a file, and the function that makes measures of their scores."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            text = file.read()
    except UnicodeDecodeError as e:
        raise bad_data(f"{path} is not UTF-8 (byte 0x{e.object[e.start]:02x} at {e.start})") from None
    words = len(text.strip().split(" "))
    ids = list(tokenizer.encode(detokenize(text, pick_table(path))))
    if len(ids) < 2 or words < 2:
        raise bad_data(f"{path} has {words} words and {len(ids)} tokens; there is nothing to predict")
    places = score.window_spans(len(ids) - 1, length, min(stride, length), at_multiples=True)
    made = [Window(ids[begin : end + 1], first - begin) for begin, first, end in places]
    size = len(text.encode())

    def measure(values: Tensor) -> dict[str, float]:
        total, ratio = float(values[:, 0].sum()), (len(ids) - 1) / (words - 1)
        loss = total / (len(ids) - 1)
        adjusted = math.exp(min(20.0, loss * ratio))
        counts = {"tokens": len(ids), "words": words, "token_ratio": ratio}
        perplexities = {"perplexity": math.exp(min(20.0, loss)), "adjusted_perplexity": adjusted}
        return {"loss": loss} | perplexities | {"bits_per_byte": total / math.log(2) / size} | counts

    return made, measure


def wikitext_line(values: dict[str, float]) -> str:
    """Return Megatron's words for the result."""
    return (
        f"avg loss: {values['loss']:.4E} | ppl: {values['perplexity']:.4E} | "
        f"adjusted ppl: {values['adjusted_perplexity']:.4E} | token ratio: {values['token_ratio']} |"
    )
