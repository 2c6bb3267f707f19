"""`meshwright evaluate DIR --input FILES`: perplexity and bits per byte of a model on text."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from meshwright import console
from meshwright import device as devices
from meshwright.errors import BAD_DATA, DONE, UserError
from meshwright.launch.world import is_first_process
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
        out = checks.reading_problems(self, "evaluate")
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
    if not is_first_process("evaluation"):
        return DONE
    parsed = command.settings(EvaluateConfig, argv, "evaluate", ABOUT, "load")
    if parsed is None:
        return DONE
    from meshwright.data.prepare.inputs import find
    from meshwright.data.prepare.text import read_texts
    from meshwright.evaluation.score import plain_scorer, read_token_files, score, score_ids

    c, e = parsed.config, parsed.config.evaluate
    texts = list[str]()
    if e.input:
        found = find(e)
        texts = list(read_texts(e, found))
        if not any(texts):
            reason = f" ({found.passed.line()})" if found.passed else ""
            raise UserError(f"{', '.join(e.input)}: no text to score{reason}", BAD_DATA)
        if found.passed:
            console.notice(found.passed.line())

    # torch is imported only now, so that a mistake in the flags is reported at once.
    from meshwright.generation import engine
    from meshwright.optim.loss_scale import dtype_of

    console.set_stream(None if e.json else "stdout")
    assert c.checkpoint.load
    load, given = c.checkpoint.load, flags.given(parsed)
    if parsed.dry_run:
        fit = engine.open_fit(load, given, c.tokenizer)
        what = f"{len(texts)} documents" if e.input else f"token files {c.data.data_path[0]}"
        print(f"{what}; the flags fit step {fit.source.step} in {fit.source.root}; nothing was loaded")
        return DONE
    device = devices.pick(c.parallel.device)
    batch = int(c.training.micro_batch_size or 8)
    with command.explain_out_of_memory(f"a smaller --micro-batch-size (now {batch}) or --seq-length, or --bf16,"):
        m = engine.load(load, given, c.tokenizer, dtype_of(c.precision), device)
        stride = min(e.overlapping_eval or max(1, m.seq_length // 2), m.seq_length)
        if c.data.data_path:
            documents = read_token_files(c.data, m.tokenizer, divided=parsed.sources["split"] != "default")
            s = score_ids(plain_scorer(m.model), m.tokenizer.eod, documents, m.seq_length, stride, batch)
        else:
            s = score(plain_scorer(m.model), m.tokenizer, texts, m.seq_length, stride, batch)
    print_score(s, m.step, m.seq_length, stride, e.json)
    return DONE


def print_score(s: Score, step: int, length: int, stride: int, as_json: bool) -> None:
    values = {"step": step} | {name: getattr(s, name) for name in "documents tokens bytes loss perplexity".split()}
    values |= {"bits_per_byte": s.bits_per_byte, "sequence_length": length, "stride": stride}
    if as_json:
        print(json.dumps(values))
    else:
        for name, value in values.items():
            print(f"  {name.replace('_', ' '):16}", f"{value:,.4f}" if isinstance(value, float) else f"{value:,}")
