"""The parameter group of each parameter, and the optimizers over flat buffers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshwright.config.schema import Model, Optimizer
from meshwright.kernels.adamw import AdamWConstants
from meshwright.optim import elementwise
from meshwright.optim.muon import Muon, Spread
from meshwright.optim.rule_table import STATE as STATE
from meshwright.optim.rule_table import ParamGroup as ParamGroup
from meshwright.optim.rule_table import Rule as Rule
from meshwright.optim.rule_table import is_beyond_torch as is_beyond_torch
from meshwright.optim.rule_table import is_rounded as is_rounded
from meshwright.optim.rule_table import param_group_of
from meshwright.runtime.lazy_compiler import spare, spare_step

AdamW = spare_step(torch.optim.AdamW)
SGD = spare_step(torch.optim.SGD)
spare(torch.optim.Optimizer.add_param_group)


class StepScalars(NamedTuple):
    """The numbers of one update.

    Floats, or float64 tensors [] on the training device, which a CUDA graph reads anew at each
    replay.
    """

    lr: float | Tensor
    weight_decay: float | Tensor
    scale: float | Tensor = 1.0  # of the loss, for fp16


class GradientCheck(NamedTuple):
    """The outcome of a step's gradients, as tensors [] on the device."""

    norm: Tensor  # before clipping
    shrink: Tensor  # factor that clips
    is_finite: Tensor  # the norm and the loss; else nothing may change
    decision: Tensor | None = None  # of AdamW over flat buffers


def param_group(o: Optimizer, m: Model | None, name: str, parameter: Tensor) -> ParamGroup:
    return param_group_of(o, m, name, parameter.ndim)


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


def adamw_constants(o: Optimizer) -> AdamWConstants:
    return AdamWConstants(o.adam_beta1, o.adam_beta2, o.adam_eps, o.cautious_weight_decay)


def make_optimizer(
    o: Optimizer,
    rule: Rule,
    parameters: list[nn.Parameter],
    counter: Tensor | None,
    spread: Spread | None,
) -> torch.optim.Optimizer:
    """Make the optimizer; learning rate and weight decay are set before each step.

    `counter` is the number of the update, if torch lacks this AdamW.
    """
    if rule == "muon":  # updates of AdamW's size, so that one learning rate serves both
        return Muon(
            parameters,
            o.muon_momentum,
            o.muon_num_ns_steps,
            spread,
            is_cautious=o.cautious_weight_decay,
        )
    # Ours where torch has no such rule, or not with these settings; else torch's fused ones.
    if rule == "lion":
        return elementwise.Lion(parameters, o.lion_beta1, o.lion_beta2, o.cautious_weight_decay)
    if rule == "sgd":
        if is_rounded(o):
            return elementwise.SGD(parameters, o.sgd_momentum)
        return SGD(parameters, lr=0.0, momentum=o.sgd_momentum, fused=True)
    if counter is not None:
        return elementwise.AdamW(parameters, adamw_constants(o), counter)
    return AdamW(parameters, lr=0.0, betas=(o.adam_beta1, o.adam_beta2), eps=o.adam_eps, fused=True)
