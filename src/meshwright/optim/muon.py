"""Muon: momentum whose matrices are orthogonalised by Newton-Schulz iterations.

Our own because torch.optim.Muon takes one matrix after the other, and needs the host to know
whether a step is finite. This one has the same formula, constants and state, and updates all
matrices of one shape at once.

With X [m, k], m <= k, of norm 1, an iteration is X <- P X, where R = X X^T, P = a I + b R + c R^2.

    plain   computes R, R^2 and P X: 4 m^2 k + 2 m^3 flops
    gram    keeps R and the product Q of the P, which are all symmetric and commute:
            R <- P R P, Q <- P Q, 8 m^3 flops. X itself is read and written once in 3 iterations.

Every product but P X and Q X is symmetric. Where kernels/symmetric.py has a kernel for it, the half
below the diagonal is computed in tiles of 128 x 256: 62 % of a product at m = 1024, 56 % at 2048.
The work by arithmetic, for the 24 layers of a model of hidden size 1024 (345M) and 5 iterations, in
TFLOP (benchmarks/gpu_muon.py measures the times):

            full   halves
    plain    7.2      5.7
    gram     5.2      3.8       k >= 1.5 m; plain for square matrices

R has the squares of X's singular values; its rounding errors grow with 1 / value^2. So R is
computed again from X after 3 iterations, and all is in float16, whose 3 more bits of precision need
no scale because no number exceeds 512. Measured on a CPU, with random matrices of condition 1 to
10^6 and matrices of low rank: the distance from float64's result is 1/5 to 1/14 of that of the
plain form in bfloat16, which torch computes. In bfloat16 the gram form would be up to 4 times worse
than plain, and would diverge without the second R. Devices without Triton kernels keep torch's
form.

The update begins when the backward pass has ended: before that nobody knows the norm of all
gradients, which clips them, and whether it is finite. What it moves for each element of a matrix,
in float32 with weights in bfloat16, is 30 bytes beside the products (kernels/triton/muon.py).

Where several ranks share matrices, each is orthogonalised on one of them: parallel/owner_ranks.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from meshwright.base import device as devices
from meshwright.kernels import muon as passes
from meshwright.kernels.symmetric import symmetric_product
from meshwright.optim.own_rule import OwnRule, scalar
from meshwright.optim.rule_table import GRAM, MUON_CHUNK, MUON_RESTART, MatrixForm

T = TypeVar("T")
V = TypeVar("V", bound=Tensor)
# By form: numbers of parameters, and a tensor [n, *shape] of theirs.
Stacks = dict[MatrixForm, tuple[list[int], Tensor]]

# Keller Jordan's coefficients, as torch has them: the steepest slope at 0.
A = 3.4445
B = -4.7750
C = 2.0315
SPREAD = 256.0  # factor of a stored R: its entries, about 1 / m, are far from float16's smallest


class Exchange(Protocol):
    """The way of matrices to their owners, and of updates back: parallel/owner_ranks.py."""

    @property
    def rounds(self) -> list[Any]: ...

    def collect(
        self, one_round: Any, ahead: Iterable[tuple[int, Tensor]], like: Tensor
    ) -> Stacks: ...

    def give_back(
        self, one_round: Any, updates: Stacks, like: Tensor
    ) -> Iterator[list[tuple[int, Tensor]]]: ...


@dataclass(frozen=True)
class Spread:
    """Where Muon's matrices are.

    With an exchange, every parameter is this rank's part of what its form describes.
    """

    forms: list[MatrixForm]  # of the parameters
    device: torch.device  # of the iterations; parameters and moments may be on the host
    exchange: Exchange | None = None
    copies: list[Tensor] | None = None  # of the parameters in the network's format, if written here


class Muon(OwnRule):
    """Muon with Nesterov momentum and updates of AdamW's size, over matrices.

    A cautious decay is that of elementwise.py.
    """

    def __init__(
        self,
        params: list[nn.Parameter],
        momentum: float = 0.95,
        ns_steps: int = 5,
        spread: Spread | None = None,
        chunk: int = MUON_CHUNK,
        is_cautious: bool = False,
    ) -> None:
        super().__init__(
            params, {"lr": 0.0, "weight_decay": 0.0, "momentum": momentum, "ns_steps": ns_steps}
        )
        if spread is None:
            forms = [MatrixForm(tuple(p.shape)) for p in params]
            spread = Spread(forms, params[0].device)
        self.spread = spread
        self.chunk = chunk
        self.is_cautious = is_cautious

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        if self.spread.exchange is not None:
            self._update_at_owners(self.spread.exchange, group)
            return
        forms = self.spread.forms
        used = [(i, p) for i, p in enumerate(group["params"]) if p.grad is not None]
        for some in chunks(used, lambda i, _: forms[i], self.chunk):
            self._update([i for i, _ in some], group)

    def _update(self, numbers: list[int], group: dict[str, Any]) -> None:
        form = self.spread.forms[numbers[0]]
        ahead, norms = self._advance([group["params"][i] for i in numbers], group)
        # The norms are those of whole matrices, where the parameters are. Sections, and matrices
        # that go to another device, get norms there.
        if form.sections or ahead.device != self.spread.device:
            x = orthogonalise_all(ahead.to(self.spread.device), form, group["ns_steps"])
        else:
            x = normalised(ahead, norms)
            del ahead
            x = orthogonalise_either(x, group["ns_steps"])
        self._subtract(numbers, x, group)

    def _update_at_owners(self, exchange: Exchange, group: dict[str, Any]) -> None:
        parameters = group["params"]
        forms = self.spread.forms
        steps = group["ns_steps"]
        ahead_like, update_like = formats(parameters[0].dtype, self.spread.device)

        def kind(i: int, _: Tensor) -> Hashable:
            return forms[i].scale, parameters[i].shape

        # A round at a time bounds the memory of look-aheads and updates.
        for one_round in exchange.rounds:
            # To the owners, the look-aheads of this rank's parts.
            mine = self._look_ahead(one_round.members, group)
            stacks = exchange.collect(one_round, mine, ahead_like)
            updates: Stacks = {}
            # Each look-ahead is freed as soon as its update is there.
            for form in list(stacks):
                numbers, ahead = stacks.pop(form)
                updates[form] = numbers, self._orthogonalise_chunks(ahead, form, steps)
                del ahead
            # Back from them, the updates of this rank's parts, which have shapes of their own.
            for parts in exchange.give_back(one_round, updates, update_like):
                for some in chunks(parts, kind, self.chunk):
                    numbers = [i for i, _ in some]
                    x = torch.stack([update for _, update in some])
                    x = x.view(-1, *parameters[numbers[0]].shape)
                    self._subtract(numbers, x, group)

    def _look_ahead(
        self, numbers: list[int], group: dict[str, Any]
    ) -> Iterator[tuple[int, Tensor]]:
        """Advance the momentum of parts; yield their look-aheads."""
        parts = [(i, group["params"][i]) for i in numbers]
        parts = [(i, p) for i, p in parts if p.numel()]  # of some, this rank has no rows
        for some in chunks(parts, lambda *_: None, self.chunk):
            ahead, _ = self._advance([p for _, p in some], group)
            yield from zip((i for i, _ in some), ahead, strict=True)

    def _orthogonalise_chunks(self, ahead: Tensor, form: MatrixForm, steps: int) -> Tensor:
        count = max(1, self.chunk // ahead[0].numel())
        if len(ahead) <= count:  # without a copy
            return orthogonalise_all(ahead, form, steps)
        return torch.cat(
            [orthogonalise_all(some, form, steps) for some in torch.split(ahead, count)]
        )

    def _advance(
        self, matrices: list[nn.Parameter], group: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        first = matrices[0]
        # All of them have a gradient; the condition tells mypy.
        gradients = [p.grad for p in matrices if p.grad is not None]
        moments = [self._moment(p) for p in matrices]
        draws = None if self.rounding is None else [self.rounding.draws(p) for p in matrices]
        scale = scalar(self.grad_scale, first)
        skipped = scalar(self.found_inf, first)
        return passes.advance(gradients, moments, scale, skipped, group["momentum"], draws)

    def _subtract(self, numbers: list[int], x: Tensor, group: dict[str, Any]) -> None:
        """Subtract the updates x [n, *shape] of the parameters of these numbers, of one form."""
        weights = [group["params"][i].detach() for i in numbers]
        first = weights[0]
        copies = self.spread.copies
        if copies is not None:
            copies = [copies[i] for i in numbers]
        # The form's scale gives the update AdamW's size, so that one learning rate serves both.
        lr = group["lr"]
        decay = scalar(1 - lr * group["weight_decay"], first)
        rate = scalar(lr * self.spread.forms[numbers[0]].scale, first)
        updates = x.to(first.device)
        skipped = scalar(self.found_inf, first)
        passes.subtract(weights, updates, decay, rate, skipped, self.is_cautious, copies)

    def _moment(self, p: nn.Parameter) -> Tensor:
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        return state["momentum_buffer"]  # type: ignore[no-any-return]


def chunks(
    items: Iterable[tuple[T, V]], kind: Callable[[T, V], Hashable], size: int
) -> Iterator[list[tuple[T, V]]]:
    """Yield tensors of one kind and shape: at most `size` elements, but at least one tensor."""
    kinds: dict[tuple[Hashable, torch.Size], list[tuple[T, V]]] = {}
    for key, x in items:
        kinds.setdefault((kind(key, x), x.shape), []).append((key, x))
    for (_, shape), members in kinds.items():
        count = max(1, size // shape.numel())
        for i in range(0, len(members), count):
            yield members[i : i + count]


def formats(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return empty tensors in the formats of look-aheads and of their orthogonal matrices."""
    if dtype is torch.float64:
        same = torch.empty(0, dtype=dtype, device=device)
        return same, same
    low = torch.float16 if devices.has_kernels(device) else torch.bfloat16
    ahead_like = torch.empty(0, dtype=torch.bfloat16, device=device)
    update_like = torch.empty(0, dtype=low, device=device)
    return ahead_like, update_like


def normalised(x: Tensor, norms: Tensor) -> Tensor:
    """Return x [n, r, c] / its norms [n] in the iterations' format."""
    _, update_like = formats(x.dtype, x.device)
    return passes.normalise(x, norms, update_like.dtype)


def orthogonalise_all(ahead: Tensor, form: MatrixForm, steps: int) -> Tensor:
    """Return the update [n, *shape] of parameters of one form, for the scale of the form."""
    *_, rows, columns = form.shape
    if not form.sections:
        # A gate's stack [n, 2, rows, columns] has 2 n matrices.
        matrices = ahead.reshape(-1, rows, columns)
        return orthogonalise_any(matrices, steps).view(ahead.shape)

    _, update_like = formats(ahead.dtype, ahead.device)
    out = torch.empty_like(ahead, dtype=update_like.dtype)
    for section, to in zip(sections(ahead, form), sections(out, form), strict=True):
        # Its rows of all groups are one matrix, unless each group's are.
        n, groups, *_ = section.shape
        count = n * groups if form.by_group else n
        x = orthogonalise_any(section.reshape(count, -1, columns), steps)
        # The form's scale is for a whole parameter; a section is smaller.
        ratio = math.sqrt(max(x.shape[1:]) / max(rows, columns))
        torch.mul(x.view(to.shape), ratio, out=to)
    return out


def sections(x: Tensor, form: MatrixForm) -> Sequence[Tensor]:
    """Return views [n, groups, rows, columns] of the sections of parameters [n, *shape]."""
    groups = x.view(len(x), -1, sum(form.sections), x.shape[-1])
    return groups.split_with_sizes(form.sections, dim=2)


def orthogonalise_any(x: Tensor, steps: int) -> Tensor:
    """Return the matrices x [n, r, c], of any shape and norm, with singular values of about 1."""
    wide = None if x.dtype is torch.float64 else torch.float32
    norms = torch.linalg.vector_norm(x, dim=(1, 2), dtype=wide)
    return orthogonalise_either(normalised(x, norms), steps)


def orthogonalise_either(x: Tensor, steps: int) -> Tensor:
    """Return the matrices x [n, r, c] of norm 1, of any shape, with singular values of about 1."""
    # X X^T is then the smaller of the two squares.
    if x.shape[1] > x.shape[2]:
        return orthogonalise(x.mT, steps).mT
    return orthogonalise(x, steps)


def orthogonalise(x: Tensor, steps: int, is_gram: bool | None = None) -> Tensor:
    """Return the matrices x [n, m, k], m <= k, of norm 1, with singular values of about 1.

    The result lies in memory as x does: row by row or column by column.
    """
    if is_gram is None:
        is_gram = x.dtype is torch.float16 and 2 * x.shape[2] >= GRAM * x.shape[1]
    if is_gram:
        # After MUON_RESTART iterations R is computed again: its rounding errors have grown.
        for first in range(0, steps, MUON_RESTART):
            q = polynomial_of_gram(x, min(MUON_RESTART, steps - first))
            x = multiply_symmetric(q, x)
        return x
    for _ in range(steps):
        r = symmetric_product(x, x)
        p = symmetric_product(r, r, r, C, B)  # c R^2 + b R
        x = multiply_symmetric(p, x, A)
    return x


def polynomial_of_gram(x: Tensor, steps: int) -> Tensor:
    """Return the product Q [n, m, m] of the steps' P. R is stored multiplied by SPREAD."""
    r = symmetric_product(x, x, scale=SPREAD)
    q = None
    for step in range(steps):
        # P = c R^2 + b R + a I, of an R that is SPREAD times as large.
        p = symmetric_product(r, r, r, C / SPREAD**2, B / SPREAD, A)
        q = p if q is None else symmetric_product(q, p)
        # The next R is that of P X: P R P, as P is symmetric.
        if step + 1 < steps:
            pr = symmetric_product(p, r)
            r = symmetric_product(pr, p)
    assert q is not None
    return q


def multiply_symmetric(q: Tensor, x: Tensor, keep: float = 0.0) -> Tensor:
    """Return q x + keep x, of a symmetric q, in x's order in memory."""
    if x.is_contiguous():
        return torch.baddbmm(x, q, x, beta=keep) if keep else torch.bmm(q, x)
    rows = x.mT  # x^T q is (q x)^T
    y = torch.baddbmm(rows, rows, q, beta=keep) if keep else torch.bmm(rows, q)
    return y.mT
