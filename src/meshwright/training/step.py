"""One global batch on one rank: `train_step` updates the weights.

data/loader.py reads the batch from disk; parallel/store.py turns its gradients into new weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.base import device as devices
from meshwright.base.errors import BAD_DATA
from meshwright.config.problem import SettingsError
from meshwright.data.loader import Batch
from meshwright.parallel import comm
from meshwright.parallel.pipeline import AutogradPasses
from meshwright.runtime.ranks.heartbeat import heartbeat
from meshwright.training.micro_step import (
    DIVISOR,
    VOTE,
    VOTES,
    Network,
    Position,
    Timed,
    Update,
    forward_backward,
    forward_stage,
    untimed,
    update_weights,
)

CHECK_MASKS = "check the data and {eod_mask_loss=True}"


@dataclass(frozen=True)
class StepSettings:
    """The numbers of one update."""

    seed: int
    lr: float
    weight_decay: float
    scale: float = 1.0  # of the loss, for fp16
    loss_mean: str = "global"
    wants_stop: bool = False  # whether this rank has a reason to end the run


def train_step(
    net: Network, batches: list[Batch], settings: StepSettings, timed: Timed = untimed
) -> Update:
    """Update the weights from this rank's micro-batches of one global batch.

    Every unmasked token of the global batch weighs the same; with loss_mean "microbatch" every
    micro-batch does. With CUDA graphs the next step overwrites the result.
    """
    for part in net.parts:
        if not part.training:
            part.train()
    # Use the stream that the parameters were made on, where autograd adds up their gradients.
    with devices.on_stream(net.stream):
        rows, counted = prepare_numbers(net, batches, settings)
        # Replay the step if steps of its shape are captured, else run it as usual.
        if net.graphs is not None and net.graphs.replay(net, batches, rows, counted, settings.seed):
            return net.graphs.totals
        numbers, totals = accumulate(net, batches, rows, counted, settings, timed)
        heartbeat.enter("optimizer")
        with timed("optimizer", 1):
            update_weights(net, numbers[-1] if net.store.reads_tensors else rows[-1], totals)
        return totals


def prepare_numbers(
    net: Network, batches: list[Batch], s: StepSettings
) -> tuple[Tensor, Tensor | None]:
    """Return the micro-batches' numbers [n, NUMBERS], and their divisor if it is on the device.

    The numbers are on the host. Both ways of running a step divide by a copy on the device, because
    there a division by a number of the host rounds differently.
    """
    count = len(batches) * net.layout.dp  # micro-batches of the global batch
    unmasked = count_unmasked(net, batches)
    counted = None
    if s.loss_mean == "global" and isinstance(unmasked, Tensor):
        counted = unmasked
    rows = []
    for b in batches:
        # Either the mean over all tokens, or the mean of the micro-batches' means.
        divisor = unmasked
        if s.loss_mean == "microbatch":
            divisor = max(b.unmasked, 1) * count
        # A divisor that is on the device takes its place in the copy there.
        on_host = 1.0 if isinstance(divisor, Tensor) else divisor
        rows.append([s.lr, s.weight_decay, s.scale, on_host, s.wants_stop])
    pinned = devices.is_accelerator(net.device)  # only pinned memory is copied without a wait
    return torch.tensor(rows, dtype=torch.float64, pin_memory=pinned), counted


def accumulate(
    net: Network,
    batches: list[Batch],
    rows: Tensor,
    counted: Tensor | None,
    settings: StepSettings,
    timed: Timed = untimed,
) -> tuple[Tensor, Tensor]:
    """Give the store the gradients of all micro-batches; return their numbers and the totals.

    Both are on the device.
    """
    # Send everything first, so that no micro-batch waits for a copy.
    numbers = devices.send(rows, net.device)
    if counted is not None:
        numbers[:, DIVISOR] = counted
    batches = [b.to(net.device) for b in batches]
    totals = torch.zeros(len(net.update_columns), dtype=torch.float64, device=net.device)

    if net.pipeline is not None:
        pipeline_step(net, batches, numbers, totals, settings.seed, timed)
        return numbers, totals
    with timed("forward-backward", 1):
        for i, batch in enumerate(batches):
            position = Position(i == 0, i == len(batches) - 1)
            forward_backward(net, settings.seed, timed, batch, numbers[i], totals, position)
    return numbers, totals


def pipeline_step(
    net: Network,
    batches: list[Batch],
    numbers: Tensor,
    totals: Tensor,
    seed: int,
    timed: Timed,
) -> None:
    """Run a step's forward and backward passes in the order of the pipeline's schedule."""
    assert net.pipeline is not None
    net.store.clear_gradients()
    totals[VOTES] = numbers[0, VOTE]

    def forward(part: Any, i: int, stream: Tensor | None) -> Tensor:
        return forward_stage(net, part, seed, timed, batches[i], numbers[i], totals, stream)

    def begin_backward(chunk: int, i: int) -> None:
        net.store.begin_backward(i == len(batches) - 1)

    passes = AutogradPasses(net.parts, forward, begin_backward)
    with timed("forward-backward", 1):
        net.pipeline.train([b.tokens for b in batches], passes)


def count_unmasked(net: Network, batches: list[Batch]) -> float | Tensor:
    """Return the number of tokens that count in the global batch, over all ranks."""
    own: float = sum(b.unmasked for b in batches)
    # Without a mask every rank counts as many as this one.
    if batches[0].loss_mask is None or net.layout.dp == 1:
        unmasked: float | Tensor = own * net.layout.dp
    else:  # the sum stays on the device: the host waits for it below only if this rank has none
        counted = devices.send(torch.tensor(own, dtype=torch.float64), net.device)
        # Each rank of a context group counts all columns of its samples.
        unmasked = comm.total(counted, net.layout.group("gradients")) / net.layout.cp
    if not own and not unmasked:
        where = f"the global batch that starts at sample {batches[0].first_sample}"
        raise SettingsError(f"every token is masked in {where}; {CHECK_MASKS}", BAD_DATA, True)
    return unmasked
