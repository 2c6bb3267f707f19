"""Agreement of a group's ranks: all of them can do something, or none does it."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def on_all(group: ProcessGroup | None, device: torch.device, *steps: Callable[[], str]) -> str:
    """Run steps that return "" or why they failed, up to the first that some rank cannot do.

    Every rank of the group (None: of this process alone) must call this with the same steps. Return
    "" if all ranks could do all of them, else the reason, which is this rank's own if it has one.
    """
    for step in steps:
        try:
            reason = step()
        except Exception as error:
            reason = f"it failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if group is not None:
            has_reason = torch.tensor(float(bool(reason)), device=device)
            dist.all_reduce(has_reason, dist.ReduceOp.MAX, group)
            reason = reason or ("it failed on another rank" if bool(has_reason) else "")
        if reason:
            return reason
    return ""


def is_spread(group: ProcessGroup, device: torch.device) -> bool:
    """Return whether the group's ranks are on several machines."""
    name = zlib.crc32(socket.gethostname().encode())
    ends = torch.tensor([name, -name], device=device)
    dist.all_reduce(ends, dist.ReduceOp.MAX, group)
    return bool(ends[0] != -ends[1])
