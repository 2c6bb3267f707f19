"""A block's norms, activation and split into heads, each together with the fp8 products beside it.

    norm_heads      x = residual + dropout(pending + bias); q, k, v = heads of qkv(norm(x)),
                    whose queries and keys may have norms of their own
    norm_mlp        x likewise; proj(activation(fc(norm(x))))

What a product multiplies is written only in fp8, by the kernel that computes it, and transposed by
another: 1 + 2 bytes a number, where bfloat16 and a cast have 2 + 4. These are single functions of
autograd, which wants a gradient in the format of the tensor that it belongs to. Their results are
those of the separate functions, bit for bit: numbers are rounded to bfloat16 before the cast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.kernels import activation, gradients, heads, norm, qk_norm
from meshwright.kernels.fp8 import Cast, Fp8Product, Into
from meshwright.kernels.heads import HeadSizes, Rotation
from meshwright.kernels.norm import NormWeights, Operands, SavedRows
from meshwright.kernels.qk_norm import HeadNorms, PackedGradients

Grads = tuple[Tensor | None, ...]


class Fp8Linear(NamedTuple):
    """A linear map in fp8."""

    product: Fp8Product
    weight: Tensor
    bias: Tensor | None

    def with_cast(self) -> Fp8Product:
        """Return the product, which has a cast of the weight."""
        self.product.know(self.weight)
        return self.product


def norm_heads(
    operands: Operands,
    weights: NormWeights,
    qkv: Fp8Linear,
    sizes: HeadSizes,
    rotation: Rotation | None,
    norms: HeadNorms | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, q, k and v; `sizes`, `rotation` and `norms` are those of qk_norm.py."""
    front = front_of(operands, weights, qkv)
    tensors = (*operands[:3], *weights[:2], *qkv[1:])
    vectors = () if norms is None else norms.vectors
    is_training = torch.is_grad_enabled()
    return _NormHeads.apply(front, sizes, rotation, norms, is_training, *tensors, *vectors)  # type: ignore[no-any-return,no-untyped-call]


def norm_mlp(
    operands: Operands, weights: NormWeights, kind: str, fc: Fp8Linear, proj: Fp8Linear
) -> tuple[Tensor, Tensor]:
    """Return x and the MLP's output; `kind` is that of activation.activate."""
    front = front_of(operands, weights, fc)
    cast = proj.with_cast()
    tensors = (*operands[:3], *weights[:2], *fc[1:], *proj[1:])
    return _NormMLP.apply(front, cast, kind, torch.is_grad_enabled(), *tensors)  # type: ignore[no-any-return,no-untyped-call]


def front_of(operands: Operands, weights: NormWeights, linear: Fp8Linear) -> _Front:
    """Gather what a norm and a product need, except for the tensors that have gradients."""
    rows = operands.rows if operands.p else None
    return _Front(linear.with_cast(), rows, operands.p, weights.eps, weights.plus, weights.centers)


class _Front(NamedTuple):
    """The common beginning: a norm and a product.

    Its tensors are residual, pending, bias, the norm's weight and bias, the map's weight and bias.
    """

    product: Fp8Product
    rows: Tensor | None
    p: float
    eps: float
    plus: float
    centers: bool

    def forward(
        self, ctx: Any, tensors: tuple[Any, ...], is_training: bool
    ) -> tuple[Tensor, Tensor, list[Any]]:
        """Return x, the product's output [N, C], and tensors that backward needs."""
        residual, pending, added, weight, shift, _, bias = tensors[:7]
        operands = norm.operands_of(residual, pending, added, self.rows, self.p)
        weights = NormWeights(weight, shift, self.eps, self.plus, self.centers)

        def make(into: Into | None) -> tuple[Tensor, list[Any]]:
            x, y, *of_rows = norm.forward(operands, weights, into)
            return y, [x, *of_rows]

        product = self.product
        shape = operands.pending.shape
        y, (x, *of_rows) = product.scales.write(product.first, shape, make, is_training)
        x = x.view(pending.shape) if operands.adds else pending
        # The end of SavedRows, which follows the tensors.
        ctx.rest = (
            self.p,
            self.plus,
            residual is not None,
            pending.dtype,
        )
        ctx.parameters = tensors[2:]  # not the activations before, which would stay in memory
        ctx.inverse = y.inverse
        out = product.multiply(y, bias, weight.dtype)
        return x, out, [x, *of_rows, operands.rows, weight, y.transposed]

    def backward(
        self,
        ctx: Any,
        tensors: Sequence[Any],
        needed: Sequence[bool],
        dx: Tensor,
        q: Cast,
        partials: Tensor | None,
    ) -> Grads:
        """Return its tensors' gradients from those of x and its output, q with partial sums."""
        x, *saved, transposed = tensors
        added, weight, shift, parameter, bias = ctx.parameters[:5]
        dy, of_parameter = self.product.differentiate(
            q, transposed, ctx.inverse, parameter, weight.dtype
        )
        of_bias = None if partials is None else gradients.from_columns(bias, partials)
        needs_added, needs_weight, needs_shift = needed[2:5]
        vectors = [
            weight if needs_weight else None,
            shift if needs_shift else None,
            added if needs_added else None,
        ]
        rows = SavedRows(norm.as_rows(x), *saved, *ctx.rest)
        of_residual, of_pending, of_weight, of_shift, of_added = norm.differentiate(
            dx, dy, rows, vectors, x.shape
        )
        return of_residual, of_pending, of_added, of_weight, of_shift, of_parameter, of_bias


class _NormHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        front: _Front,
        sizes: HeadSizes,
        rotation: Rotation | None,
        norms: HeadNorms | None,
        is_training: bool,
        *tensors: Any,
    ) -> tuple[Tensor, ...]:
        x, qkv, saved = front.forward(ctx, tensors, is_training)
        qkv = qkv.view(*x.shape[:-1], -1)
        ctx.front = front
        ctx.split = sizes, rotation, norms
        if norms is None:
            ctx.save_for_backward(*saved)
            return x, *heads.split_and_rotate(qkv, sizes, rotation)
        ctx.save_for_backward(*saved, qkv)
        return x, *qk_norm.norm_and_split(qkv, sizes, rotation, norms)

    @staticmethod
    def backward(ctx: Any, dx: Tensor, *grads: Tensor) -> Grads:
        # The gradient of qkv is packed from three, in fp8, for the product's backward pass.
        product = ctx.front.product
        sizes, rotation, norms = ctx.split
        saved = list(ctx.saved_tensors)  # read only once: each reading unpacks them
        # The arguments: five that are no tensors, seven of the front, those of the norms.
        needed = ctx.needs_input_grad[5:12]

        def make(into: Into | None) -> tuple[Tensor, PackedGradients | Tensor | None]:
            if norms is None:
                return heads.pack(grads, sizes, rotation, needed[-1], into)
            packed = qk_norm.pack(grads, saved[-1], sizes, rotation, norms, needed[-1], into)
            return packed.of_qkv, packed

        columns = sizes.groups * (sizes.per_group + 2) * sizes.head_dim
        shape = dx.numel() // dx.shape[-1], columns
        q, partials = product.scales.write(product.first + 2, shape, make, True)
        of_norms: list[Tensor | None] = []
        if isinstance(partials, PackedGradients):
            of_norms = qk_norm.give_gradients(partials, norms, ctx.needs_input_grad[12:])
            partials = partials.sums
            del saved[-1]  # the product's output, which only the norms need
        of_front = ctx.front.backward(ctx, saved, needed, dx, q, partials)
        return None, None, None, None, None, *of_front, *of_norms


class _NormMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, front: _Front, proj: Fp8Product, kind: str, is_training: bool, *tensors: Any
    ) -> tuple[Tensor, Tensor]:
        x, u, saved = front.forward(ctx, tensors, is_training)

        def make(into: Into | None) -> tuple[Tensor, None]:
            return activation.forward(kind, u, into), None

        # The activation is written for the second product only; bfloat16 never reaches memory.
        a, _ = proj.scales.write(proj.first, (len(u), tensors[7].shape[-1]), make, is_training)
        ctx.save_for_backward(*saved, u, a.transposed)
        ctx.proj_inverse = a.inverse
        ctx.front = front
        ctx.proj = proj
        ctx.kind = kind
        return x, proj.multiply(a, tensors[8], u.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dx: Tensor, grad: Tensor) -> Grads:
        *saved, u, transposed = ctx.saved_tensors
        product = ctx.front.product
        proj = ctx.proj
        # The second product, whose parameters come after the five of the front: ctx.parameters has
        # neither residual nor pending.
        weight, bias = ctx.parameters[5:7]
        rows = norm.as_rows(grad)
        q = proj.scales.cast(proj.first + 2, rows, True, True)
        if not ctx.needs_input_grad[-1]:
            bias = None
        of_bias = gradients.from_rows(bias, grad)
        da, of_weight = proj.differentiate(q, transposed, ctx.proj_inverse, weight, grad.dtype)
        # The activation, whose input is the first product's output.
        # The arguments: four that are no tensors, seven of the front, the second product's.
        needed = ctx.needs_input_grad[4:11]

        def make(into: Into | None) -> tuple[Tensor, Tensor | None]:
            return activation.backward(ctx.kind, u, da, needed[-1], into)

        q, partials = product.scales.write(product.first + 2, u.shape, make, True)
        of_front = ctx.front.backward(ctx, saved, needed, dx, q, partials)
        return None, None, None, None, *of_front, of_weight, of_bias
