"""Cross entropy of the next tokens."""

from __future__ import annotations

from torch import Tensor

from meshwright.kernels.cross_entropy import Combine, cross_entropy


def token_losses(logits: Tensor, labels: Tensor, vocab: int, first: int = 0, combine: Combine | None = None) -> Tensor:
    """Return the loss of each token, [B, T], in float32 (or float64); ignore logits beyond `vocab`.

    The backward pass overwrites the logits, the largest tensor of a step, with their gradient.
    """
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), vocab, first, combine).view(labels.shape)


def loss_sum(losses: Tensor, mask: Tensor | None) -> Tensor:
    """Sum the losses of unmasked tokens; the caller divides by their number in the global batch."""
    return losses.sum() if mask is None else (losses * mask).sum()
