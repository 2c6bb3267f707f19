"""The block of gpt.py made of fused kernels, run without a compiler.

The parameters and, up to rounding, the numbers are those of `Block`, its twin. cuBLAS computes the
products and torch's kernels the attention. Between them one kernel in each direction does what
would take several passes over memory: the addition to the residual stream with the norm after it,
the split into heads with their rotation, and the activation. The gradients of biases come out of
the same passes, so the products take their biases detached.
"""

from __future__ import annotations

from torch import Tensor, nn

from meshwright.kernels.activation import activate
from meshwright.kernels.heads import split_heads
from meshwright.kernels.norm import NormWeights, add_norm
from meshwright.model.attention import Shared
from meshwright.model.gpt import Block
from meshwright.model.layers import Norm


class FusedBlock(Block):
    def forward(
        self, residual: Tensor | None, pending: Tensor, shared: Shared, before: Tensor | None, after: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        x, y = add_norm(residual, pending, None, before, self.p, weights_of(self.ln_1))
        branch = self.attend(y, shared)
        base = y.to(x.dtype) if self.post_norm else x
        x, z = add_norm(base, branch, self.attn.proj.bias, after, self.p, weights_of(self.ln_2))
        return z.to(x.dtype) if self.post_norm else x, self.transform(z)

    @staticmethod
    def end(residual: Tensor | None, pending: Tensor, rows: Tensor | None, p: float, norm: Norm) -> Tensor:
        return add_norm(residual, pending, None, rows, p, weights_of(norm))[1]

    def attend(self, y: Tensor, shared: Shared) -> Tensor:
        """Return the attention's output without the bias, which the next join adds."""
        attn = self.attn
        qkv = multiply(attn.qkv, y)
        groups = qkv.shape[-1] // ((attn.per_group + 2) * attn.head_dim)
        q, k, v = split_heads(qkv, groups, attn.per_group, attn.head_dim, shared.rotation, attn.qkv.bias)
        o = attn.attend(q, k, v, shared)
        return attn.proj.product(o.reshape(*o.shape[:2], -1), attn.proj.weight)

    def transform(self, z: Tensor) -> Tensor:
        """Return the MLP's output."""
        mlp = self.mlp
        a = activate(mlp.activation, multiply(mlp.fc, z), mlp.fc.bias)
        return mlp.proj.product(a, mlp.proj.weight, mlp.proj.bias)


def multiply(layer: nn.Module, x: Tensor) -> Tensor:
    """Apply a Linear or Gated layer; another kernel computes the gradient of its bias."""
    bias = layer.bias
    return layer.product(x, layer.weight, None if bias is None else bias.detach().flatten())  # type: ignore[operator,no-any-return]


def weights_of(norm: Norm) -> NormWeights:
    return NormWeights(norm.weight, norm.bias, norm.eps, norm.plus)
