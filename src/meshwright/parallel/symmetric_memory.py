"""Sums of gradients and gathers of weights by copy engines, for ranks of one machine.

NCCL's kernels take multiprocessors from the backward pass that runs beside them, and a product
whose blocks fill the GPU waits for the last of them. Here the ranks map each other's flat buffers
(torch's symmetric memory), and copy engines fetch the values over NVLink. Of r ranks, each adds up
one part of a bucket:

    barrier: all buckets are full | fetch the others' values of my part, and add them |
    barrier: all parts are added  | fetch the others' parts

All of this is submitted to a stream of its own. A barrier takes no multiprocessor (barrier.py);
only the r - 1 additions do, each of which touches 3 / r of the bucket's bytes. A rank has fetched
all it needs before it joins the norm's all-reduce, so buffers may be overwritten after that.

Hand-written because torch has no sum of its symmetric memory by copy engines: its own operations
on it (torch.ops.symm_mem) are kernels, which take multiprocessors as NCCL's do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.base import device as devices
from meshwright.parallel.agree import map_memory_of, to_map_memory
from meshwright.parallel.barrier import count_words, stream_barrier

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

TRIAL_SIZE = 1 << 22  # elements, whose copy takes so long that a missing wait shows


def submitting(stream: Any) -> Any:
    """Submit to a stream, after all earlier work of the current one."""
    stream.wait_stream(devices.current_stream(stream.device))
    return devices.use_stream(stream)


class Arrival:
    """The end of all work that a stream has been given so far, in the form of torch's `Work`."""

    def __init__(self, stream: Any) -> None:
        self.event = stream.record_event()
        self.device = stream.device

    def wait(self) -> None:
        """Let all later work of the current stream wait for it."""
        devices.current_stream(self.device).wait_event(self.event)


class SymmetricBuffer:
    """A flat buffer of this rank, `own`, and those of all ranks of the group, by rank."""

    def __init__(
        self, buffers: list[Tensor], rank: int, barrier: Callable[[], None], stream: Any
    ) -> None:
        self.all = buffers
        self.own = buffers[rank]
        self.rank = rank
        self.barrier = barrier
        self.stream = stream
        self.fetched = self.own.new_empty(0)

    def reserve(self, size: int) -> None:
        """Allocate what sums of at most this size fetch, which must not move later."""
        self.fetched = self.own.new_empty(-(-size // len(self.all)))

    def part(self, begin: int, size: int, rank: int) -> slice:
        """Return the part of a range that a rank adds up."""
        count = len(self.all)
        return slice(begin + size * rank // count, begin + size * (rank + 1) // count)

    def total(self, begin: int, size: int) -> Arrival:
        """Start to sum a range over the ranks, in place."""
        with submitting(self.stream):
            part = self.part(begin, size, self.rank)
            self.add(part, self.own[part])
            self.fetch(begin, size)
        return Arrival(self.stream)

    def scatter(self, begin: int, size: int, out: Tensor) -> Arrival:
        """Start to sum this rank's part of a range into `out`."""
        with submitting(self.stream):
            self.add(self.part(begin, size, self.rank), out)
        return Arrival(self.stream)

    def gather(self, begin: int, size: int) -> Arrival:
        """Start to fetch the others' parts of a range."""
        with submitting(self.stream):
            self.fetch(begin, size)
        return Arrival(self.stream)

    def add(self, part: slice, out: Tensor) -> None:
        self.barrier()  # all ranks have written what is summed
        total = self.own[part]
        fetched = self.fetched[: len(total)]
        # Each rank begins with another one, so that none is asked by all at once.
        for k in range(1, len(self.all)):
            theirs = self.all[(self.rank + k) % len(self.all)]
            fetched.copy_(theirs[part], non_blocking=True)
            total = torch.add(total, fetched, out=out)
        if len(self.all) == 1:
            out.copy_(total)

    def fetch(self, begin: int, size: int) -> None:
        self.barrier()  # all ranks' own parts are there
        for k in range(1, len(self.all)):
            rank = (self.rank + k) % len(self.all)
            part = self.part(begin, size, rank)
            self.own[part].copy_(self.all[rank][part], non_blocking=True)


class BufferMapper:
    """Makes the mapped buffers of one group of ranks."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self.symmetric = map_memory_of(group)
        self.group = group
        self.stream = devices.new_stream(device)
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        # One barrier for all buffers: what they submit is in the order of one stream.
        words, by_kernel = self.map(count_words(self.ranks), torch.int32)
        self.barrier = stream_barrier(words, self.rank) or by_kernel

    def zeros(self, size: int, dtype: torch.dtype) -> SymmetricBuffer:
        buffers, _ = self.map(size, dtype)
        return SymmetricBuffer(buffers, self.rank, self.barrier, self.stream)

    def map(self, size: int, dtype: torch.dtype) -> tuple[list[Tensor], Callable[[], None]]:
        """Return zeros of each rank, and torch's barrier, a kernel that waits."""
        device = self.stream.device
        own: Tensor = self.symmetric.empty(size, dtype=dtype, device=device).zero_()
        devices.count_symmetric_memory(own.nbytes)
        # torch also clears its barrier's signals in this memory, without waiting for it. If another
        # rank's signal came first, it would be lost, and this rank would wait for it forever. No
        # rank leaves the rendezvous before all have entered it.
        devices.synchronize(device)
        handle: Any = self.symmetric.rendezvous(own, self.group.group_name)
        buffers = [
            own if r == self.rank else handle.get_buffer(r, (size,), dtype)
            for r in range(self.ranks)
        ]
        return buffers, functools.partial(handle.barrier, channel=0)


def choose_mapper(
    wanted: str, group: ProcessGroup | None, device: torch.device
) -> tuple[BufferMapper | None, str]:
    """Return a way to map memory of a group's ranks, or None and the reason.

    Every rank of the group must call this; all get the same answer.
    """
    if group is None:
        return None, ""
    mappers = list[BufferMapper]()
    trials = list[SymmetricBuffer]()

    def map_memory() -> None:
        mappers.append(BufferMapper(group, device))
        trials.append(mappers[0].zeros(TRIAL_SIZE, torch.float32))

    def compare() -> str:
        return "" if sums_are_right(trials[0], group) else "its sums differ from the collectives'"

    flag = ("data-parallel", "--data-parallel-sums", "collectives", "copies")
    reason = to_map_memory(flag, wanted, group, device, [map_memory, compare])
    return (None if reason else mappers[0]), reason


def trial_numbers(rank: int, ranks: int, device: torch.device) -> Tensor:
    """Return integers of a rank, different from the others', whose sum over the ranks is exact."""
    # float32 has all integers up to 2^24, and the sum has ranks (ranks + 1) / 2 times the largest.
    period = max(2, (1 << 24) // (ranks * (ranks + 1) // 2))
    integers = torch.arange(TRIAL_SIZE, device=device) % period
    return integers.float() * (rank + 1)


def sums_are_right(trial: SymmetricBuffer, group: ProcessGroup) -> bool:
    """Return whether a sum of integers, which no order of addition changes, is the collective's."""
    numbers = trial_numbers(dist.get_rank(group), dist.get_world_size(group), trial.own.device)
    expected = trial.own.copy_(numbers).clone()
    dist.all_reduce(expected, group=group)
    trial.reserve(TRIAL_SIZE)
    trial.total(0, TRIAL_SIZE).wait()
    return torch.equal(trial.own, expected)
