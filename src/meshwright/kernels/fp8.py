"""Linear maps whose three products, forward and backward, multiply 8-bit numbers.

    forward     y  = x W^T      input    @ weight
    backward    dx = dy W       gradient @ weight
                dW = dy^T x     gradient @ input

A tensor is cast to q = fp8(x * scale), clamped to the format's largest number, and a product
multiplies its result by both inverse scales. The scale of each tensor is *delayed*: it comes from
the largest absolute values (amax) of earlier steps,

    scale = largest number / amax / 2^margin

so the cast reads a tensor only once. Weights take their own amax, because those that start at zero
double in a step. Other tensors take their own at their first use, anew in each step until they are
not all zeros: projections that start at zero make most gradients of the first steps zero. With
*tensorwise* scales every tensor takes its own each time: another pass over memory finds the amax
before the cast, and nothing is clamped. Formats are e4m3 (4 bits of exponent, largest 448) and, for
gradients if the recipe says so, e5m2 (5 bits, 57,344).

torch._scaled_mm needs the second factor transposed. One kernel therefore writes both layouts of
each tensor, and the transposed input, a byte a number, is all that is kept for backward. Where
possible, the kernel that computes a tensor writes it in fp8 itself, after rounding to bfloat16, so
that the bytes equal those of a separate cast; another kernel transposes them (fp8_fused.py).
Weights are cast once a step, into tensors that stay where they are, so that a CUDA graph may read
them. With ZeRO 3 no rank keeps a whole weight: it is cast for each use, when it has been gathered.

Hand-written because torchao casts and transposes in separate passes: at 1,024 hidden it was slower
than bfloat16. Infinities become NaN, so that no overflow is hidden.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from meshwright.base import device as devices
from meshwright.kernels.gradients import main_grad_of, of_bias
from meshwright.kernels.references import is_triton, launcher, reference

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
# torch._scaled_mm takes only multiples of this for the dimension that it sums over, and for the
# other one of its second factor.
MULTIPLE = 16
ROLES = ("input", "weight", "gradient")
BEGINNING = 100  # steps in which a tensor that was all zeros may choose its first scale again
Rest = TypeVar("Rest")


@dataclass(frozen=True)
class Recipe:
    """The rule that turns numbers into fp8."""

    hybrid: bool = False  # gradients are e5m2
    margin: int = 0
    history: int = 1  # steps whose amaxes are kept
    uses_max: bool = False  # the largest of them, not the latest
    is_tensorwise: bool = False  # each tensor's own amax, not those of earlier steps

    def format(self, role: str) -> torch.dtype:
        return E5M2 if self.hybrid and role == "gradient" else E4M3


class Cast(NamedTuple):
    """A matrix in fp8."""

    rows: Tensor  # [N, C]
    transposed: Tensor | None  # [C, N], N padded with zeros to a multiple
    inverse: Tensor  # of the scale


class Into(NamedTuple):
    """The fp8 that a kernel writes instead of numbers y in bfloat16."""

    out: Tensor  # [N, C], fp8(y * scale)
    scale: Tensor
    amax: Tensor | None  # raised to that of y

    def fill(self, y: Tensor) -> Tensor:
        """Cast y in another pass over memory, as the plain references of such kernels do."""
        quantise(y.reshape(self.out.shape), self.scale, self.amax, self.out, None)
        return self.out


def fp8_arguments(into: Into | None) -> tuple[Tensor | None, Tensor | None, float, bool]:
    """Return what a kernel that may write fp8 takes: scale, amax, LARGEST and WIDE."""
    if into is None:
        return None, None, 0.0, False
    return into.scale, into.amax, LARGEST[into.out.dtype], into.out.dtype is E5M2


@reference("fp8.quantise")
def quantise(
    x: Tensor, scale: Tensor, amax: Tensor | None, out: Tensor, transposed: Tensor | None
) -> None:
    """Cast x [N, C] * scale to the format of `out`; raise the amax, if any, to that of x.

    `transposed` [C, padded N], if not None, takes the transposed cast.
    """
    wide = x.float()
    largest = LARGEST[out.dtype]
    is_finite = wide.isfinite()
    if amax is not None:
        sizes = torch.where(is_finite, wide.abs(), 0.0)
        torch.maximum(amax, sizes.amax(), out=amax)
    # The clamp would hide infinities: they become NaN, in both formats.
    scaled = torch.where(is_finite, (wide * scale).clamp(-largest, largest), torch.nan)
    out.copy_(scaled)
    if transposed is not None:
        transpose_into(out, transposed)


@reference("fp8.transpose_into")
def transpose_into(q: Tensor, transposed: Tensor) -> None:
    """Transpose q [N, C] into `transposed` [C, padded N], whose padding becomes 0."""
    transposed.view(torch.uint8)[:, len(q) :] = 0
    transposed[:, : len(q)] = q.t()


def empty_casts(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, is_transposed: bool
) -> tuple[Tensor, Tensor | None]:
    """Return memory for both layouts of a matrix [N, C]."""
    # The transposed matrix is a factor of dW, whose sum is over its N columns.
    n, c = shape
    padded = -(-n // MULTIPLE) * MULTIPLE
    transposed = torch.empty(c, padded, dtype=dtype, device=device) if is_transposed else None
    return torch.empty(n, c, dtype=dtype, device=device), transposed


def multiply(
    a: Tensor,
    b: Tensor,
    scales: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    is_fast: bool = True,
) -> Tensor:
    """Return a [M, K] @ b [N, K]^T times both scales, plus bias; a CPU computes it in float32.

    `is_fast` lets the GPU round partial sums; the gradients of weights are sums too long for that.
    """
    if devices.has_kernels(a.device):
        return torch._scaled_mm(
            a, b.t(), *scales, bias=bias, out_dtype=dtype, use_fast_accum=is_fast, out=out
        )
    y = (a.float() @ b.float().t()) * (scales[0] * scales[1])
    if bias is not None:
        y = y + bias.float()
    y = y.to(dtype)
    return y if out is None else out.copy_(y)


class Scales:
    """The scales of all tensors that a network multiplies in fp8, and their amaxes.

    `combine`, if set, replaces amaxes by their maximum over the processes that share the layers,
    `combine_parts` by that over the processes that have other parts of one tensor.
    `keeps_casts` says whether weights are cast once a step, not for each use.
    All of these numbers lie 16 bytes apart, as torch._scaled_mm demands of scales.
    """

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.recipe = recipe
        self.device = device
        self.combine: Callable[[Tensor], None] | None = None
        self.combine_parts: Callable[[Tensor], None] | None = None
        self.keeps_casts = True
        self.slots: dict[str, int] = {}
        self.products: list[Fp8Product] = []
        self.weight_casts: Any = None  # a table for Triton, once there is one

    def add(self, names: Iterable[str]) -> dict[str, Fp8Product]:
        """Allocate the numbers of the named linear maps, and return their products by name."""
        # A linear map has three slots: its input, its weight, the gradient of its output.
        device = self.device
        largest: list[float] = []
        for name in names:
            self.products.append(Fp8Product(self, name, len(largest)))
            for role in ROLES:
                self.slots[f"{name}.{role}"] = len(largest)
                largest.append(LARGEST[self.recipe.format(role)])
        n = len(self.slots)
        self.largest = torch.tensor(largest, device=device)
        # Of each row only the first number is used: 4 float32 are the 16 bytes between scales.
        self.amax = torch.zeros(n, 4, device=device)
        self.scale = torch.ones(n, 4, device=device)
        self.inverse = torch.ones(n, 4, device=device)
        self.history = torch.zeros(n, self.recipe.history, device=device)
        # On the host: whether a scale has been chosen. Tensorwise, only those of weights are kept.
        self.is_set = [not self.is_kept(slot) for slot in range(n)]
        self.begun: set[int] = set()  # slots whose first scale was chosen in this step
        self.is_settled = True  # whether no first scale is to be chosen again
        self.steps = 0
        # Views made once: a step uses each many times.
        self.views = []
        for i in range(n):
            self.views.append((self.scale[i, 0], self.inverse[i, 0], self.amax[i, 0]))
        return {m.name: m for m in self.products}

    def cast(self, slot: int, x: Tensor, is_recorded: bool, is_transposed: bool) -> Cast:
        """Return x [N, C] in fp8; only recorded uses have a part in later scales."""
        if self.is_kept(slot):
            scale, inverse, amax = self.views[slot]
            if not self.is_set[slot]:
                self._begin(slot, x, is_recorded)
        else:
            scale, inverse = self.own_scale(slot, x)
            is_recorded = False
        out, transposed = empty_casts(x.shape, self.format(slot), self.device, is_transposed)
        quantise(x, scale, amax if is_recorded else None, out, transposed)
        return Cast(out, transposed, inverse)

    def write(
        self,
        slot: int,
        shape: Sequence[int],
        make: Callable[[Into | None], tuple[Tensor, Rest]],
        is_training: bool,
    ) -> tuple[Cast, Rest]:
        """Return in fp8 the matrix that `make` computes, and the rest of what it returns.

        `make(None)` computes bfloat16, from which a scale of its own is taken before the cast.
        """
        if not self.is_set[slot] or not self.is_kept(slot):
            y, rest = make(None)
            return self.cast(slot, y.view(shape), is_training, is_training), rest
        # The kernel that computes the matrix writes it in fp8 itself; another one transposes it.
        scale, inverse, amax = self.views[slot]
        out, transposed = empty_casts(shape, self.format(slot), self.device, is_training)
        _, rest = make(Into(out, scale, amax if is_training else None))
        if transposed is not None:
            transpose_into(out, transposed)
        return Cast(out, transposed, inverse), rest

    def is_kept(self, slot: int) -> bool:
        """Whether a tensor's scale is kept from step to step."""
        return not self.recipe.is_tensorwise or ROLES[slot % 3] == "weight"

    def own_scale(self, slot: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scale of a tensor's own largest number, and its inverse."""
        amax = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32).view(1)
        if self.combine_parts is not None:
            self.combine_parts(amax)
        scale = self._scale_of(slice(slot, slot + 1), amax, torch.ones_like(amax))
        inverse = 1 / scale
        return scale[0], inverse[0]

    def format(self, slot: int) -> torch.dtype:
        return self.recipe.format(ROLES[slot % 3])

    def _begin(self, slot: int, x: Tensor, is_recorded: bool) -> None:
        """Take a first scale from x; a validation before the first step does so each time.

        `combine` waits for the other processes. No process waits for ever: those that share layers
        run the same passes, and autograd goes back through a network in one order. A custom loss
        must not leave out the network in the first micro-batch of some of them only.
        """
        amax = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32).view(1)
        if is_recorded and self.combine is not None:
            self.combine(amax)
        self._choose(slice(slot, slot + 1), amax, self.scale[slot, :1].clone())
        if is_recorded:
            self.is_set[slot] = True
            self.begun.add(slot)

    def _choose(self, slots: slice, amax: Tensor, otherwise: Tensor) -> None:
        scale = self._scale_of(slots, amax, otherwise)
        self.scale[slots, 0] = scale
        self.inverse[slots, 0] = 1 / scale

    def _scale_of(self, slots: slice, amax: Tensor, otherwise: Tensor) -> Tensor:
        """Return the scales of amaxes; one of 0, or not finite, says nothing."""
        scale = self.largest[slots] / amax
        scale = scale * 2.0**-self.recipe.margin
        # Up to 2^100, so that neither a scale nor its inverse leaves float32's range.
        scale = scale.clamp(max=2.0**100)
        is_known = (amax > 0) & amax.isfinite()
        return torch.where(is_known, scale, otherwise)

    @torch.no_grad()
    def update(self) -> None:
        """Choose the next step's scales; the host reads amaxes if this one chose first scales."""
        if self.combine is not None:
            self.combine(self.amax)
        self._settle()
        self.steps += 1
        # The latest amaxes come first.
        history = self.history
        if self.recipe.history > 1:
            history[:, 1:] = history[:, :-1].clone()
        history[:, 0] = self.amax[:, 0]
        amax = history.amax(1) if self.recipe.uses_max else history[:, 0]
        self._choose(slice(None), amax, self.scale[:, 0].clone())
        self.amax.zero_()

    def _settle(self) -> None:
        """Let tensors that were all zeros, or not finite, choose a first scale again."""
        self.is_settled = True
        # Only here does the host read amaxes, which waits for the device.
        if self.begun and self.steps < BEGINNING:
            amaxes = self.amax[:, 0].tolist()
            for slot in self.begun:
                self.is_set[slot] = amaxes[slot] > 0
            self.is_settled = all(self.is_set[slot] for slot in self.begun)
        self.begun.clear()

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast the new weights, those that have been used at least once; on a GPU in one launch."""
        self._scale_weights()
        casts: list[tuple[Tensor, Tensor, Tensor, int]] = []
        for each in self.products:
            cast = each.cast
            if cast is None or cast.transposed is None or not is_triton(self.scale):
                each.refresh()
            else:
                # The weight's slot follows the input's; a row of scales has 4 numbers.
                casts.append((each.matrix, cast.rows, cast.transposed, 4 * (each.first + 1)))
        if casts:
            self.weight_casts = launcher("fp8.prepare_casts")(casts, self.weight_casts)
            launcher("fp8.quantise_many")(casts[0], self.weight_casts, self.scale, self.amax)

    def _scale_weights(self) -> None:
        """Take the scales of the weights from their own amaxes; those not used yet keep theirs."""
        used = [each for each in self.products if each.cast is not None]
        if not used:
            return
        matrices = [each.matrix for each in used]
        norms = iter(torch._foreach_norm(matrices, torch.inf, torch.float32))
        none = torch.zeros((), device=self.device)  # says nothing, so that the scale stays
        self.scale_weights([none if each.cast is None else next(norms) for each in self.products])

    @torch.no_grad()
    def scale_weights(self, amaxes: list[Tensor]) -> None:
        """Set the scales of the weights from their amaxes, or from those of their parts here."""
        amax = torch.stack(amaxes)
        if self.combine is not None:
            self.combine(amax)
        weights = slice(ROLES.index("weight"), None, len(ROLES))
        self._choose(weights, amax, self.scale[weights, 0].clone())

    @contextlib.contextmanager
    def trial(self, is_shared: bool = False) -> Iterator[None]:
        """Forget what the passes of this block record; all processes have a part if `is_shared`.

        Casts of weights that were there stay in their memory, which CUDA graphs read.
        """
        names = ("is_set", "begun", "is_settled", "steps", "combine", "combine_parts")
        kept = {name: copy.copy(getattr(self, name)) for name in names}
        tensors = self.tensors()
        before = [x.clone() for x in tensors]
        casts = [each.cast for each in self.products]
        if not is_shared:
            self.combine = self.combine_parts = None
        try:
            yield
        finally:
            vars(self).update(kept)
            torch._foreach_copy_(tensors, before)
            for each, cast in zip(self.products, casts, strict=True):
                each.cast = cast

    def tensors(self) -> list[Tensor]:
        """Return all that a step changes, but for the weights' casts."""
        return [self.amax, self.scale, self.inverse, self.history]

    # In a checkpoint

    def state(self, gather: Callable[[Any], list[Any]] = lambda mine: [mine]) -> dict[str, Any]:
        """Return the chosen scales with their histories by name, exactly.

        `gather` returns a value of every process, some of which have other layers.
        """
        rows = torch.cat([self.scale[:, :1], self.history], 1).tolist()
        mine: dict[str, list[float]] = {}
        for name, slot in self.slots.items():
            if self.is_set[slot] and self.is_kept(slot):
                mine[name] = rows[slot]
        everyone: dict[str, list[float]] = {}
        for some in gather(mine):
            everyone.update(some)
        return {"recipe": self._kind(), "scales": everyone, "steps": self.steps}

    def load(self, state: dict[str, Any] | None) -> None:
        """Continue with saved scales, if their recipe is this one; else begin anew."""
        if not state or state["recipe"] != self._kind():
            return
        self.steps = state.get("steps", BEGINNING)
        self.is_set = [not self.is_kept(slot) for slot in range(len(self.is_set))]
        self.begun.clear()
        self.scale.fill_(1.0)  # in place, where CUDA graphs read it
        self.history.zero_()
        for name, (scale, *history) in state["scales"].items():
            slot = self.slots.get(name)
            if slot is None:  # of another process's layers
                continue
            self.scale[slot, 0] = scale
            self.is_set[slot] = True
            # The saved history may be longer or shorter than this recipe's.
            saved = torch.tensor(history[: self.recipe.history], device=self.device)
            self.history[slot, : len(saved)] = saved
        self.inverse[:, 0] = 1 / self.scale[:, 0]
        self.is_settled = all(self.is_set) or self.steps >= BEGINNING
        # The amaxes are of a step that is undone. Casts, which CUDA graphs read, are refreshed in
        # place.
        self.amax.zero_()

    def _kind(self) -> dict[str, Any]:
        """Return what of the recipe a saved scale depends on."""
        kind: dict[str, Any] = {"hybrid": self.recipe.hybrid, "margin": self.recipe.margin}
        if self.recipe.is_tensorwise:
            kind["tensorwise"] = True
        return kind


class Fp8Product:
    """The products of one linear map, instead of kernels.linear.linear."""

    def __init__(self, scales: Scales, name: str, first: int) -> None:
        self.scales = scales
        self.name = name
        self.first = first
        self.parameter: Tensor | None = None  # known from the first use on
        self.cast: Cast | None = None

    def __call__(self, x: Tensor, parameter: Tensor, bias: Tensor | None = None) -> Tensor:
        self.know(parameter)
        return _Multiply.apply(x, parameter, bias, self, torch.is_grad_enabled())  # type: ignore[no-any-return,no-untyped-call]

    def know(self, parameter: Tensor) -> None:
        """Note the weight; cast it if its cast is to be kept, and is not there."""
        is_new = self.cast is None or self.parameter is not parameter
        self.parameter = parameter
        if is_new and self.scales.keeps_casts:
            self.refresh()

    def weight(self, is_transposed: bool) -> Cast:
        """Return the weight in fp8."""
        if self.scales.keeps_casts:
            assert self.cast is not None
            return self.cast
        return self.scales.cast(self.first + 1, self.matrix, True, is_transposed)

    @property
    def matrix(self) -> Tensor:
        """The weight; a stack of matrices is one."""
        assert self.parameter is not None
        return self.parameter.detach().flatten(0, -2)

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast the weight, into the same memory each time."""
        if self.parameter is None:
            return
        weight = self.matrix
        slot = self.first + 1
        # The first cast allocates, and takes a scale from the weight if none was loaded.
        if self.cast is None or self.cast.rows.shape != weight.shape:
            self.cast = self.scales.cast(slot, weight, True, True)
            return
        scale, _, amax = self.scales.views[slot]
        quantise(weight, scale, amax, self.cast.rows, self.cast.transposed)

    def multiply(self, x: Cast, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the product [N, out] of x [N, in], plus bias."""
        weight = self.weight(is_transposed=False)
        flat = None if bias is None else bias.flatten()
        return multiply(x.rows, weight.rows, (x.inverse, weight.inverse), dtype, flat)

    def differentiate(
        self,
        grad: Cast,
        transposed: Tensor,
        inverse: Tensor,
        parameter: Tensor,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the input and of the weight.

        The input is kept `transposed`, with the inverse of its scale.
        """
        self.know(parameter)
        weight = self.weight(is_transposed=True)
        assert weight.transposed is not None and grad.transposed is not None
        back = multiply(grad.rows, weight.transposed, (grad.inverse, weight.inverse), dtype)
        inverses = grad.inverse, inverse
        return back, give_gradient(parameter, grad.transposed, transposed, inverses)


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        parameter: Tensor,
        bias: Tensor | None,
        product: Fp8Product,
        is_training: bool,
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        q = product.scales.cast(product.first, flat, is_training, is_training)
        # A byte a number: all that backward needs of the input.
        if is_training:
            ctx.save_for_backward(q.transposed)
        # Not saved: autograd would take a scale that is set for a write to what it keeps.
        ctx.inverse = q.inverse
        ctx.product = product
        ctx.parameter = parameter
        ctx.bias = bias
        return product.multiply(q, bias, x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        (transposed,) = ctx.saved_tensors
        product = ctx.product
        flat = grad.reshape(-1, grad.shape[-1])
        q = product.scales.cast(product.first + 2, flat, True, True)
        of_x, of_weight = product.differentiate(
            q, transposed, ctx.inverse, ctx.parameter, grad.dtype
        )
        of_x = of_x.view(*grad.shape[:-1], -1)
        return of_x, of_weight, of_bias(ctx, grad), None, None


def give_gradient(
    parameter: Tensor, grad: Tensor, x: Tensor, scales: tuple[Tensor, Tensor]
) -> Tensor | None:
    """Give a parameter the gradient grad [out, N] @ x [in, N]^T, as gradients.from_product does."""
    # The sum is over all tokens, so its partial sums are not rounded (is_fast=False).
    main_grad = main_grad_of(parameter)
    if main_grad is None:
        return multiply(grad, x, scales, parameter.dtype, is_fast=False).view_as(parameter)
    total, adds = main_grad.begin()
    flat = total.view(len(grad), len(x))
    if adds:
        flat.add_(multiply(grad, x, scales, total.dtype, is_fast=False))
    else:
        multiply(grad, x, scales, total.dtype, out=flat, is_fast=False)
    main_grad.end()
    return None
