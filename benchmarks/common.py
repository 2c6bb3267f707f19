"""Helpers that benchmarks share: sizes, times on a GPU, errors, tables, and what they ran on."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

GPU = torch.cuda.is_available()
VOCAB = 50257
SIZES = {  # layers, hidden size, heads
    "tiny": (2, 64, 4),
    "345M": (24, 1024, 16),
    "1.3B": (24, 2048, 16),
    "2.7B": (32, 2560, 32),
}


def new_parser(about: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def describe_machine(*packages: str) -> str:
    """Return the processor or GPU, and the versions of Python and of some packages."""
    libraries = ", ".join(f"{name} {version(name)}" for name in packages)
    if torch.cuda.is_available() and "torch" in packages:
        return f"{torch.cuda.get_device_name()}; Python {platform.python_version()}, {libraries}"
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")),
        "unknown processor",
    )
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores of {model}; Python {platform.python_version()}, {libraries}; Linux {os.uname().release}"


def print_head(*names: str) -> None:
    """Print the head of a Markdown table."""
    print_row(*names)
    print("|---" * len(names) + "|", flush=True)


def print_row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def attempt(name: str, run: Callable[..., Any], *arguments: Any) -> Any:
    """Return what `run` does; print an error instead of raising it, and return None."""
    try:
        return run(*arguments)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {str(error)[:400]} ({frame.filename}:{frame.lineno})"
        print(f"FAILED {name}: {reason}", flush=True)
        return None
    finally:
        if GPU:
            torch.cuda.empty_cache()


def doubled(value: Any) -> Any:
    """Return tensors of floating point in float64, also those within sequences and named tuples."""
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(doubled, value))
    return [doubled(x) for x in value] if isinstance(value, list | tuple) else value


def distance(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Return ||result - exact|| / ||exact|| in float64."""
    wide = exact.double()
    return float((result.double().view_as(wide) - wide).norm() / wide.norm())


def seconds_of(
    run: Callable[..., Any],
    sets: Sequence[tuple[Any, ...]] = ((),),
    graph: bool = True,
    least: float = 0.0,
) -> float:
    """Return the median time of a call over five rounds, each of which cycles through `sets`.

    A round is the replay of a CUDA graph, in which the host does not count, or with graph=False the
    calls themselves. Sets of arguments that together exceed the L2 cache keep it cold. A round
    takes `least` seconds or more. Without a GPU it is the time of one call.
    """
    if not GPU:
        start = time.perf_counter()
        run(*sets[0])
        return time.perf_counter() - start
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(*sets[0])  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    start = time.perf_counter()
    run(*sets[0])
    torch.cuda.synchronize()
    rounds = max(1, min(50, round(least / (time.perf_counter() - start) / len(sets))))
    outputs = []  # each set has its own, as in a step

    def cycle() -> None:
        for i in range(rounds * len(sets)):
            output = run(*sets[i % len(sets)])
            if graph and i < len(sets):
                outputs.append(output)

    replay: Callable[[], None] = cycle
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            cycle()
        replay = captured.replay
    times = []
    for _ in range(6):  # the first one is not counted
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[1:]) / (rounds * len(sets))
