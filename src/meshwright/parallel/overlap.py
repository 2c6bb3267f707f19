"""Products of tensor parallelism together with the collective before or after them.

`PlainProducts` runs one after the other. `OverlappedProducts` cuts the rows by rank: while a
product runs on some rows, copy engines move others over NVLink, between memory that the ranks map
from each other (torch's symmetric memory), without multiprocessors of the GPU and without NCCL.

    gather + multiply     own rows @ W, while they are sent to each rank | rank 1's rows @ W | ...
    multiply + scatter    rank 1's rows @ W, which the next rank fetches, adds to its own product of
                          these rows, and so on: a ring, whose last product is that of own rows

Each part of the second is cut into pieces, so that one is fetched while another is multiplied, and
a product adds to what has been fetched: there is no sum of its own.

Hand-written because torch's pipelines of the same purpose (torch.ops.symm_mem.fused_*) make a step
of 2.7B take 167 ms on two H100 GPUs, where half of one GPU's is 135: in 97 of 129 scatters they ran
the product of own rows first, so that nothing hid the copy of the others (5.8 ms); a sum (6.2),
seven barriers for each pair of a gather and a scatter (4.3) and copies into mapped memory (1.8)
were exposed too. Multicast is not needed and is left off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright import device as devices
from meshwright.kernels.products import affine, product
from meshwright.parallel import comm
from meshwright.parallel.agree import to_map_memory
from meshwright.parallel.layout import WORTHWHILE_BYTES
from meshwright.parallel.mapped import Arrival, BufferMapper

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


TRIAL_BYTES = 1 << 20  # to map at least, for `largest_difference`
# Of a rank's rows, each multiplied and fetched alone: the fewest of which one is fetched while
# another is multiplied, since each takes a barrier and makes products smaller.
PIECES = 2


class PlainProducts:
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

    def multiply_scatter(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> comm.Started:
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
    """Several copies, waited for together."""

    source: Tensor

    def wait(self) -> None:
        for arrival in self:
            arrival.wait()


class OverlappedProducts(PlainProducts):
    """Products while rows are copied.

    `size` is twice the bytes of a rank's rows. Each rank's mapped memory has a part of that size
    for each rank's rows, which their ranks send, and two for sums, which the next rank fetches.
    """

    def __init__(self, group: ProcessGroup, size: int, device: torch.device) -> None:
        super().__init__(group)
        self.rank, self.ranks, self.device = dist.get_rank(group), dist.get_world_size(group), device
        self.part = size // 2
        mapper = BufferMapper(group, device)
        memory = mapper.zeros(self.part * (self.ranks + 2), torch.uint8)
        self.memory, self.barrier, self.stream = memory.all, mapper.barrier, mapper.stream
        self.filling = devices.new_stream(device)

    def fits(self, rows: int, width: int, like: Tensor) -> bool:
        """Return whether a rank's rows fit: CUDA graphs use the memory, so it must never move."""
        return rows * width * like.element_size() <= self.part

    def mapped(self, rank: int, part: int, rows: int, width: int, like: Tensor) -> Tensor:
        """Return rows at the beginning of a part of a rank's memory."""
        size = rows * width * like.element_size()
        return self.memory[rank][part * self.part :][:size].view(like.dtype).view(rows, width)

    def send(self, x: Tensor, keeps_rows: bool) -> tuple[Tensor, Arrivals]:
        """Start to send contiguous rows to all ranks; return all ranks' rows, and how to wait.

        The first of what is to be waited for are the rows of the rank before this one, then those
        of the one before that, and so on.
        """
        n, width = x.shape
        # Those of all ranks are consecutive.
        rows = self.memory[self.rank][: self.ranks * x.nbytes].view(x.dtype).view(self.ranks * n, width)
        arrivals = Arrivals()
        with self.submitting(self.stream):
            self.barrier()  # all ranks have used the rows of the last gather
            for k in range(1, self.ranks):
                to = self.memory[(self.rank + k) % self.ranks][self.rank * x.nbytes :][: x.nbytes]
                to.view(x.dtype).view(n, width).copy_(x, non_blocking=True)
                self.barrier()  # all have come that were sent in this round
                arrivals.append(self.arrival(self.stream))
        if keeps_rows:
            with self.submitting(self.filling):
                rows.chunk(self.ranks)[self.rank].copy_(x, non_blocking=True)
                arrivals.append(self.arrival(self.filling))
        return rows, arrivals

    def start_gather(self, x: Tensor) -> comm.Started:
        if not self.fits(len(x), x.shape[1], x):
            return super().start_gather(x)
        rows, arrivals = self.send(x := x.contiguous(), keeps_rows=True)
        arrivals.source = x  # which must outlive the copies
        return comm.Started(rows, arrivals)

    def gather_multiply(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, keeps_rows: bool = False
    ) -> tuple[Tensor, Tensor]:
        if not self.fits(len(x), x.shape[1], x):
            return super().gather_multiply(x, weight, bias, keeps_rows)
        rows, arrivals = self.send(x := x.contiguous(), keeps_rows)
        y = x.new_empty(len(rows), len(weight))
        found, parts = rows.chunk(self.ranks), y.chunk(self.ranks)
        for k in range(self.ranks):
            source = (self.rank - k) % self.ranks
            if k:
                arrivals[k - 1].wait()
            multiply(found[source] if k else x, weight.t(), bias, parts[source])
        arrivals.wait()
        return y, rows

    def multiply_scatter(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> comm.Started:
        if not self.fits(len(x) // self.ranks, len(weight), x):
            return super().multiply_scatter(x, weight, bias)
        return self.scatter(x, weight.t(), bias)

    def back_multiply_scatter(self, grad: Tensor, weight: Tensor) -> comm.Started:
        if not self.fits(len(grad) // self.ranks, weight.shape[1], grad):
            return super().back_multiply_scatter(grad, weight)
        return self.scatter(grad, weight, None)

    def scatter(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> comm.Started:
        """Sum x @ weight over the ranks, plus bias, which the first product of each part adds."""
        n, width = len(x) // self.ranks, weight.shape[1]
        parts = [part.chunk(PIECES) for part in x.chunk(self.ranks)]
        y = x.new_empty(n, width)
        before = (self.rank - 1) % self.ranks
        # A step's sums are where those of the last but one were: fetched before this one's begin.
        sums, others = (
            [self.mapped(rank, self.ranks + k % 2, n, width, x).chunk(PIECES) for k in range(self.ranks - 1)]
            for rank in (self.rank, before)
        )
        sums.append(y.chunk(PIECES))
        fetched: list[Arrival] = []
        for k, own in enumerate(sums):
            fetching, fetched = fetched, []
            for j, piece in enumerate(parts[(self.rank - 1 - k) % self.ranks]):
                if k:
                    fetching[j].wait()
                    own[j].addmm_(piece, weight)
                else:
                    multiply(piece, weight, bias, own[j])
                if k < self.ranks - 1:
                    with self.submitting(self.stream):
                        self.barrier()  # all ranks have multiplied this piece
                        sums[k + 1][j].copy_(others[k][j], non_blocking=True)
                        fetched.append(self.arrival(self.stream))
                    if (k, j) == (self.ranks - 2, len(own) - 1):
                        with devices.use_stream(self.stream):
                            self.barrier()  # all have fetched, and may multiply anew
                            fetched.append(self.arrival(self.stream))
        fetching[-1].wait()
        return comm.Started(y, None)

    def back_gather_multiply(self, grad: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return self.gather_multiply(grad, weight.t(), keeps_rows=True)

    def submitting(self, stream: Any) -> Any:
        """Submit to a stream, after all earlier work of the current one."""
        stream.wait_stream(devices.current_stream(self.device))
        return devices.use_stream(stream)

    def arrival(self, stream: Any) -> Arrival:
        return Arrival(stream.record_event(), self.device)


def multiply(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias, a, b, out=out)


def choose_products(wanted: str, group: ProcessGroup, device: torch.device, size: int) -> tuple[PlainProducts, str]:
    """Return the products for a group, and why they are not overlapped ("" if they are).

    `size` is the number of bytes to map, twice those of the rows. Every rank of the group must call
    this; all get the same kind.
    """
    chosen = [PlainProducts(group)]

    def map_memory() -> None:
        chosen.append(OverlappedProducts(group, max(size, TRIAL_BYTES), device))

    def compare() -> str:
        difference = largest_difference(chosen[-1], device)
        return "" if difference < 0.01 else f"its result is {difference:.1%} from that of NCCL"

    few = f"the rows of a micro-batch are few: {size >> 21} MiB on a rank, of {WORTHWHILE_BYTES >> 20}"
    few *= size < 2 * WORTHWHILE_BYTES
    reason = to_map_memory("tensor --tp-overlap off on", wanted, group, device, [map_memory, compare], few)
    return chosen[0 if reason else -1], reason


@torch.no_grad()
def largest_difference(chosen: PlainProducts, device: torch.device) -> float:
    """Return the largest relative difference of small products of each kind from the plain ones."""
    plain, ranks = PlainProducts(chosen.group), dist.get_world_size(chosen.group)
    draw = torch.Generator(device).manual_seed(1 + dist.get_rank(chosen.group))
    x, weight, bias, wide = (
        torch.randn(shape, generator=draw, device=device).bfloat16()
        for shape in ((128, 64), (128, 64), (128,), (128 * ranks, 128))
    )
    results = []
    for by in (plain, chosen):
        y, _ = by.gather_multiply(x, weight, bias)
        back, rows = by.back_gather_multiply(x, weight.t())
        sums = [by.multiply_scatter(wide, weight.t()), by.back_multiply_scatter(wide, weight)]
        results.append([y, back, rows, *map(comm.wait_for, sums)])
    return max(float((a.float() - b.float()).norm() / a.float().norm()) for a, b in zip(*results, strict=True))
