"""`--micro-batch-size auto`: the largest micro-batch that fits beside the weights and the optimizer, before the first step.

Activations grow in proportion to the micro-batch. On an accelerator a forward and backward pass of one and of two samples
give both numbers of that line; the largest divisor of the global batch below the memory is then tried for certain. On a CPU,
where running out of memory ends the process, the bytes of the tensors alive at once are counted instead.
"""

from __future__ import annotations

import gc
import math
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from meshwright import device as devices

SHARE = 0.92  # of the memory that may be filled: the allocator's gaps and other libraries want some


def largest(
    attempt: Callable[[int], None], batches: list[int], device: torch.device, preferred: int | None
) -> tuple[int, str]:
    """The micro-batch and how it was found. `attempt` runs forward and backward of so many samples; `batches` are the
    global batch sizes of the run, which the micro-batch must divide; `preferred`: an earlier attempt's, to keep to."""
    whole = math.gcd(*batches)
    small = [n for n in range(1, math.isqrt(whole) + 1) if whole % n == 0]
    divisors = sorted({*small, *(whole // n for n in small)})
    if device.type == "cpu":
        each, have = (peak_bytes(attempt, 3) - peak_bytes(attempt, 1)) / 2, free_memory()
        fitting = [n for n in divisors if n * each <= SHARE * have]
        size = preferred if preferred in fitting else max(fitting, default=1)
        return size, f"one sample takes {each / 2**20:,.1f} MiB, {have / 2**30:,.1f} GiB are free"
    have = devices.free_memory(device)
    if preferred in divisors and fits(attempt, preferred, device) is not None:
        return preferred, "as before"
    one, two = fits(attempt, 1, device), fits(attempt, 2, device)
    if one is None or two is None:
        return 1, "two samples do not fit"
    told = (
        f"one sample takes {(two - one) / 2**30:,.2f} GiB beside {(2 * one - two) / 2**30:,.2f}, of {have / 2**30:,.1f}"
    )
    for n in reversed(divisors):
        if one + (n - 1) * (two - one) <= SHARE * have and fits(attempt, n, device) is not None:
            return n, told
    return 1, told


def fits(attempt: Callable[[int], None], size: int, device: torch.device) -> int | None:
    """Peak bytes of an attempt, or None if it ran out of memory."""
    devices.forget_memory(device)
    try:
        attempt(size)
        devices.synchronize(device)
        return devices.peak_memory(device) or 0
    except RuntimeError as error:
        if not devices.is_out_of_memory(error):
            raise
    finally:
        gc.collect()  # the frames of the exception hold its tensors
        devices.forget_memory(device)
    return None


class Peak(TorchDispatchMode):
    """The most bytes that the tensors made under it held at once, each storage counted while it lives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self.known: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._note, out)
        return out

    def _note(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        if storage not in self.known:
            size = storage.nbytes()
            self.known[storage] = size
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, size)

    def _gone(self, size: int) -> None:
        self.now -= size


def peak_bytes(attempt: Callable[[int], None], size: int) -> int:
    """Of a forward and backward pass; the weights, which are looked at too, are the same for every size."""
    counter = Peak()
    with counter:
        attempt(size)
    return counter.peak


def free_memory() -> int:
    """What Linux says could be had without swapping; elsewhere half of all memory."""
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
