"""AdamW and SGD whose state has fewer bits: kernels/moments.py says how it is stored and rounded.

Our own because torch's optimizers have their state in the format of the weights. An update takes a
chunk of a parameter's elements at a time, so that no more than that exists in float32. It is
computed from the new state before this is rounded, and never waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from meshwright.kernels import moments
from meshwright.kernels.moments import PlaceDraws, Rounding
from meshwright.optim.muon import scalar
from meshwright.optim.rule_table import STATE_CHUNK


class RoundedRule(torch.optim.Optimizer):
    """Base of rules that update each element for itself.

    As for torch's fused optimizers, `grad_scale` divides the gradients, and a step with a
    `found_inf` other than 0 changes nothing; both are tensors on the device. The learning rate and
    the weight decay may be so too.
    """

    keys: tuple[str, ...]
    rounding: Rounding
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, params: Iterable[Any], **constants: Any) -> None:
        super().__init__(params, {"lr": 0.0, "weight_decay": 0.0} | constants)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                codes = [self.state[p][key] for key in self.keys]
                flats = [x.detach().view(-1).split(STATE_CHUNK) for x in (p, p.grad, *codes)]
                draws = self.rounding.draws(p)
                for weight, gradient, *some in zip(*flats, strict=True):
                    self._update(weight, gradient, some, draws, group)
                    draws = draws.after(len(weight))

    def _update(
        self, weight: Tensor, gradient: Tensor, codes: list[Tensor], draws: PlaceDraws, group: dict[str, Any]
    ) -> None:
        skipped = scalar(0.0 if self.found_inf is None else self.found_inf, weight)
        now = gradient / scalar(1.0 if self.grad_scale is None else self.grad_scale, weight)
        old = [moments.expanded(code, weight.dtype) for code in codes]
        new_weight, new = self.advance(weight, now, old, group)
        weight.copy_(torch.where(skipped > 0, weight, new_weight))
        for key, code, values in zip(self.keys, codes, new, strict=True):
            moments.store(values, code, draws, skipped, key == "exp_avg_sq")

    def advance(
        self, weight: Tensor, gradient: Tensor, old: list[Tensor], group: dict[str, Any]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the new weight and state."""
        raise NotImplementedError


class RoundedAdamW(RoundedRule):
    """AdamW as kernels/adamw.py computes it, also with a cautious decay."""

    keys = "exp_avg", "exp_avg_sq"

    def __init__(self, params: Iterable[Any], is_cautious: bool = False, **constants: Any) -> None:
        super().__init__(params, **constants)
        self.is_cautious = is_cautious

    def advance(
        self, weight: Tensor, gradient: Tensor, old: list[Tensor], group: dict[str, Any]
    ) -> tuple[Tensor, list[Tensor]]:
        lr, (beta1, beta2), t = group["lr"], group["betas"], self.rounding.step.double().clamp(min=1.0)
        size, root = (scalar(x, weight) for x in (lr / (1 - beta1**t), (1 - beta2**t).rsqrt()))
        m = old[0].lerp(gradient, 1 - beta1)
        v = (old[1] * beta2).addcmul_(gradient, gradient, value=1 - beta2)
        update, decay = m / (v.sqrt() * root + group["eps"]), weight * scalar(lr * group["weight_decay"], weight)
        if self.is_cautious:
            decay = torch.where(update * weight >= 0, decay, 0.0)
        return weight - decay - size * update, [m, v]


class RoundedSGD(RoundedRule):
    """SGD with momentum; the weight decay is added to the gradient, as torch does."""

    keys = ("momentum_buffer",)

    def advance(
        self, weight: Tensor, gradient: Tensor, old: list[Tensor], group: dict[str, Any]
    ) -> tuple[Tensor, list[Tensor]]:
        ahead = old[0] * group["momentum"] + (gradient + weight * scalar(group["weight_decay"], weight))
        return weight - ahead * scalar(group["lr"], weight), [ahead]
