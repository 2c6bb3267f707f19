"""One batch: `train_step` updates the weights, `evaluate` returns a mean loss.

`train_step` is the middle of a batch's path: data/loader.py reads it from disk, train_step runs it through the model,
parallel/zero.py turns its gradients into new weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.data.loader import Batch
from meshwright.errors import BAD_DATA, UserError
from meshwright.model.loss import loss_sum
from meshwright.parallel import comm
from meshwright.training.network import Network

Timed = Callable[[str, int], contextlib.AbstractContextManager[None]]


def untimed(name: str, level: int) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def train_step(
    net: Network,
    batches: list[Batch],
    seed: int,
    lr: float,
    weight_decay: float,
    scale: float,
    loss_mean: str,
    stop: bool = False,
    timed: Timed = untimed,
) -> tuple[Tensor, Tensor, Tensor]:
    """One update from this rank's micro-batches of one global batch; returns the whole batch's loss, its unclipped gradient
    norm, and on how many ranks `stop` was asked for.

    The loss of every token weighs the same, wherever the masks lie: sums are divided by the unmasked tokens of the whole
    batch, counted beforehand. `microbatch` weighs every micro-batch the same instead.
    """
    net.train()
    store = net.store
    store.clear_gradients()
    unmasked = count_unmasked(net, batches)
    told = torch.zeros(2, dtype=torch.float64, device=net.device)
    told[1] = float(stop)

    def share(part: Any, batch: Batch, stream: Tensor | None = None) -> Tensor:
        b = batch.to(net.device)
        with timed("forward-compute", 2):
            out = forward(net, part, b, seed, stream)
            if not getattr(part, "last", True):
                return out
            weight = unmasked if loss_mean == "global" else max(b.unmasked, 1) * len(batches) * net.layout.dp
            return loss_sum(net.loss(out, b), b.loss_mask) / weight

    losses = []
    with timed("forward-backward", 1):
        if net.pipeline is not None:
            losses = net.pipeline.train(batches, share, scale, lambda last: setattr(store, "last", last))
        else:
            for i, batch in enumerate(batches):
                loss = share(net.parts[0], batch)
                store.last = i == len(batches) - 1
                with timed("backward-compute", 2):
                    (loss * scale).backward()  # type: ignore[no-untyped-call]
                losses.append(loss.detach())
    if net.is_counted:
        told[0] = sum_of(losses)
    with timed("optimizer", 1):
        norm = store.step(lr, weight_decay, scale, told)
    return told[0], norm, told[1]


def forward(net: Network, part: Any, batch: Batch, seed: int | None, stream: Tensor | None = None) -> Tensor:
    """Logits [B, T, padded vocabulary], or what the next stage continues with. Without a seed there is no dropout."""
    where = net.where(batch, seed)
    return part(batch.tokens, where) if stream is None else part(batch.tokens, where, stream=stream)  # type: ignore[no-any-return]


def count_unmasked(net: Network, batches: list[Batch]) -> float | Tensor:
    """Tokens that count in the whole batch, on all ranks."""
    unmasked: float = sum(b.unmasked for b in batches)
    if batches[0].loss_mask is None or net.layout.dp == 1:
        whole: float | Tensor = unmasked * net.layout.dp
    else:  # it stays on the device: nobody waits for it, unless here there is none
        counted = torch.tensor(unmasked, dtype=torch.float64).to(net.device, non_blocking=True)
        whole = comm.total(counted, net.layout.group("gradients")) / net.layout.cp  # context ranks count a sample each
    if not unmasked and not whole:
        first = batches[0].first_sample
        raise UserError(f"no token counts in the global batch from sample {first} on: all are masked", BAD_DATA, True)
    return whole


def sum_of(losses: list[Tensor]) -> Tensor:
    """One after the other, so that a batch's loss does not depend on how its micro-batches are held."""
    total = torch.zeros_like(losses[0])
    for loss in losses:
        total += loss
    return total


@torch.no_grad()
def evaluate(net: Network, batches: Iterator[list[Batch]], asked_to_stop: Callable[[], bool] = lambda: False) -> float:
    """Mean loss of the unmasked tokens of these global batches, without dropout; given up when asked to stop."""
    net.train(False)
    told = torch.zeros(2, dtype=torch.float64, device=net.device)  # loss, tokens

    def sums(part: Any, batch: Batch, stream: Tensor | None = None) -> Tensor:
        b = batch.to(net.device)
        out = forward(net, part, b, None, stream)
        return loss_sum(net.loss(out, b), b.loss_mask) if getattr(part, "last", True) else out

    stopped = False
    for micro in batches:
        if asked_to_stop():
            stopped = True
            break
        if net.pipeline is not None:
            losses = net.pipeline.evaluate([b.to(net.device) for b in micro], sums)
        else:
            losses = [sums(net.parts[0], batch) for batch in micro]
        if net.is_counted:
            for loss in losses:
                told[0] += loss
            told[1] += 0 if net.layout.at("cp") else sum(b.unmasked for b in micro)
    if net.layout.world > 1:
        dist.all_reduce(told)
    total, tokens = told.tolist()
    if not tokens and not stopped:
        raise UserError("no token of the validation counts: all are masked", BAD_DATA, True)
    return total / max(tokens, 1)  # type: ignore[no-any-return]
