"""Named measures of a model on files: made once, then scored by any model, also during training."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.apps.evaluate import lambada, wikitext
from meshwright.apps.evaluate.score import Score, Window, document_windows, score_windows
from meshwright.base.console import say
from meshwright.base.errors import bad_data
from meshwright.base.files import sha256
from meshwright.config.grammar import EVAL_TASKS
from meshwright.config.text_inputs import TextInputs

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.data.tokenizers import Tokenizer
    from meshwright.parallel.window_scores import Scorer

WIKITEXT_STRIDE = 32  # of Megatron's --overlapping-eval
# The measures that are drawn over the steps of a training; the first says most about the task.
DRAWN_MEASURES = dict.fromkeys(("lambada", "lambada-strict"), ("accuracy", "perplexity"))
DRAWN_MEASURES |= {"wikitext": ("adjusted_perplexity", "perplexity"), "text": ("bits_per_byte", "perplexity")}
LOG_LINES = dict.fromkeys(("lambada", "lambada-strict"), lambada.lambada_line) | {"wikitext": wikitext.wikitext_line}


@dataclass(frozen=True)
class Task:
    """A file as windows of tokens.

    Fields:
        name: lambada, lambada-strict, wikitext or text.
        variant: how exactly it is measured, in words.
        sha256: of the file.
        measure: makes the measures of [windows, 2] nats and hits.
    """

    name: str
    file: str
    variant: str
    sha256: str
    windows: list[Window]
    measure: Callable[[Tensor], dict[str, float]]

    @property
    def headline(self) -> str:
        return DRAWN_MEASURES[self.name][0]

    def scores(self, values: dict[str, float]) -> dict[str, float]:
        """Return the measures that are drawn, by titles of several tasks."""
        return {f"{self.name} {name.replace('_', ' ')}": values[name] for name in DRAWN_MEASURES[self.name]}

    def line(self, values: dict[str, float]) -> str:
        """Return the result in the words of Megatron's log, framed by dashes."""
        title = {"wikitext": "WIKITEXT103"}.get(self.name, self.name.partition("-")[0].upper())
        measures = (f"{name.replace('_', ' ')}: {value:,.6g}" for name, value in values.items())
        words = LOG_LINES[self.name](values) if self.name in LOG_LINES else " | ".join(measures)
        text = f" validation results on {title} | {words}"
        frame = "-" * (len(text) + 1)
        return f"{frame}\n{text}\n{frame}"


def make_task(
    name: str, path: str, tokenizer: Tokenizer, length: int, stride: int | None = None, limit: int | None = None
) -> Task:
    """Read a task's file and cut it into windows of at most `length` predictions.

    `stride` is that of overlapping windows (none: 32 for wikitext, half the length for text), and
    `limit` the most passages or documents (wikitext has neither).
    """
    assert name in EVAL_TASKS
    if not Path(path).is_file() and name != "text":
        raise bad_data(f"{name}={path}: no such file")
    digest = sha256(path) if Path(path).is_file() else ""
    if name == "text":
        stride = min(stride or max(1, length // 2), length)
        made, measure = text_windows(path, tokenizer, length, stride, limit)
        variant = f"each document alone, windows of {length} tokens that advance by {stride}"
    elif name == "wikitext":
        stride = min(stride or WIKITEXT_STRIDE, length)
        made, measure = wikitext.wikitext_windows(tokenizer, path, length, stride)
        table = wikitext.pick_table(path)
        variant = f"{table} detokenizer, windows of {length} tokens that advance by {stride}"
    else:
        say(f"> building lambada dataset from {path} ...")
        examples, strict = lambada.read_examples(path)[:limit], name == "lambada-strict"
        say(f" > found {len(examples)} samples.")
        made = lambada.word_windows(tokenizer, examples, strict, length)
        measure = functools.partial(lambada.measure_words, made)
        kind = "OpenAI's file" if digest == lambada.OPENAI_SHA256 else "another file than OpenAI's"
        variant = f"{'strict: the whole last word' if strict else 'not strict: the last token'}; {kind}"
    variant += f"; at most the first {limit:,}" if limit else ""
    return Task(name, path, variant, digest, made, measure)


def text_windows(
    path: str, tokenizer: Tokenizer, length: int, stride: int, limit: int | None
) -> tuple[list[Window], Callable[[Tensor], dict[str, float]]]:
    from meshwright.data.text.cutting import read_texts

    texts = list(itertools.islice(filter(None, read_texts(TextInputs(input=[path]))), limit))
    if not texts:
        raise bad_data(f"text={path}: no text to score")
    made: list[Window] = []
    for text in texts:
        made += document_windows([tokenizer.eod, *tokenizer.encode(text)], length, stride)
    tokens = sum(len(w.tokens) - 1 - w.first for w in made)
    size = sum(len(text.encode()) for text in texts)

    def measure(values: Tensor) -> dict[str, float]:
        score = Score(float(values[:, 0].sum()), tokens, size, len(texts))
        names = "loss perplexity bits_per_byte documents tokens bytes".split()
        return {name: getattr(score, name) for name in names}

    return made, measure


def score_task(
    task: Task,
    scorer: Scorer,
    length: int,
    batch: int,
    fixed: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """Score a task with a model; see `score_windows`. Return None if it should stop on the way."""
    import torch

    scores = []
    for values in score_windows(scorer, task.windows, length, batch, fixed):
        if should_stop():
            return None
        scores.append(values)
    return task.measure(torch.cat(scores))
