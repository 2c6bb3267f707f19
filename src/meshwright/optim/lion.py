"""Lion: steps of the learning rate in the direction of a momentum's sign (Chen et al. 2023).

Our own because torch has none. Like Muon, it updates in place and never waits for the device, so
that a CUDA graph can hold it. Each operation rounds once, so that no layout changes a bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from meshwright.kernels import moments
from meshwright.kernels.moments import PlaceDraws, Rounding
from meshwright.optim.muon import scalar
from meshwright.optim.rule_table import LION_CHUNK

# In float64, by which layouts are compared, what is smaller has no sign: it is 0 but for rounding,
# such as the gradient of a bias of keys, and its sign would depend on the order of sums.
ROUNDING = 1e-13


class Lion(torch.optim.Optimizer):
    """Lion with decoupled weight decay.

    As for torch's fused optimizers, `grad_scale` divides the gradients, and a step with a
    `found_inf` other than 0 changes nothing; both are tensors on the device. The learning rate and
    the weight decay may be so too. A cautious decay is only for elements whose update has the sign
    of the weight, or is 0: w <- w - lr (u + weight decay w [u w >= 0]).
    """

    rounding: Rounding | None = None  # of a momentum of fewer bits
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(
        self, params: Iterable[Any], beta1: float = 0.9, beta2: float = 0.99, is_cautious: bool = False
    ) -> None:
        super().__init__(params, {"lr": 0.0, "weight_decay": 0.0, "betas": (beta1, beta2)})
        self.is_cautious = is_cautious

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                parts = (x.detach().view(-1).split(LION_CHUNK) for x in (p, p.grad, self.state[p]["exp_avg"]))
                draws = None if self.rounding is None else self.rounding.draws(p)
                for weight, gradient, moment in zip(*parts, strict=True):
                    self._update(weight, gradient, moment, draws, group)
                    draws = draws and draws.after(len(weight))

    def _update(
        self, weight: Tensor, gradient: Tensor, stored: Tensor, draws: PlaceDraws | None, group: dict[str, Any]
    ) -> None:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        rate, decay = scalar(lr, weight), scalar(1 - lr * group["weight_decay"], weight)
        is_skipped = scalar(0.0 if self.found_inf is None else self.found_inf, weight) > 0
        now = gradient / scalar(1.0 if self.grad_scale is None else self.grad_scale, weight)
        moment = moments.expanded(stored, weight.dtype)
        ahead = moment * beta1 + now * (1 - beta1)
        if ahead.dtype is torch.float64:
            ahead = torch.where(ahead.abs() < ROUNDING, 0.0, ahead)
        update = ahead.sign_()
        kept = torch.where(update * weight >= 0, decay, 1.0) if self.is_cautious else decay
        weight.copy_(torch.where(is_skipped, weight, weight * kept - update * rate))
        new = moment * beta2 + now * (1 - beta2)
        if draws is None:
            moment.copy_(torch.where(is_skipped, moment, new))
        else:
            moments.store(new, stored, draws, is_skipped)
