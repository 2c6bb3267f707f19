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

ELEMENTS, ROUNDS = 1 << 25, 8


def main() -> None:
    device = devices.open_device(sys.argv[1], int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if device.type == "cpu" else None)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    size = ELEMENTS if device.type != "cpu" else ELEMENTS >> 4
    x = torch.ones(size, device=device)
    small = torch.ones(1, device=device)
    summed = seconds_of(lambda: dist.all_reduce(x), device)
    latency = seconds_of(lambda: dist.all_reduce(small), device) / (2 * (ranks - 1))
    reached = 2 * (ranks - 1) / ranks * 4 * size / summed
    copies = 0.0
    if rank == 0 and device.type != "cpu" and devices.count_accelerators() > 1:
        there = torch.ones(size, device=torch.device(device.type, 1))
        copies = 4 * size / seconds_of(lambda: x.copy_(there), device)
    dist.barrier()
    if rank == 0:
        print(
            json.dumps({"collectives": reached, "copies": copies, "latency": latency}), flush=True
        )
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
    return statistics.median(times[2:])


if __name__ == "__main__":
    main()
