"""Measure memory and time of training steps of drawn configurations on one GPU.

usage: python benchmarks/plan_cases.py FILE [--seed N] [--seconds S]

Each case is measured in a child process and written to FILE as a line of JSON: its flags, the bytes
allocated by its state, the most bytes allocated and reserved, the bytes of the device that torch
does not count, and the median milliseconds of its steps. plan_memory.py and plan_times.py --lines
print the plan's predictions beside them.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import sys
import time
import traceback
from typing import Any, TextIO

import torch
from common import new_parser
from trust_cost import NEEDED, open_trainer

SECONDS = 70  # of a case, at most
SHAPES = [(768, 12, 12), (1024, 16, 24), (1280, 20, 36), (1536, 16, 24), (2048, 16, 24), (2560, 32, 32), (4096, 32, 32)]
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


def draw(rng: random.Random, memory: float) -> list[str]:
    """Draw the flags of a run that may fit."""
    while True:
        hidden, heads, most = rng.choice(SHAPES)
        layers = rng.choice([most, most, rng.randint(2, most)])
        length, micro = rng.choice([512, 1024, 1024, 1024, 2048, 2048, 4096]), rng.choice([1, 1, 2, 4, 4, 8, 8, 16])
        words = (
            f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --seq-length {length}".split()
        )
        batch = micro * rng.choice([1, 1, 1, 2, 3])
        words += f"--micro-batch-size {micro} --global-batch-size {batch} --vocab-size 50257".split()
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
        saved = (80 if full else 44) * hidden * tokens * (1 if recompute else layers) + tokens * 50304 * 6
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
        "graphs": bool(graphs and not graphs.is_off),
        "execution": str(trainer.net.execution),
        "torch": torch.__version__,
    }


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


def main(argv: list[str]) -> int:
    parser = new_parser(__doc__)
    parser.add_argument("file", help="where lines are appended")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=300, help="after which no case begins (default: 300)")
    parser.add_argument("--memory", type=float, default=62e9, help="most bytes by a rough estimate (default: 62e9)")
    given = parser.parse_args(argv)
    rng, until = random.Random(given.seed), time.monotonic() + given.seconds
    with open(given.file, "a") as file:
        while time.monotonic() < until:
            words = draw(rng, given.memory)
            print("measured" if in_child(words, file) else "failed", *words, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
