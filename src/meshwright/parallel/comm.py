"""Collectives as functions of tensors whose backward pass is the opposite collective, and plain ones beside them.

Those with a gradient go through torch's functional collectives, which torch.compile can trace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from meshwright.parallel.layout import LANES, Layout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Collective = Callable[[Tensor, "ProcessGroup"], Tensor]

# Names of torch 2.13, and those of 2.11 and 2.12.
_gather: Any = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_scatter: Any = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_into: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def wait(x: Tensor) -> Tensor:
    return functional.wait_tensor(x)  # type: ignore[no-any-return,no-untyped-call]


def all_reduce(x: Tensor, group: ProcessGroup, op: str = "sum", wait: bool = True) -> Tensor:
    return _given(functional.all_reduce(x.contiguous(), op, group), wait)


def all_gather(x: Tensor, group: ProcessGroup, wait: bool = True) -> Tensor:
    """The ranks' tensors one after the other, along the first dimension."""
    return _given(_gather(x.contiguous(), 0, group), wait)


def reduce_scatter(x: Tensor, group: ProcessGroup, wait: bool = True) -> Tensor:
    """The sum over the ranks, of which each gets its part along the first dimension."""
    return _given(_scatter(x.contiguous(), "sum", 0, group), wait)


def _given(x: Tensor, waits: bool) -> Tensor:
    return wait(x) if waits else x


def all_to_all(x: Tensor, group: ProcessGroup) -> Tensor:
    """Part i of the first dimension goes to rank i, whose parts are put one after the other."""
    return wait(functional.all_to_all_single(x.contiguous(), None, None, group))


def same(x: Tensor, group: ProcessGroup) -> Tensor:
    return x.view_as(x)


class _Pair(torch.autograd.Function):
    """One collective forward, another one for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, there: Collective, back: Collective) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grad, ctx.group), None, None, None


def copied(x: Tensor, group: ProcessGroup) -> Tensor:
    """What every rank goes on with by itself: backward sums their gradients."""
    return _Pair.apply(x, group, same, all_reduce)  # type: ignore[no-any-return,no-untyped-call]


def summed(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of what the ranks computed in parts."""
    return _Pair.apply(x, group, all_reduce, same)  # type: ignore[no-any-return,no-untyped-call]


def gathered(x: Tensor, group: ProcessGroup) -> Tensor:
    """All ranks' rows, to go on with by itself: backward sums the gradients of a row over the ranks."""
    return _Pair.apply(x, group, all_gather, reduce_scatter)  # type: ignore[no-any-return,no-untyped-call]


def scattered(x: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's rows of the sum."""
    return _Pair.apply(x, group, reduce_scatter, all_gather)  # type: ignore[no-any-return,no-untyped-call]


def exchanged(x: Tensor, group: ProcessGroup) -> Tensor:
    """All to all, which undoes itself."""
    return _Pair.apply(x, group, all_to_all, all_to_all)  # type: ignore[no-any-return,no-untyped-call]


def open_all(layout: Layout, device: torch.device) -> None:
    """A first sum in every group, in one order. NCCL connects a group's ranks at its first use, which may wait for the whole
    device: in a pass of the network, beside messages that are under way, that would be for ever."""
    if layout.world > 1:
        dist.all_reduce(torch.zeros(1, device=device))
    for name, group in layout.groups.items():
        if name not in LANES:
            dist.all_reduce(torch.zeros(1, device=device), group=group)


def total(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """In place, without a gradient; a group of None is a group of one."""
    if group is not None:
        dist.all_reduce(x, group=group)
    return x
