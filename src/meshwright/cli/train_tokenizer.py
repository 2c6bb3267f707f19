"""`meshwright train-tokenizer`: learn a byte-level BPE from text, in GPT-2's two files."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.base import origin
from meshwright.base.console import fit, notice
from meshwright.base.errors import DONE, bad_data
from meshwright.base.files import make_folder
from meshwright.config import flags
from meshwright.config.fields import MISSING, flag
from meshwright.config.problem import Problem, stated
from meshwright.config.text_inputs import TextInputs

if TYPE_CHECKING:
    from meshwright.data.text.inputs import Inputs

FILES = ("vocab.json", "merges.txt")
RECORD = "vocab.origin.json"


@dataclass(frozen=True, kw_only=True)
class TrainTokenizerConfig(TextInputs):
    """Settings of `meshwright train-tokenizer`."""

    vocab_size: int = flag(
        MISSING, "size of the vocabulary, with the bytes and <|endoftext|>", docs="checkpoints data"
    )
    output: Path = flag(MISSING, "folder for vocab.json and merges.txt", docs="tutorial")
    overwrite: bool = flag(False, "replace a vocabulary that was made from other text or settings")

    def problems(self) -> list[Problem]:
        out = self.input_problems()
        if self.vocab_size < 257:
            text = "cannot hold the 256 bytes and <|endoftext|>; use at least 257"
            out.append(Problem(("vocab_size",), f"{stated(self, 'vocab_size')} {text}"))
        return out


def main(argv: list[str]) -> int:
    given = flags.parse_settings(
        TrainTokenizerConfig, argv, "meshwright train-tokenizer", about="Learn a BPE."
    ).config
    from meshwright.data.text.inputs import find_inputs
    from meshwright.data.text.reading import why_nothing
    from meshwright.data.tokenizers import GPT2BPE, train_bpe

    inputs = find_inputs(given)
    texts = _read_progress(given, inputs)
    # See whether there is any text before anything is written.
    first = next((text for text in texts if text), None)
    if first is None:
        reason = "".join(f" ({line})" for line in why_nothing(inputs, given))
        raise bad_data(f"{', '.join(given.input)}: no text to learn from{reason}")
    vocabulary = [given.output / name for name in FILES]
    # By this record the same vocabulary is known again, and not learnt twice.
    made_from = {
        "command": "train-tokenizer",
        "inputs": inputs.identity(),
        "settings": recorded_settings(given),
    }
    if origin.is_done(given.output / RECORD, made_from, vocabulary, given.overwrite, "--output"):
        print(f"{' and '.join(map(str, vocabulary))} are already there, unchanged")
    else:
        make_folder(given.output, "--output")
        # It is learnt in a folder beside its place, and moved there when both files are whole.
        with tempfile.TemporaryDirectory(dir=given.output) as made:
            train_bpe(itertools.chain([first], texts), given.vocab_size, Path(made))
            sizes = {name: os.path.getsize(Path(made) / name) for name in FILES}
            # Write the record first: files that it does not describe are made again.
            origin.write_origin(given.output / RECORD, made_from, sizes)
            for name, target in zip(FILES, vocabulary, strict=True):
                os.replace(Path(made) / name, target)
        built = GPT2BPE(*vocabulary)
        print(fit(f"wrote {vocabulary[0]} and {vocabulary[1]}: {built.size} ids"))
        if built.size < given.vocab_size:
            print(
                f"fewer than --vocab-size {given.vocab_size}: the text has no more pairs to merge"
            )
    for line in inputs.left_out(given.on_error, given.encoding):
        notice(line)
    words = ["meshwright", "preprocess", *given.words(), "--tokenizer", str(given.output)]
    notice(f"next: {shlex.join(words)} --append-eod --output-prefix PREFIX")
    return DONE


def recorded_settings(given: TrainTokenizerConfig) -> dict[str, Any]:
    """Return the settings that decide what is learned; records name most of them only if given."""
    defaults = asdict(TextInputs())
    always = ("vocab_size", "json_keys", "document_separator")
    # A new option that nobody sets leaves earlier records as they are.
    chosen = [
        name for name in defaults if name != "input" and getattr(given, name) != defaults[name]
    ]
    return {name: getattr(given, name) for name in dict.fromkeys((*always, *chosen))}


def _read_progress(given: TextInputs, inputs: Inputs) -> Iterator[str]:
    from meshwright.base.progress import progress_bar
    from meshwright.data.text.reading import read_texts

    with progress_bar("reading", inputs.bytes or None) as advance:
        yield from read_texts(given, inputs, advance)
    if sys.stderr.isatty():
        notice("learning the merges ...")
