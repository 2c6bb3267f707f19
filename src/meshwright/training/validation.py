"""The mean loss of a data set, between two steps and at the end of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.base.errors import BAD_DATA
from meshwright.config.problem import SettingsError
from meshwright.data.loader import Batch
from meshwright.model.loss import loss_sum
from meshwright.runtime.ranks.pulse import pulse
from meshwright.training.loss_parts import LossParts
from meshwright.training.micro_step import Network
from meshwright.training.step import CHECK_MASKS


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
