"""Measure the links between ranks: latency and bandwidth of messages in each pair."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.base import device as devices
from meshwright.runtime.ranks.team import Team

if TYPE_CHECKING:
    import torch

# ranks up to which every pair is measured, one after the other; of more, many at once
ALL_PAIRS = 32
SMALL_REPEATS = 30
LARGE_REPEATS = 8
# Bytes of a large message.
LARGE = 64 << 20
LARGE_ON_CPU = 4 << 20
SLOWER = 2.0  # times the median bandwidth, or latency, that makes a link a slow one
LATENCY_NOISE = 100e-6  # seconds by which any two latencies may differ


@dataclass(frozen=True)
class Link:
    """Two ranks, the seconds of a small message, and bytes per second of a large one."""

    a: int
    b: int
    latency: float
    bandwidth: float

    def __str__(self) -> str:
        return f"{self.latency * 1e6:,.0f} µs, {self.bandwidth / 1e9:,.2f} GB/s"


def pairs_of(size: int) -> list[tuple[int, int]]:
    """Return the pairs to measure; of many ranks those whose numbers differ by powers of two."""
    distances: Sequence[int] = range(1, size)
    if size > ALL_PAIRS:
        distances = [1 << n for n in range((size - 1).bit_length())]
    pairs = []
    for distance in distances:
        pairs += [(a, a + distance) for a in range(size - distance)]
    return sorted(pairs)


def rounds_of(size: int) -> list[list[tuple[int, int]]]:
    """Return pairs to measure at once: one of few ranks, those of equal distance of many."""
    pairs = pairs_of(size)
    if size <= ALL_PAIRS:
        return [[pair] for pair in pairs]
    rounds = defaultdict(list)
    for a, b in pairs:
        rounds[b - a, a // (b - a) % 2].append((a, b))  # no rank twice in a round
    return list(rounds.values())


def measure_links(team: Team, device: torch.device) -> list[Link]:
    """Measure round after round; return all links on every rank, which all call this."""
    measured: list[list[float]] = []
    for pairs in rounds_of(team.size):
        for a, b in pairs:
            if team.rank in (a, b):
                is_first = team.rank == a
                other = b if is_first else a
                latency, bandwidth = measure_pair(other, is_first, device)
                if is_first:  # both have measured the same
                    measured.append([a, b, latency, bandwidth])
        team.wait()  # the others keep the link free
    every = sorted(values for rows in team.gather(measured) for values in rows)
    return [Link(int(a), int(b), latency, bandwidth) for a, b, latency, bandwidth in every]


def measure_pair(other: int, is_first: bool, device: torch.device) -> tuple[float, float]:
    """Return the seconds that one number takes to the other rank, and bytes per second of many."""
    import torch
    import torch.distributed as dist

    def seconds(numbers: int, repeats: int) -> float:
        values = torch.zeros(numbers, device=device)
        times = list[float]()
        for _ in range(repeats + 2):
            devices.synchronize(device)
            begin = time.perf_counter()
            for sends in (is_first, not is_first):  # there and back
                dist.send(values, other) if sends else dist.recv(values, other)
            devices.synchronize(device)
            times.append((time.perf_counter() - begin) / 2)
        return statistics.median(times[2:])  # the first ones connect

    size = LARGE_ON_CPU if device.type == "cpu" else LARGE
    return seconds(1, SMALL_REPEATS), size / seconds(size // 4, LARGE_REPEATS)


def typical_link(links: list[Link]) -> Link:
    """Return a link with the median figures of all."""
    latency = statistics.median(link.latency for link in links)
    return Link(-1, -1, latency, statistics.median(link.bandwidth for link in links))


def slow_links(links: list[Link]) -> list[Link]:
    """Return the links that are much slower than most, the slowest first."""
    if len(links) < 3:
        return []
    typical = typical_link(links)
    latency = SLOWER * typical.latency + LATENCY_NOISE
    bandwidth = typical.bandwidth / SLOWER
    slow = [link for link in links if link.bandwidth < bandwidth or link.latency > latency]
    return sorted(slow, key=lambda link: (link.bandwidth, -link.latency))
