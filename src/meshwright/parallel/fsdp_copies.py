"""Gathers and sums of ZeRO 3 by copy engines, in place of fully_shard's collectives.

fully_shard copies what it sends into a tensor that it asks for, and lets an object gather or sum
it. These objects give it a room in memory that the ranks map from each other
(symmetric_memory.py). Only blocks have rooms: the rest of the network is gathered once a pass.

Hand-written because torch's own such object (SymmMemAllGather) needs NCCL's symmetric memory, whose
sums are kernels that take multiprocessors from the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.parallel.symmetric_memory import Arrival, BufferMapper

ALIGNMENT = 256  # elements, for kernels that read and write several at a time


class Rooms:
    """Two rooms of the same size in memory that the ranks map, which exchanges take in turn.

    Once a rank's next exchange has ended, the others have fetched what is in the room before, since
    they come to a barrier only after that.
    """

    def __init__(self, mapper: BufferMapper, size: int, dtype: torch.dtype) -> None:
        self.size = -(-size // ALIGNMENT) * ALIGNMENT
        self.buffer = mapper.zeros(2 * self.size, dtype)
        self.begin = 0
        self.last: Arrival | None = None

    def take(self, size: int) -> Tensor:
        """Return the next room, which the current stream may write."""
        if self.last is not None:
            self.last.wait()
        self.begin = self.size - self.begin
        return self.buffer.own[self.begin : self.begin + size]

    def end(self, arrival: Arrival) -> None:
        """Let the current stream wait for the exchange of the room taken last."""
        self.last = arrival
        arrival.wait()

    def forget(self) -> None:
        """Forget the last exchange, after which all ranks have met."""
        self.last = None


class CopiedGather:
    """A gather of a block's weights, for `set_custom_all_gather`."""

    def __init__(self, rooms: Rooms) -> None:
        self.rooms = rooms

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.rooms.take(math.prod(size))

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Fetch the others' parts; this rank's own lies in the room already."""
        rooms = self.rooms
        rooms.end(rooms.buffer.gather(rooms.begin, output_tensor.numel()))


class CopiedSum:
    """A sum of a block's gradients in full precision, for `set_custom_reduce_scatter`.

    The gradients are sent as the backward pass computes them, in half of the bytes.
    """

    def __init__(self, rooms: Rooms, full: torch.dtype) -> None:
        self.rooms = rooms
        self.full = full
        self.has_room = False  # of the sum that is being prepared

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        # First what is summed, then the sum, which stays as the gradient of the weights' shards.
        if self.has_room:
            return torch.empty(*size, dtype=self.full, device=device)
        self.has_room = True
        return self.rooms.take(math.prod(size))

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self.has_room = False
        rooms = self.rooms
        rooms.end(rooms.buffer.scatter(rooms.begin, input_tensor.numel(), output_tensor))


class Exchanges:
    """The rooms of all blocks; gathers and sums have streams and barriers of their own."""

    def __init__(
        self,
        mapper: BufferMapper,
        blocks: Sequence[Any],
        dtype: torch.dtype,
        full: torch.dtype,
    ) -> None:
        # fully_shard may gather the next block's weights while it sums the last one's gradients.
        other = BufferMapper(mapper.group, mapper.stream.device)
        size = max(padded_size(block, mapper.ranks) for block in blocks)
        self.gathered = Rooms(mapper, size, dtype)
        self.summed = Rooms(other, size, dtype)
        self.summed.buffer.reserve(size)
        for block in blocks:
            block.set_custom_all_gather(CopiedGather(self.gathered))
            block.set_custom_reduce_scatter(CopiedSum(self.summed, full))

    def forget(self) -> None:
        self.gathered.forget()
        self.summed.forget()


def padded_size(block: nn.Module, ranks: int) -> int:
    """Return the elements of a block's parameters, with rows for all ranks alike."""
    return sum(
        p.numel() // p.shape[0] * -(-p.shape[0] // ranks) * ranks for p in block.parameters()
    )
