"""Cross entropy of the next tokens."""

from __future__ import annotations

from torch import Tensor

from meshwright.kernels.cross_entropy import Combine, losses_and_normalisers


def token_losses(
    logits: Tensor, labels: Tensor, vocab: int, first: int = 0, combine: Combine | None = None
) -> Tensor:
    """Return the loss of each token, [B, T], in float32 (or float64); ignore logits beyond `vocab`.

    The backward pass overwrites the logits, the largest tensor of a step, with their gradient.
    """
    return token_terms(logits, labels, vocab, 0.0, first, combine)["loss"]


def token_terms(
    logits: Tensor,
    labels: Tensor,
    vocab: int,
    z_loss_coef: float,
    first: int,
    combine: Combine | None,
) -> dict[str, Tensor]:
    """Return `token_losses`, and the z-losses of PaLM (2022) unless their coefficient is 0."""
    losses, normalisers = losses_and_normalisers(
        logits.flatten(0, 1), labels.flatten(), vocab, first, combine
    )
    terms = {"loss": losses.view(labels.shape)}
    if z_loss_coef:
        terms["z_loss"] = z_loss_coef * normalisers.view(labels.shape).square()
    return terms


def loss_sum(losses: Tensor, mask: Tensor | None) -> Tensor:
    """Sum the losses of unmasked tokens; the caller divides by their number in the global batch."""
    return losses.sum() if mask is None else (losses * mask).sum()


def first_positions(length: int) -> list[int]:
    """Return the first of each range of positions with a mean loss of its own: 0, 1, 2, 4, 8 ..."""
    return [0, *(1 << k for k in range((length - 1).bit_length()))]


def range_names(length: int) -> list[str]:
    """Return the names of these ranges: 0, 1, 2-3, 4-7 and so on, up to `length` - 1."""
    firsts = first_positions(length)
    ends = [*firsts[1:], length]
    return [
        f"{first}-{end - 1}" if end - 1 > first else str(first)
        for first, end in zip(firsts, ends, strict=True)
    ]
