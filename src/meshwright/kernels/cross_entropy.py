"""Cross entropy over a vocabulary with neither a float32 copy of the logits nor a second tensor for their gradient.

Hand-written because torch's needs both: for 32 x 1024 tokens and 50,304 ids that is 6.6 + 3.3 GB beside the logits' 3.3.
Forward reads the logits once; backward turns them, in place, into their gradient. On CUDA a Triton kernel goes over each
row; the plain twin, which serves every other device and float64, goes over some rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright import device as devices

ROWS = 1 << 20  # numbers of the plain twin's portions: they stay in a CPU's cache


Combine = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def cross_entropy(logits: Tensor, labels: Tensor, vocab: int, first: int = 0, combine: Combine | None = None) -> Tensor:
    """logits [N, padded], labels [N] below `vocab` -> losses [N]. The logits are used up by the backward pass.

    The logits may be those of the ids from `first` on alone: `combine` then makes, of the log-sum-exp of these and of the
    label's logit (0 where it is not among them), both for the whole vocabulary.
    """
    here = min(max(vocab - first, 0), logits.shape[1])
    return _CrossEntropy.apply(logits, labels - first if first else labels, here, combine)  # type: ignore[no-any-return,no-untyped-call]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocab: int, combine: Combine | None) -> Tensor:
        ctx.vocab, ctx.used = vocab, False
        if is_triton(logits):
            from meshwright.kernels.cross_entropy_triton import forward

            lse, picked = forward(logits, labels, vocab)
        else:
            lse, picked = plain_forward(logits, labels, vocab)
        if combine is not None:
            lse, picked = combine(lse, picked)
        ctx.save_for_backward(logits, labels, lse)
        return lse - picked

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.used:
            raise RuntimeError("a second backward pass through this loss: its logits were overwritten by the first")
        ctx.used = True
        logits, labels, lse = ctx.saved_tensors
        if is_triton(logits):
            from meshwright.kernels.cross_entropy_triton import backward

            backward(logits, labels, lse, grad, ctx.vocab)
            torch.autograd.graph.increment_version(logits)  # who kept them for a backward pass of his own is told
        else:
            plain_backward(logits, labels, lse, grad, ctx.vocab)
        return logits, None, None, None


def is_triton(logits: Tensor) -> bool:
    return devices.has_kernels(logits.device) and logits.dtype is not torch.float64


def upcast(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()


def portions(logits: Tensor) -> range:
    return range(0, len(logits), max(1, ROWS // logits.shape[1]))


def plain_forward(logits: Tensor, labels: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Log-sum-exps, and the labels' logits: 0 for a label that is not here."""
    lses, picked = [], []
    for i in portions(logits) if vocab else ():
        x, label = upcast(logits[i : i + portions(logits).step, :vocab]), labels[i : i + portions(logits).step]
        high = x.amax(-1, keepdim=True)
        lses.append((x - high).exp_().sum(-1).log_() + high.squeeze(1))
        one, here = at_labels(label, vocab)
        picked.append(x.gather(1, one).squeeze(1).where(here, 0.0))
    if not vocab:  # all of it is padding: the rest of the vocabulary lies elsewhere
        none = upcast(logits.new_zeros(len(logits)))
        return none - float("inf"), none
    return torch.cat(lses), torch.cat(picked)


def plain_backward(logits: Tensor, labels: Tensor, lse: Tensor, grad: Tensor, vocab: int) -> None:
    """logits := (softmax - 1 at the label) * grad, 0 beyond the vocabulary."""
    for i in portions(logits):
        x = logits[i : i + portions(logits).step]
        p = (upcast(x[:, :vocab]) - lse[i : i + len(x), None]).exp_()
        if vocab:
            one, here = at_labels(labels[i : i + len(x)], vocab)
            p.scatter_add_(1, one, -here.to(p.dtype)[:, None])
        x[:, :vocab] = p.mul_(grad[i : i + len(x), None])
        x[:, vocab:] = 0


def at_labels(labels: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Indices [N, 1] that can be looked up, and whether they are the labels."""
    return labels.clamp(0, max(vocab - 1, 0))[:, None], (labels >= 0) & (labels < vocab)
