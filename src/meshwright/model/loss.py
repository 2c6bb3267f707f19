"""Cross entropy of next tokens."""

from __future__ import annotations

from torch import Tensor

from meshwright.kernels.cross_entropy import Combine, cross_entropy


def token_losses(logits: Tensor, labels: Tensor, vocab: int, first: int = 0, combine: Combine | None = None) -> Tensor:
    """Loss of each token, [B, T], in float32 (float64 stays); logits beyond `vocab` weigh nothing.

    The backward pass writes the gradient over the logits, the largest tensor of a step.
    """
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), vocab, first, combine).view(labels.shape)


def loss_sum(losses: Tensor, mask: Tensor | None) -> Tensor:
    """Sum of the losses of unmasked tokens; the caller divides by the global batch's count of them."""
    return losses.sum() if mask is None else (losses * mask).sum()
