"""AdamW, SGD and Lion where torch lacks them: each element is updated for itself.

Torch has no Lion (Chen et al. 2023), no cautious weight decay (Chen et al. 2025), and no state with
fewer bits than the weights, whose formats and rounding kernels/moments.py describes. A cautious
decay is only for elements whose update u has the sign of the weight, or is 0, so that it never
works against the update:

    w <- w - lr (u + weight decay w [u w >= 0])

A chunk of a parameter is updated at a time, so that no more than that exists in float32 beside the
parameter. The new weights follow from the new state before this is rounded. The AdamW here serves
where the kernel over flat buffers does not run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.kernels import adamw, moments, muon
from meshwright.kernels.moments import PlaceDraws
from meshwright.optim.own_rule import OwnRule, scalar
from meshwright.optim.rule_table import CHUNK, STATE

# In float64, in which layouts are compared, a smaller number counts as 0. It would be 0 but for
# rounding, as the gradient of the keys' bias, and its sign would depend on the order of sums.
ROUNDING = 1e-13


class ElementwiseRule(OwnRule):
    """Base of the rules; each says how a chunk of elements moves."""

    keys: tuple[str, ...]  # of the state

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.0, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = [self.state[p][key] for key in self.keys]
                # Views: what a chunk writes reaches the parameter and its state.
                chunks = (x.detach().view(-1).split(CHUNK) for x in (p, p.grad, *state))
                draws = None if self.rounding is None else self.rounding.draws(p)
                for weight, gradient, *stored in zip(*chunks, strict=True):
                    self._update(weight, gradient, stored, draws, group)
                    # The next chunk's elements come after these in the parameter.
                    if draws is not None:
                        draws = draws.after(len(weight))

    def _update(
        self,
        weight: Tensor,
        gradient: Tensor,
        stored: list[Tensor],
        draws: PlaceDraws | None,
        group: dict[str, Any],
    ) -> None:
        # `skipped` is known on the device alone, so a step to be skipped is computed too, and then
        # every number is replaced by itself.
        skipped = scalar(self.found_inf, weight)
        now = gradient / scalar(self.grad_scale, weight)
        old = [moments.expanded(x, weight.dtype) for x in stored]
        new_weight, *new = self.advance(weight, now, old, group)
        weight.copy_(torch.where(skipped > 0, weight, new_weight))
        for key, target, values in zip(self.keys, stored, new, strict=True):
            if draws is None:
                target.copy_(torch.where(skipped > 0, target, values))
            else:
                moments.store(values, target, draws, skipped, key == "exp_avg_sq")

    def advance(
        self, weight: Tensor, gradient: Tensor, state: list[Tensor], group: dict[str, Any]
    ) -> tuple[Tensor, ...]:
        raise NotImplementedError


class AdamW(ElementwiseRule):
    """AdamW as its kernel computes it; `counter` is the number of this update, float32 []."""

    keys = tuple(STATE["adamw"])

    def __init__(
        self, params: Iterable[nn.Parameter], constants: adamw.AdamWConstants, counter: Tensor
    ) -> None:
        super().__init__(params)
        self.constants = constants
        self.counter = counter

    def advance(
        self, weight: Tensor, gradient: Tensor, state: list[Tensor], group: dict[str, Any]
    ) -> tuple[Tensor, ...]:
        lr = group["lr"]
        t = self.counter.double().clamp(min=1.0)  # 0 if no step was finite yet
        # Adam's corrections, for the first steps' moments, which begin at 0.
        size = lr / (1 - self.constants.beta1**t)
        root = (1 - self.constants.beta2**t).rsqrt()
        decay = lr * group["weight_decay"]
        factors = [scalar(x, weight) for x in (decay, size, root)]
        return adamw.advance(weight, gradient, state, self.constants, *factors)


class SGD(ElementwiseRule):
    """SGD with momentum; the weight decay is added to the gradient, as torch does."""

    keys = tuple(STATE["sgd"])

    def __init__(self, params: Iterable[nn.Parameter], momentum: float) -> None:
        super().__init__(params)
        self.momentum = momentum

    def advance(
        self, weight: Tensor, gradient: Tensor, state: list[Tensor], group: dict[str, Any]
    ) -> tuple[Tensor, ...]:
        # The new momentum: the old one, faded, the gradient and the decay.
        ahead = weight * scalar(group["weight_decay"], weight)
        ahead.add_(gradient)
        ahead.add_(state[0] * self.momentum)
        return weight - ahead * scalar(group["lr"], weight), ahead


class Lion(ElementwiseRule):
    """Lion: steps of the learning rate in the direction of a momentum's sign.

    Each operation rounds once, so that no layout changes a bit.
    """

    keys = tuple(STATE["lion"])

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        beta1: float = 0.9,
        beta2: float = 0.99,
        is_cautious: bool = False,
    ) -> None:
        super().__init__(params)
        self.beta1 = beta1
        self.beta2 = beta2
        self.is_cautious = is_cautious

    def advance(
        self, weight: Tensor, gradient: Tensor, state: list[Tensor], group: dict[str, Any]
    ) -> tuple[Tensor, ...]:
        (moment,) = state
        lr = group["lr"]
        ahead = moment * self.beta1 + gradient * (1 - self.beta1)
        if ahead.dtype is torch.float64:
            ahead = torch.where(ahead.abs() < ROUNDING, 0.0, ahead)
        # Decay and step as in AdamW; the step has the same size for every element.
        decay = scalar(1 - lr * group["weight_decay"], weight)
        rate = scalar(lr, weight)
        new = muon.moved(weight, ahead.sign_(), decay, rate, self.is_cautious)
        del ahead  # before the moment's terms take as much memory
        return new, moment * self.beta2 + gradient * (1 - self.beta2)
