"""The treatment of each parameter, and the optimizers over flat buffers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.lazy_compiler import spare, spare_step
from meshwright.optim.cautious import CautiousAdamW
from meshwright.optim.lion import Lion
from meshwright.optim.muon import Muon, Spread
from meshwright.optim.rounded import RoundedAdamW, RoundedRule, RoundedSGD
from meshwright.optim.rule_table import STATE as STATE
from meshwright.optim.rule_table import Rule as Rule
from meshwright.optim.rule_table import Treatment as Treatment
from meshwright.optim.rule_table import is_rounded as is_rounded
from meshwright.optim.rule_table import treatment_of
from meshwright.settings.schema import Model, Optimizer

AdamW, SGD = spare_step(torch.optim.AdamW), spare_step(torch.optim.SGD)
spare(torch.optim.Optimizer.add_param_group)


class Numbers(NamedTuple):
    """The numbers of one update.

    Floats, or float64 tensors [] on the training device, which a CUDA graph reads anew at each
    replay.
    """

    lr: float | Tensor
    weight_decay: float | Tensor
    scale: float | Tensor = 1.0  # of the loss, for fp16


class Verdict(NamedTuple):
    """The outcome of a step's gradients, as tensors [] on the device."""

    norm: Tensor  # before clipping
    shrink: Tensor  # factor that clips
    is_finite: Tensor  # the norm and the loss; else nothing may change
    decision: Tensor | None = None  # of AdamW over flat buffers


def treatment(o: Optimizer, m: Model | None, name: str, parameter: Tensor) -> Treatment:
    """Return the parameter's treatment."""
    return treatment_of(o, m, name, parameter.ndim)


def state_dtype(o: Optimizer, key: str, full: torch.dtype) -> torch.dtype:
    """Return the format of a moment, given that of the masters: those of kernels/moments.py."""
    if not is_rounded(o):
        return full
    if o.optimizer_state_dtype == "bfloat16":
        return torch.bfloat16
    return torch.uint8 if key == "exp_avg_sq" else torch.int8


def matrices(p: Tensor) -> list[Tensor]:
    """Return the matrices of a parameter: two for a gated MLP's weight, otherwise one."""
    return list(p.detach().unbind()) if p.ndim == 3 else [p.detach()]


def is_ours(update: torch.optim.Optimizer) -> bool:
    """Whether an optimizer takes all numbers as tensors, in the format of the weights."""
    return isinstance(update, (CautiousAdamW, Lion, Muon, RoundedRule))


def make_optimizer(
    o: Optimizer, rule: Rule, parameters: list[nn.Parameter], spread: Spread | None = None
) -> torch.optim.Optimizer:
    """Make the optimizer; learning rate and weight decay are set before each step."""
    if rule == "muon":  # updates of AdamW's size, so that one learning rate serves both
        return Muon(parameters, o.muon_momentum, o.muon_num_ns_steps, spread, is_cautious=o.cautious_weight_decay)
    group: list[dict[str, Any]] = [{"params": parameters}]
    if rule == "lion":
        return Lion(group, o.lion_beta1, o.lion_beta2, o.cautious_weight_decay)
    if is_rounded(o):
        if rule == "sgd":
            return RoundedSGD(group, momentum=o.sgd_momentum)
        return RoundedAdamW(group, o.cautious_weight_decay, betas=(o.adam_beta1, o.adam_beta2), eps=o.adam_eps)
    if rule == "sgd":
        return SGD(group, lr=0.0, momentum=o.sgd_momentum, fused=True)
    betas = o.adam_beta1, o.adam_beta2
    if o.cautious_weight_decay:
        return CautiousAdamW(group, betas, o.adam_eps)
    return AdamW(group, lr=0.0, betas=betas, eps=o.adam_eps, fused=True)
