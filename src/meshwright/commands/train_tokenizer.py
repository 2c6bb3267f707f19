"""`meshwright train-tokenizer`: learn a byte-level BPE from JSON lines, in GPT-2's two files."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from meshwright import origin
from meshwright.console import notice
from meshwright.errors import BAD_DATA, DONE, UserError
from meshwright.files import make_folder
from meshwright.settings import flags
from meshwright.settings.schema import MISSING, flag

FILES, RECORD = ("vocab.json", "merges.txt"), "vocab.origin.json"


@dataclass(frozen=True)
class TrainTokenizerConfig:
    """Settings of `meshwright train-tokenizer`."""

    input: list[str] = flag(MISSING, "files of JSON lines, one document per line")
    vocab_size: int = flag(MISSING, "size of the vocabulary, with the bytes and <|endoftext|>")
    output: Path = flag(MISSING, "folder for vocab.json and merges.txt")
    json_keys: list[str] = flag(["text"], "keys whose text is read")
    overwrite: bool = flag(False, "replace a vocabulary that was made from other text or settings")


def main(argv: list[str]) -> int:
    given = flags.parse(TrainTokenizerConfig, argv, "meshwright train-tokenizer", about="Learn a BPE.").config
    from meshwright.data.prepare.inputs import find_inputs
    from meshwright.data.prepare.text import read_texts
    from meshwright.tokenizers import GPT2BPE, train_bpe

    inputs = find_inputs(given.input)
    texts = read_texts(inputs, given.json_keys)
    first = next((text for text in texts if text), None)
    if first is None:
        raise UserError(f"{', '.join(given.input)}: no text to learn from", BAD_DATA)
    vocabulary = [given.output / name for name in FILES]
    settings = [given.vocab_size, given.json_keys]
    made_from = {"command": "train-tokenizer", "inputs": origin.digest_of(inputs), "settings": settings}
    if origin.is_done(given.output / RECORD, made_from, vocabulary, given.overwrite, "--output"):
        print(f"{' and '.join(map(str, vocabulary))} are already there, unchanged")
    else:
        make_folder(given.output, "--output")
        with tempfile.TemporaryDirectory(dir=given.output) as made:
            train_bpe(itertools.chain([first], texts), given.vocab_size, Path(made), sys.stderr.isatty())
            sizes = {name: os.path.getsize(Path(made) / name) for name in FILES}
            origin.write(given.output / RECORD, made_from, sizes)
            for name, target in zip(FILES, vocabulary, strict=True):
                os.replace(Path(made) / name, target)
        built = GPT2BPE(*vocabulary)
        print(f"wrote {vocabulary[0]} and {vocabulary[1]}: {built.size} ids")
        if built.size < given.vocab_size:
            print(f"fewer than --vocab-size {given.vocab_size}: the text has no more pairs to merge")
    words = ["meshwright", "preprocess", "--input", *given.input, "--tokenizer", str(given.output)]
    notice(f"next: {shlex.join(words)} --append-eod --output-prefix PREFIX")
    return DONE
