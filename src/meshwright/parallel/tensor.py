"""Tensor, sequence and context parallelism, put onto the plain model from outside.

Hand-written because DTensors dispatch every operation anew and know no rows cut as here: every layer computes on plain local
tensors, and a collective stands wherever a picture of the method has an arrow.

Tensor: a layer's first products (attn.qkv, mlp.fc) are cut by outputs, its second ones (attn.proj, mlp.proj) by inputs; what
comes out of these are parts of a sum. The token table and the head are cut by ids.

    plain rows of x --enter--> [qkv or fc | attention or activation | proj] --leave--> plain rows

    without sequence parallelism   enter: backward sums        leave: the sum (all-reduce)
    with it, rows are cut as well  enter: all-gather of rows   leave: each rank gets its rows of the sum (reduce-scatter)

The rows that a rank keeps are consecutive ones of all B x T tokens, so that both collectives need no copy: the residual
stream is [1, B T / tp, H] there, and whatever acts on single rows (norms, dropout, additions) does not notice.

Context: every rank holds some consecutive columns of each sequence. Around the attention kernel all columns of some heads
are exchanged for some columns of all heads (Ulysses), so that every kernel and every mask works as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.kernels.cross_entropy import Combine
from meshwright.kernels.linear import linear
from meshwright.model.attention import Attend, Shared
from meshwright.parallel import comm, shard
from meshwright.parallel.layout import Layout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from meshwright.model.gpt import GPT
    from meshwright.model.layers import Linear


class Row(nn.Module):
    """A linear map of which this rank has some inputs; the bias joins the sum."""

    def __init__(self, plain: Linear, leave: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.bias, self.leave = plain.weight, plain.bias, leave

    def forward(self, x: Tensor) -> Tensor:
        y = self.leave(linear(x, self.weight))
        return y if self.bias is None else y + self.bias


class Rows(nn.Module):
    """The token table of which this rank has the ids from `first` on."""

    def __init__(self, plain: nn.Embedding, first: int, leave: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.first, self.leave = plain.weight, first, leave

    def forward(self, ids: Tensor) -> Tensor:
        here = (ids >= self.first) & (ids < self.first + len(self.weight))
        x = F.embedding((ids - self.first).where(here, 0), self.weight)
        return self.leave(x.masked_fill(~here.unsqueeze(-1), 0))


class Exchanged(nn.Module):
    """Attention over all columns for some of the heads: one all-to-all before the kernel, one behind it."""

    def __init__(self, attend: Attend, group: ProcessGroup, ranks: int) -> None:
        super().__init__()
        self.attend, self.group, self.ranks = attend, group, ranks

    def forward(self, q: Tensor, k: Tensor, v: Tensor, shared: Shared) -> Tensor:
        n, b, t, d = self.ranks, q.shape[0], q.shape[1], q.shape[3]
        parts = [x.view(b, t, n, -1, d) for x in (q, k, v)]
        sent = torch.cat(parts, dim=3).permute(2, 0, 1, 3, 4)  # [to whom, B, T / n, heads and groups / n, d]
        got = comm.exchanged(sent, self.group).transpose(0, 1)  # [B, from whom, ...]
        q, k, v = got.reshape(b, n * t, -1, d).split([x.shape[3] for x in parts], dim=2)  # type: ignore[no-untyped-call]
        o = self.attend(q, k, v, shared)  # [B, T, heads / n, d]
        o = comm.exchanged(
            o.reshape(b, n, t, -1, d).transpose(0, 1), self.group
        )  # [whose heads, B, T / n, heads / n, d]
        return o.permute(1, 2, 0, 3, 4).reshape(b, t, -1, d)


def spread(model: GPT, layout: Layout, sequence: bool, columns: int) -> range | None:
    """Cut the model, which is on the meta device, to this rank's part; `columns`: tokens of a sequence on this rank. Returns
    which heads it computes."""
    m, tp, cp = model.m, layout.group("tp"), layout.group("cp")
    blocks: list[Any] = list(model.h.children())
    heads = None
    if tp is not None or cp is not None:
        assert m.num_attention_heads
        count = m.num_attention_heads // (layout.tp * layout.cp)
        first = (layout.at("tp") * layout.cp + layout.at("cp")) * count
        heads = range(first, first + count)
    if cp is not None:
        for block in blocks:
            block.attn.attend = Exchanged(block.attn.attend, cp, layout.cp)
    if tp is None:
        return heads

    def enter(x: Tensor) -> Tensor:
        if not sequence:
            return comm.copied(x, tp)
        return comm.gathered(x.flatten(0, 1), tp).view(-1, columns, x.shape[-1])

    def leave(y: Tensor) -> Tensor:
        return comm.scattered(y.flatten(0, 1), tp).unsqueeze(0) if sequence else comm.summed(y, tp)

    def entering(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (enter(args[0]),)

    for name, p in list(model.named_parameters()):
        rule = shard.rule(name)
        if rule is not None and rule.cut is not None:
            shape = list(p.shape)
            shape[rule.cut] //= layout.tp
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, nn.Parameter(torch.empty(shape, device=p.device)))
    for block in blocks:
        for part, entry in ((block.attn, block.attn.qkv), (block.mlp, block.mlp.fc)):
            entry.register_forward_pre_hook(entering)
            part.proj = Row(part.proj, leave)
    if model.first or hasattr(model, "wte"):
        model.wte = Rows(model.wte, layout.at("tp") * len(model.wte.weight), leave)  # type: ignore[assignment]
    if model.last:
        model.ln_f.register_forward_hook(lambda module, args, y: enter(y))
    return heads


def joining(layout: Layout) -> Combine | None:
    """For a cross entropy whose logits are cut by ids: the whole vocabulary's log-sum-exp, and the label's logit."""
    group = layout.group("tp")
    if group is None:
        return None

    def combine(lse: Tensor, picked: Tensor) -> tuple[Tensor, Tensor]:
        high = comm.all_reduce(lse, group, "max")
        both = comm.all_reduce(torch.stack([(lse - high).exp(), picked]), group)
        return both[0].log() + high, both[1]

    return combine
