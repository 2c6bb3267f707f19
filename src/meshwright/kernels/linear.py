"""Linear maps whose weight gradient goes into its full-precision total.

Hand-written because autograd would make a gradient in the weight's precision first, and add it up
in a pass of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.kernels import gradients
from meshwright.kernels.matmul import affine, product


class _Linear(torch.autograd.Function):
    """F.linear whose weight gradient is left where kernels/gradients.py says."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, parameter)
        ctx.parameter = parameter
        ctx.bias = bias
        return affine(x, parameter.flatten(0, -2), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, parameter = ctx.saved_tensors
        # A view would keep the graph that made it, and with it the input of a pipeline's stage.
        flat = grad.detach().reshape(-1, grad.shape[-1])
        rows = x.detach().reshape(-1, x.shape[-1])
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = product(grad, parameter.flatten(0, -2))
        of_weight = gradients.from_product(ctx.parameter, flat, rows)
        return of_x, of_weight, gradients.of_bias(ctx, grad)


def linear(x: Tensor, parameter: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear, in which a parameter of more than two dimensions is a stack of matrices."""
    # Without a total there is nothing to gain over torch's own function.
    if torch.compiler.is_compiling() or gradients.main_grad_of(parameter) is None:
        return affine(x, parameter.flatten(0, -2), bias)
    return _Linear.apply(x, parameter, bias)  # type: ignore[no-any-return,no-untyped-call]


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor) -> Tensor:
        ctx.bias = bias
        return y + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        of_bias = None
        if ctx.needs_input_grad[1]:
            of_bias = gradients.from_rows(ctx.bias, grad)
        return grad, of_bias


def add_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    """Return y + bias, whose gradient is summed in full precision."""
    return y if bias is None else _AddBias.apply(y, bias)  # type: ignore[no-untyped-call]
