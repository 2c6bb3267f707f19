"""Which parameters decay, and the update rule."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwright.config import Optimizer


def decays(name: str, parameter: Tensor) -> bool:
    """Matrices decay, embeddings included; biases and norms, being one-dimensional, do not (Megatron's rule)."""
    return parameter.ndim > 1


def adamw(o: Optimizer, flat: list[tuple[nn.Parameter, bool]]) -> torch.optim.AdamW:
    """torch's fused AdamW over flat buffers: one kernel for unscale, clip, moments and weights."""
    return torch.optim.AdamW(
        [{"params": [p], "weight_decay": o.weight_decay if decay else 0.0, "decays": decay} for p, decay in flat],
        lr=0.0,
        betas=(o.adam_beta1, o.adam_beta2),
        eps=o.adam_eps,
        fused=True,
    )
