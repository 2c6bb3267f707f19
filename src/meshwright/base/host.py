"""The machine around the devices: CPU cores, memory and address space, and the lack of them."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import re
import resource
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from meshwright.base.errors import UserError

CGROUP = Path("/sys/fs/cgroup")
# Files with the limit, the usage and the number of cached bytes, of control groups 2 and 1.
CGROUP_FILES = [
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
]
MALLOPT = {-1: 2**31 - 1, -3: 2**30}  # glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD, in bytes
ADDRESS_SPACE = 800_000_000  # bytes that torch's build for CPUs, one thread and a tiny model fill
REFUSED = re.compile(
    "can't allocate memory|can't start new thread|failed to map segment|bad_alloc|Cannot allocate memory|"
    r"^(\[Errno 11\] )?Resource temporarily unavailable"  # a thread or a process could not start
)


@contextlib.contextmanager
def handled(
    signals: Iterable[int], handler: Callable[[int, FrameType | None], Any]
) -> Iterator[None]:
    """Have these signals handled so during the block."""
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Collect no cycles of objects during the block."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def keep_freed_memory() -> None:
    """Let this process keep up to 2 GB of freed memory for its next tensors.

    GNU's C library returns large blocks to the system, which clears each page before it is used
    again: a tenth of a training step on a CPU.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        import ctypes

        for setting, size in MALLOPT.items():
            ctypes.CDLL(None).mallopt(setting, size)


def returned_memory(size: int) -> mmap.mmap:
    """Return zeroed memory, in bytes, that the system has back as soon as nothing uses it.

    GNU's C library keeps freed blocks of up to 32 MiB, and has a heap for each of several threads.
    """
    # Python's default would be memory that processes share; nothing can be mapped of no bytes.
    memory = mmap.mmap(-1, max(size, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A page of 2 MiB is cleared in a tenth of the time that 512 small ones take.
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    # A scheduler may have given this process only some of the cores.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota() -> float | None:
    """Return how many cores' time the container may use, or None without a limit."""
    try:
        quota, period = (CGROUP / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def physical_memory() -> int:
    """Return the memory of the machine, or of its container, in bytes."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(physical, container_memory()[0] or physical)


def free_host_memory() -> int:
    """Return what Linux can give without swapping in this container; elsewhere half of all."""
    try:
        with open("/proc/meminfo") as file:
            free = next(
                int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable")
            )
    except (OSError, StopIteration):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    limit, used = container_memory()
    return min(free, limit - used) if limit else free


def container_memory() -> tuple[int | None, int]:
    """Return this container's memory limit, or None, and its usage without cached files.

    Cached files give way to other use; with memory-mapped data they fill whatever there is.
    """
    # Two versions of cgroups have different files; the first version that is there counts.
    for limit, used, stat in CGROUP_FILES:
        try:
            most = (CGROUP / limit).read_text().strip()
            in_use = int((CGROUP / used).read_text())
            counts = dict(line.split() for line in (CGROUP / stat).read_text().splitlines())
            cached = int(counts.get("inactive_file", 0)) + int(counts.get("active_file", 0))
            return (None if most == "max" else int(most)), max(in_use - cached, 0)
        except (OSError, ValueError):
            continue
    return None, 0


def address_limit() -> int | None:
    """Return the bytes of address space that this process may have (ulimit -v), or None."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def require_address_space() -> None:
    """Refuse a limit below what torch needs: importing it would fail in odd ways, or never end."""
    limit = address_limit()
    if limit is not None and limit < ADDRESS_SPACE:
        has = f"this process may have {limit:,} bytes of address space (ulimit -v)"
        raise UserError(
            f"{has}, and torch needs {ADDRESS_SPACE:,} for the smallest run; raise that limit"
        )


MORE_MEMORY = "end other programs, start fewer ranks, or raise the limits of this machine"


def refused_request(error: BaseException) -> str:
    """Return how much memory was asked for, such as "Tried to allocate 2.00 GiB", or ""."""
    request = re.search(
        r"tried to allocate .*?(?= Including| Error code|$)", str(error), re.I | re.M
    )
    return request[0].rstrip(".") if request else ""


def describe_lack(error: BaseException) -> str | None:
    """Return in which words the host refused memory, if that is why the error was raised."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    # The lack may be the cause of an error that says something else.
    while cause is not None and cause not in seen:
        if isinstance(cause, MemoryError) or REFUSED.search(str(cause)):
            line = refused_request(cause) or (str(cause).splitlines() or [""])[0][:200]
            parts = [line.rstrip(".")]
            limit = address_limit()
            if limit is not None:
                parts.append(f"the limit on address space is {limit:,} bytes (ulimit -v)")
            return "; ".join(filter(None, parts))
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__

    # Where memory lacks while torch is imported, a part of it is missing afterwards.
    is_odd = isinstance(error, ImportError | AttributeError | SystemError)
    is_odd |= isinstance(error, OSError) and error.errno is None
    if is_odd and (limit := address_limit()) is not None and peak_address_space() > 0.9 * limit:
        return (
            f"the limit on address space is {limit:,} bytes (ulimit -v), and nearly all are in use"
        )
    return None


def peak_address_space() -> int:
    with contextlib.suppress(OSError):
        line = re.search(r"VmPeak:\s*(\d+) kB", Path("/proc/self/status").read_text())
        return 1024 * int(line[1]) if line else 0
    return 0
