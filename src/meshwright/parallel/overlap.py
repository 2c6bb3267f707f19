"""Products of tensor parallelism together with the collective before or after them.

`PlainMatmuls` runs one after the other. `OverlappedMatmuls` cuts the rows by rank: while a
product runs on some rows, copy engines move others over NVLink, between memory that the ranks map
from each other (torch's symmetric memory), without multiprocessors of the GPU and without NCCL.

    gather + multiply     own rows @ W, while they are sent to each rank | rank 1's rows @ W | ...
    multiply + scatter    rank 1's rows @ W, which the next rank fetches, adds to its own product of
                          these rows, and so on: a ring, whose last product is that of own rows

A rank's rows are cut into pieces in the second, so that one is fetched while another is multiplied,
and a product adds to what has been fetched: there is no sum of its own. It is rounded to the rows'
format at each rank, as in NCCL's ring.

Hand-written because torch's pipelines of the same purpose (torch.ops.symm_mem.fused_*) make a step
of 2.7B take 167 ms on two H100 GPUs, where it takes 153 by these and half of one GPU's is 135: they
run the product of own rows first in most scatters, so that nothing hides the copy of the others,
and a sum, more barriers and copies into symmetric memory come on top. Multicast is not needed and
is left off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.base import device as devices
from meshwright.kernels.matmul import affine, product
from meshwright.parallel import comm
from meshwright.parallel.agree import to_map_memory
from meshwright.parallel.layout import MORE_ROOMS, WORTHWHILE_BYTES
from meshwright.parallel.symmetric_memory import Arrival, BufferMapper, submitting

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


TRIAL_BYTES = 1 << 20  # to map at least, for `largest_difference`
# A rank's rows are multiplied and fetched in so many pieces: the fewest that let one be fetched
# while another is multiplied, since each more costs a barrier and makes the products smaller.
PIECES = 2


class PlainMatmuls:
    """NCCL's collectives (gloo's, on CPUs) before and after whole products."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def gather_multiply(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, keeps_rows: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return all ranks' rows @ weight^T + bias, and if `keeps_rows` the rows.

        The rows are valid until the next gather.
        """
        rows = comm.all_gather(x, self.group)
        return affine(rows, weight, bias), rows

    def start_gather(self, x: Tensor) -> comm.Started:
        """Start to gather all ranks' rows, which are valid until the next gather."""
        return comm.start_all_gather(x, self.group)

    def multiply_scatter(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> comm.Started:
        """Start to sum x @ weight^T over the ranks, plus bias; this rank keeps its rows."""
        own_bias = bias if dist.get_rank(self.group) == 0 else None
        return comm.start_reduce_scatter(affine(x, weight, own_bias), self.group)

    def back_multiply_scatter(self, grad: Tensor, weight: Tensor) -> comm.Started:
        """Do the same for grad @ weight."""
        return comm.start_reduce_scatter(product(grad, weight), self.group)

    def back_gather_multiply(self, grad: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return all ranks' rows @ weight, and the rows, which are valid until the next gather."""
        rows = comm.all_gather(grad, self.group)
        return product(rows, weight), rows


class Arrivals(list[Arrival]):
    """The ends of several copies from one tensor, which is kept until then."""

    def __init__(self, source: Tensor) -> None:
        super().__init__()
        self.source = source

    def wait(self) -> None:
        for arrival in self:
            arrival.wait()


class OverlappedMatmuls(PlainMatmuls):
    """Products while rows are copied.

    Each rank's symmetric memory has room for all ranks' rows, which their ranks send, and two more
    rooms of this size, `room` bytes, for sums, which the next rank fetches.
    """

    def __init__(self, group: ProcessGroup, room: int, device: torch.device) -> None:
        super().__init__(group)
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self.room = room
        mapper = BufferMapper(group, device)
        memory = mapper.zeros(room * (self.ranks + MORE_ROOMS), torch.uint8)
        self.memory = memory.all
        self.barrier = mapper.barrier
        self.stream = mapper.stream
        self.filling = devices.new_stream(device)

    def fits(self, rows: int, width: int, like: Tensor) -> bool:
        """Return whether a rank's rows fit: CUDA graphs use the memory, so it must never move."""
        return rows * width * like.element_size() <= self.room

    def mapped(self, rank: int, number: int, rows: int, width: int, like: Tensor) -> Tensor:
        """Return rows at the beginning of one of a rank's rooms."""
        size = rows * width * like.element_size()
        begin = number * self.room
        room = self.memory[rank][begin : begin + size]
        return room.view(like.dtype).view(rows, width)

    def send(self, x: Tensor, keeps_rows: bool) -> tuple[Tensor, Arrivals]:
        """Start to send contiguous rows to all ranks; return all ranks' rows, and how to wait.

        The arrivals are in the order of the copies: first the rows of the rank before this one,
        then those of the rank before that, and so on.
        """
        n, width = x.shape
        # Those of all ranks are consecutive.
        own = self.memory[self.rank]
        rows = own[: self.ranks * x.nbytes].view(x.dtype).view(self.ranks * n, width)
        arrivals = Arrivals(x)
        with submitting(self.stream):
            self.barrier()  # all ranks have used the rows of the last gather
            # Round k: to the rank k places on, so that each receives from one rank only.
            for k in range(1, self.ranks):
                theirs = self.memory[(self.rank + k) % self.ranks]
                to = theirs[self.rank * x.nbytes :][: x.nbytes]
                to.view(x.dtype).view(n, width).copy_(x, non_blocking=True)
                self.barrier()  # all have come that were sent in this round
                arrivals.append(Arrival(self.stream))
        # This rank's own rows among the others', on a stream that waits for no other rank.
        if keeps_rows:
            with submitting(self.filling):
                rows.chunk(self.ranks)[self.rank].copy_(x, non_blocking=True)
                arrivals.append(Arrival(self.filling))
        return rows, arrivals

    def start_gather(self, x: Tensor) -> comm.Started:
        if not self.fits(len(x), x.shape[1], x):
            return super().start_gather(x)
        return comm.Started(*self.send(x.contiguous(), keeps_rows=True))

    def gather_multiply(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, keeps_rows: bool = False
    ) -> tuple[Tensor, Tensor]:
        if not self.fits(len(x), x.shape[1], x):
            return super().gather_multiply(x, weight, bias, keeps_rows)
        x = x.contiguous()
        rows, arrivals = self.send(x, keeps_rows)
        y = x.new_empty(len(rows), len(weight))
        found = rows.chunk(self.ranks)
        parts = y.chunk(self.ranks)
        # First this rank's own rows, then those of the ranks before it, in the order they come.
        multiply(x, weight.t(), bias, parts[self.rank])
        for k in range(1, self.ranks):
            source = (self.rank - k) % self.ranks
            arrivals[k - 1].wait()
            multiply(found[source], weight.t(), bias, parts[source])
        arrivals.wait()
        return y, rows

    def multiply_scatter(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> comm.Started:
        if not self.fits(len(x) // self.ranks, len(weight), x):
            return super().multiply_scatter(x, weight, bias)
        return self.scatter(x, weight.t(), bias)

    def back_multiply_scatter(self, grad: Tensor, weight: Tensor) -> comm.Started:
        if not self.fits(len(grad) // self.ranks, weight.shape[1], grad):
            return super().back_multiply_scatter(grad, weight)
        return self.scatter(grad, weight, None)

    def scatter(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> comm.Started:
        """Sum x @ weight over the ranks, plus bias, which the first product of each part adds."""
        n = len(x) // self.ranks
        width = weight.shape[1]
        parts = [part.chunk(PIECES) for part in x.chunk(self.ranks)]
        y = x.new_empty(n, width)
        before = (self.rank - 1) % self.ranks
        # A round's sums are where those of the last but one were: fetched before this one's begin.
        sums = []
        others = []
        for k in range(self.ranks - 1):
            room = self.ranks + k % 2
            sums.append(self.mapped(self.rank, room, n, width, x).chunk(PIECES))
            others.append(self.mapped(before, room, n, width, x).chunk(PIECES))
        sums.append(y.chunk(PIECES))
        # Round k multiplies the rows that are k + 1 places back; in the last one these are its own.
        fetched: list[Arrival] = []
        for k, own in enumerate(sums):
            fetching = fetched
            fetched = []
            for j, piece in enumerate(parts[(self.rank - 1 - k) % self.ranks]):
                # The product adds to the sum that has come from the rank before.
                if k:
                    fetching[j].wait()
                    own[j].addmm_(piece, weight)
                else:
                    multiply(piece, weight, bias, own[j])
                if k < self.ranks - 1:
                    with submitting(self.stream):
                        self.barrier()  # all ranks have multiplied this piece
                        sums[k + 1][j].copy_(others[k][j], non_blocking=True)
                        fetched.append(Arrival(self.stream))
                    if (k, j) == (self.ranks - 2, len(own) - 1):
                        with devices.use_stream(self.stream):
                            self.barrier()  # all have fetched, and may multiply anew
                            fetched.append(Arrival(self.stream))
        # So that what comes next on this stream cannot overwrite sums before they are fetched.
        fetching[-1].wait()
        return comm.Started(y, None)

    def back_gather_multiply(self, grad: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return self.gather_multiply(grad, weight.t(), keeps_rows=True)


def multiply(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias, a, b, out=out)


def choose_matmuls(
    wanted: str, group: ProcessGroup, device: torch.device, room: int, unworthy: str = ""
) -> tuple[PlainMatmuls, str]:
    """Return the products for a group, and why they are not overlapped ("" if they are).

    `room` is the bytes of a rank's rows; `unworthy` says why "auto" does without. Every rank of the
    group must call this; all get the same kind.
    """
    # The plain products, and behind them the overlapped ones, if memory can be mapped.
    chosen = [PlainMatmuls(group)]

    def map_memory() -> None:
        chosen.append(OverlappedMatmuls(group, max(room, TRIAL_BYTES), device))

    def compare() -> str:
        difference = largest_difference(chosen[-1], device)
        return "" if difference < 0.01 else f"its result is {difference:.1%} from that of NCCL"

    if not unworthy and room < WORTHWHILE_BYTES:
        unworthy = f"the rows of a micro-batch are few: {room >> 20} MiB on a rank, of {WORTHWHILE_BYTES >> 20}"
    flag = ("tensor", "--tp-overlap", "off", "on")
    reason = to_map_memory(flag, wanted, group, device, [map_memory, compare], unworthy)
    return chosen[0 if reason else -1], reason


@torch.no_grad()
def largest_difference(chosen: PlainMatmuls, device: torch.device) -> float:
    """Return the largest relative difference of products of each kind from the plain ones.

    Each runs twice with other numbers, so that rows of the first time, which a missing wait would
    leave, show. Rows of 1 MiB take longer to copy than small products to begin.
    """
    plain = PlainMatmuls(chosen.group)
    ranks = dist.get_world_size(chosen.group)
    own = torch.Generator(device).manual_seed(1 + dist.get_rank(chosen.group))
    common = torch.Generator(device).manual_seed(0)
    width = 64
    rows = TRIAL_BYTES // (2 * width)
    results: list[list[Tensor]] = [[], []]
    for _ in range(2):
        bias = torch.randn(width, generator=common, device=device).bfloat16()
        x, weight, wide = (
            torch.randn(count, width, generator=own, device=device).bfloat16()
            for count in (rows, width, rows * ranks)
        )
        # What is valid only until the next gather is copied.
        for by, found in zip((plain, chosen), results, strict=True):
            found.append(by.gather_multiply(x, weight, bias)[0])
            found += [part.clone() for part in by.back_gather_multiply(x, weight.t())]
            found.append(comm.wait_for(by.multiply_scatter(wide, weight.t(), bias)))
            started = by.start_gather(x)
            found.append(comm.wait_for(by.back_multiply_scatter(wide, weight)))
            found.append(comm.wait_for(started).clone())
    return max(
        float((a.float() - b.float()).norm() / a.float().norm())
        for a, b in zip(*results, strict=True)
    )
