"""Measure memory and time of training steps of drawn configurations on one GPU, or on two.

usage: python benchmarks/plan_cases.py FILE [--ranks 2] [--seed N] [--seconds S] [--flags TEXT]

Each case is measured in child processes and written to FILE as a line of JSON: its flags, the bytes
allocated by its state (on one GPU), the most bytes allocated and reserved by a rank, the bytes of
the device that torch does not count, and the median milliseconds of its steps. plan_memory.py and
plan_times.py --lines print the plan's predictions beside them. With --flags these configurations
are measured instead of drawn ones.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

# else no process forked from this one may use the GPU
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch
from common import new_parser
from trust_cost import NEEDED, open_trainer

from meshwright.base import device as devices
from meshwright.base.runs.rows import read_rows
from meshwright.config.flags import parse_settings
from meshwright.config.schema import TrainConfig
from meshwright.training import run

SECONDS = 70  # of a case, at most
SHAPES = [
    (768, 12, 12),
    (1024, 16, 24),
    (1280, 20, 36),
    (1536, 16, 24),
    (2048, 16, 24),
    (2560, 32, 32),
    (4096, 32, 32),
]
LLAMA = "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"
LLAMA += " --untie-embeddings-and-output-weights"
EXTRAS = (
    "--final-logit-softcapping 30",
    "--z-loss-coef 1e-4",
    "--window-size 255,0",
    "--squared-relu",
    "--untie-embeddings-and-output-weights",
    "--fp32-residual-connection",
    "--use-parallel-residual",
    "--apply-residual-connection-post-layernorm",
    "--reset-position-ids --reset-attention-mask --eod-mask-loss --tokenizer-type NullTokenizer",
    "--qk-layernorm",
    "--position-embedding-type rope",
    "--normalization RMSNorm",
    "--swiglu",
)
RECOMPUTE = "--recompute-granularity full --recompute-method"


# Of two ranks: flags, ranks that share the parameters' state, and data-parallel ranks.
LAYOUTS = (
    ("--zero-stage 0", 1, 2),
    ("--zero-stage 1", 2, 2),
    ("--zero-stage 2", 2, 2),
    ("--zero-stage 3", 2, 2),
    ("--tensor-model-parallel-size 2", 2, 1),
    ("--tensor-model-parallel-size 2 --sequence-parallel", 2, 1),
    ("--pipeline-model-parallel-size 2", 2, 1),
    ("--pipeline-model-parallel-size 2 --pipeline-schedule gpipe", 2, 1),
    ("--context-parallel-size 2", 1, 1),
)
RUN_ON_RANKS = (
    "--mock-data --eval-iters 0 --train-iters 14 --log-interval 1 --lr 1e-5 --no-tensorboard"
)
RUN_ON_RANKS += " --check-replicas-interval 1000"
AS_RANK = "--as-rank"
WARM_UP = 5  # steps that compile, and record graphs


def draw_on_ranks(rng: random.Random, memory: float) -> list[str]:
    """Draw the flags of a run on two ranks that may fit."""
    layout, sharing, replicas = rng.choice(LAYOUTS)
    words = draw(rng, memory * sharing)
    for flag, factor in (("--num-layers", 1), ("--global-batch-size", replicas)):
        place = words.index(flag) + 1
        words[place] = str(int(words[place]) * factor)
    if "pipeline" in layout:
        layers, batch = words.index("--num-layers") + 1, words.index("--global-batch-size") + 1
        words[layers] = str(max(int(words[layers]) // 2 * 2, 2))
        words[batch] = str(
            int(words[words.index("--micro-batch-size") + 1]) * rng.choice([2, 4, 8])
        )
    return [*words, *layout.split(), "--world-size", "2"]


def draw(rng: random.Random, memory: float) -> list[str]:
    """Draw the flags of a run that may fit."""
    while True:
        hidden, heads, most = rng.choice(SHAPES)
        layers = rng.choice([most, most, rng.randint(2, most)])
        length, micro = (
            rng.choice([512, 1024, 1024, 1024, 2048, 2048, 4096]),
            rng.choice([1, 1, 2, 4, 4, 8, 8, 16]),
        )
        words = f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --seq-length {length}".split()
        batch = micro * rng.choice([1, 1, 1, 2, 3])
        words += (
            f"--micro-batch-size {micro} --global-batch-size {batch} --vocab-size 50257".split()
        )
        kind = rng.random()
        if kind < 0.3:
            words += LLAMA.split() + (["--num-query-groups", "4"] if rng.random() < 0.4 else [])
        elif kind < 0.65:
            words += rng.choice(EXTRAS).split()
        words += (
            "--hidden-dropout 0.1 --attention-dropout 0.1".split()
            if rng.random() < 0.25
            else "--hidden-dropout 0 --attention-dropout 0".split()
        )
        dtype = rng.random()
        words += ["--fp16"] if dtype < 0.12 else [] if dtype < 0.2 else ["--bf16"]
        if dtype >= 0.85:
            words += ["--fp8-format", rng.choice(["e4m3", "hybrid"])]
        again, recompute = rng.random(), 0
        if again < 0.12:
            words += "--recompute-granularity selective".split()
        elif again < 0.27:
            recompute, count = 1, rng.choice([1, 1, 2, 4])
            words += f"{RECOMPUTE} uniform --recompute-num-layers {count}".split()
        elif again < 0.35:
            words += f"{RECOMPUTE} block --recompute-num-layers {max(layers // 2, 1)}".split()
        optimizer = rng.random()
        if optimizer < 0.15:
            words += ["--optimizer", "muon"]
        elif optimizer < 0.25:
            words += ["--optimizer", rng.choice(["lion", "sgd"])]
        way = rng.random()
        if way < 0.15:
            words += "--cuda-graphs off".split()
        elif way < 0.2:
            words += "--compile on --cuda-graphs off".split()
        elif way < 0.25:
            words += "--fused-kernels off --compile off --cuda-graphs off".split()
        parameters = 12 * layers * hidden**2 + 51000 * hidden
        full, tokens = dtype >= 0.12 and dtype < 0.2, length * micro
        saved = (80 if full else 44) * hidden * tokens * (
            1 if recompute else layers
        ) + tokens * 50304 * 6
        if parameters * 18.2 + saved < memory and 6 * parameters * tokens < 2.5e14:
            return words


def measure(words: list[str]) -> dict[str, Any]:
    trainer = open_trainer([*NEEDED, *words])
    trainer.replicas.every = 1 << 40  # nothing but the step
    torch.cuda.synchronize()
    static = torch.cuda.memory_allocated()
    for _ in range(5):
        trainer.step()
    trainer.finish()
    torch.cuda.synchronize()
    first, first_reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(4):
            trainer.step()
        trainer.finish()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began) / 4)
    free, total = torch.cuda.mem_get_info()
    graphs = trainer.net.graphs
    parameters = sum(p.numel() for part in trainer.net.parts for p in part.parameters())
    return {
        "device": torch.cuda.get_device_name(),
        "parameters": parameters,
        "static": static,
        "peak": max(first, torch.cuda.max_memory_allocated()),
        "peak_later": torch.cuda.max_memory_allocated(),
        "reserved": max(first_reserved, torch.cuda.max_memory_reserved()),
        "context": total - free - torch.cuda.memory_reserved(),
        "ms": statistics.median(times),
        "ms_all": times,
        "graphs": bool(graphs and not graphs.why_off),
        "execution": str(trainer.net.execution),
        "torch": torch.__version__,
    }


def measure_on_ranks(words: list[str], count: int) -> dict[str, Any] | None:
    """Train on several ranks, each a program; return what they measured, None if one failed."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    sizes = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    with tempfile.TemporaryDirectory(prefix="plan-cases") as name:
        folder, ranks = Path(name), []
        for rank in range(count):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [
                sys.executable,
                __file__,
                AS_RANK,
                str(folder / f"rank{rank}"),
                *words,
                "--run-dir",
                str(folder / "run"),
            ]
            ranks.append(
                subprocess.Popen(command, env=os.environ | sizes | place, stdout=subprocess.DEVNULL)
            )
        if any([rank.wait() for rank in ranks]):
            return None
        got = [json.loads((folder / f"rank{rank}").read_text()) for rank in range(count)]
        times = [row["ms"] for row in read_rows(folder / "run") if row["event"] == "step"][WARM_UP:]
    most = {key: max(rank[key] for rank in got) for key in got[0]}
    return {"world": count, **most, "ranks": got, "ms": statistics.median(times), "ms_all": times}


def train_as_rank(file: Path, words: list[str]) -> None:
    """Train on this rank, and write what was measured to a file."""
    signal.alarm(SECONDS)
    run.run(parse_settings(TrainConfig, [*RUN_ON_RANKS.split(), *words], "train").config)
    free, total = torch.cuda.mem_get_info()
    mapped = devices.symmetric_memory()  # of other ranks too, which torch does not count
    measured = {
        "device": torch.cuda.get_device_name(),
        "peak": torch.cuda.max_memory_allocated() + mapped,
        "reserved": torch.cuda.max_memory_reserved() + mapped,
        "mapped": mapped,
        "context": total - free - torch.cuda.memory_reserved(),
        "torch": torch.__version__,
    }
    file.write_text(json.dumps(measured))


def in_child(words: list[str], file: TextIO) -> bool:
    """Measure in a fork, which imports nothing again; return whether that succeeds."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    signal.alarm(SECONDS)
    try:
        file.write(json.dumps({"flags": " ".join(words)} | measure(words)) + "\n")
        file.flush()
    except BaseException:
        print("failed:", " ".join(words), traceback.format_exc(limit=-3), flush=True)
        os._exit(1)
    os._exit(0)


def measure_case(words: list[str], ranks: int, file: TextIO) -> bool:
    """Measure a case and write its line; return whether that succeeded."""
    if ranks == 1:
        return in_child(words, file)
    row = measure_on_ranks(words, ranks)
    if row:
        file.write(json.dumps({"flags": " ".join(words)} | row) + "\n")
        file.flush()
    return bool(row)


def main(argv: list[str]) -> int:
    if argv[:1] == [AS_RANK]:
        train_as_rank(Path(argv[1]), argv[2:])
        return 0
    parser = new_parser(__doc__)
    parser.add_argument("file", help="where lines are appended")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=300, help="after which no case begins (default: 300)"
    )
    parser.add_argument(
        "--memory", type=float, default=62e9, help="most bytes by a rough estimate (default: 62e9)"
    )
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=1, help="GPUs of a run")
    parser.add_argument(
        "--first", nargs="*", default=[], help="configurations to measure before drawn ones"
    )
    given = parser.parse_args(argv)
    rng, until = random.Random(given.seed), time.monotonic() + given.seconds
    first = [text.split() for text in given.first]
    with open(given.file, "a") as file:
        while time.monotonic() < until:
            words = (
                first.pop(0)
                if first
                else (draw if given.ranks == 1 else draw_on_ranks)(rng, given.memory)
            )
            print(
                "measured" if measure_case(words, given.ranks, file) else "failed",
                *words,
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
