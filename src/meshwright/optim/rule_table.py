"""The treatment of each parameter by the update, and the state that its rule keeps. No torch."""

from __future__ import annotations

from typing import Literal, NamedTuple

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


class Treatment(NamedTuple):
    """How a step changes a parameter."""

    rule: Rule
    rate: float  # factor of the step's learning rate
    decay: float  # factor of the step's weight decay, which its rule multiplies by the parameter's rate


def treatment_of(o: Optimizer, name: str, dimensions: int) -> Treatment:
    """Return a parameter's treatment.

    Weight decay is for matrices and embeddings, not biases and norms. With Muon, only matrices of
    layers follow its rule, the rest AdamW's.
    """
    is_matrix = dimensions > 1 and not name.endswith("bias")
    rule: Rule = "adamw" if o.optimizer == "adam" else o.optimizer
    if rule == "muon" and not (is_matrix and name.startswith("h.")):
        rule = "adamw"
    return Treatment(rule, 1.0, float(is_matrix))
