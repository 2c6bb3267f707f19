"""`meshwright train-tokenizer`: learn a byte-level BPE from JSON lines, in GPT-2's two files."""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

from meshwright.data.prepare.text import find_inputs, read_texts
from meshwright.errors import BAD_DATA, DONE, UserError
from meshwright.tokenizers import END_OF_TEXT, GPT2BPE, train_bpe


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("meshwright train-tokenizer", allow_abbrev=False, description="Learn a BPE.")
    parser.add_argument("--input", nargs="+", required=True, help="JSON-lines file(s), one document a line")
    parser.add_argument("--json-keys", nargs="+", default=["text"], help="keys whose text is read (default: text)")
    parser.add_argument("--vocab-size", type=int, required=True, help=f"ids in all, with the bytes and {END_OF_TEXT}")
    parser.add_argument("--output", type=Path, required=True, help="folder for vocab.json and merges.txt")
    given = parser.parse_args(argv)
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
