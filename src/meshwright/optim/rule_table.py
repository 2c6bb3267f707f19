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

MUON_CHUNK = 1 << 27  # elements that Muon updates at a time: four copies in 16 bits are 1 GB
MUON_STAGE = 3  # iterations of Muon's gram form from one R
GRAM = 3  # that form is for matrices with at least so many halves of columns for a row
LION_CHUNK = 1 << 24  # elements that Lion updates at a time: four copies in float32 are 256 MB


def decays(name: str, dimensions: int) -> bool:
    """Whether weight decay applies: to matrices and embeddings, not biases and norms."""
    return dimensions > 1 and not name.endswith("bias")


def rule_of(o: Optimizer, name: str, dimensions: int) -> Rule:
    """Return the parameter's rule; with Muon, only matrices of layers use it, the rest AdamW."""
    if o.optimizer == "muon":
        return "muon" if decays(name, dimensions) and name.startswith("h.") else "adamw"
    return "adamw" if o.optimizer == "adam" else o.optimizer
