"""The MLP's activation, whose backward pass also sums the gradient of the bias before it.

Hand-written because torch's needs a second pass over the gradient to sum its columns, and several
for a gated kind. The product before it adds the bias, detached, which costs nothing there; here
the bias is an input only to get its gradient. Arithmetic is in at least float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels import gradients
from meshwright.kernels.fp8 import Into
from meshwright.kernels.references import reference, upcast


def activate(kind: str, u: Tensor, bias: Tensor | None = None) -> Tensor:
    """Map u [..., F], or (gate, up) [..., 2F] of a gated kind, to [..., F].

    The product before has added the bias to u, detached; the bias gets its gradient here.
    """
    return _Activate.apply(u, bias, kind)  # type: ignore[no-any-return,no-untyped-call]


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor, bias: Tensor | None, kind: str) -> Tensor:
        ctx.save_for_backward(u)
        ctx.parameter = bias
        ctx.kind = kind
        return forward(kind, u)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (u,) = ctx.saved_tensors
        du, partials = backward(ctx.kind, u, grad, ctx.needs_input_grad[1])
        of_bias = None if partials is None else gradients.from_columns(ctx.parameter, partials)
        return du, of_bias, None


@reference("activation.forward", of=lambda kind, u, *_: u)
def forward(kind: str, u: Tensor, into: Into | None = None) -> Tensor:
    a = plain(kind, halves(kind, upcast(u))).to(u.dtype)
    return a if into is None else into.fill(a)


@reference("activation.backward", of=lambda kind, u, *_: u)
def backward(
    kind: str, u: Tensor, grad: Tensor, summed: bool, into: Into | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of u and, if asked for, partial sums [n, F or 2F] of its columns."""
    # Autograd differentiates torch's own activation, which keeps the reference simple.
    with torch.enable_grad():
        x = upcast(u.detach()).requires_grad_()
        a = plain(kind, halves(kind, x))
        (wide,) = torch.autograd.grad(a, x, upcast(grad))
    # The sums are taken before the gradient is rounded, as in the Triton kernel.
    partials = wide.flatten(0, -2).sum(0, keepdim=True) if summed else None
    du = wide.to(u.dtype)
    return du if into is None else into.fill(du), partials


def plain(kind: str, x: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """Apply an activation; the gated kinds (Shazeer 2020) take the pair (gate, up)."""
    if isinstance(x, tuple):
        gate, up = x
        if kind == "swiglu":
            return F.silu(gate) * up
        if kind == "geglu":
            return F.gelu(gate) * up
        if kind == "reglu":
            return F.relu(gate) * up
        return gate * up  # liglu
    if kind == "squared-relu":
        return F.relu(x).square()
    return F.gelu(x, approximate="tanh" if kind == "gelu-tanh" else "none")


def halves(kind: str, u: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    """Split the first product's output if the kind is gated."""
    if not kind.endswith("glu"):
        return u
    gate, up = u.chunk(2, dim=-1)
    return gate, up
