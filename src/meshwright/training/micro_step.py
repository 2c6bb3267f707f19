"""A step's work on each micro-batch, and the update after the last: what CUDA graphs record.

A step (step.py) calls these functions for each of its micro-batches, or graphs.py replays its
recording of them. When it runs, this module imports neither file.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from meshwright.base.errors import UserError
from meshwright.checkpoint.saved_model import GPT_NETWORK
from meshwright.data.loader import Batch
from meshwright.model.loss import loss_sum, token_terms
from meshwright.optim.rules import StepScalars
from meshwright.parallel.layout import Layout
from meshwright.parallel.parallel_model import ModelInput, ParallelModel
from meshwright.parallel.tensor import combine_over
from meshwright.runtime.ranks.heartbeat import heartbeat

if TYPE_CHECKING:
    from meshwright.parallel.flat import FlatStore
    from meshwright.parallel.fsdp import FullyShardedStore
    from meshwright.training.graphs import Graphs

Loss = Callable[[Tensor, Batch], Tensor]  # logits [B, T, vocab] and the batch to losses [B, T]
# The same for each term of the loss, by its name. The gradients are those of the terms' sum.
Losses = Callable[[Tensor, Batch], dict[str, Tensor]]
# A step's numbers, float64 [3 or more]: the first term of the loss, the gradients' norm before
# clipping, the number of ranks that vote to stop the run, and the further terms of the loss. A vote
# travels with the loss because this costs no collective of its own.
Update = Tensor
LOSS, GRAD_NORM, VOTES = range(3)
Timed = Callable[[str, int], contextlib.AbstractContextManager[None]]
# The numbers of a micro-batch: learning rate, weight decay, loss scale, divisor of the loss, and
# whether this rank votes to stop the run.
NUMBERS = 5
DIVISOR, VOTE = 3, 4


@dataclass(kw_only=True)
class Network(ParallelModel):
    """The model as one rank trains it, with the store that owns its parameters."""

    store: FlatStore | FullyShardedStore
    loss: Losses
    terms: tuple[str, ...] = ("loss",)  # names of the terms, which are columns of metrics.jsonl
    # A checkpoint states it: the kind of network that its tensors belong to.
    name: str = GPT_NETWORK
    execution: str = ""  # a description for the log
    is_compiled: bool = False
    stream: Any = None  # that all steps run on, if some may be CUDA graphs
    graphs: Graphs | None = None
    without_graphs: str | None = None  # why there are none

    @property
    def update_columns(self) -> tuple[str, ...]:
        """Names of the elements of an Update."""
        return ("loss", "grad_norm", "votes", *self.terms[1:])


class Position(NamedTuple):
    """Where a micro-batch is in its step."""

    is_first: bool
    is_last: bool


def untimed(name: str, level: int) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def micro_step(
    net: Network, seed: int, batch: Batch, scalars: Tensor, totals: Tensor, position: Position
) -> None:
    """Run a micro-batch and, after the last, update the weights. A CUDA graph captures this."""
    forward_backward(net, seed, untimed, batch, scalars, totals, position)
    if position.is_last:
        update_weights(net, scalars, totals)
        net.store.wait_for_weights()


def forward_backward(
    net: Network,
    seed: int,
    timed: Timed,
    batch: Batch,
    scalars: Tensor,
    totals: Tensor,
    position: Position,
) -> None:
    """Add a micro-batch's gradients to the store's and its share of the loss to the totals."""
    _, _, scale, divisor, vote = scalars.unbind()
    # The totals begin anew with each step. They keep their memory, which a CUDA graph writes to.
    if position.is_first:
        net.store.clear_gradients()
        totals.zero_()
        totals[VOTES].copy_(vote)
    heartbeat.tick()

    # Forward. The divisor counts the unmasked tokens of the whole global batch (see
    # prepare_numbers), so the gradients of micro-batches and ranks need only be added up.
    with timed("forward-compute", 2):
        # The logits get no name: it would keep a step's largest tensor through the backward pass.
        sums = sum_terms(net, batch, forward_part(net, net.parts[0], batch, seed))
        terms = [term / divisor for term in sums]

    # Backward. In the last micro-batch the store sums each bucket of gradients over the ranks once
    # it is complete, while autograd is still busy with earlier layers.
    net.store.begin_backward(position.is_last)
    with timed("backward-compute", 2):
        loss = functools.reduce(torch.add, terms)
        (loss * scale).backward()  # type: ignore[no-untyped-call]
    if net.has_results:
        add_terms(totals, terms)


def forward_part(
    net: Network, part: Any, batch: Batch, seed: int | None, stream: Tensor | None = None
) -> Tensor:
    """Return logits [B, T, padded vocabulary] or the next stage's input; no seed, no dropout."""
    return net.run_part(part, ModelInput(batch.tokens, net.where(batch, seed)), stream)


def forward_stage(
    net: Network,
    part: Any,
    seed: int,
    timed: Timed,
    batch: Batch,
    scalars: Tensor,
    totals: Tensor,
    stream: Tensor | None,
) -> Tensor:
    """Return the next stage's input or, after the last one, the micro-batch's scaled loss.

    The loss is added to the totals too. Any schedule brings the micro-batches in their order.
    """
    heartbeat.tick()
    _, _, scale, divisor, _ = scalars.unbind()
    with timed("forward-compute", 2):
        out = forward_part(net, part, batch, seed, stream)
        if not part.has_head:
            return out
        terms = [term / divisor for term in sum_terms(net, batch, out)]
        if net.has_results:
            add_terms(totals, terms)
        return functools.reduce(torch.add, terms) * scale


def sum_terms(net: Network, batch: Batch, logits: Tensor) -> list[Tensor]:
    """Return each term of the loss, summed over the unmasked tokens."""
    return [loss_sum(losses, batch.loss_mask) for losses in net.loss(logits, batch).values()]


def add_terms(totals: Tensor, terms: list[Tensor]) -> None:
    """Add a micro-batch's terms of the loss to a step's numbers."""
    totals[LOSS] += terms[0].detach()
    for i, term in enumerate(terms[1:], VOTES + 1):
        totals[i] += term.detach()


def update_weights(net: Network, scalars: Tensor, totals: Tensor) -> None:
    """Update the weights, and complete the totals: sums over the ranks, and the gradient norm."""
    # torch's own optimizers take numbers from the host. Ours read tensors, as a CUDA graph must.
    numbers = scalars.unbind() if net.store.reads_tensors else scalars.tolist()
    lr, weight_decay, scale, *_ = numbers

    # One collective sums loss, votes and further terms with the squares of the gradients. The norm
    # that comes back takes its place between loss and votes.
    before, after = totals[:GRAD_NORM], totals[VOTES:]
    sums = torch.cat((before, after))
    norm = net.store.step(StepScalars(lr, weight_decay, scale), sums)
    before, after = sums[:GRAD_NORM], sums[GRAD_NORM:]
    totals.copy_(torch.cat((before, norm.double()[None], after)))


def make_loss(
    vocab: int, layout: Layout, custom: Loss | None, z_loss_coef: float
) -> tuple[Losses, tuple[str, ...]]:
    """Return the function that computes each token's terms of the loss, and the terms' names.

    The gradients are those of the terms' sum; the first term is the loss that is reported.
    """
    combine = combine_over(layout.group("tp"))

    def compute_losses(logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        if custom is not None:
            return {"loss": custom_losses(custom, vocab, logits, batch)}
        # A tensor rank has the logits of its own range of ids; `combine` reduces over the ranks.
        first_id = layout.at("tp") * logits.shape[-1]
        return token_terms(logits, batch.labels, vocab, z_loss_coef, first_id, combine)

    return compute_losses, ("loss", "z_loss") if z_loss_coef else ("loss",)


def checking_logits(compute: Losses, ids: int) -> Losses:
    """Return the same losses for an own model, which may return anything in place of logits."""

    def compute_losses(logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        require_logits(logits, batch, ids)
        return compute(logits, batch)

    return compute_losses


def require_logits(logits: object, batch: Batch, ids: int) -> None:
    """Refuse what a custom model returned if it is not logits of at least so many ids."""
    wanted = tuple(batch.labels.shape)
    if not isinstance(logits, Tensor):
        found = f"an object of type {type(logits).__name__}"
    elif logits.shape[:-1] != wanted or logits.shape[-1] < ids:
        found = f"a tensor of shape {tuple(logits.shape)}"
    else:
        return
    raise UserError(
        f"the model returned {found}; return logits [B, T, padded]: {wanted} by at least {ids} ids"
    )


def custom_losses(custom: Loss, vocab: int, logits: Tensor, batch: Batch) -> Tensor:
    """Compute a custom loss; refuse a result that is not one number for each token."""
    losses = custom(logits[..., :vocab], batch)
    if not isinstance(losses, Tensor):
        kind = type(losses).__name__
        raise UserError(
            f"the loss function returned an object of type {kind}; return a tensor, one loss for each token"
        )
    if logits.requires_grad and not losses.requires_grad:
        raise UserError(
            "the loss function returned a loss without a gradient; compute it from the logits, undetached"
        )
    if losses.shape != batch.labels.shape:
        shapes = (
            f"a tensor of shape {tuple(losses.shape)}; return [B, T] = {tuple(batch.labels.shape)}"
        )
        raise UserError(
            f"the loss function returned {shapes}, one loss for each token, neither summed nor averaged"
        )
    return losses
