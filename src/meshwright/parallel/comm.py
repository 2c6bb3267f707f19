"""Collectives: plain ones, and differentiable ones whose backward pass is the opposite collective.

Where torch.compile traces them they are torch's functional collectives, which it needs. Elsewhere
they are not: each takes the host about 0.4 ms more, for which a step without CUDA graphs waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from meshwright.parallel.layout import LANES, Layout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Collective = Callable[[Tensor, "ProcessGroup"], Tensor]

# Names in torch 2.13, then those in 2.11 and 2.12.
_gather: Any = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_scatter: Any = (
    getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
)
gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_into: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class Started(NamedTuple):
    """A collective that may still be under way."""

    result: Tensor
    work: Any  # None if the compiler waits for it, or it has ended


def wait_for(started: Started) -> Tensor:
    """Return a collective's result when it is there."""
    if started.work is not None:
        started.work.wait()
    elif torch.compiler.is_compiling():
        return functional.wait_tensor(started.result)  # type: ignore[no-any-return,no-untyped-call]
    return started.result


def start_all_reduce(
    x: Tensor, group: ProcessGroup, op: str = "sum", waits: bool = False
) -> Started:
    if torch.compiler.is_compiling():
        return Started(functional.all_reduce(x.contiguous(), op, group), None)
    y = x.clone(memory_format=torch.contiguous_format)
    return Started(y, dist.all_reduce(y, OPERATIONS[op], group, async_op=not waits))


def start_all_gather(x: Tensor, group: ProcessGroup, waits: bool = False) -> Started:
    if torch.compiler.is_compiling():
        return Started(_gather(x.contiguous(), 0, group), None)
    count = len(x) * dist.get_world_size(group)
    y = x.new_empty(count, *x.shape[1:])
    # With `waits` there is no work to wait for: the current stream does so by itself.
    work = gather_into(y, x.contiguous(), group=group, async_op=not waits)
    return Started(y, work)


def start_reduce_scatter(x: Tensor, group: ProcessGroup, waits: bool = False) -> Started:
    if torch.compiler.is_compiling():
        return Started(_scatter(x.contiguous(), "sum", 0, group), None)
    count = len(x) // dist.get_world_size(group)
    y = x.new_empty(count, *x.shape[1:])
    work = scatter_into(y, x.contiguous(), group=group, async_op=not waits)
    return Started(y, work)


def all_reduce(x: Tensor, group: ProcessGroup, op: str = "sum") -> Tensor:
    return wait_for(start_all_reduce(x, group, op, waits=True))


def all_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    """Concatenate the ranks' tensors along the first dimension."""
    return wait_for(start_all_gather(x, group, waits=True))


def reduce_scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over the ranks and return this rank's part along the first dimension."""
    return wait_for(start_reduce_scatter(x, group, waits=True))


def all_to_all(x: Tensor, group: ProcessGroup) -> Tensor:
    """Send part i of the first dimension to rank i and concatenate the parts received."""
    x = x.contiguous()
    if torch.compiler.is_compiling():
        return wait_for(Started(functional.all_to_all_single(x, None, None, group), None))
    y = torch.empty_like(x)
    dist.all_to_all_single(y, x, group=group)
    return y


def exchange(x: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    """Send elements [n] to the ranks, so many to each, and return those received, by rank.

    They travel as bytes: gloo exchanges few formats.
    """
    out = x.new_empty(sum(received))
    bytes_in = [n * x.itemsize for n in received]
    bytes_out = [n * x.itemsize for n in sent]
    dist.all_to_all_single(out.view(torch.uint8), x.view(torch.uint8), bytes_in, bytes_out, group)
    return out


def identity(x: Tensor, group: ProcessGroup) -> Tensor:
    return x.view_as(x)


class _Pair(torch.autograd.Function):
    """One collective for the value, another for the gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: ProcessGroup, collective: Collective, back: Collective
    ) -> Tensor:
        ctx.group = group
        ctx.back = back
        return collective(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grad, ctx.group), None, None, None


def copied(x: Tensor, group: ProcessGroup) -> Tensor:
    """Use the same tensor on every rank; backward sums the gradients."""
    return _Pair.apply(x, group, identity, all_reduce)  # type: ignore[no-any-return,no-untyped-call]


def summed(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum the ranks' partial results."""
    return _Pair.apply(x, group, all_reduce, identity)  # type: ignore[no-any-return,no-untyped-call]


def gathered(x: Tensor, group: ProcessGroup) -> Tensor:
    """Gather all ranks' rows; backward sums a row's gradients over the ranks."""
    return _Pair.apply(x, group, all_gather, reduce_scatter)  # type: ignore[no-any-return,no-untyped-call]


def scattered(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum the ranks' partial results and keep this rank's rows."""
    return _Pair.apply(x, group, reduce_scatter, all_gather)  # type: ignore[no-any-return,no-untyped-call]


def exchanged(x: Tensor, group: ProcessGroup) -> Tensor:
    """All-to-all, which is its own inverse."""
    return _Pair.apply(x, group, all_to_all, all_to_all)  # type: ignore[no-any-return,no-untyped-call]


def open_all(layout: Layout, device: torch.device, unused: tuple[str, ...] = ("matrices",)) -> None:
    """Run a first sum in every group but unused ones, in a fixed order.

    NCCL connects a group's ranks at its first use and may wait for the whole device then. Within a
    pass of the network, with messages in flight, that would deadlock.
    """
    if layout.world > 1:
        dist.all_reduce(torch.zeros(1, device=device))
    for name, group in layout.groups.items():
        if name not in (*LANES, *unused):
            dist.all_reduce(torch.zeros(1, device=device), group=group)


def total(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum in place, without a gradient; None is a group of one."""
    if group is not None:
        dist.all_reduce(x, group=group)
    return x
