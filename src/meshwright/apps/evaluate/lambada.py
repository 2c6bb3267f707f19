"""LAMBADA: predict the last word, or the last token, of passages that need all of their context.

Published accuracies differ by what is predicted and by the file: OpenAI's has other quotation marks
and no added spaces. So every result names both.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.base.errors import bad_data
from meshwright.data.windows import Window, label_window
from meshwright.training.tasks import Metric, Scored, Task, TaskFile

if TYPE_CHECKING:
    from meshwright.data.tokenizers import Tokenizer

# SHA-256 of OpenAI's file
OPENAI_SHA256 = "4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226"


def read_examples(path: str) -> list[str]:
    """Return the passages of JSON lines {"text": ...}."""
    out = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        why = ""
        try:
            text = json.loads(line)["text"]
            if not text.split():
                why = "its text is empty"
            text.encode()  # JSON can state half a character, which no tokenizer takes
        except ValueError as error:  # it is no JSON, or no text
            why = str(error)
        except (TypeError, KeyError, AttributeError):
            why = 'it has no "text"'
        if why:
            wanted = 'LAMBADA is JSON lines such as {"text": "a passage"}'
            raise bad_data(f"{path}:{number}: {why}; {wanted}")
        out.append(text)
    if not out:
        raise bad_data(f"{path} has no example")
    return out


def last_token(text: str, tokenizer: Tokenizer, file: TaskFile) -> list[Window]:
    """Return a window that counts the last token of a passage."""
    ids = list(tokenizer.encode(text))
    return [label_window(ids[:-1] or [tokenizer.eod], ids[-1:], file.length)]


def last_word(text: str, tokenizer: Tokenizer, file: TaskFile) -> list[Window]:
    """Return a window that counts all tokens of a passage's last word."""
    word = text.split()[-1]
    context = text[: text.rfind(word)].strip()
    before = tokenizer.encode(context) or [tokenizer.eod]
    # The word as it is written within a text: with the space before it.
    label = tokenizer.encode_inside(" " + word)
    return [label_window(before, label, file.length)]


def measure_words(scored: Scored[str]) -> dict[str, float]:
    """Return the accuracy and the perplexity of the last words.

    The perplexity is that of whole words, as in lm-evaluation-harness: exp of the mean loss of a
    passage.
    """
    # A passage is right if each of its counted tokens is.
    correct = int((scored.hits == scored.counted).sum())
    loss = float(scored.nats.mean())
    # A loss that is not finite stays visible; one that is too large for exp is cut off.
    perplexity = math.exp(min(loss, 700)) if math.isfinite(loss) else loss
    examples = len(scored.documents)
    return {
        "correct": correct,
        "examples": examples,
        "accuracy": correct / examples,
        "perplexity": perplexity,
    }


def describe_lambada(what: str, file: TaskFile) -> str:
    """Return what is counted, and in which file."""
    which = "OpenAI's file" if file.sha256 == OPENAI_SHA256 else "another file than OpenAI's"
    return f"{what}; {which}"


def megatrons_words(values: dict[str, float]) -> str:
    """Return Megatron's words for the result."""
    return (
        f"number correct: {values['correct']:.4E} | total examples: {values['examples']:.4E} | "
        f"avg accuracy: {values['accuracy']:.4E}"
    )


LAMBADA = Task(
    name="lambada",
    title="LAMBADA",
    metrics=(
        Metric("accuracy", "share of the passages", "higher"),
        Metric("perplexity", "of a passage's last word", "lower"),
    ),
    read=read_examples,
    cut=last_token,
    measure=measure_words,
    describe=functools.partial(describe_lambada, "not strict: the last token"),
    words=megatrons_words,
    dataset="lambada",
    megatron="LAMBADA",
    source=f"""LAMBADA https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_test.jsonl
  SHA-256 {OPENAI_SHA256}""",
)
STRICT_LAMBADA = dataclasses.replace(
    LAMBADA,
    name="lambada-strict",
    cut=last_word,
    describe=functools.partial(describe_lambada, "strict: the whole last word"),
    megatron="LAMBADA --strict-lambada",
)
