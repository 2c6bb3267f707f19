"""Measure the links between ranks: the latency and bandwidth of an all-reduce in each pair."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright import device as devices
from meshwright.ranks.team import Team

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

ALL_PAIRS = 32  # ranks up to which every pair is measured, one after the other
SMALL_REPEATS, LARGE_REPEATS = 30, 8
LARGE_BYTES = {"cpu": 4 << 20}  # elsewhere:
LARGE_ON_DEVICES = 64 << 20
SLOWER = 2.0  # times the median bandwidth, or latency, that makes a link a slow one
LATENCY_NOISE = 100e-6  # seconds by which any two latencies may differ


@dataclass(frozen=True)
class Link:
    """Two ranks, the seconds of a small all-reduce, and bytes per second of a large one."""

    a: int
    b: int
    latency: float
    bandwidth: float

    def __str__(self) -> str:
        return f"{self.latency * 1e6:,.0f} µs, {self.bandwidth / 1e9:,.2f} GB/s"


def pairs_of(size: int) -> list[tuple[int, int]]:
    """Return the pairs to measure; of many ranks those whose numbers differ by powers of two."""
    every = [(a, b) for a in range(size) for b in range(a + 1, size)]
    return every if size <= ALL_PAIRS else [(a, b) for a, b in every if (b - a).bit_count() == 1]


def measure_links(team: Team, device: torch.device) -> list[Link]:
    """Measure pair after pair; return all links on every rank, which all call this."""
    import torch.distributed as dist

    measured: list[list[float]] = []
    for a, b in pairs_of(team.size):
        group = dist.new_group([a, b])
        if team.rank in (a, b):
            latency, bandwidth = measure_pair(group, device)
            if team.rank == a:
                measured.append([a, b, latency, bandwidth])
            dist.destroy_process_group(group)
        team.wait()  # the others keep the link free
    every = [values for rows in team.gather(measured) for values in rows]
    return [Link(int(a), int(b), latency, bandwidth) for a, b, latency, bandwidth in every]


def measure_pair(group: ProcessGroup | None, device: torch.device) -> tuple[float, float]:
    """Return the median seconds of a small all-reduce, and the bytes per second of a large one."""
    import torch
    import torch.distributed as dist

    def seconds(numbers: int, repeats: int) -> float:
        values, times = torch.zeros(numbers, device=device), list[float]()
        for _ in range(repeats + 2):
            devices.synchronize(device)
            begin = time.perf_counter()
            dist.all_reduce(values, group=group)
            devices.synchronize(device)
            times.append(time.perf_counter() - begin)
        return statistics.median(times[2:])  # the first ones connect

    size = LARGE_BYTES.get(device.type, LARGE_ON_DEVICES)
    return seconds(1, SMALL_REPEATS), size / seconds(size // 4, LARGE_REPEATS)


def slow_links(links: list[Link]) -> list[Link]:
    """Return the links that are much slower than most, the slowest first."""
    if len(links) < 3:
        return []
    latency = SLOWER * statistics.median(link.latency for link in links) + LATENCY_NOISE
    bandwidth = statistics.median(link.bandwidth for link in links) / SLOWER
    slow = [link for link in links if link.bandwidth < bandwidth or link.latency > latency]
    return sorted(slow, key=lambda link: (link.bandwidth, -link.latency))
