"""The group that each parameter is updated in, and the state that its rule keeps; no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

from meshwright.config.schema import Model, Optimizer
from meshwright.optim.mup import factors_of

Rule = Literal["adamw", "sgd", "lion", "muon"]
# Each rule's state: torch's name -> name in a checkpoint.
STATE = {
    "adamw": {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
    "sgd": {"momentum_buffer": "momentum"},
    "lion": {"exp_avg": "exp_avg"},
    "muon": {"momentum_buffer": "momentum"},
}
AVERAGE = "ema"  # the average of --ema, in a checkpoint beside the state of any rule

# Parameters that may have a peak rate of their own -> the setting that gives it.
OWN_RATES = {
    "wte.weight": "embedding_lr",
    "wpe.weight": "embedding_lr",
    "lm_head.weight": "head_lr",
}

MUON_CHUNK = 1 << 27  # elements that Muon updates at a time: four copies in 16 bits are 1 GB
MUON_RESTART = 3  # iterations of Muon's gram form, after which it begins again with a new R
MUON_TILE = 128  # rows of a tile of symmetric products, whose columns are twice as many
GRAM = 3  # the gram form is for matrices with at least GRAM / 2 columns for each row
MUON_HALF = 665  # rows of matrices whose products reach half of the speed of large ones
CHUNK = 1 << 24  # elements that the other rules update at a time: four copies in float32 are 256 MB


def state_bytes(o: Optimizer, full: int) -> int:
    """Return the bytes of a number of the state, where one of the masters takes `full`."""
    return {"float32": full, "bfloat16": 2, "float8": 1}[o.optimizer_state_dtype]


def is_rounded(o: Optimizer) -> bool:
    """Whether the state has fewer bits than the masters."""
    return o.optimizer_state_dtype != "float32"


def is_beyond_torch(o: Optimizer) -> bool:
    """Whether torch lacks AdamW with these settings."""
    return is_rounded(o) or o.cautious_weight_decay


class ParamGroup(NamedTuple):
    """How a step changes a parameter."""

    rule: Rule
    rate: float  # factor of the step's learning rate
    # factor of the step's weight decay, which its rule multiplies by the parameter's rate
    decay: float


def param_group_of(o: Optimizer, m: Model | None, name: str, dimensions: int) -> ParamGroup:
    """Return a parameter's group; `m` is None for a custom model.

    Weight decay is for matrices and embeddings, not biases and norms. With Muon, only matrices of
    layers follow its rule, the rest AdamW's. A peak rate of its own is a factor of --lr, so that it
    follows the same schedule.
    """
    is_matrix = dimensions > 1 and not name.endswith("bias")
    rule: Rule = "adamw" if o.optimizer == "adam" else o.optimizer
    if rule == "muon" and not (is_matrix and name.startswith("h.")):
        rule = "adamw"
    rate = 1.0
    own = own_rate(o, name, is_matrix)
    if own is not None and o.lr:
        rate = own / o.lr
    decay = float(is_matrix)
    if m is not None:  # muP's factors, 1 without it
        carried = factors_of(m, name, is_matrix, rule == "muon")
        rate *= carried.rate
        decay *= carried.decay
    return ParamGroup(rule, rate, decay)


def own_rate(o: Optimizer, name: str, is_matrix: bool) -> float | None:
    """Return the peak rate of a parameter's kind, if it is given; a tied table is an embedding."""
    if not is_matrix:
        return o.vector_lr
    return getattr(o, OWN_RATES.get(name, "lr"))  # type: ignore[no-any-return]


class MatrixForm(NamedTuple):
    """The matrices of a parameter that Muon orthogonalises, each for itself.

    Sections are the rows of a query group's queries, keys and values.
    """

    shape: tuple[int, ...]  # [rows, columns], or a gate's [2, rows, columns]
    sections: tuple[int, ...] = ()
    by_group: bool = False  # each group's sections are matrices of their own

    @property
    def matrices(self) -> list[tuple[int, int, int]]:
        """The number, rows and columns of the matrices of each kind."""
        *stack, rows, columns = self.shape
        if not self.sections:
            return [(math.prod(stack), rows, columns)]
        groups = rows // sum(self.sections)
        if self.by_group:
            return [(groups, n, columns) for n in self.sections]
        return [(1, groups * n, columns) for n in self.sections]

    @property
    def scale(self) -> float:
        """The factor that gives an update the size of AdamW's."""
        return 0.2 * math.sqrt(max(self.shape[-2:]))

    def cost(self, steps: int) -> float:
        """Return the operations of the iterations; products of small matrices are slower."""
        costs = []
        for n, rows, columns in self.matrices:
            short = min(rows, columns)
            long = max(rows, columns)
            slowness = 1 + MUON_HALF / short
            costs.append(n * muon_flops(short, long, steps) * slowness)
        return sum(costs)


def form_of(o: Optimizer, m: Model | None, name: str, shape: tuple[int, ...]) -> MatrixForm:
    """Return how a parameter of this full shape is divided for Muon."""
    if m is None or o.muon_split_qkv == "off" or not name.endswith("attn.qkv.weight"):
        return MatrixForm(shape)
    # The rows of a group: its queries, its key, its value.
    queries = (m.num_attention_heads or 0) // m.groups * m.head_dim
    sections = queries, m.head_dim, m.head_dim
    return MatrixForm(shape, sections, o.muon_split_qkv == "groups")


def muon_flops(short: int, long: int, steps: int) -> float:
    """Return the operations that optim/muon.py needs for a matrix, on Hopper or a later GPU.

    There a symmetric product computes only the tiles on the diagonal and below it.
    """
    # T rows of tiles have T (T + 1) / 2 on or below the diagonal, and wide tiles reach beyond it.
    half = min(1.0, 0.5 + MUON_TILE / short)
    wide = 2.0 * short**2 * long
    square = 2.0 * short**3
    if 2 * long < GRAM * short:
        return steps * (wide + half * (wide + square))
    # The gram form begins anew after MUON_RESTART iterations. Each time it takes X X^T and Q X, and
    # 4 products of squares an iteration, less one for Q in the first and two for R in the last.
    costs = []
    for first in range(0, steps, MUON_RESTART):
        count = min(MUON_RESTART, steps - first)
        costs.append(wide + half * (wide + (4 * count - 3) * square))
    return sum(costs)


def assign(costs: dict[int, float], loads: list[float]) -> dict[int, int]:
    """Give each number to the rank with the least load so far, the costliest first."""
    # Of equal costs the lower number comes first, so that all ranks find the same owners.
    out = {}
    # Of equal costs or loads the lower number comes first, so that all ranks find the same.
    for i in sorted(costs, key=lambda i: (-costs[i], i)):
        rank = out[i] = min(range(len(loads)), key=loads.__getitem__)
        loads[rank] += costs[i]
    return out


def packed(numbers: Iterable[int], sizes: list[int], limit: int) -> list[list[int]]:
    """Return the numbers in lists, each of one number or with sizes of at most `limit` in all."""
    out = list[list[int]]()
    total = 0
    for i in numbers:
        if not out or total + sizes[i] > limit:
            out.append([])
            total = 0
        out[-1].append(i)
        total += sizes[i]
    return out
