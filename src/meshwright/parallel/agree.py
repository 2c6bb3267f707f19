"""Agreement of a group's ranks: all of them can do something, or none does it.

The way to map each other's memory (torch's symmetric memory) is agreed upon here too: overlap.py
and symmetric_memory.py copy over NVLink through it.
"""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from meshwright.base import device as devices
from meshwright.base.errors import UserError, first_line

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Step = Callable[[], str | None]


def on_all(group: ProcessGroup | None, device: torch.device, *steps: Step) -> str:
    """Run steps that return why they failed, if they did, up to the first that some rank cannot do.

    Every rank of the group (None: of this process alone) must call this with the same steps. Return
    "" if all ranks could do all of them, else the reason, which is this rank's own if it has one.
    """
    for step in steps:
        try:
            reason = step() or ""
        except Exception as error:
            reason = f"it failed: {type(error).__name__}: {first_line(error)}"
        # Before the next step, whose collectives a rank that failed would not join.
        if group is not None:
            has_reason = torch.tensor(float(bool(reason)), device=device)
            dist.all_reduce(has_reason, dist.ReduceOp.MAX, group)
            reason = reason or ("it failed on another rank" if bool(has_reason) else "")
        if reason:
            return reason
    return ""


def map_memory_of(group: ProcessGroup) -> Any:
    """Return torch's module of symmetric memory, ready for the group."""
    # torch reads the variable when it imports this module, so it is set before.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    import torch.distributed._symmetric_memory as symmetric

    # Newer torch has deprecated the call: it needs none.
    if not hasattr(symmetric.enable_symm_mem_for_group, "__deprecated__"):
        symmetric.enable_symm_mem_for_group(group.group_name)
    return symmetric


def to_map_memory(
    flag: tuple[str, str, str, str],
    wanted: str,
    group: ProcessGroup,
    device: torch.device,
    steps: list[Step],
    unworthy: str = "",
) -> str:
    """Return "" if the steps, which map memory and compare results, succeed on all ranks, or why.

    `flag` names the kind of ranks, a flag, and its values that forbid and demand mapped memory;
    `unworthy` says why "auto" does without.
    """
    ranks, name, never, always = flag
    if wanted == never:
        reason = f"of {name} {never}"
    elif device.type != devices.NVIDIA:
        reason = "the device is not an NVIDIA GPU"
    elif wanted == "auto" and unworthy:
        reason = unworthy
    elif is_spread(group, device):
        reason = f"{ranks} ranks are on several machines"
    else:  # there may be no peer access, no right to it, or another version of torch
        reason = on_all(group, device, *steps)
    if reason and wanted == always:
        raise UserError(f"{name} {always}: {reason}; give {name} auto")
    return reason


def is_spread(group: ProcessGroup, device: torch.device) -> bool:
    """Return whether the group's ranks are on several machines."""
    # The largest and, negated, the smallest hash: equal only if all are.
    name = zlib.crc32(socket.gethostname().encode())
    ends = torch.tensor([name, -name], device=device)
    dist.all_reduce(ends, dist.ReduceOp.MAX, group)
    return bool(ends[0] != -ends[1])
