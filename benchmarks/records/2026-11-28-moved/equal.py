"""Run the same commands by two trees, and compare losses and the bytes of all files they write.

    python equal.py OLD/src NEW/src FOLDER

Text to tokens, a run that is resumed, tensor and pipeline parallelism, ZeRO 1 in bfloat16, a run in
Megatron's format, and conversions from and to Hugging Face.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shlex
import subprocess
import sys
from pathlib import Path

RUN = """train --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2
    --global-batch-size 8 --lr 1e-2 --eval-iters 2 --eval-interval 5 --log-interval 1 --data-path t_text_document
    --tokenizer words --no-tensorboard"""
COMMANDS = f"""train-tokenizer --input text.jsonl --vocab-size 400 --output words
preprocess --input text.jsonl --output-prefix t --tokenizer words --append-eod
{RUN} --train-iters 6 --save one
{RUN} --train-iters 12 --save one --load one --override-opt_param-scheduler
launch --nproc-per-node 2 {RUN} --train-iters 8 --tensor-model-parallel-size 2 --sequence-parallel --save tp
launch --nproc-per-node 2 {RUN} --train-iters 8 --pipeline-model-parallel-size 2 --save pp
launch --nproc-per-node 2 {RUN} --train-iters 8 --zero-stage 1 --bf16 --save z1
{RUN} --train-iters 4 --save meg --ckpt-format torch
convert one hf --to huggingface
convert one mt --to torch
convert hf back --to native""".replace("\n    ", " ").splitlines()
ENDINGS = {".safetensors", ".bin", ".idx", ".pt", ".json"}


def run(source: str, folder: Path) -> dict[str, object]:
    """Run all commands; return the hash of each file, and the losses of each run."""
    folder.mkdir(parents=True)
    chance = random.Random(1)
    words = ["".join(chance.choices("abcdefghij", k=chance.randrange(2, 8))) for _ in range(300)]
    texts = (" ".join(chance.choices(words, k=120)) for _ in range(400))
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    environment = os.environ | {"PYTHONPATH": os.path.abspath(source), "OMP_NUM_THREADS": "1"}
    for command in COMMANDS:
        argv = [sys.executable, "-m", "meshwright", *shlex.split(command)]
        subprocess.run(argv, cwd=folder, env=environment, check=True, capture_output=True)
    files = [
        path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix in ENDINGS
    ]
    found: dict[str, object] = {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }
    for path in sorted(folder.glob("*/metrics.jsonl")):
        rows = map(json.loads, path.read_text().splitlines())
        found[str(path.relative_to(folder))] = [
            (r["event"], r["iteration"], r["loss"]) for r in rows if "loss" in r
        ]
    return found


if __name__ == "__main__":
    old, new = (
        run(source, Path(sys.argv[3], name))
        for name, source in zip(("old", "new"), sys.argv[1:3], strict=True)
    )
    unequal = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    print(f"{len(old)} files and curves, unequal: {unequal or 'none'}")
    sys.exit(bool(unequal))
