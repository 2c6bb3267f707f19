"""Settings tuned on a small model that hold for a wider and deeper one: µP and CompleteP. No torch.

µP (Yang et al. 2022, arXiv 2203.03466) multiplies outputs, initial weights and learning rates by
powers of the width so that each step changes activations by as much at any width; CompleteP (Dey et
al. 2025, arXiv 2505.01618, with its alpha = 1) does so for the depth. Here the network computes as
it always does: a multiplier c of a weight's product is put into the weight, whose initial values
and learning rate are then c times as large. AdamW, Lion and Muon take steps whose size does not
depend on that of the gradients, so the result is the same, in every layout, kernel and export.

With m = width / base width and d = depth / base depth:

    parameter                      initial values         rate               weight decay
    qkv, fc                        1 / sqrt(m)            1 / m              m
    proj                           1 / (sqrt(m) d)        1 / (m d)          m d
    bias of proj                   0                      1 / d              none
    lm_head, if untied             1 / m                  1 / m              m
    ln_f, if the head is tied      1 / m                  1 / m              none
    wte, wpe, other vectors        1                      1                  1, or none

proj is the last matrix of a branch. At the base its values are as without µP: std / sqrt(2 layers).

Weight decay is that of AdamW, which shrinks a weight by rate x decay in each step: the product is
the same at any size, which is CompleteP's m for its hidden matrices.

Muon's rates of matrices have sqrt(m) in the place of m. Its update has the spectral norm 0.2 rate
sqrt(max(rows, columns)), which grows as sqrt(m); an output's change keeps its size if that norm is
constant, as that of the initial matrix is: sqrt(rows) + sqrt(columns) times 1 / sqrt(m).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from meshwright.config.matrices import is_second
from meshwright.config.schema import Model


class Factors(NamedTuple):
    initial: float  # of the standard deviation, or of a norm's weight
    rate: float
    decay: float


def factors_of(m: Model, name: str, is_matrix: bool, is_muon: bool = False) -> Factors:
    """Return the factors of a parameter; all are 1 at the base, and without one."""
    # The rows of the table above, one after the other.
    width = m.width_growth
    depth = m.depth_growth
    module, _, _ = name.rpartition(".")
    # The rows of the table above: matrices of layers, ends of branches, the head's factor.
    initial = rate = 1.0
    if is_matrix and name.startswith("h."):
        initial /= math.sqrt(width)
        rate /= math.sqrt(width) if is_muon else width
    if is_second(module):
        initial /= depth
        rate /= depth
    if module == ("lm_head" if m.untie_embeddings_and_output_weights else "ln_f"):
        initial /= width
        rate /= width
    # Rate x decay, which shrinks a weight, is that of the base.
    return Factors(initial, rate, 1 / rate)
