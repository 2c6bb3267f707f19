"""Cross entropy without a float32 copy of the logits or a separate tensor for their gradient.

Hand-written because torch's needs both: for 32 x 1024 tokens and 50,304 ids these are 6.6 + 3.3 GB
in addition to the logits' 3.3. Forward reads the logits once; backward overwrites them with their
gradient. On CUDA a Triton kernel processes each row; its plain reference, for every other device
and for float64, processes some rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.kernels.references import reference, upcast

PORTION = 1 << 20  # elements that the plain reference processes at a time; they fit a CPU's cache

Combine = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def cross_entropy(
    logits: Tensor, labels: Tensor, vocab: int, first: int = 0, combine: Combine | None = None
) -> Tensor:
    """Map logits [N, padded] and labels [N] to losses [N]; backward overwrites the logits."""
    return losses_and_normalisers(logits, labels, vocab, first, combine)[0]


def losses_and_normalisers(
    logits: Tensor, labels: Tensor, vocab: int, first: int = 0, combine: Combine | None = None
) -> tuple[Tensor, Tensor]:
    """Return the losses of `cross_entropy`, and the log-sum-exps [N] of the full vocabulary.

    The logits may cover only the ids from `first` on. `combine` then turns their log-sum-exp and
    the label's logit (0 if it is not among them) into those of the full vocabulary.
    """
    count = min(max(vocab - first, 0), logits.shape[1])  # ids of the vocabulary among these logits
    return _CrossEntropy.apply(logits, labels - first if first else labels, count, combine)  # type: ignore[no-any-return,no-untyped-call]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, vocab: int, combine: Combine | None
    ) -> tuple[Tensor, Tensor]:
        ctx.vocab = vocab
        ctx.used = False
        # Without a z-loss the normalisers have no gradient, and get None in place of zeros.
        ctx.set_materialize_grads(False)
        lse, picked = log_sum_exp(logits, labels, vocab)
        if combine is not None:
            lse, picked = combine(lse, picked)
        ctx.save_for_backward(logits, labels, lse)
        return lse - picked, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, of_lse: Tensor | None) -> tuple[Tensor, None, None, None]:
        if ctx.used:
            raise RuntimeError(
                "a second backward pass through this loss: the first one overwrote its logits"
            )
        ctx.used = True
        logits, labels, lse = ctx.saved_tensors
        overwrite(logits, labels, lse, grad, ctx.vocab, of_lse)
        return logits, None, None, None


def portions(logits: Tensor) -> list[slice]:
    """Return the rows that are processed at a time."""
    count = max(1, PORTION // logits.shape[1])
    return [slice(begin, begin + count) for begin in range(0, len(logits), count)]


@reference("cross_entropy.log_sum_exp")
def log_sum_exp(logits: Tensor, labels: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Return log-sum-exps and the labels' logits, 0 for a label that is not here."""
    if not vocab:  # these logits are all padding
        none = upcast(logits.new_zeros(len(logits)))
        return none - float("inf"), none
    lses = []
    picked = []
    for rows in portions(logits):
        x = upcast(logits[rows, :vocab])
        index, is_label = at_labels(labels[rows], vocab)
        of_label = x.gather(1, index).squeeze(1)
        picked.append(of_label.where(is_label, 0.0))
        # Less the largest, so that no exponential overflows. In place where x is a copy: the logits
        # themselves are still needed.
        high = x.amax(-1, keepdim=True)
        shifted = x - high if x.dtype is logits.dtype else x.sub_(high)
        total = shifted.exp_().sum(-1)
        lses.append(total.log_() + high.squeeze(1))
    return torch.cat(lses), torch.cat(picked)


@reference("cross_entropy.overwrite")
def overwrite(
    logits: Tensor,
    labels: Tensor,
    lse: Tensor,
    grad: Tensor,
    vocab: int,
    of_lse: Tensor | None = None,
) -> None:
    """Set logits to (softmax - 1 at the label) * grad, and to 0 beyond the vocabulary.

    Where log-sum-exps have a gradient too, softmax times that is added.
    """
    for rows in portions(logits):
        x = logits[rows]
        # The softmax, in the logits themselves if they are wide enough, else in a copy.
        p = upcast(x[:, :vocab]).sub_(lse[rows, None]).exp_()
        more = None if of_lse is None else p * of_lse[rows, None]
        if vocab:
            index, is_label = at_labels(labels[rows], vocab)
            p.scatter_add_(1, index, -is_label.to(p.dtype)[:, None])
        p.mul_(grad[rows, None])
        if more is not None:
            p.add_(more)
        # Back into the logits, if p is a copy; the padding gets no gradient.
        if p.dtype is not x.dtype:
            x[:, :vocab] = p
        x[:, vocab:] = 0


def at_labels(labels: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Return valid indices [N, 1], and whether they are the labels."""
    index = labels.clamp(0, vocab - 1)
    return index[:, None], (labels >= 0) & (labels < vocab)
