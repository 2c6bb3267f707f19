"""Verify every layout that two GPUs allow, some at a time, and print a line for each.

usage: python benchmarks/verify_layouts.py OUT [NAME ...] [--jobs 4] [--device cpu]

Each is `meshwright verify-layout` on two ranks, by NCCL on GPUs. OUT holds their logs. A rank that
hangs for MINUTES is named in its log, with all stacks. The status is 1 if one of the layouts
differs from one process or does not end.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from common import new_parser, print_head, print_row

GPT = "--preset gpt2-345m --micro-batch-size 2 --global-batch-size 8"
LLAMA = (
    f"{GPT} --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"
    " --group-query-attention --num-query-groups 4 --untie-embeddings-and-output-weights"
)
TP = "--tensor-model-parallel-size 2"
SP = f"{TP} --sequence-parallel"
PP = "--pipeline-model-parallel-size 2"
CP = "--context-parallel-size 2 --attention-dropout 0"
MUON = "--optimizer muon --lr 1e-3"
FULL = "--recompute-granularity full --recompute-method uniform"
FP8 = "--fp8-format hybrid"
QK_NORM = "--qk-layernorm"
LAYOUTS = {
    "DP2": f"{GPT} --bf16",
    "DP2 by collectives": f"{GPT} --bf16 --data-parallel-sums collectives",
    "DP2 fp16": f"{GPT} --fp16",
    "DP2 fp8": f"{GPT} --bf16 {FP8}",
    "DP2 QK-norm": f"{GPT} --bf16 {QK_NORM}",
    "ZeRO 1": f"{GPT} --bf16 --zero-stage 1",
    "ZeRO 1 fp16 recomputed": f"{GPT} --fp16 --zero-stage 1 --recompute-activations",
    "ZeRO 1 Muon": f"{GPT} --bf16 --zero-stage 1 {MUON}",
    "ZeRO 2": f"{GPT} --bf16 --zero-stage 2",
    "ZeRO 3": f"{GPT} --bf16 --zero-stage 3",
    "ZeRO 3 fp16 recomputed": f"{GPT} --fp16 --zero-stage 3 {FULL}",
    "ZeRO 3 fp8": f"{GPT} --bf16 --zero-stage 3 {FP8}",
    "ZeRO 3 QK-norm": f"{GPT} --bf16 --zero-stage 3 {QK_NORM}",
    "ZeRO 3 cautious": f"{GPT} --bf16 --zero-stage 3 --cautious-weight-decay",
    "ZeRO 3 rounded state": f"{GPT} --bf16 --zero-stage 3 --optimizer-state-dtype bfloat16",
    "ZeRO 3 Muon": f"{GPT} --bf16 --zero-stage 3 {MUON}",
    "ZeRO 3 Llama": f"{LLAMA} --bf16 --zero-stage 3",
    "TP2": f"{GPT} --bf16 {TP}",
    "TP2 SP": f"{GPT} --bf16 {SP}",
    "TP2 SP fp16 recomputed": f"{GPT} --fp16 {SP} --recompute-activations",
    "TP2 SP fp8": f"{GPT} --bf16 {SP} {FP8}",
    "TP2 SP QK-norm": f"{GPT} --bf16 {SP} {QK_NORM}",
    "TP2 SP Muon": f"{GPT} --bf16 {SP} {MUON}",
    "TP2 SP Llama": f"{LLAMA} --bf16 {SP}",
    "PP2": f"{GPT} --bf16 {PP}",
    "PP2 interleaved": f"{GPT} --bf16 {PP} --num-layers-per-virtual-pipeline-stage 6",
    "PP2 fp16 recomputed": f"{GPT} --fp16 {PP} --checkpoint-activations",
    "PP2 fp8": f"{GPT} --bf16 {PP} {FP8}",
    "PP2 QK-norm": f"{GPT} --bf16 {PP} {QK_NORM}",
    "PP2 gpipe": f"{GPT} --bf16 {PP} --pipeline-schedule gpipe",
    "CP2": f"{GPT} --bf16 {CP}",
    "CP2 ZeRO 3": f"{GPT} --bf16 {CP} --zero-stage 3",
}
MINUTES = 1.5
MARKS = (
    "gloo on",
    "nccl on",
    "optimizer state",
    "differs",
    "error",
    "hangs",
)  # of the lines that tell most


def verify(folder: Path, device: str | None, name: str) -> tuple[int, float, str]:
    """Run one layout; return its status, its seconds, and the lines of its log that tell most."""
    command = [sys.executable, "-m", "meshwright"]
    if device:
        command += ["verify-layout", "--world-size=2", f"--device={device}"]
    else:
        command += ["launch", "--nproc-per-node=2", "verify-layout"]
    command += LAYOUTS[name].split() + [f"--distributed-timeout-minutes={MINUTES}"]
    log = folder / f"{re.sub('[^a-zA-Z0-9]+', '-', name)}.txt"
    begun = time.monotonic()
    with log.open("w") as file:
        try:
            status = subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, check=False, timeout=200
            ).returncode
        except subprocess.TimeoutExpired:
            status = 124  # as timeout(1) says it
    seconds = time.monotonic() - begun

    lines = [" ".join(x.split()) for x in log.read_text(errors="replace").splitlines() if x.strip()]
    telling = [line for line in lines if any(mark in line for mark in MARKS)]
    return status, seconds, "; ".join(telling or lines[-1:])[:300].replace("|", " ")


def main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("names", nargs="*", metavar="NAME", help="layouts (none: all)")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--device", help="of ranks that this machine starts (none: its GPUs)")
    given = parser.parse_args()
    if unknown := sorted(set(given.names) - set(LAYOUTS)):
        parser.error(f"no layout is called {unknown[0]!r}; choose from {', '.join(LAYOUTS)}")
    given.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

    names = given.names or list(LAYOUTS)
    differing = 0
    print_head("layout", "", "s", "what verify-layout says")
    with ThreadPoolExecutor(given.jobs) as pool:
        results = pool.map(partial(verify, given.out, given.device), names)
        for name, (status, seconds, says) in zip(names, results, strict=True):
            differing += status != 0
            print_row(name, "equal" if not status else f"status {status}", f"{seconds:.0f}", says)
    print(f"{len(names) - differing} of {len(names)} equal")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
