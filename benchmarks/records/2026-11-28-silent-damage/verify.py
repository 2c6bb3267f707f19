"""Verify every layout that two GPUs allow, four at a time, and print a line for each.

python3 verify.py OUT [--device cpu] [NAME ...]
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

GPT = "--preset gpt2-345m --micro-batch-size 2 --global-batch-size 8"
LLAMA = (
    f"{GPT} --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"
)
LLAMA += " --group-query-attention --num-query-groups 4 --untie-embeddings-and-output-weights"
TP = "--tensor-model-parallel-size 2"
PP = "--pipeline-model-parallel-size 2"
MUON = "--optimizer muon --lr 1e-3"
LAYOUTS = {
    "DP2": f"{GPT} --bf16",
    "DP2 by collectives": f"{GPT} --bf16 --data-parallel-sums collectives",
    "DP2 fp16": f"{GPT} --fp16",
    "ZeRO 1": f"{GPT} --bf16 --zero-stage 1",
    "ZeRO 1 fp16 recomputed": f"{GPT} --fp16 --zero-stage 1 --recompute-activations",
    "ZeRO 2": f"{GPT} --bf16 --zero-stage 2",
    "ZeRO 3": f"{GPT} --bf16 --zero-stage 3",
    "ZeRO 3 by collectives": f"{GPT} --bf16 --zero-stage 3 --data-parallel-sums collectives",
    "ZeRO 3 fp16 recomputed": f"{GPT} --fp16 --zero-stage 3 --recompute-granularity full --recompute-method uniform",
    "ZeRO 3 cautious": f"{GPT} --bf16 --zero-stage 3 --cautious-weight-decay",
    "ZeRO 3 rounded state": f"{GPT} --bf16 --zero-stage 3 --optimizer-state-dtype bfloat16",
    "ZeRO 3 Muon": f"{GPT} --bf16 --zero-stage 3 {MUON}",
    "ZeRO 3 Llama": f"{LLAMA} --bf16 --zero-stage 3",
    "TP2": f"{GPT} --bf16 {TP}",
    "TP2 SP": f"{GPT} --bf16 {TP} --sequence-parallel",
    "TP2 SP fp16 recomputed": f"{GPT} --fp16 {TP} --sequence-parallel --recompute-activations",
    "TP2 SP fp8": f"{GPT} --bf16 {TP} --sequence-parallel --fp8-format hybrid",
    "TP2 SP Muon": f"{GPT} --bf16 {TP} --sequence-parallel {MUON}",
    "TP2 SP Llama": f"{LLAMA} --bf16 {TP} --sequence-parallel",
    "PP2": f"{GPT} --bf16 {PP}",
    "PP2 interleaved": f"{GPT} --bf16 {PP} --num-layers-per-virtual-pipeline-stage 6",
    "PP2 fp16 recomputed": f"{GPT} --fp16 {PP} --checkpoint-activations",
    "PP2 zero-bubble": f"{GPT} --bf16 {PP} --pipeline-schedule zero-bubble",
    "CP2": f"{GPT} --bf16 --context-parallel-size 2 --attention-dropout 0",
    "CP2 ZeRO 3": f"{GPT} --bf16 --context-parallel-size 2 --attention-dropout 0 --zero-stage 3",
    "DP2 fp8": f"{GPT} --bf16 --fp8-format hybrid",
    "ZeRO 1 Muon": f"{GPT} --bf16 --zero-stage 1 {MUON}",
}


def verify(name: str, folder: Path, device: list[str]) -> str:
    """Run one layout; return its line: status, seconds, device, the rows that tell most."""
    launched = (
        ["launch", "--nproc-per-node", "2", "verify-layout"]
        if not device
        else ["verify-layout", "--world-size=2"]
    )
    begin = time.monotonic()
    log = folder / f"{re.sub('[^a-zA-Z0-9]+', '-', name)}.txt"
    with log.open("w") as file:
        command = [sys.executable, "-m", "meshwright", *launched, *LAYOUTS[name].split(), *device]
        status = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, check=False, timeout=300
        ).returncode
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    marks = "gloo on", "nccl on", "optimizer state", "differs", "error"
    told = [" ".join(line.split()) for line in lines if any(mark in line for mark in marks)]
    return f"{name:28} {status:3} {time.monotonic() - begin:5.0f} s  {' | '.join(told or lines[-1:])[:300]}"


def main() -> int:
    out, *words = sys.argv[1:]
    device = []
    if "--device" in words:
        at = words.index("--device")
        device, words = words[at : at + 2], words[:at] + words[at + 2 :]
    Path(out).mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    with ThreadPoolExecutor(int(os.environ.get("JOBS", "4"))) as pool:
        made = [pool.submit(verify, name, Path(out), device) for name in words or LAYOUTS]
        for line in made:
            print(line.result(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
