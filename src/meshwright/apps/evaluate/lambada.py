"""LAMBADA: predict the last word, or the last token, of passages that need all of their context.

Published accuracies differ by what is predicted and by the file: OpenAI's has other quotation marks
and no added spaces. So every result names both.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.base.errors import bad_data
from meshwright.training.tasks import Window

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.data.tokenizers import Tokenizer

OPENAI_SHA256 = "4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226"  # SHA-256 of OpenAI's file


def read_examples(path: str) -> list[str]:
    """Return the passages of JSON lines {"text": ...}."""
    out = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
            if not text.split():
                raise ValueError("its text is empty")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            why = 'it has no "text"' if isinstance(error, KeyError | TypeError | AttributeError) else str(error)
            wanted = 'LAMBADA is JSON lines such as {"text": "a passage"}'
            raise bad_data(f"{path}:{number}: {why}; {wanted}") from None
        out.append(text)
    if not out:
        raise bad_data(f"{path} has no example")
    return out


def word_windows(tokenizer: Tokenizer, texts: list[str], strict: bool, length: int) -> list[Window]:
    """Return a window for each passage, which counts the last word if strict, else the last token.

    A passage of more than `length` + 1 tokens loses its beginning; one without a context follows an
    end of document.
    """
    out = []
    for text in texts:
        if strict:
            word = text.split()[-1]
            label = tokenizer.encode_inside(" " + word)
            context = list(tokenizer.encode(text[: text.rfind(word)].strip()))
        else:
            ids = list(tokenizer.encode(text))
            context, label = ids[:-1], ids[-1:]
        ids = [*(context or [tokenizer.eod]), *label][-length - 1 :]
        out.append(Window(ids, max(len(ids) - len(label) - 1, 0)))
    return out


def measure_words(made: list[Window], values: Tensor) -> dict[str, float]:
    """Return the accuracy and the perplexity of the last words, from [examples, 2] nats and hits.

    The perplexity is that of whole words, as in lm-evaluation-harness: exp of the mean loss of an
    example.
    """
    import torch

    counted = torch.tensor([len(w.tokens) - 1 - w.first for w in made], dtype=values.dtype)
    correct, loss = int((values[:, 1] == counted).sum()), float(values[:, 0].mean())
    perplexity = math.exp(min(loss, 700)) if math.isfinite(loss) else loss
    shares = {"accuracy": correct / len(made), "perplexity": perplexity}
    return {"correct": correct, "examples": len(made)} | shares


def lambada_line(values: dict[str, float]) -> str:
    """Return Megatron's words for the result."""
    return (
        f"number correct: {values['correct']:.4E} | total examples: {values['examples']:.4E} | "
        f"avg accuracy: {values['accuracy']:.4E}"
    )
