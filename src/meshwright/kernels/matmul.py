"""Matrix products: in float32 where a CPU would take long, and into full-precision totals.

CPUs without instructions for float16 multiply it many times as slowly as float32, so `affine` and
`product` compute in float32 there.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.base import device as devices

PIECE = 1 << 18  # elements that `put_into` converts at a time


def is_slow(x: Tensor) -> bool:
    return x.dtype is torch.float16 and x.device.type == "cpu"


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b."""
    return (a.float() @ b.float()).half() if is_slow(a) else a @ b


def affine(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return F.linear."""
    if is_slow(x):
        return _InFloat32.apply(x, weight, bias)  # type: ignore[no-any-return,no-untyped-call]
    return F.linear(x, weight, bias)


class _InFloat32(torch.autograd.Function):
    """F.linear of float16, which keeps no copy in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        wide_bias = None if bias is None else bias.float()
        return F.linear(x.float(), weight.float(), wide_bias).half()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        of_x = product(grad, weight)
        of_weight = product(flat.t(), x.reshape(-1, x.shape[-1]))
        of_bias = flat.sum(0) if ctx.biased else None
        return of_x, of_weight, of_bias


def multiply_into(total: Tensor, a: Tensor, b: Tensor, adds: bool) -> None:
    """Set the total to a @ b, or add it; a GPU does not round the product to the inputs' format."""
    if a.dtype is total.dtype and not adds:
        torch.mm(a, b, out=total)
        return
    # cuBLAS writes float32 from 16-bit factors, and adds to what is there; elsewhere the product
    # has the factors' format.
    is_low = a.dtype in (torch.bfloat16, torch.float16)
    if not (devices.has_kernels(a.device) and is_low and total.dtype is torch.float32):
        found = a.float() @ b.float() if is_slow(a) else a @ b
        put_into(total, found, adds)
        return
    aten: Any = torch.ops.aten
    if adds:
        aten.addmm.dtype_out(total, a, b, torch.float32, out=total)
    else:
        aten.mm.dtype_out(a, b, torch.float32, out=total)


def put_into(total: Tensor, found: Tensor, adds: bool) -> None:
    """Set the total to what was found, or add it.

    To add bfloat16 to float32, a CPU takes ten times as long as to convert it first, which is done
    in pieces that stay in its cache.
    """
    if not adds:
        total.copy_(found)
    elif total.device.type != "cpu" or found.dtype is total.dtype or not found.is_contiguous():
        total.add_(found)
    else:
        totals = torch.split(total.view(-1), PIECE)
        pieces = torch.split(found.view(-1), PIECE)
        for to, piece in zip(totals, pieces, strict=True):
            to.add_(piece.to(to.dtype))
