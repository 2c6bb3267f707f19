"""Tensor, sequence and context parallelism, applied to the plain model from outside.

Hand-written because DTensor dispatches every operation anew and cannot cut rows as done here: every
layer computes on plain local tensors, and there is one collective wherever a drawing of the method
has an arrow.

Tensor: a layer's first products (attn.qkv, mlp.fc) are cut by outputs, its second ones (attn.proj,
mlp.proj) by inputs, so their results are partial sums. The token table and the head are cut by ids.

    plain rows of x --enter--> [qkv or fc | attention or activation | proj] --leave--> plain rows

    without sequence parallelism   enter: backward sums        leave: all-reduce
    with it, rows are cut too      enter: all-gather of rows   leave: reduce-scatter of rows

The backward collectives of `enter` overlap the product for the weight's gradient. With sequence
parallelism, the others can overlap the products that they belong to (overlap.py).

A rank keeps consecutive rows of all B x T tokens, so that neither collective needs a copy: the
residual stream is [1, B T / tp, H], and operations on single rows (norms, dropout, additions) are
unaffected.

Context: every rank holds consecutive columns of each sequence. Around the attention kernel, all
heads for these columns are exchanged for all columns of some heads (Ulysses), so that every kernel
and every mask works unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.config.matrices import matrices_of
from meshwright.kernels import gradients
from meshwright.kernels.cross_entropy import Combine
from meshwright.kernels.linear import add_bias, linear
from meshwright.kernels.matmul import affine, product
from meshwright.model.attention import Attend
from meshwright.model.positions import Shared
from meshwright.parallel import comm, shard
from meshwright.parallel.layout import Layout
from meshwright.parallel.overlap import PlainMatmuls

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from meshwright.model.gpt import GPT


Multiply = Callable[..., Tensor]  # as kernels.linear.linear


class _ColumnParallel(torch.autograd.Function):
    """x @ W with this rank's columns of W, where every rank has all rows.

    Backward sums the input's gradient over the ranks while it computes the weight's.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, parameter: Tensor, bias: Tensor | None, group: ProcessGroup
    ) -> Tensor:
        ctx.save_for_backward(x, parameter)
        ctx.group = group
        ctx.parameter = parameter
        ctx.bias = bias
        return affine(x, parameter.flatten(0, -2), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        x, parameter = ctx.saved_tensors
        # The sum over the ranks runs while the parameters' gradients are computed.
        of_x = product(grad, parameter.flatten(0, -2))
        back = comm.start_all_reduce(of_x, ctx.group)
        of_bias = gradients.of_bias(ctx, grad)
        of_weight = gradients.from_product(ctx.parameter, grad, x)
        return comm.wait_for(back), of_weight, of_bias, None


class _GatheredColumnParallel(torch.autograd.Function):
    """The same where rows are cut too; backward gathers the other ranks' rows again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, parameter: Tensor, bias: Tensor | None, by: PlainMatmuls
    ) -> Tensor:
        ctx.save_for_backward(x, parameter)
        ctx.by = by
        ctx.parameter = parameter
        ctx.bias = bias
        return by.gather_multiply(x, parameter.flatten(0, -2), bias)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        x, parameter = ctx.saved_tensors
        # Rows arrive while the input's gradient is computed, and that is summed over the ranks
        # while the parameters' are.
        rows = ctx.by.start_gather(x)
        back = ctx.by.back_multiply_scatter(grad, parameter.flatten(0, -2))
        of_bias = gradients.of_bias(ctx, grad)
        of_weight = gradients.from_product(ctx.parameter, grad, comm.wait_for(rows))
        return comm.wait_for(back), of_weight, of_bias, None


class _RowParallel(torch.autograd.Function):
    """x @ W + b with this rank's rows of W: the sum over the ranks, cut into rows [1, n, H]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, parameter: Tensor, bias: Tensor | None, by: PlainMatmuls
    ) -> Tensor:
        ctx.save_for_backward(x, parameter)
        ctx.by = by
        ctx.parameter = parameter
        ctx.bias = bias
        return comm.wait_for(by.multiply_scatter(x, parameter, bias)).unsqueeze(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        x, parameter = ctx.saved_tensors
        # From the gradient as it comes, with which the sums of its columns may be kept.
        of_bias = gradients.of_bias(ctx, grad)
        of_x, rows = ctx.by.back_gather_multiply(grad[0], parameter)
        of_weight = gradients.from_product(ctx.parameter, rows, x)
        return of_x, of_weight, of_bias, None


class VocabularyRows(nn.Module):
    """The token table's rows for the ids from `first` on."""

    def __init__(self, plain: nn.Embedding, first: int, add_up: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = plain.weight
        self.first = first
        self.add_up = add_up

    def forward(self, ids: Tensor) -> Tensor:
        rows = ids - self.first
        is_own = (rows >= 0) & (rows < len(self.weight))
        # Other ranks' ids look up row 0, whose result becomes 0.
        rows = rows.where(is_own, 0)
        x = F.embedding(rows, self.weight)
        return self.add_up(x.masked_fill(~is_own.unsqueeze(-1), 0))


class Exchanged(nn.Module):
    """Attention over all columns for some heads: one all-to-all before the kernel, one after."""

    def __init__(self, attend: Attend, group: ProcessGroup, ranks: int) -> None:
        super().__init__()
        self.attend = attend
        self.group = group
        self.ranks = ranks

    def forward(self, q: Tensor, k: Tensor, v: Tensor, shared: Shared) -> Tensor:
        n = self.ranks
        b, t, _, d = q.shape
        # Sent [destination, B, T / n, heads and groups / n, d], received [source, B, ...]; a name
        # of its own would keep either through attention.
        parts = [x.view(b, t, n, -1, d).permute(2, 0, 1, 3, 4) for x in (q, k, v)]
        columns = comm.exchanged(torch.cat(parts, dim=3), self.group)
        columns = columns.transpose(0, 1).reshape(b, n * t, -1, d)
        sizes = [x.shape[3] for x in parts]
        q, k, v = columns.split(sizes, dim=2)  # type: ignore[no-untyped-call]
        o = self.attend(q, k, v, shared)  # [B, T, heads / n, d]
        # [rank whose heads these are, B, T / n, heads / n, d]
        o = o.reshape(b, n, t, -1, d).transpose(0, 1)
        o = comm.exchanged(o, self.group)
        return o.permute(1, 2, 0, 3, 4).reshape(b, t, -1, d)


@dataclass
class SampleColumns:
    """The tokens of a sequence on this rank, in the micro-batch that is computed."""

    number: int = 0


def shard_layers(
    model: GPT, layout: Layout, by_rows: PlainMatmuls | None, columns: SampleColumns
) -> range | None:
    """Cut the model (on the meta device) to this rank's part; return the heads it computes.

    `by_rows` multiplies with sequence parallelism, None is without, which does not need `columns`.
    """
    m = model.m
    tp = layout.group("tp")
    cp = layout.group("cp")
    sequence = by_rows is not None
    blocks: list[Any] = list(model.h.children())
    heads = None
    if tp is not None or cp is not None:
        # A tensor rank's heads are divided among its context ranks.
        assert m.num_attention_heads
        count = m.num_attention_heads // (layout.tp * layout.cp)
        first = (layout.at("tp") * layout.cp + layout.at("cp")) * count
        heads = range(first, first + count)
    if cp is not None:
        for block in blocks:
            block.attn.attend = Exchanged(block.attn.attend, cp, layout.cp)
    if tp is None:
        return heads

    def column_parallel(
        x: Tensor, parameter: Tensor, bias: Tensor | None = None, by: Multiply = linear
    ) -> Tensor:
        """Multiply as a layer's first products and the head do; `by` may be another product."""
        rows = x.flatten(0, -2)
        y: Tensor
        if by is not linear:
            # Such as fp8's, which cannot be taken apart to overlap with a collective.
            rows = comm.gathered(rows, tp) if sequence else comm.copied(rows, tp)
            y = by(rows, parameter, bias)
        elif sequence:
            y = _GatheredColumnParallel.apply(rows, parameter, bias, by_rows)  # type: ignore[no-untyped-call]
        else:
            y = _ColumnParallel.apply(rows, parameter, bias, tp)  # type: ignore[no-untyped-call]
        return y.view(-1, columns.number, y.shape[-1]) if sequence else y.view(*x.shape[:-1], -1)

    def add_up(y: Tensor) -> Tensor:
        return comm.scattered(y.flatten(0, 1), tp).unsqueeze(0) if sequence else comm.summed(y, tp)

    def row_parallel(
        x: Tensor, parameter: Tensor, bias: Tensor | None = None, by: Multiply = linear
    ) -> Tensor:
        """Multiply as a layer's second products do: partial sums, added up before the bias."""
        if not sequence or by is not linear:
            return add_bias(add_up(by(x, parameter)), bias)
        return _RowParallel.apply(x.flatten(0, 1), parameter, bias, by_rows)  # type: ignore[no-any-return,no-untyped-call]

    # Replace each parameter that is cut by one of its part's shape.
    for name, p in list(model.named_parameters()):
        rule = shard.rule(name)
        if rule.cut is not None:
            shape = list(p.shape)
            shape[rule.cut] //= layout.tp
            part = nn.Parameter(torch.empty(shape, device=p.device))
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, part)

    # Then the products around which there are collectives, the token table and the head.
    for block in blocks:
        for name, matrix in matrices_of(m).items():
            is_first = matrix.pair == "first"
            block.get_submodule(name).product = column_parallel if is_first else row_parallel
    if hasattr(model, "wte"):  # the first stage, and the last one if the head is tied
        model.wte = VocabularyRows(model.wte, layout.at("tp") * len(model.wte.weight), add_up)  # type: ignore[assignment]
    model.product = column_parallel
    return heads


def combine_over(group: ProcessGroup | None) -> Combine | None:
    """Return how to combine the ranks' parts of a cross entropy whose logits are cut by ids.

    The result is the log-sum-exp over the full vocabulary and the label's logit.
    """
    if group is None:
        return None

    def combine(lse: Tensor, picked: Tensor) -> tuple[Tensor, Tensor]:
        high = comm.all_reduce(lse, group, "max")
        # Relative to the highest, as any log-sum-exp; both sums travel together.
        shares = (lse - high).exp()
        total, picked = comm.all_reduce(torch.stack([shares, picked]), group)
        return total.log() + high, picked

    return combine
