"""Cross entropy of next tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Loss of each token, [B, T], in float32 (float64 stays). Padded logits are -inf and so weigh nothing."""
    logits = logits.flatten(0, 1)
    if logits.dtype is not torch.float64:
        logits = logits.float()
    return F.cross_entropy(logits, labels.flatten(), reduction="none").view(labels.shape)


def loss_sum(logits: Tensor, labels: Tensor, mask: Tensor | None) -> Tensor:
    """Sum of the losses of unmasked tokens; the caller divides by the global batch's count of them."""
    losses = token_losses(logits, labels)
    return losses.sum() if mask is None else (losses * mask).sum()
