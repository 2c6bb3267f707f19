"""Processor time of preprocess for about 50 MB of each form, by two trees in turn, twice.

python speed.py OLD/src NEW/src FOLDER [WORKERS]
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import random
import subprocess
import sys
from pathlib import Path

CODE = """
import contextlib, io, sys, time
from meshwright.__main__ import main
import meshwright.data.text.preprocess
out, workers, *names = sys.argv[1:]
flags = ["--tokenizer", "byte", "--workers", workers, "--overwrite", "--output-prefix", out]
for name in names:
    began = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert main(["preprocess", "--input", name, *flags]) == 0
    print(f"{time.process_time() - began:.2f} s", end="  ")
"""
WORDS = ("alpha", "beta", "gamma", "é", "delta")


def write_texts(folder: Path) -> list[str]:
    """Write the same texts in four forms."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(0)
    texts = [" ".join(chance.choices(WORDS, k=chance.randrange(20, 120))) for _ in range(130_000)]
    lines = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "b.txt").write_text("\n<|endoftext|>\n".join(texts))
    with open(folder / "c.csv", "w", newline="") as file:
        csv.writer(file).writerows([["id", "text"], *enumerate(texts)])
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(lines, 1))
    return [str(folder / name) for name in ("a.jsonl", "b.txt", "c.csv", "d.jsonl.gz")]


if __name__ == "__main__":
    old, new, where, *workers = sys.argv[1:]
    names = write_texts(Path(where).absolute())
    print(*(f"{Path(name).name} {os.path.getsize(name) / 1e6:.0f} MB" for name in names))
    for _ in range(2):
        for side, source in (("old", old), ("new", new)):
            environment = os.environ | {
                "PYTHONPATH": os.path.abspath(source),
                "OMP_NUM_THREADS": "1",
            }
            argv = [sys.executable, "-c", CODE, f"{where}/{side}", *(workers or ["1"]), *names]
            done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True)
            print(side, done.stdout, flush=True)
