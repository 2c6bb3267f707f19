"""AdamW with cautious weight decay (Chen et al. 2025), where no kernel over flat buffers runs.

Our own because torch's fused AdamW decays before it knows the direction of the update. With the
gradient g, Adam's moments and their bias corrections, the step of every element is

    m <- b1 m + (1 - b1) g           v <- b2 v + (1 - b2) g^2
    u  = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)
    w <- w - lr (u + weight decay w [u w >= 0])

The decay thus never works against the update. Lion and Muon have the same last line, with updates
of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from meshwright.optim.muon import scalar
from meshwright.optim.rule_table import LION_CHUNK


class CautiousAdamW(torch.optim.Optimizer):
    """AdamW that decays only elements which the update moves towards 0, or does not move.

    As for torch's fused optimizers, `grad_scale` divides the gradients, and a step with a
    `found_inf` other than 0 changes nothing; both are tensors on the device. The learning rate and
    the weight decay may be so too.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, params: Iterable[Any], betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": 0.0, "weight_decay": 0.0, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if self.found_inf is None:
                    state["step"] += 1
                else:
                    state["step"] += self.found_inf == 0
                tensors = p, p.grad, state["exp_avg"], state["exp_avg_sq"]
                parts = (x.detach().view(-1).split(LION_CHUNK) for x in tensors)
                for weight, gradient, mean, square in zip(*parts, strict=True):
                    self._update(weight, gradient, mean, square, state["step"], group)

    def _update(
        self, weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, step: Tensor, group: dict[str, Any]
    ) -> None:
        (beta1, beta2), lr = group["betas"], group["lr"]
        t = step.double().clamp(min=1.0)  # 0 if no step was finite yet
        rate, decay = scalar(lr, weight), scalar(lr * group["weight_decay"], weight)
        is_skipped = scalar(0.0 if self.found_inf is None else self.found_inf, weight) > 0
        now = gradient / scalar(1.0 if self.grad_scale is None else self.grad_scale, weight)
        new_mean = mean.lerp(now, 1 - beta1)
        new_square = (square * beta2).addcmul_(now, now, value=1 - beta2)
        del now
        root = (new_square / scalar(1 - beta2**t, weight)).sqrt_().add_(group["eps"])
        update = (new_mean / scalar(1 - beta1**t, weight)).div_(root)
        del root
        new = weight - torch.where(update * weight >= 0, weight * decay, 0.0)
        new -= update.mul_(rate)
        for old, value in ((weight, new), (mean, new_mean), (square, new_square)):
            old.copy_(torch.where(is_skipped, old, value))
