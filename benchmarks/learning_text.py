"""Make token files and a tokenizer for benchmarks/learning.py from files of installed packages.

    python benchmarks/learning_text.py OUT FOLDER [FOLDER ...] --megabytes 60

Python sources and documentation below the folders, files that are equal or nearly equal to another
left out by `meshwright data dedup`, in an order that depends on their names alone. OUT then holds
text.jsonl, tokenizer/ and corpus_text_document.bin and .idx.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from common import new_parser

SUFFIXES = {".py", ".pyi", ".md", ".rst", ".txt"}
# bytes of a file; larger ones are mostly tables and generated code
SMALLEST, LARGEST = 400, 100_000


def texts(folders: list[Path], most: int) -> Iterator[str]:
    """Yield the files' texts, at most so many bytes of them."""
    found = {
        path.resolve()
        for folder in folders
        for path in folder.rglob("*")
        if path.suffix in SUFFIXES
    }
    named = sorted(
        (hashlib.sha256("/".join(path.parts[-4:]).encode()).digest(), path) for path in found
    )
    seen: set[bytes] = set()
    for _, path in named:
        if most <= 0:
            return
        if not (path.is_file() and SMALLEST <= path.stat().st_size <= LARGEST):
            continue
        data = path.read_bytes()
        digest = hashlib.sha256(data).digest()
        try:
            text = data.decode()
        except UnicodeDecodeError:
            continue
        if digest not in seen:
            seen.add(digest)
            most -= len(data)
            yield text


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--megabytes", type=float, default=60)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--keep-similar", action="store_true", help="leave only equal files out, which is faster"
    )
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    all_texts, text = given.out / "all.jsonl", given.out / "text.jsonl"
    with open(all_texts, "w") as file:
        for document in texts(given.folders, int(given.megabytes * 1e6)):
            file.write(json.dumps({"text": document}) + "\n")

    def call(*words: object) -> None:
        subprocess.run([sys.executable, "-m", "meshwright", *map(str, words)], check=True)

    if given.keep_similar:
        all_texts.rename(text)
    else:
        call("data", "dedup", all_texts, "--output-file", text, "--overwrite")
    call(
        "train-tokenizer",
        "--input",
        text,
        "--vocab-size",
        given.vocab_size,
        "--output",
        given.out / "tokenizer",
    )
    call(
        "preprocess",
        "--input",
        text,
        "--output-prefix",
        given.out / "corpus",
        "--append-eod",
        "--overwrite",
        "--tokenizer",
        given.out / "tokenizer",
        "--workers",
        given.workers,
    )
    print(f"{text.stat().st_size / 1e6:.1f} MB of text")


if __name__ == "__main__":
    main()
