"""What the update rules that torch lacks have in common."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.kernels.moments import Rounding


class OwnRule(torch.optim.Optimizer):
    """Base of update rules that take all of a step's numbers as tensors on the device.

    They update in place and never wait for the device, so that a CUDA graph can hold them. As for
    torch's fused optimizers, `grad_scale` divides the gradients, and a step with a `found_inf`
    other than 0 changes nothing.
    """

    grad_scale: float | Tensor = 1.0
    found_inf: float | Tensor = 0.0
    rounding: Rounding | None = None  # of a state of fewer bits


def scalar(value: float | Tensor, like: Tensor) -> Tensor:
    """Return a number as a tensor [] on the device, of the format of `like`."""
    if isinstance(value, Tensor):
        return value.to(like.device, like.dtype)
    return torch.full((), value, dtype=like.dtype, device=like.device)
