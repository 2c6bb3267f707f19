"""The bound of softcap.py as two Triton kernels.

Used on CUDA only; tests compare them with the plain reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.grid import cdiv

BLOCK = 2048


@triton.jit
def _tanh(x):
    # Of -|x|, so that the exponential does not overflow.
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0.0, -t, t)


@triton.jit
def _bound(logits, out, cap, count, BLOCK: tl.constexpr):
    """Compute cap * tanh(logits / cap). Bytes moved: the logits twice."""
    block = tl.program_id(0).to(tl.int64)
    i = block * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    x = tl.load(logits + i, mask=inside)
    x = x.to(tl.float32)
    y = cap * _tanh(x / cap)
    tl.store(out + i, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _overwrite(logits, grad, cap, count, BLOCK: tl.constexpr):
    """Write the gradient over the logits. Bytes moved: the logits three times."""
    block = tl.program_id(0).to(tl.int64)
    i = block * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    x = tl.load(logits + i, mask=inside)
    x = x.to(tl.float32)
    g = tl.load(grad + i, mask=inside)
    g = g.to(tl.float32)
    t = _tanh(x / cap)
    of_x = (1.0 - t * t) * g
    tl.store(logits + i, of_x.to(logits.dtype.element_ty), mask=inside)


def bound(logits: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(logits / cap)."""
    out = torch.empty_like(logits)
    count = logits.numel()
    with torch.accelerator.device_index(logits.device.index):
        _bound[(cdiv(count, BLOCK),)](logits, out, cap, count, BLOCK, num_warps=4)
    return out


def overwrite(logits: Tensor, grad: Tensor, cap: float) -> None:
    """Overwrite the logits with their gradient."""
    count = logits.numel()
    with torch.accelerator.device_index(logits.device.index):
        _overwrite[(cdiv(count, BLOCK),)](logits, grad, cap, count, BLOCK, num_warps=4)
    # Another backward pass that needs them then fails.
    torch.autograd.graph.increment_version(logits)
