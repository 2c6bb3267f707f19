"""One global batch on one rank: `train_step` updates the weights, `evaluate` returns a mean loss.

data/loader.py reads the batch from disk; parallel/store.py turns its gradients into new weights.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.base import device as devices
from meshwright.base.errors import BAD_DATA, UserError
from meshwright.checkpoint.saved_model import GPT_NETWORK
from meshwright.config.problem import SettingsError
from meshwright.data.loader import Batch
from meshwright.model.attention import seed_dropout
from meshwright.model.loss import loss_sum, token_terms
from meshwright.model.positions import Positions
from meshwright.optim.rules import Numbers
from meshwright.parallel import comm
from meshwright.parallel.cut_model import CutModel
from meshwright.parallel.layout import Layout
from meshwright.parallel.tensor import combine_over
from meshwright.runtime.ranks.pulse import pulse
from meshwright.training.graphs import DIVISOR, VOTE, Graphs, Position, copy_into
from meshwright.training.loss_parts import LossParts

if TYPE_CHECKING:
    from meshwright.parallel.flat import FlatStore
    from meshwright.parallel.fsdp import FullyShardedStore

Loss = Callable[[Tensor, Batch], Tensor]  # logits [B, T, vocab] and the batch to losses [B, T]
# the same by name: what is summed for the gradients
Losses = Callable[[Tensor, Batch], dict[str, Tensor]]
# A step's numbers, float64 [3 or more]: the first term of the loss, the gradients' norm before
# clipping, the number of ranks that vote to stop the run, and the further terms of the loss. A vote
# travels with the loss because this costs no collective of its own.
Update = Tensor
LOSS, GRAD_NORM, VOTES = range(3)
Timed = Callable[[str, int], contextlib.AbstractContextManager[None]]

CHECK_MASKS = "check the data and {eod_mask_loss=True}"


@dataclass(kw_only=True)
class Network(CutModel):
    """The model as one rank trains it, with the store that owns its parameters."""

    store: FlatStore | FullyShardedStore
    loss: Losses
    terms: tuple[str, ...] = ("loss",)  # names of what `loss` returns, columns of metrics.jsonl
    # saved in checkpoints: the kind of network that their tensors belong to
    name: str = GPT_NETWORK
    execution: str = ""  # a description for the log
    is_compiled: bool = False
    stream: Any = None  # on which all steps run if some may be CUDA graphs
    graphs: Graphs | None = None
    without_graphs: str | None = None  # why there are none

    @property
    def update_columns(self) -> tuple[str, ...]:
        """Names of the elements of an Update."""
        return ("loss", "grad_norm", "votes", *self.terms[1:])


@dataclass(frozen=True)
class StepSettings:
    """The numbers of one update."""

    seed: int
    lr: float
    weight_decay: float
    scale: float = 1.0  # of the loss, for fp16
    loss_mean: str = "global"
    wants_stop: bool = False  # whether this rank has a reason to end the run


def untimed(name: str, level: int) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def train_step(
    net: Network, batches: list[Batch], settings: StepSettings, timed: Timed = untimed
) -> Update:
    """Update the weights from this rank's micro-batches of one global batch.

    With CUDA graphs the next step overwrites the result. Every unmasked token of the global batch
    weighs the same; with loss_mean "microbatch" every micro-batch does.
    """
    for part in net.parts:
        if not part.training:
            part.train()
    with devices.on_stream(net.stream):
        rows, counted = prepare_numbers(net, batches, settings)
        if net.graphs is not None and replay(net, batches, rows, counted, settings.seed):
            return net.graphs.totals
        numbers, totals = accumulate(net, batches, rows, counted, settings, timed)
        pulse.enter("optimizer")
        with timed("optimizer", 1):
            update_weights(net, numbers[-1] if net.store.reads_tensors else rows[-1], totals)
        return totals


def prepare_numbers(
    net: Network, batches: list[Batch], s: StepSettings
) -> tuple[Tensor, Tensor | None]:
    """Return the micro-batches' numbers [n, NUMBERS], and their divisor if it is on the device.

    The numbers are on the host, from where they can be sent. Both ways of running a step read them
    on the device, because a division by a number of the host rounds differently there.
    """
    count, unmasked, rows = len(batches) * net.layout.dp, count_unmasked(net, batches), []
    counted = unmasked if s.loss_mean == "global" and isinstance(unmasked, Tensor) else None
    for b in batches:
        divisor = max(b.unmasked, 1) * count if s.loss_mean == "microbatch" else unmasked
        rows.append(
            [
                s.lr,
                s.weight_decay,
                s.scale,
                1.0 if isinstance(divisor, Tensor) else divisor,
                s.wants_stop,
            ]
        )
    return torch.tensor(
        rows, dtype=torch.float64, pin_memory=devices.is_accelerator(net.device)
    ), counted


def accumulate(
    net: Network,
    batches: list[Batch],
    rows: Tensor,
    counted: Tensor | None,
    settings: StepSettings,
    timed: Timed = untimed,
) -> tuple[Tensor, Tensor]:
    """Give the store the gradients of all micro-batches; return numbers and totals there."""
    numbers = devices.send(rows, net.device)
    if counted is not None:
        numbers[:, DIVISOR] = counted
    batches = [b.to(net.device) for b in batches]
    totals = torch.zeros(len(net.update_columns), dtype=torch.float64, device=net.device)
    if net.pipeline is not None:
        pipeline_step(net, batches, numbers, totals, settings, timed)
        return numbers, totals
    with timed("forward-backward", 1):
        for i, batch in enumerate(batches):
            position = Position(i == 0, i == len(batches) - 1)
            forward_backward(net, settings.seed, timed, batch, numbers[i], totals, position)
    return numbers, totals


def replay(
    net: Network, batches: list[Batch], numbers: Tensor, counted: Tensor | None, seed: int
) -> bool:
    """Take a step by its CUDA graphs; return whether it has any."""
    assert net.graphs is not None
    captured = net.graphs.find(batches, functools.partial(micro_step, net, seed))
    if captured is None:
        return False
    for i, batch in enumerate(batches):
        copy_into(captured.batch, batch)
        captured.numbers.copy_(numbers[i], non_blocking=True)
        if counted is not None:
            captured.numbers[DIVISOR] = counted
        seed_dropout(
            Positions(seed=seed, first_sample=batch.first_sample, heads=net.heads), 0, net.device
        )
        captured.replay(i, len(batches))
    return True


def micro_step(
    net: Network, seed: int, batch: Batch, numbers: Tensor, totals: Tensor, position: Position
) -> None:
    """Run a micro-batch and, after the last, update the weights: what a CUDA graph captures."""
    forward_backward(net, seed, untimed, batch, numbers, totals, position)
    if position.is_last:
        update_weights(net, numbers, totals)
        net.store.wait_for_weights()


def forward_backward(
    net: Network,
    seed: int,
    timed: Timed,
    batch: Batch,
    numbers: Tensor,
    totals: Tensor,
    position: Position,
) -> None:
    """Add a micro-batch's gradients to the store's and its share of the loss to the totals."""
    _, _, scale, divisor, vote = numbers.unbind()
    if position.is_first:
        net.store.clear_gradients()
        totals.zero_()
        totals[VOTES].copy_(vote)
    pulse.tick()
    with timed("forward-compute", 2):
        # A name for the logits would keep this largest tensor of a step through the backward pass.
        terms = [
            term / divisor
            for term in sum_terms(net, batch, forward_part(net, net.parts[0], batch, seed))
        ]
    net.store.begin_backward(position.is_last)
    with timed("backward-compute", 2):
        (functools.reduce(torch.add, terms) * scale).backward()  # type: ignore[no-untyped-call]
    if net.has_results:
        add_terms(totals, terms)


def pipeline_step(
    net: Network,
    batches: list[Batch],
    numbers: Tensor,
    totals: Tensor,
    s: StepSettings,
    timed: Timed,
) -> None:
    """Do a step's forward and backward passes with a pipeline, whose schedule mixes them."""
    assert net.pipeline is not None
    net.store.clear_gradients()
    totals[VOTES] = numbers[0, VOTE]
    shares: dict[int, list[Tensor]] = {}

    def compute_loss(part: Any, i: int, stream: Tensor | None) -> Tensor:
        """Return a micro-batch's share of the loss, or the next stage's input."""
        pulse.tick()
        with timed("forward-compute", 2):
            out = forward_part(net, part, batches[i], s.seed, stream)
            if not part.has_head:
                return out
            terms = [term / numbers[i, DIVISOR] for term in sum_terms(net, batches[i], out)]
            # the graph would keep each received input and its gradient
            shares[i] = [term.detach() for term in terms]
            return functools.reduce(torch.add, terms)

    with timed("forward-backward", 1):
        net.pipeline.train(
            [b.tokens for b in batches], compute_loss, s.scale, net.store.begin_backward
        )
    if net.has_results:
        for _, terms in sorted(shares.items()):  # in one order, whatever the schedule
            add_terms(totals, terms)


def add_terms(totals: Tensor, terms: list[Tensor]) -> None:
    """Add a micro-batch's terms of the loss to a step's numbers."""
    totals[LOSS] += terms[0].detach()
    for i, term in enumerate(terms[1:], VOTES + 1):
        totals[i] += term.detach()


def update_weights(net: Network, numbers: Tensor, totals: Tensor) -> None:
    """Update the weights; complete the totals. torch's optimizers read the numbers on the host."""
    lr, weight_decay, scale, *_ = numbers.unbind() if net.store.reads_tensors else numbers.tolist()
    sums = torch.cat((totals[:GRAD_NORM], totals[VOTES:]))
    norm = net.store.step(Numbers(lr, weight_decay, scale), sums)
    totals.copy_(torch.cat((sums[:GRAD_NORM], norm.double()[None], sums[GRAD_NORM:])))


def forward_part(
    net: Network, part: Any, batch: Batch, seed: int | None, stream: Tensor | None = None
) -> Tensor:
    """Return logits [B, T, padded vocabulary] or the next stage's input; no seed, no dropout."""
    where = net.where(batch, seed)
    return part(batch.tokens, where) if stream is None else part(batch.tokens, where, stream=stream)  # type: ignore[no-any-return]


def make_loss(
    vocab: int, layout: Layout, custom: Loss | None, z_loss_coef: float
) -> tuple[Losses, tuple[str, ...]]:
    """Return the function that computes each token's losses [B, T], and the names of these terms.

    All are added up for the gradients; the first is the loss that is reported.
    """
    combine = combine_over(layout.group("tp"))

    def compute_losses(logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        if custom is not None:
            return {"loss": custom_losses(custom, vocab, logits, batch)}
        first_id = layout.at("tp") * logits.shape[-1]
        return token_terms(logits, batch.labels, vocab, z_loss_coef, first_id, combine)

    return compute_losses, ("loss", "z_loss") if z_loss_coef else ("loss",)


def custom_losses(custom: Loss, vocab: int, logits: Tensor, batch: Batch) -> Tensor:
    """Compute a custom loss and refuse one that is not a number for each token."""
    losses = custom(logits[..., :vocab], batch)
    if losses.shape != batch.labels.shape:
        shapes = (
            f"a tensor of shape {tuple(losses.shape)}; return [B, T] = {tuple(batch.labels.shape)}"
        )
        raise UserError(
            f"the loss function returned {shapes}, one loss for each token, neither summed nor averaged"
        )
    return losses


def count_unmasked(net: Network, batches: list[Batch]) -> float | Tensor:
    """Return the number of tokens that count in the global batch, over all ranks."""
    own: float = sum(b.unmasked for b in batches)
    if batches[0].loss_mask is None or net.layout.dp == 1:
        unmasked: float | Tensor = own * net.layout.dp
    else:  # stays on the device, so that the host does not wait, unless this rank has none
        counted = devices.send(torch.tensor(own, dtype=torch.float64), net.device)
        # Each rank of a context group counts all columns of its samples.
        unmasked = comm.total(counted, net.layout.group("gradients")) / net.layout.cp
    if not own and not unmasked:
        where = f"the global batch that starts at sample {batches[0].first_sample}"
        raise SettingsError(f"every token is masked in {where}; {CHECK_MASKS}", BAD_DATA, True)
    return unmasked


def sum_terms(net: Network, batch: Batch, logits: Tensor) -> list[Tensor]:
    """Return the sum over the unmasked tokens of each term of the loss."""
    return [loss_sum(losses, batch.loss_mask) for losses in net.loss(logits, batch).values()]


def first_term(
    net: Network, batches: list[Batch], samples: list[list[int]], parts: LossParts | None
) -> Callable[[Tensor, int], Tensor]:
    """Return the function that computes the reported loss of micro-batch i from its logits."""

    def compute(logits: Tensor, i: int) -> Tensor:
        losses = next(iter(net.loss(logits, batches[i]).values()))
        if parts is not None and net.has_results:
            parts.add(samples[i], batches[i], losses)
        return loss_sum(losses, batches[i].loss_mask)

    return compute


@torch.no_grad()
def evaluate(
    net: Network,
    batches: Iterator[list[Batch]],
    should_stop: Callable[[], bool] = lambda: False,
    parts: LossParts | None = None,
) -> float:
    """Return the mean loss of the unmasked tokens of these global batches, without dropout.

    Checks `should_stop` before each batch; the mean is then that of the batches so far. `parts`
    takes the losses by data set and position.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=net.device)  # loss, tokens
    is_stopped = False
    for micro_batches in batches:
        pulse.tick()
        if is_stopped := should_stop():
            break
        on_device = [batch.to(net.device) for batch in micro_batches]
        samples = [batch.sample_ids.tolist() for batch in micro_batches]
        losses = net.infer(on_device, first_term(net, on_device, samples, parts))
        if net.has_results:
            for loss in losses:
                sums[0] += loss
            sums[1] += 0 if net.layout.at("cp") else sum(b.unmasked for b in micro_batches)
    if net.layout.world > 1:
        dist.all_reduce(sums)
    if parts is not None:
        parts.merge()
    total, tokens = sums.tolist()
    if not tokens and not is_stopped:
        raise SettingsError(
            f"every token of the validation set is masked; {CHECK_MASKS}", BAD_DATA, True
        )
    return total / max(tokens, 1)  # type: ignore[no-any-return]
