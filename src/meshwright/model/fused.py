"""The block of gpt.py made of fused kernels, run without a compiler.

The parameters and, up to rounding, the numbers are those of `Block`, its reference. cuBLAS computes
the products and torch's kernels the attention. Between them one kernel in each direction does what
would take several passes over memory: the addition to the residual stream with the norm after it,
the split into heads with their norms and their rotation, and the activation. The gradients of
biases come out of the same passes, so the products take their biases detached.
"""

from __future__ import annotations

from torch import Tensor, nn

from meshwright.kernels.activation import activate
from meshwright.kernels.heads import HeadSizes, split_heads
from meshwright.kernels.norm import NormWeights, add_norm
from meshwright.kernels.qk_norm import HeadNorms, split_and_norm_heads
from meshwright.model.gpt import Block, join
from meshwright.model.layers import Norm
from meshwright.model.positions import Shared


class FusedBlock(Block):
    def forward(
        self,
        residual: Tensor | None,
        pending: Tensor,
        shared: Shared,
        before: Tensor | None,
        after: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        base, q, k, v = self.enter(residual, pending, before, shared)
        if shared.where.cached is not None:
            k, v = shared.where.cached.append(self.attn.layer, k, v)
        o = self.attn.attend(q, k, v, shared).flatten(2)
        proj = self.attn.proj
        if not self.parallel:
            # The bias of this product is added by the kernel of the next norm.
            return self.transform(base, proj.product(o, proj.weight), proj.bias, after)
        # The MLP reads the stream from before attention, whose output is added apart. The norm's
        # kernel adds nothing to the stream, but its gradient to that of the stream.
        branch = proj.product(o, proj.weight, proj.bias)
        base, out = self.transform(None, base, None, None)
        return join(base, branch, after, self.p), out

    @staticmethod
    def end(
        residual: Tensor | None, pending: Tensor, rows: Tensor | None, p: float, norm: Norm
    ) -> Tensor:
        return add_norm(residual, pending, None, rows, p, weights_of(norm))[1]

    def enter(
        self, residual: Tensor | None, pending: Tensor, rows: Tensor | None, shared: Shared
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the residual stream, and attention's inputs."""
        x, y = add_norm(residual, pending, None, rows, self.p, weights_of(self.ln_1))
        attn = self.attn
        qkv = apply_unbiased(attn.qkv, y)
        sizes = self.sizes(qkv.shape[-1])
        norms = self.head_norms()
        if norms is None:
            q, k, v = split_heads(qkv, sizes, shared.rotation, attn.qkv.bias)
        else:
            q, k, v = split_and_norm_heads(qkv, sizes, shared.rotation, attn.qkv.bias, norms)
        if self.post_norm:
            x = y.to(x.dtype)
        return x, q, k, v

    def transform(
        self,
        residual: Tensor | None,
        pending: Tensor,
        bias: Tensor | None,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the stream that ln_2 reads and the MLP's output; `bias` is that of pending."""
        x, z = add_norm(residual, pending, bias, rows, self.p, weights_of(self.ln_2))
        fc = self.mlp.fc
        a = activate(self.mlp.activation, apply_unbiased(fc, z), fc.bias)
        proj = self.mlp.proj
        y = proj.product(a, proj.weight, proj.bias)
        if self.post_norm:
            x = z.to(x.dtype)
        return x, y

    def head_norms(self) -> HeadNorms | None:
        """Return the norms of queries and keys, if there are any."""
        attn = self.attn
        if attn.ln_q is None or attn.ln_k is None:
            return None
        return HeadNorms(weights_of(attn.ln_q), weights_of(attn.ln_k))

    def sizes(self, columns: int) -> HeadSizes:
        """Return the sizes of the heads that so many columns of attention's first product hold."""
        attn = self.attn
        # A group has its queries, one key and one value; a tensor rank has some of the groups.
        per_group = (attn.per_group + 2) * attn.head_dim
        return HeadSizes(columns // per_group, attn.per_group, attn.head_dim)


def apply_unbiased(layer: nn.Module, x: Tensor) -> Tensor:
    """Apply a Linear or Gated layer; another kernel computes the gradient of its bias."""
    bias = layer.bias
    return layer.product(x, layer.weight, None if bias is None else bias.detach().flatten())  # type: ignore[operator,no-any-return]


def weights_of(norm: Norm) -> NormWeights:
    return NormWeights(norm.weight, norm.bias, norm.eps, norm.plus, norm.centers)
