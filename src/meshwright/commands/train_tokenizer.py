"""`meshwright train-tokenizer`: learn a byte-level BPE from JSON lines, in GPT-2's two files."""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import BAD_DATA, DONE, UserError
from meshwright.settings import flags
from meshwright.settings.schema import MISSING, flag


@dataclass(frozen=True)
class TrainTokenizerConfig:
    """Settings of `meshwright train-tokenizer`."""

    input: list[str] = flag(MISSING, "files of JSON lines, one document per line")
    vocab_size: int = flag(MISSING, "size of the vocabulary, with the bytes and <|endoftext|>")
    output: Path = flag(MISSING, "folder for vocab.json and merges.txt")
    json_keys: list[str] = flag(["text"], "keys whose text is read")


def main(argv: list[str]) -> int:
    given = flags.parse(TrainTokenizerConfig, argv, "meshwright train-tokenizer", about="Learn a BPE.").config
    from meshwright.data.prepare.inputs import find_inputs
    from meshwright.data.prepare.text import read_texts
    from meshwright.tokenizers import GPT2BPE, train_bpe

    texts = read_texts(find_inputs(given.input), given.json_keys)
    first = next((text for text in texts if text), None)
    if first is None:
        raise UserError(f"{', '.join(given.input)}: no text to learn from", BAD_DATA)
    train_bpe(itertools.chain([first], texts), given.vocab_size, given.output, show_progress=sys.stderr.isatty())
    built = GPT2BPE(given.output / "vocab.json", given.output / "merges.txt")
    print(f"wrote {built.files['vocab.json']} and {built.files['merges.txt']}: {built.size} ids")
    if built.size < given.vocab_size:
        print(f"fewer than --vocab-size {given.vocab_size}: the text has no more pairs to merge")
    return DONE
