"""Measure steps that wait for the host beside the plan's predictions, on one GPU.

usage: python benchmarks/plan_host.py FILE [--seconds S] [--kernels] [--try]

The host's time for each kind of launch is measured first, as `meshwright bench --calibrate` does,
and printed with the predictions that follow from it. Half of the configurations run without CUDA
graphs. Each is measured in a process of its own and appended to FILE as a line of JSON with its
flags, ms, device, and whether its steps are CUDA graphs; `plan_times.py --lines FILE` reads them.
With --kernels a line also has the milliseconds of the kernels of a step, and of the host's calls
of the driver, some of which may wait for the device. --try runs tiny sizes,
which is for a CPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import statistics
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

# else no process forked from this one may use the GPU
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch
from common import new_parser
from plan_times import predicted_step
from trust_cost import NEEDED, open_trainer

from meshwright.apps.bench import calibrate
from meshwright.base import device as devices
from meshwright.base.device_profiles import (
    LAUNCHES,
    DeviceProfile,
    launch_times,
    load_profile,
    profile_of,
)
from meshwright.training.loop import Trainer

SECONDS = 60, 150  # of a case, and of the host's times, at most
NO_GRAPHS = "--cuda-graphs off"
STILL = "--hidden-dropout 0 --attention-dropout 0"
# as the documents type it, and Megatron's defaults
DROPS = "--hidden-dropout 0.1 --attention-dropout 0.1"
PLAIN = "--fused-kernels off --compile off"
LLAMA = "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"
LLAMA += " --untie-embeddings-and-output-weights --num-query-groups 4"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SMALL = "--num-layers 6 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --bf16"
M124 = "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024"
M345 = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --bf16"
L345 = (
    f"--num-layers 16 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --bf16 {LLAMA}"
)
TINY = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 32"


def batches(micro: int, count: int = 1) -> str:
    return f"--micro-batch-size {micro} --global-batch-size {micro * count}"


CASES = (
    f"{M345} {STILL} {batches(2)} {NO_GRAPHS}",
    f"{M345} {STILL} {batches(1)}",
    f"{M345} {DROPS} {batches(8)}",
    f"{M124} --bf16 {STILL} {batches(8)} {NO_GRAPHS}",
    f"{M124} --bf16 {STILL} {batches(4)} {PLAIN} {NO_GRAPHS}",
    f"{M124} --bf16 {DROPS} {batches(4)} {PLAIN} {NO_GRAPHS} --qk-layernorm",
    f"{M124} --bf16 {DROPS} {batches(8)} {FULL}",
    f"{M124} --bf16 {STILL} {batches(8)} {FULL} {NO_GRAPHS}",
    f"{M124} --bf16 {STILL} {batches(4)} {FULL} {NO_GRAPHS}",
    f"{M124} --bf16 {DROPS} {batches(2)} {FULL}",
    f"{M124} --bf16 {DROPS} {batches(8)} --recompute-granularity selective",
    f"{M124} --bf16 {DROPS} {batches(4)} {NO_GRAPHS}",
    f"{M124} --fp16 {STILL} {batches(4)} {NO_GRAPHS}",
    f"{M124} --fp16 {DROPS} {batches(4)}",
    f"{M124} {STILL} {batches(2)}",
    f"{M124} --bf16 {STILL} {batches(4)} --optimizer muon {NO_GRAPHS}",
    f"{M124} --bf16 {STILL} {batches(4)} --optimizer muon",
    f"{M124} --bf16 {STILL} {batches(2, 8)} {NO_GRAPHS}",
    f"{M124} --bf16 {STILL} {batches(2, 8)}",
    f"{L345} {STILL} {batches(2)} {NO_GRAPHS}",
    f"{L345} {STILL} {batches(4)}",
    f"{M124} --bf16 {STILL} {batches(4)} --recompute-granularity selective {NO_GRAPHS}",
    f"{M345} {STILL} {batches(4)} --fp8-format hybrid {NO_GRAPHS}",
    f"{M124} --bf16 {STILL} {batches(4)} --optimizer sgd",
    f"{SMALL} {STILL} {batches(1)} {NO_GRAPHS}",
)
# Small steps of 2 and of 8 layers, whose seconds are the host's alone.
STEPS = (
    "",
    PLAIN,
    FULL,
    f"{PLAIN} {FULL}",
    "--recompute-granularity selective",
    "--hidden-dropout 0.1",
    DROPS,
    LLAMA.replace("--num-query-groups 4", ""),
    f"{PLAIN} {LLAMA.replace('--num-query-groups 4', '')}",
    "--fp8-format hybrid --hidden-size 128",
    "--optimizer muon",
    "--optimizer sgd",
)
TRIED = (f"{TINY} {STILL} {batches(2)}", f"{TINY} {STILL} {batches(1, 2)} --optimizer muon")


def main(argv: list[str]) -> int:
    parser = new_parser(__doc__)
    parser.add_argument("file", type=Path, help="where lines are appended")
    parser.add_argument(
        "--seconds", type=float, default=330, help="after which no case begins (default: 330)"
    )
    parser.add_argument(
        "--kernels", action="store_true", help="also write what the kernels of a step take"
    )
    parser.add_argument(
        "--try", dest="tries", action="store_true", help="tiny sizes, on the device that there is"
    )
    given = parser.parse_args(argv)
    until = time.monotonic() + given.seconds

    # The host's times, in a process of its own as all that uses the device
    host = in_child(measure_host, given.tries) or {}
    device = host.pop("device", "cpu")
    times = launch_times(host["seconds"])
    names = (*LAUNCHES.values(), "prepare")
    print(f"{device}, torch {torch.__version__}; microseconds of the host:")
    print("  " + ", ".join(f"{name} {1e6 * times[name]:.1f}" for name in names), flush=True)
    known = profile_of(device) or load_profile("cpu")
    profile = dataclasses.replace(
        known, seconds=known.seconds | {name: times[name] for name in names}
    )

    # The steps
    rows = []
    with given.file.open("a") as file:
        file.write(json.dumps({"host": host, "device": device}) + "\n")
        for words in TRIED if given.tries else CASES:
            if time.monotonic() > until:
                print("left out:", words)
                continue
            row = in_child(measure, f"{words} --vocab-size 50257", given.kernels)
            if row is not None:
                rows.append(row)
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(f"{row['ms']:9.2f} ms  {words}", flush=True)
    show(rows, profile)
    return 0


def show(rows: list[dict[str, Any]], profile: DeviceProfile) -> None:
    """Print measured beside predicted steps."""
    print("\n measured predicted   error  graphs  host  device  flags")
    for graphs in (True, False):
        errors = []
        for row in (row for row in rows if row["graphs"] is graphs):
            step = predicted_step(row["flags"], 1, profile)
            ms, host = 1e3 * step.seconds, 1e3 * step.parts.get("host", 0.0)
            errors.append(abs(ms / row["ms"] - 1))
            own = " ".join(
                word for word in row["flags"].split() if word not in ("--vocab-size", "50257")
            )
            error = ms / row["ms"] - 1
            print(
                f"{row['ms']:9.2f} {ms:9.2f} {error:+7.1%}  {graphs!s:6} {host:5.1f} {ms - host:7.1f}  {own}"
            )
        if errors:
            kind = "with" if graphs else "without"
            print(
                f"{len(errors)} {kind} CUDA graphs: median {statistics.median(errors):.1%}, worst {max(errors):.1%}\n"
            )


def in_child(measured: Any, *arguments: Any) -> Any:
    """Call a function in a fork, which imports nothing again; return None if it fails."""
    sys.stdout.flush()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        signal.alarm(SECONDS[measured is measure_host])
        try:
            with os.fdopen(writing, "w") as file:
                file.write(json.dumps(measured(*arguments)))
        except BaseException:
            print("failed:", *arguments, traceback.format_exc(limit=-3), flush=True)
            os._exit(1)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    return json.loads(text) if os.waitpid(child, 0)[1] == 0 else None


def measure_host(tries: bool) -> dict[str, Any]:
    """Return the host's seconds of a launch, and of small steps."""
    device = devices.open_device("auto")
    if tries:
        calibrate.FIGURE_SECONDS = 0.01
    else:
        keep_busy(device)
    found = {"device": devices.device_name(device), "seconds": calibrate.host_seconds(device)}
    calibrate.FIGURE_SECONDS /= 2
    found["steps"] = {}
    for flags in STEPS[:2] if tries else STEPS:
        with contextlib.suppress(Exception):
            found["steps"][flags] = [
                calibrate.step_seconds(device, layers, flags) for layers in (2, 8)
            ]
    return found


def keep_busy(device: torch.device) -> None:
    """Multiply for a second, after which clocks of host and device are up."""
    x = torch.randn(4096, 4096, device=device)
    end = time.perf_counter() + 1.0
    while time.perf_counter() < end:
        torch.mm(x, x)
        devices.synchronize(device)


def measure(flags: str, kernels: bool) -> dict[str, Any]:
    """Return the milliseconds of a configuration's steps, and what else explains them."""
    trainer = open_trainer([*NEEDED, *flags.split()])
    trainer.replicas.every = 1 << 40  # nothing but the step
    device, times, submitted = trainer.net.device, [], []
    for _ in range(6):  # kernels are compiled, graphs captured
        trainer.step()
    for _ in range(5):
        trainer.finish()
        devices.synchronize(device)
        began = time.perf_counter()
        for _ in range(6):
            trainer.step()
        submitted.append(1e3 * (time.perf_counter() - began) / 6)
        trainer.finish()
        devices.synchronize(device)
        times.append(1e3 * (time.perf_counter() - began) / 6)
    graphs = trainer.net.graphs
    row = {
        "flags": flags,
        "ms": statistics.median(times),
        "device": devices.device_name(device),
        "graphs": bool(graphs and not graphs.why_off),
        "quiet": True,
        "ms_all": times,
        "submitted_ms": statistics.median(submitted),  # until the host has launched all of a step
        "execution": trainer.net.execution,
        "torch": torch.__version__,
    }
    return row | (kernels_of_step(trainer) if kernels and device.type == "cuda" else {})


def kernels_of_step(trainer: Trainer) -> dict[str, Any]:
    """Return the milliseconds of the kernels of a step, the longest first, and their number.

    `calls` has the same of the host's calls, such as cudaLaunchKernel and cudaStreamSynchronize.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        trainer.step()
        trainer.finish()
        devices.synchronize(trainer.net.device)
    on_device, on_host, counts = Counter[str](), Counter[str](), Counter[str]()
    for event in profiler.events():
        name = event.name[:100]
        counts[name] += 1
        if event.device_type == torch.autograd.DeviceType.CPU:
            on_host[name] += event.cpu_time_total / 1e3
        else:
            on_device[name] += event.device_time_total / 1e3
    longest, calls = (
        {name: (round(ms, 4), counts[name]) for name, ms in found.most_common(most)}
        for found, most in ((on_device, 40), (on_host, 12))
    )
    kernels = sum(counts[name] for name in on_device)
    return {
        "device_ms": sum(on_device.values()),
        "kernels": kernels,
        "longest": longest,
        "calls": calls,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
