"""Choice between a Triton kernel and its plain twin, and the precision of the twin."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright import device as devices


def is_triton(x: Tensor) -> bool:
    """Return whether the Triton kernel runs; all of them compute in float32."""
    return devices.has_kernels(x.device) and x.dtype is not torch.float64


def upcast(x: Tensor) -> Tensor:
    """Return x in float32; float64 stays."""
    return x if x.dtype is torch.float64 else x.float()
