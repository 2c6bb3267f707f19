"""Products of tensor parallelism together with the collective before or after them.

`PlainProducts` runs one after the other. `OverlappedProducts` cuts the rows by rank: while a
product runs on the rows that are here, copy engines fetch those of another rank over NVLink into
memory that the ranks map from each other (torch's symmetric memory), without multiprocessors of the
GPU and without NCCL.

    gather + multiply     own rows @ W    |  copy rank 1's rows, then multiply them | ...
    multiply + scatter    rank 1's rows @ W, which it fetches | ... | own rows @ W, then the sum

torch's own operations for both (torch.ops.symm_mem.fused_*) add no bias, so this module calls the
pipelines that they consist of. Multicast is not needed and is left off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.kernels.products import affine, product
from meshwright.parallel import comm
from meshwright.parallel.agree import map_memory_of, to_map_memory
from meshwright.parallel.layout import WORTHWHILE_BYTES

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


TRIAL_BYTES = 1 << 20  # to map at least, for `largest_difference`


class PlainProducts:
    """NCCL's collectives (gloo's, on CPUs) before and after whole products."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def gather_multiply(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, keeps_rows: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return all ranks' rows @ weight^T + bias, and if `keeps_rows` the rows."""
        rows = comm.all_gather(x, self.group)
        return affine(rows, weight, bias), rows

    def multiply_scatter(self, x: Tensor, weight: Tensor) -> comm.Started:
        """Start to sum x @ weight^T over the ranks, of which this one keeps its rows."""
        return comm.start_reduce_scatter(affine(x, weight), self.group)

    def back_multiply_scatter(self, grad: Tensor, weight: Tensor) -> comm.Started:
        """Do the same for grad @ weight."""
        return comm.start_reduce_scatter(product(grad, weight), self.group)

    def back_gather_multiply(self, grad: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return all ranks' rows @ weight, and the rows."""
        rows = comm.all_gather(grad, self.group)
        return product(rows, weight), rows


class OverlappedProducts(PlainProducts):
    """Products while rows are copied; `size` bytes of each rank are mapped by the others."""

    def __init__(self, group: ProcessGroup, size: int) -> None:
        super().__init__(group)
        self.pipelines: Any = map_memory_of(group)
        self.name, self.ranks, self.size = group.group_name, dist.get_world_size(group), size
        self.pipelines.get_symm_mem_workspace(self.name, min_size=size)

    def fits(self, rows: int, x: Tensor, width: int, copies: int = 1) -> bool:
        """Return whether a rank's rows fit: CUDA graphs use the memory, so it must never move."""
        return copies * rows * width * x.element_size() <= self.size

    def gather_multiply(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, keeps_rows: bool = False
    ) -> tuple[Tensor, Tensor]:
        if not self.fits(len(x), x, x.shape[1]):
            return super().gather_multiply(x, weight, bias, keeps_rows)
        x, transposed = x.contiguous(), weight.t()
        rows = x.new_empty(len(x) * self.ranks, x.shape[1])
        y = x.new_empty(len(rows), len(weight))
        parts = y.chunk(self.ranks)

        def multiply(part: Tensor, rank: int) -> None:
            if bias is None:
                torch.mm(part, transposed, out=parts[rank])
            else:
                torch.addmm(bias, part, transposed, out=parts[rank])

        self.pipelines._pipelined_all_gather_and_consume(x, multiply, rows, self.name, keeps_rows)
        return y, rows

    def multiply_scatter(self, x: Tensor, weight: Tensor) -> comm.Started:
        return self.back_multiply_scatter(x, weight.t())

    def back_multiply_scatter(self, grad: Tensor, weight: Tensor) -> comm.Started:
        n = len(grad) // self.ranks
        if not self.fits(n, grad, weight.shape[1], copies=2):
            return super().back_multiply_scatter(grad, weight)
        parts = grad.chunk(self.ranks)
        partial = grad.new_empty(len(grad), weight.shape[1])

        def multiply(rank: int, out: Tensor) -> None:
            torch.mm(parts[rank], weight, out=out)

        self.pipelines._pipelined_produce_and_all2all(multiply, partial, self.name)
        return comm.Started(partial.view(self.ranks, n, -1).sum(0), None)

    def back_gather_multiply(self, grad: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return self.gather_multiply(grad, weight.t(), keeps_rows=True)


def choose_products(wanted: str, group: ProcessGroup, device: torch.device, size: int) -> tuple[PlainProducts, str]:
    """Return the products for a group, and why they are not overlapped ("" if they are).

    `size` is the number of bytes to map, twice those of the rows. Every rank of the group must call
    this; all get the same kind.
    """
    chosen = [PlainProducts(group)]

    def map_memory() -> None:
        chosen.append(OverlappedProducts(group, max(size, TRIAL_BYTES)))

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
