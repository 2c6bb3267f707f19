"""The time on the clock that runs a rank's steps, written into memory without waiting for it.

On a GPU a kernel of one program reads the GPU's own clock at its place among the other kernels: in
CUDA graphs too, where events measure nothing. On a CPU it is the host's clock.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from meshwright.base import device as devices


def new_times(count: int, device: torch.device) -> Tensor | None:
    """Return memory for times in nanoseconds [count] int64, or None if there is no such clock."""
    # %globaltimer is NVIDIA's; ROCm calls its devices by the same name.
    has_globaltimer = device.type == devices.NVIDIA and torch.version.hip is None
    if device.type != "cpu" and not has_globaltimer:
        return None
    return torch.zeros(count, dtype=torch.int64, device=device)


def stamp(times: Tensor, place: int) -> None:
    """Write the time at which all earlier work of this stream is done."""
    if times.device.type == "cpu":
        times[place] = time.perf_counter_ns()
        return
    from meshwright.kernels.triton import clock as clock_triton

    clock_triton.stamp[(1,)](times, place, num_warps=1)
