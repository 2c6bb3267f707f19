"""Memory that ranks on CPUs map from each other, in files, in place of torch's symmetric memory.

All work is done when it is submitted, to whatever stream.
"""

import contextlib
import itertools
import os
import tempfile
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch.distributed.distributed_c10d import _resolve_process_group

from meshwright.base import device as devices
from meshwright.parallel import agree

CPU = torch.device("cpu")


class Stream:
    """The part of a stream that is used: on a CPU, all work is done when it is submitted."""

    device = CPU

    def wait_stream(self, other):
        pass

    def wait_event(self, event):
        pass

    def record_event(self):
        pass


class Memory:
    """Stand-in for torch's symmetric memory, which counts the calls of chosen methods."""

    def __init__(self):
        names = [tempfile.mkdtemp(dir="/dev/shm") if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(names)
        self.folder, self.numbers = names[0], itertools.count()
        self.others_come = True
        self.calls = {}

    def empty(self, size, dtype, device):
        self.newest = next(self.numbers)
        return self.file(dist.get_rank(), size, dtype)

    def file(self, rank, size, dtype):
        return torch.from_file(
            os.path.join(self.folder, f"{self.newest}-{rank}"), True, size, dtype=dtype
        )

    def rendezvous(self, own, name):
        group = _resolve_process_group(name)
        if self.others_come:
            dist.barrier(group)
        return SimpleNamespace(
            get_buffer=lambda rank, shape, dtype: self.file(
                dist.get_global_rank(group, rank), *shape, dtype
            ),
            barrier=lambda channel: self.others_come and dist.barrier(group),
        )

    def counted(self, owner, name):
        """Count calls of a method while it is patched so."""
        plain, self.calls[name] = getattr(owner, name), 0

        def call(*args, **kwargs):
            self.calls[name] += 1
            return plain(*args, **kwargs)

        return mock.patch.object(owner, name, call)

    @contextlib.contextmanager
    def installed(self, *counted):
        with contextlib.ExitStack() as stack:
            for name in ("empty", "rendezvous"):
                stack.enter_context(mock.patch.object(symmetric, name, getattr(self, name)))
            for owner, name in counted:
                stack.enter_context(self.counted(owner, name))
            stack.enter_context(mock.patch.object(agree, "devices", SimpleNamespace(NVIDIA="cpu")))
            for name in ("new_stream", "current_stream"):
                stack.enter_context(mock.patch.object(devices, name, lambda device: Stream()))
            stack.enter_context(
                mock.patch.object(devices, "use_stream", lambda stream: contextlib.nullcontext())
            )
            yield
