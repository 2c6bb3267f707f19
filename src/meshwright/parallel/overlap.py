"""Products of tensor parallelism together with the collective before or after them.

`Plain` runs one after the other. `Overlapped` cuts the rows by rank: while a product runs on the
rows that are here, copy engines fetch those of another rank over NVLink into memory that the ranks
map from each other (torch's symmetric memory), without processors of the GPU and without NCCL.

    gather + multiply     own rows @ W    |  copy rank 1's rows, then multiply them | ...
    multiply + scatter    rank 1's rows @ W, which it fetches | ... | own rows @ W, then the sum

torch's own operations for both (torch.ops.symm_mem.fused_*) add no bias, so this module calls the
pipelines that they consist of. Multicast is not needed and is left off.
"""

from __future__ import annotations

import os
import socket
import zlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright import device as devices
from meshwright.errors import UserError
from meshwright.kernels.products import affine, product
from meshwright.parallel import comm

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


LEAST = 1 << 20  # bytes to map, enough for the trial


class Plain:
    """NCCL's collectives (gloo's, on CPUs) before and after whole products."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def gather_multiply(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, keeps_rows: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return all ranks' rows @ weight^T + bias, and if `keeps_rows` the rows."""
        rows = comm.all_gather(x, self.group)
        return affine(rows, weight, bias), rows

    def multiply_scatter(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return this rank's rows of the sum of x @ weight^T over the ranks, for comm.wait."""
        return comm.reduce_scatter(affine(x, weight), self.group, wait=False)

    def back_multiply_scatter(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Do the same for grad @ weight."""
        return comm.reduce_scatter(product(grad, weight), self.group, wait=False)

    def back_gather_multiply(self, grad: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return all ranks' rows @ weight, and the rows."""
        rows = comm.all_gather(grad, self.group)
        return product(rows, weight), rows


class Overlapped(Plain):
    """Products while rows are copied; `size` bytes of each rank are mapped by the others."""

    def __init__(self, group: ProcessGroup, size: int) -> None:
        super().__init__(group)
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        import torch.distributed._symmetric_memory as symmetric

        self.pipelines: Any = symmetric
        self.name, self.ranks, self.size = group.group_name, dist.get_world_size(group), size
        if not hasattr(symmetric.enable_symm_mem_for_group, "__deprecated__"):  # newer torch needs no call
            symmetric.enable_symm_mem_for_group(self.name)
        symmetric.get_symm_mem_workspace(self.name, min_size=size)

    def fits(self, rows: int, x: Tensor, width: int, copies: int = 1) -> bool:
        """Return whether a rank's rows fit: CUDA graphs use the memory, so it must never move."""
        return copies * rows * width * x.element_size() <= self.size

    def gather_multiply(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, keeps_rows: bool = False
    ) -> tuple[Tensor, Tensor]:
        if not self.fits(len(x), x, x.shape[1]):
            return super().gather_multiply(x, weight, bias, keeps_rows)
        x, turned = x.contiguous(), weight.t()
        rows = x.new_empty(len(x) * self.ranks, x.shape[1])
        y = x.new_empty(len(rows), len(weight))
        parts = y.chunk(self.ranks)

        def multiply(part: Tensor, rank: int) -> None:
            if bias is None:
                torch.mm(part, turned, out=parts[rank])
            else:
                torch.addmm(bias, part, turned, out=parts[rank])

        self.pipelines._pipelined_all_gather_and_consume(x, multiply, rows, self.name, keeps_rows)
        return y, rows

    def multiply_scatter(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.back_multiply_scatter(x, weight.t())

    def back_multiply_scatter(self, grad: Tensor, weight: Tensor) -> Tensor:
        n = len(grad) // self.ranks
        if not self.fits(n, grad, weight.shape[1], copies=2):
            return super().back_multiply_scatter(grad, weight)
        parts = grad.chunk(self.ranks)
        partial = grad.new_empty(len(grad), weight.shape[1])

        def multiply(rank: int, out: Tensor) -> None:
            torch.mm(parts[rank], weight, out=out)

        self.pipelines._pipelined_produce_and_all2all(multiply, partial, self.name)
        return partial.view(self.ranks, n, -1).sum(0)

    def back_gather_multiply(self, grad: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return self.gather_multiply(grad, weight.t(), keeps_rows=True)


def choose(wanted: str, group: ProcessGroup, device: torch.device, size: int) -> tuple[Plain, str]:
    """Return the products for a group, and why they are not overlapped ("" if they are).

    Every rank of the group must call this; all get the same kind.
    """
    reason = "of --tp-overlap off" if wanted == "off" else ""
    if not reason and device.type != devices.NVIDIA:
        reason = "the device is not an NVIDIA GPU"
    if not reason and is_spread(group, device):
        reason = "tensor ranks are on several machines"
    plain = chosen = Plain(group)
    if not reason:
        try:
            chosen = Overlapped(group, max(size, LEAST))
        except Exception as error:  # no peer access, no rights for it, another version of torch
            reason = failure(error)
        reason = agree(reason, group, device)
    if not reason:  # all ranks have mapped the memory, so none is left waiting in a product
        try:
            difference = furthest(chosen, device)
            reason = "" if difference < 0.01 else f"its result is {difference:.1%} from that of NCCL"
        except Exception as error:
            reason = failure(error)
        reason = agree(reason, group, device)
    if reason and wanted == "on":
        raise UserError(f"--tp-overlap on: {reason}; give --tp-overlap auto")
    return (plain if reason else chosen), reason


def failure(error: Exception) -> str:
    line = (str(error).splitlines() or [""])[0]
    return f"it failed: {type(error).__name__}: {line}"


def agree(reason: str, group: ProcessGroup, device: torch.device) -> str:
    """Return this rank's reason, or that another rank has one."""
    has_one = comm.all_reduce(torch.tensor(float(bool(reason)), device=device), group, "max")
    return reason or ("it failed on another rank" if bool(has_one) else "")


def is_spread(group: ProcessGroup, device: torch.device) -> bool:
    """Return whether the group's ranks are on several machines."""
    here = zlib.crc32(socket.gethostname().encode())
    ends = comm.all_reduce(torch.tensor([here, -here], device=device), group, "max").tolist()
    return bool(ends[0] != -ends[1])


@torch.no_grad()
def furthest(chosen: Plain, device: torch.device) -> float:
    """Return the largest relative distance of a small product of each kind from the plain one."""
    plain, ranks = Plain(chosen.group), dist.get_world_size(chosen.group)
    draw = torch.Generator(device).manual_seed(1 + dist.get_rank(chosen.group))
    x, weight, bias, wide = (
        torch.randn(shape, generator=draw, device=device).bfloat16()
        for shape in ((128, 64), (128, 64), (128,), (128 * ranks, 128))
    )
    found = []
    for by in (plain, chosen):
        y, _ = by.gather_multiply(x, weight, bias)
        back, rows = by.back_gather_multiply(x, weight.t())
        sums = [by.multiply_scatter(wide, weight.t()), by.back_multiply_scatter(wide, weight)]
        found.append([y, back, rows, *map(comm.wait, sums)])
    return max(float((a.float() - b.float()).norm() / a.float().norm()) for a, b in zip(*found, strict=True))
