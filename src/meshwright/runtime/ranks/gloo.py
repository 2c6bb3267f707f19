"""Gloo process groups with one worker thread: they avoid a data race in torch 2.11 to 2.13.

torch gives a gloo group two worker threads. After each collective the thread records its name in a
string of the group without a lock (`ProcessGroupGloo::runLoop`). If both threads finish at once,
one may write into memory that the other has freed, which ends the process some time later with
"malloc(): unaligned tcache chunk detected". docs/known-issues.md has the evidence. One thread
cannot race with itself; a group's collectives were ordered before, so nothing else changes.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

BACKEND = "gloo_single"  # its name in torch's registry


def register() -> str:
    """Register the backend with torch, once per process; return its name."""
    if BACKEND not in dist.Backend.backend_list:
        kinds = dist.Backend.backend_capability["gloo"]
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=kinds)
    return BACKEND


def _create(group: Any, options: Any) -> Any:
    return make_group(group.store, group.group_rank, group.group_size, group.timeout)


def make_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Connect a group of these ranks, which meet on the store."""
    settings = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    settings._threads = 1
    settings._timeout = timeout
    # As torch's own constructor does:
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
    make = dist.ProcessGroupGloo.create_device
    if interfaces:
        settings._devices = [make(interface=name) for name in interfaces.split(",")]
    else:
        settings._devices = [dist.ProcessGroupGloo.create_default_device()]
    return dist.ProcessGroupGloo(store, rank, size, settings)
