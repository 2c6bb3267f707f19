"""Measure the links between this machine's devices; `meshwright launch` starts one per device.

Rank 0 prints a line of JSON: bytes per second of collectives and of copies, and the latency.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from meshwright.base import device as devices

ELEMENTS = 1 << 25
ROUNDS = 8


def main() -> None:
    device = devices.open_device(sys.argv[1], int(os.environ["LOCAL_RANK"]))
    is_cpu = device.type == "cpu"
    dist.init_process_group("gloo" if is_cpu else None)
    ranks = dist.get_world_size()
    rank = dist.get_rank()
    size = ELEMENTS >> 4 if is_cpu else ELEMENTS
    x = torch.ones(size, device=device)
    small = torch.ones(1, device=device)

    # A ring sends each part once to sum it and once to share it: 2 (n - 1) messages, each of an
    # nth of the tensor's 4 bytes an element.
    messages = 2 * (ranks - 1)
    summed = seconds_of(lambda: dist.all_reduce(x), device)
    reached = messages / ranks * 4 * size / summed
    latency = seconds_of(lambda: dist.all_reduce(small), device) / messages

    # Copies to a neighbour's memory.
    copies = 0.0
    if rank == 0 and not is_cpu and devices.count_accelerators() > 1:
        there = torch.ones(size, device=torch.device(device.type, 1))
        copies = 4 * size / seconds_of(lambda: x.copy_(there), device)
    dist.barrier()
    if rank == 0:
        figures = {"collectives": reached, "copies": copies, "latency": latency}
        print(json.dumps(figures), flush=True)
    dist.destroy_process_group()


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of a call; every rank must make as many."""
    times = []
    for _ in range(ROUNDS):
        devices.synchronize(device)
        begun = time.perf_counter()
        run()
        devices.synchronize(device)
        times.append(time.perf_counter() - begun)
    return statistics.median(times[2:])  # without warm-up


if __name__ == "__main__":
    main()
