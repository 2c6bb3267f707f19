"""GPT-2: the whole network in one file. It knows no ranks, no groups, no files.

    tokens -> wte + wpe -> [ln_1 -> attn -> +, ln_2 -> mlp -> +] x layers -> ln_f -> logits by the token table

A block takes and returns (residual, pending): pending is the last branch's output before dropout and the addition, so
that a fused kernel can join that addition with the next norm. `Block.join` adds; the places where it happens are
numbered (0: the embedding's dropout, 2i+1: after attention i, 2i+2: after MLP i), and that number is the dropout's site.

Names are those of the checkpoint: wte, wpe, h.{i}.ln_1, h.{i}.attn.qkv, h.{i}.attn.proj, h.{i}.ln_2, h.{i}.mlp.fc,
h.{i}.mlp.proj, ln_f, lm_head (only when untied). i is the layer's number in the whole model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright import config
from meshwright.kernels.dropout import dropout
from meshwright.model.attention import Where, attend


class Linear(nn.Linear):
    """Draws no initial values where there is no memory yet: `initialise` will, and torch takes a second to draw nothing."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class Embedding(nn.Embedding):
    """Likewise."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class Attention(nn.Module):
    def __init__(self, m: config.Model, layer: int) -> None:
        super().__init__()
        assert m.hidden_size and m.num_attention_heads
        self.layer, self.head_dim, self.p, self.impl = layer, m.head_dim, m.attention_dropout, m.attention_impl
        width = m.num_attention_heads * m.head_dim
        self.qkv = Linear(m.hidden_size, 3 * width)  # rows [head, 3, head_dim]
        self.proj = Linear(width, m.hidden_size)

    def forward(self, x: Tensor, where: Where) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, -1, 3, self.head_dim).unbind(3)  # each [B, T, heads, head_dim]
        if self.layer in where.caches:
            k, v = where.caches[self.layer].append(k, v)
        p = self.p if self.training and where.samples is not None else 0.0
        return self.proj(attend(q, k, v, p, self.impl, self.layer, where).reshape(b, t, -1))  # type: ignore[no-any-return]


class MLP(nn.Module):
    def __init__(self, m: config.Model) -> None:
        super().__init__()
        assert m.hidden_size
        self.gelu = m.gelu
        self.fc = Linear(m.hidden_size, m.ffn)
        self.proj = Linear(m.ffn, m.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.gelu(self.fc(x), approximate=self.gelu))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, m: config.Model, layer: int) -> None:
        super().__init__()
        assert m.hidden_size
        self.layer, self.p = layer, m.hidden_dropout
        self.ln_1 = nn.LayerNorm(m.hidden_size, m.layernorm_epsilon)
        self.attn = Attention(m, layer)
        self.ln_2 = nn.LayerNorm(m.hidden_size, m.layernorm_epsilon)
        self.mlp = MLP(m)

    def forward(self, residual: Tensor | None, pending: Tensor, where: Where) -> tuple[Tensor, Tensor]:
        residual = self.join(residual, pending, 2 * self.layer, where)
        residual = self.join(residual, self.attn(self.ln_1(residual), where), 2 * self.layer + 1, where)
        return residual, self.mlp(self.ln_2(residual))

    def join(self, residual: Tensor | None, pending: Tensor, site: int, where: Where) -> Tensor:
        """residual + dropout(pending); there is no residual yet behind the embedding."""
        if self.p > 0 and self.training and where.samples is not None:
            pending = dropout(pending, where.rows, site, self.p)
        return pending if residual is None else residual + pending


class GPT(nn.Module):
    """The model. `padded` rows beyond `vocab` exist for the speed of the matrix products: zero, never a prediction."""

    def __init__(
        self,
        m: config.Model,
        vocab: int,
        padded: int,
        positions: int,
        block: type[Block] = Block,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        assert m.hidden_size and m.num_layers
        self.vocab, self.layers, self.recompute = vocab, m.num_layers, recompute
        self.wte = Embedding(padded, m.hidden_size)
        self.wpe = Embedding(positions, m.hidden_size)
        self.h = nn.ModuleDict({str(i): block(m, i) for i in range(m.num_layers)})
        self.ln_f = nn.LayerNorm(m.hidden_size, m.layernorm_epsilon)
        untied = m.untie_embeddings_and_output_weights
        self.lm_head = Linear(m.hidden_size, padded, bias=False) if untied else None

    def forward(
        self, tokens: Tensor, where: Where, position_ids: Tensor | None = None, last_only: bool = False
    ) -> Tensor:
        """tokens [B, T] -> logits [B, T, padded] (of the last token alone: [B, 1, padded]); padded rows give -inf."""
        if where.positions is None:
            where.positions = torch.arange(tokens.shape[1], device=tokens.device)
        residual, pending = None, self.wte(tokens) + self.wpe(where.positions if position_ids is None else position_ids)
        for block in self.h.values():
            if self.recompute and self.training:  # dropout needs no saved random state: its mask is a function
                residual, pending = checkpoint(
                    block, residual, pending, where, use_reentrant=False, preserve_rng_state=False
                )
            else:
                residual, pending = block(residual, pending, where)
        x = self.finish(residual, pending, where)
        return self.head(x[:, -1:] if last_only else x)

    def finish(self, residual: Tensor | None, pending: Tensor, where: Where) -> Tensor:
        """The last addition."""
        return self.h[str(self.layers - 1)].join(residual, pending, 2 * self.layers, where)  # type: ignore[operator,no-any-return]

    def head(self, x: Tensor) -> Tensor:
        logits = F.linear(self.ln_f(x), self.wte.weight if self.lm_head is None else self.lm_head.weight)
        if logits.shape[-1] > self.vocab:
            logits[..., self.vocab :] = float("-inf")  # in place: no second copy of the largest tensor
        return logits


@torch.no_grad()
def initialise(masters: Iterable[tuple[str, Tensor]], m: config.Model, vocab: int, seed: int) -> None:
    """Fill the weights: normal(0, std), the two projections into the residual std / sqrt(2 layers), biases 0, norms 1.

    Each tensor is drawn whole, at the true vocabulary size, in float32 on the CPU, from a generator seeded by (seed,
    name): so the values depend on no device, no precision, no padding, no layout and no other tensor.
    """
    assert m.num_layers
    for name, p in masters:
        kind = name.removesuffix(".weight").split(".")[-1]
        if name.endswith("bias"):
            p.zero_()
        elif kind.startswith("ln_"):
            p.fill_(1.0)
        else:
            std = m.init_method_std / (2 * m.num_layers) ** 0.5 if kind == "proj" else m.init_method_std
            true_rows = vocab if kind in ("wte", "lm_head") else p.shape[0]
            name_seed = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little") >> 1
            draw = torch.empty(true_rows, p.shape[1]).normal_(
                0, std, generator=torch.Generator().manual_seed(name_seed)
            )
            p[:true_rows] = draw.to(p.device)
            p[true_rows:] = 0
