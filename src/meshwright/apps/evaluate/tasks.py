"""Our tasks of --eval-tasks: LAMBADA in two forms, WikiText and texts.

pyproject.toml has their names.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.apps.evaluate import lambada, wikitext
from meshwright.apps.evaluate.score import Score, document_windows, score_windows
from meshwright.base.console import say
from meshwright.base.errors import bad_data
from meshwright.base.files import sha256
from meshwright.config.text_inputs import TextInputs
from meshwright.training import tasks
from meshwright.training.tasks import Window

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.data.tokenizers import Tokenizer
    from meshwright.parallel.window_scores import Scorer

WIKITEXT_STRIDE = 32  # of Megatron's --overlapping-eval


@dataclass(frozen=True)
class TextTask:
    """A file of text as windows of tokens; see training.tasks.Task.

    Fields:
        measure: makes the measures of [windows, 2] nats and hits.
        drawn: the measures that are drawn over the steps of a training; the first says most.
        title: in Megatron's log.
        words: makes Megatron's words for the result (none: every measure with its name).
    """

    name: str
    file: str
    variant: str
    sha256: str
    windows: list[Window]
    measure: Callable[[Tensor], dict[str, float]]
    drawn: tuple[str, ...]
    title: str
    words: Callable[[dict[str, float]], str] | None = None

    @property
    def headline(self) -> str:
        return self.drawn[0]

    def score(
        self,
        scorer: Scorer,
        length: int,
        batch: int,
        fixed: bool = False,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> dict[str, float] | None:
        import torch

        scores = []
        for values in score_windows(scorer, self.windows, length, batch, fixed):
            if should_stop():
                return None
            scores.append(values)
        return self.measure(torch.cat(scores))

    def scores(self, values: dict[str, float]) -> dict[str, float]:
        return {f"{self.name} {name.replace('_', ' ')}": values[name] for name in self.drawn}

    def line(self, values: dict[str, float]) -> str:
        measures = (f"{name.replace('_', ' ')}: {value:,.6g}" for name, value in values.items())
        words = self.words(values) if self.words is not None else " | ".join(measures)
        text = f" validation results on {self.title} | {words}"
        frame = "-" * (len(text) + 1)
        return f"{frame}\n{text}\n{frame}"


def make_lambada(
    path: str, tokenizer: Tokenizer, length: int, stride: int | None = None, limit: int | None = None
) -> tasks.Task:
    """Measure the last token of each passage."""
    return read_passages("lambada", path, tokenizer, length, limit)


def make_strict_lambada(
    path: str, tokenizer: Tokenizer, length: int, stride: int | None = None, limit: int | None = None
) -> tasks.Task:
    """Measure the whole last word of each passage."""
    return read_passages("lambada-strict", path, tokenizer, length, limit)


def read_passages(name: str, path: str, tokenizer: Tokenizer, length: int, limit: int | None) -> TextTask:
    strict, digest = name == "lambada-strict", digest_of(name, path)
    say(f"> building lambada dataset from {path} ...")
    examples = lambada.read_examples(path)[:limit]
    say(f" > found {len(examples)} samples.")
    made = lambada.word_windows(tokenizer, examples, strict, length)
    measure = functools.partial(lambada.measure_words, made)
    kind = "OpenAI's file" if digest == lambada.OPENAI_SHA256 else "another file than OpenAI's"
    variant = f"{'strict: the whole last word' if strict else 'not strict: the last token'}; {kind}{limited(limit)}"
    drawn = ("accuracy", "perplexity")
    return TextTask(name, path, variant, digest, made, measure, drawn, "LAMBADA", lambada.lambada_line)


def make_wikitext(
    path: str, tokenizer: Tokenizer, length: int, stride: int | None = None, limit: int | None = None
) -> tasks.Task:
    """Measure one long text, which has nothing to limit."""
    digest, stride = digest_of("wikitext", path), min(stride or WIKITEXT_STRIDE, length)
    made, measure = wikitext.wikitext_windows(tokenizer, path, length, stride)
    table = wikitext.pick_table(path)
    variant = f"{table} detokenizer, windows of {length} tokens that advance by {stride}{limited(limit)}"
    drawn = ("adjusted_perplexity", "perplexity")
    return TextTask("wikitext", path, variant, digest, made, measure, drawn, "WIKITEXT103", wikitext.wikitext_line)


def make_text(
    path: str, tokenizer: Tokenizer, length: int, stride: int | None = None, limit: int | None = None
) -> tasks.Task:
    """Measure each document of a file, or of a folder's files, alone."""
    digest, stride = sha256(path) if Path(path).is_file() else "", min(stride or max(1, length // 2), length)
    made, measure = text_windows(path, tokenizer, length, stride, limit)
    variant = f"each document alone, windows of {length} tokens that advance by {stride}{limited(limit)}"
    return TextTask("text", path, variant, digest, made, measure, ("bits_per_byte", "perplexity"), "TEXT")


def digest_of(name: str, path: str) -> str:
    if not Path(path).is_file():
        raise bad_data(f"{name}={path}: no such file")
    return sha256(path)


def limited(limit: int | None) -> str:
    return f"; at most the first {limit:,}" if limit else ""


def text_windows(
    path: str, tokenizer: Tokenizer, length: int, stride: int, limit: int | None
) -> tuple[list[Window], Callable[[Tensor], dict[str, float]]]:
    from meshwright.data.text.reading import read_texts

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
