"""What the tests of the documents' commands share: a folder as the documents have it, smaller
sizes, and programs of several ranks.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import warm
from helpers import free_port
from on_ranks import run_programs

ROOT = Path(__file__).parents[2]

# Values that make a documented run small; everything else stays as the document has it.
SMALLER = {
    "num-layers": 2,
    "hidden-size": 32,
    "num-attention-heads": 4,
    "seq-length": 32,
    "max-position-embeddings": 32,
    "train-iters": 6,
    "lr-decay-iters": 40,
    "lr-warmup-iters": 4,
    "log-interval": 2,
    "save-interval": 4,
    "eval-interval": 3,
    "eval-iters": 1,
}


def smaller(command: str, **more: object) -> str:
    """`more`: other flags' values, with _ for -."""
    for name, value in (SMALLER | {n.replace("_", "-"): v for n, v in more.items()}).items():
        command = re.sub(rf"--{name} +\S+", f"--{name} {value}", command)
    return command


def fill(folder: Path) -> Path:
    """As after the documents' downloads: scripts, a corpus, GPT-2's two vocabulary files (ours are
    smaller).
    """
    from meshwright.data.tokenizers import train_bpe

    for name in ("pretrain_gpt.py", "tools", "src"):
        (folder / name).symlink_to(ROOT / name)
    texts = [
        f"Document {n}. The quick brown fox jumps over the lazy dog {n * n} times; 你好。" * 9
        for n in range(60)
    ]
    lines = [
        json.dumps({"src": "x", "text": t, "type": "Eng", "id": str(n), "title": "T"})
        for n, t in enumerate(texts)
    ]
    for name in ("oscar-1GB.jsonl", "my-corpus.json"):
        (folder / name).write_text("\n".join(lines) + "\n")
    train_bpe(texts, 320, folder / "words")
    (folder / "words/vocab.json").rename(folder / "gpt2-vocab.json")
    (folder / "words/merges.txt").rename(folder / "gpt2-merges.txt")
    return folder


def environment() -> dict[str, str]:
    """Return variables with which python, torchrun and meshwright start warm."""
    path = f"{warm.programs()}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}


def shell(place: Path, script: str, status: int = 0) -> str:
    done = subprocess.run(
        ["bash", "-c", script], cwd=place, capture_output=True, text=True, env=environment()
    )
    assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def words(place: Path, script: str, program: str) -> list[str]:
    """What `program` is given as arguments in a shell script, which runs nothing."""
    return shell(place, program + """() { printf '%s\\0' "$@"; }\n""" + script).split("\0")[:-1]


def end(processes: list[subprocess.Popen[str]]) -> None:
    """Those that still run, each with all that it has started."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


ROUNDING = 1e-2  # fp16
SCRIPT = "pretrain_gpt.py"
Step = tuple[float, float, bool]  # loss, gradient norm, skipped


def steps(folder: Path) -> list[Step]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        (float(r["loss"]), float(r["grad_norm"]), r["skipped"])
        for r in rows
        if r["event"] == "step"
    ]


def with_values(flags: list[str], **values: object) -> list[str]:
    """These flags, with other values where they are there."""
    known = {"--" + name.replace("_", "-"): str(value) for name, value in values.items()}
    return [known.get(before, word) for before, word in zip(["", *flags], flags, strict=False)]


def as_one_process(place: Path, flags: list[str], monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """The steps of the same command without ranks."""
    from meshwright.__main__ import main

    monkeypatch.chdir(place)
    folder = f"single-{len(list(place.iterdir()))}"
    one = dict.fromkeys(
        ("tensor_model_parallel_size", "pipeline_model_parallel_size", "num_gpus_per_node"), 1
    )
    assert (
        main(
            ["train", *with_values(flags, save=folder, load=folder, tensorboard_dir=folder, **one)]
        )
        == 0
    )
    return steps(place / folder)


def assert_same(ours: list[Step], single: list[Step], within: float) -> None:
    assert len(ours) == len(single) > 0 and not all(skipped for _, _, skipped in ours)
    for (loss, norm, skipped), (loss_1, norm_1, skipped_1) in zip(ours, single, strict=True):
        assert (
            math.isfinite(loss)
            and loss == pytest.approx(loss_1, rel=within)
            and skipped == skipped_1
        )
        assert skipped or norm == pytest.approx(norm_1, rel=within)


@contextlib.contextmanager
def started(place: Path, *scripts: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Side by side; what is left of them at the end is killed."""
    processes = []
    with contextlib.ExitStack() as held:
        for n, script in enumerate(scripts):
            log = held.enter_context((place / f"log-{n}").open("w"))
            processes.append(
                subprocess.Popen(
                    ["bash", "-c", script, "script.sh", str(n)],
                    cwd=place,
                    text=True,
                    stdout=log,
                    stderr=log,
                    env=environment(),
                    start_new_session=True,
                )
            )
        try:
            yield processes
        finally:
            end(processes)


def run(place: Path, *scripts: str) -> list[str]:
    """All to their ends, which must be good; $1 is a script's number."""
    with started(place, *scripts) as processes:
        ends = [process.wait() for process in processes]
    logs = [(place / f"log-{n}").read_text() for n in range(len(scripts))]
    assert ends == [0] * len(scripts), "\n".join(log[-3000:] for log in logs)
    return logs


def by_deepspeed(
    place: Path, nodes: list[list[str]], each: int, script: str = SCRIPT
) -> tuple[list[int], list[str]]:
    """As the deepspeed launcher starts `each` ranks on each node with that node's flags."""
    port = str(free_port())
    environ, argv = [], []
    for node, flags in enumerate(nodes):
        for local in range(each):
            environ.append(
                {
                    "RANK": str(node * each + local),
                    "LOCAL_RANK": str(local),
                    "WORLD_SIZE": str(len(nodes) * each),
                    "LOCAL_SIZE": str(each),
                    "CROSS_RANK": str(node),
                    "CROSS_SIZE": str(len(nodes)),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                }
            )
            argv.append([f"--local_rank={local}", *flags])
    return run_programs(place / script, argv, environ, place)


# The documents' distributed commands
SEED_000 = """
       --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 24 --hidden-size 1024
       --num-attention-heads 16 --micro-batch-size 8 --global-batch-size 16 --seq-length 1024
       --max-position-embeddings 1024 --train-iters 5000 --lr-decay-iters 320000 --save checkpoints/gpt2
       --load checkpoints/gpt2 --data-path data/meg-gpt2_text_document --vocab-file data/gpt2-vocab.json
       --merge-file data/gpt2-merges.txt --data-impl mmap --split 949,50,1 --distributed-backend nccl --lr 0.00015
       --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2 --clip-grad 1.0 --lr-warmup-fraction .01
       --checkpoint-activations --log-interval 10 --save-interval 500 --eval-interval 100 --eval-iters 10 --fp16
"""
# Seed 003's args_deepspeed_gpt.sh 2 8 RANK ADDR 2 4 true true 32 512, and 1024 on the second node.
SEED_003 = """
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024
    --micro-batch-size {micro} --global-batch-size {batch} --lr 0.00015 --train-iters 220 --lr-decay-iters 320000
    --lr-decay-style cosine --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --lr-warmup-fraction .01
    --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --save checkpoints/gpt2
    --data-path my-gpt2_text_document --deepspeed --deepspeed_config ./ds_config.json --zero-stage 1
    --deepspeed-activation-checkpointing --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4
    --DDP-impl local
"""
# What args_deepspeed_gpt.sh of seed 003 writes, whatever its USE_FP16 says.
CONFIG_003 = """{
  "train_micro_batch_size_per_gpu": $MICRO,
  "train_batch_size": $GLOBAL,
  "gradient_clipping": 1.0,
  "zero_optimization": {
    "stage": 1
  },
  "fp16": {
    "enabled": true,
    "loss_scale": 0,
    "loss_scale_window": 500,
    "hysteresis": 2,
    "min_loss_scale": 1,
    "initial_scale_power": 12
  },
  "steps_per_print": 2000,
  "wall_clock_breakdown": false
}
"""
