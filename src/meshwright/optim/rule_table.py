"""The update rule of each parameter, and the state that it keeps. No torch."""

from __future__ import annotations

from typing import Literal

from meshwright.settings.schema import Optimizer

Rule = Literal["adamw", "sgd", "lion", "muon"]
# Each rule's state: torch's name -> name in a checkpoint.
STATE = {
    "adamw": {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
    "sgd": {"momentum_buffer": "momentum"},
    "lion": {"exp_avg": "exp_avg"},
    "muon": {"momentum_buffer": "momentum"},
}


def decays(name: str, dimensions: int) -> bool:
    """Whether weight decay applies: to matrices and embeddings, not biases and norms."""
    return dimensions > 1 and not name.endswith("bias")


def rule_of(o: Optimizer, name: str, dimensions: int) -> Rule:
    """Return the parameter's rule; with Muon, only matrices of layers use it, the rest AdamW."""
    if o.optimizer == "muon":
        return "muon" if decays(name, dimensions) and name.startswith("h.") else "adamw"
    return "adamw" if o.optimizer == "adam" else o.optimizer
