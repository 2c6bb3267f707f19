"""`meshwright evaluate DIR --input FILES`: perplexity and bits per byte of a model on text."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from meshwright import console
from meshwright.commands import launch
from meshwright.errors import BAD_DATA, DONE, UserError
from meshwright.launch.world import World
from meshwright.settings import checks, command, data_paths, flags
from meshwright.settings.schema import (
    READING,
    Checkpoint,
    Data,
    Model,
    Parallel,
    Precision,
    Tokenizer,
    Training,
    flag,
    spelling,
)
from meshwright.settings.texts import TextInputs

if TYPE_CHECKING:
    from meshwright.evaluation.score import Score
    from meshwright.generation.engine import LanguageModel


@dataclass(frozen=True, kw_only=True)
class Evaluate(TextInputs):
    """Text to score."""

    overlapping_eval: int | None = flag(
        None, "tokens by which a window advances (none: half the sequence length)", bound=">0"
    )
    json: bool = flag(False, "print one line of JSON instead of a table")


@dataclass(frozen=True)
class EvaluateConfig:
    """Settings of `meshwright evaluate`."""

    evaluate: Evaluate = Evaluate()
    model: Model = Model()
    tokenizer: Tokenizer = Tokenizer()
    data: Data = Data()
    training: Training = Training()
    precision: Precision = Precision()
    parallel: Parallel = Parallel()
    checkpoint: Checkpoint = Checkpoint()

    USES: ClassVar[frozenset[str]] = frozenset(
        {f.name for group in (Evaluate, Tokenizer) for f in dataclasses.fields(group)}
        | {*READING, "data_path", "split", "split_arithmetic"}
    )

    def problems(self) -> list[str]:
        out = checks.reading_problems(self, "evaluate", copies=True)
        others = [n for n in data_paths.given(self.data) if n != "data_path"]
        out += [f"{spelling(n)} is not read by evaluate; name token files with --data-path" for n in others]
        if self.data.data_path and self.evaluate.input:
            out.append("--input, which is text, and --data-path, which are token files, exclude each other; give one")
        elif self.data.data_path and len(self.data.data_path) > 1:
            out.append("--data-path takes one prefix here; evaluate each part of a blend by itself")
        elif not self.data.data_path and not self.evaluate.input:
            out.append("--input is needed: files or folders of text; or --data-path: token files")
        return [*out, *(self.evaluate.input_problems() if self.evaluate.input else [])]


ABOUT = "Score text with a model. Every token counts, a document's first one too: it follows an end of document."


def main(argv: list[str]) -> int:
    return launch.run_rank(argv, lambda words, world: command_line(argv, words, world))


def command_line(argv: list[str], words: list[str], world: World) -> int:
    is_lead = world.rank == 0
    parsed = command.settings(EvaluateConfig, words, "evaluate", ABOUT, "load", prints=is_lead)
    if parsed is None:
        return DONE
    c, e = parsed.config, parsed.config.evaluate
    if not parsed.dry_run and (status := launch.relaunch(c.parallel, ["evaluate", *argv])) is not None:
        return status
    texts = read_input(e) if e.input and is_lead else []

    # torch is imported only now, so that a mistake in the flags is reported at once.
    from meshwright.generation import engine, ranks

    console.set_stream(None if e.json else "stdout")
    assert c.checkpoint.load
    load, given = c.checkpoint.load, flags.given(parsed)
    if parsed.dry_run:
        fit = engine.open_fit(load, given, c.tokenizer)
        what = f"{len(texts)} documents" if e.input else f"token files {c.data.data_path[0]}"
        print(f"{what}; the flags fit step {fit.source.step} in {fit.source.root}; nothing was loaded")
        return DONE
    batch = int(c.training.micro_batch_size or 8)
    is_divided = parsed.sources["split"] != "default"
    with command.explain_out_of_memory(f"a smaller --micro-batch-size (now {batch}) or --seq-length, or --bf16,"):
        return ranks.run(c, given, lambda m: measure(c, m, texts, is_divided), copies=True)


def read_input(e: Evaluate) -> list[str]:
    """Return the documents of --input."""
    from meshwright.data.prepare.inputs import find
    from meshwright.data.prepare.text import read_texts

    found = find(e)
    texts = list(read_texts(e, found))
    if not any(texts):
        reason = f" ({found.passed.line()})" if found.passed else ""
        raise UserError(f"{', '.join(e.input)}: no text to score{reason}", BAD_DATA)
    if found.passed:
        console.notice(found.passed.line())
    return texts


def measure(c: EvaluateConfig, m: LanguageModel, texts: list[str], is_divided: bool) -> None:
    """Score the documents and print the figures."""
    from meshwright.evaluation.score import read_token_files, score, score_ids

    e, batch = c.evaluate, int(c.training.micro_batch_size or 8)
    stride = min(e.overlapping_eval or max(1, m.seq_length // 2), m.seq_length)
    if c.data.data_path:
        documents = read_token_files(c.data, m.tokenizer, divided=is_divided)
        s = score_ids(m.scorer, m.tokenizer.eod, documents, m.seq_length, stride, batch)
    else:
        s = score(m.scorer, m.tokenizer, texts, m.seq_length, stride, batch)
    print_score(s, m.step, m.seq_length, stride, e.json)


def print_score(s: Score, step: int, length: int, stride: int, as_json: bool) -> None:
    values = {"step": step} | {name: getattr(s, name) for name in "documents tokens bytes loss perplexity".split()}
    values |= {"bits_per_byte": s.bits_per_byte, "sequence_length": length, "stride": stride}
    if as_json:
        print(json.dumps(values))
    else:
        for name, value in values.items():
            print(f"  {name.replace('_', ' '):16}", f"{value:,.4f}" if isinstance(value, float) else f"{value:,}")
