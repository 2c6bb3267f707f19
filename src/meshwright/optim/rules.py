"""Which rule updates which parameter, and torch's own implementations of the rules over flat buffers."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from meshwright.settings.schema import Optimizer

Rule = Literal["adamw", "sgd", "muon"]
# What each rule remembers of a parameter, by torch's names, and as a checkpoint calls it.
STATE = {
    "adamw": {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
    "sgd": {"momentum_buffer": "momentum"},
    "muon": {"momentum_buffer": "momentum"},
}


def decays(name: str, parameter: Tensor) -> bool:
    """Matrices decay, embeddings included; biases and norms do not (Megatron's rule)."""
    return parameter.ndim > 1 and not name.endswith("bias")


def rule(o: Optimizer, name: str, parameter: Tensor) -> Rule:
    """Muon is for the matrices of the layers; the embeddings, the head, biases and norms stay with AdamW."""
    if o.optimizer == "muon":
        return "muon" if decays(name, parameter) and name.startswith("h.") else "adamw"
    return "sgd" if o.optimizer == "sgd" else "adamw"


def matrices(p: Tensor) -> list[Tensor]:
    """What Muon orthogonalises one by one: a gated MLP's weight is two matrices, any other is one."""
    return list(p.detach().unbind()) if p.ndim == 3 else [p.detach()]


def make(o: Optimizer, kind: Rule, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """torch's rule over these; learning rate and weight decay are set before each step."""
    group: list[dict[str, Any]] = [{"params": parameters}]
    if kind == "muon":  # updates of AdamW's size, so that one learning rate serves both
        return torch.optim.Muon(
            group,
            lr=0.0,
            weight_decay=0.0,
            momentum=o.muon_momentum,
            ns_steps=o.muon_num_ns_steps,
            adjust_lr_fn="match_rms_adamw",
        )
    if kind == "sgd":
        return torch.optim.SGD(group, lr=0.0, momentum=o.sgd_momentum, fused=True)
    return torch.optim.AdamW(group, lr=0.0, betas=(o.adam_beta1, o.adam_beta2), eps=o.adam_eps, fused=True)
