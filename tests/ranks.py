"""Run a test body on several gloo ranks of this machine, in a fraction of a second.

A fork server that has imported torch already makes each rank by a cheap fork: tens of milliseconds, not the seconds of a
fresh interpreter, and no rank inherits threads from the test process (a plain fork after a threaded product can hang).
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# torch._dynamo too: the first torch.manual_seed() of a process imports it, which takes seconds.
multiprocessing.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "pytest"])


def run_ranks(body: Callable[..., None], world: int, *args: Any) -> None:
    """Call body(*args) on `world` gloo ranks; a failure on any of them is raised here with its traceback."""
    with tempfile.TemporaryDirectory() as folder:  # a file store: no port to collide on
        store = os.path.join(folder, "store")
        mp.start_processes(_rank, (body, world, store, args), world, start_method="forkserver")


def _rank(rank: int, body: Callable[..., None], world: int, store: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    dist.barrier()  # every rank is connected before any body can fail
    try:
        body(*args)
    finally:
        dist.destroy_process_group()
