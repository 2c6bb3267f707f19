"""A GPT in plain PyTorch, as people write it after nanoGPT, to compare the guides' commands with.

float32 weights under bfloat16 autocast, SDPA, torch.compile and fused AdamW. The model is compiled
as a whole or, where layers are recomputed, block by block within torch's checkpoints. A step
accumulates the micro-batches of the row.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright.config.schema import Model


class PlainBlock(nn.Module):
    def __init__(self, m: Model) -> None:
        super().__init__()
        h = m.hidden_size or 0
        self.heads = m.num_attention_heads or 1
        self.p = m.hidden_dropout
        self.p_attention = m.attention_dropout
        self.ln_1 = nn.LayerNorm(h)
        self.qkv = nn.Linear(h, 3 * h)
        self.proj = nn.Linear(h, h)
        self.ln_2 = nn.LayerNorm(h)
        self.fc = nn.Linear(h, m.ffn)
        self.out = nn.Linear(m.ffn, h)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.ln_1(x))
        qkv = qkv.view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.transpose(1, 3).unbind(2)
        o = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p_attention, is_causal=True)
        o = o.transpose(1, 2).reshape(batch, length, width)
        x = x + F.dropout(self.proj(o), self.p)

        y = self.fc(self.ln_2(x))
        y = F.gelu(y, approximate="tanh")
        return x + F.dropout(self.out(y), self.p)


class PlainGPT(nn.Module):
    def __init__(self, m: Model, length: int, padded: int, recomputes: bool) -> None:
        super().__init__()
        h = m.hidden_size or 0
        self.wte = nn.Embedding(padded, h)
        self.wpe = nn.Embedding(length, h)
        self.blocks = nn.ModuleList(PlainBlock(m) for _ in range(m.num_layers or 0))
        self.ln_f = nn.LayerNorm(h)
        self.p = m.hidden_dropout
        self.recomputes = recomputes
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.wte(ids) + self.wpe(places)
        x = F.dropout(x, self.p)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        x = self.ln_f(x)
        logits = F.linear(x, self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def compiled(m: Model, length: int, padded: int, recomputes: bool) -> Any:
    """Return the compiled network; shapes stay the same, so no symbolic ones are compiled."""
    network = PlainGPT(m, length, padded, recomputes)
    if not recomputes:
        return network, torch.compile(network, dynamic=False)
    for block in network.blocks:
        block.compile(dynamic=False)
    return network, network


def precision(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if device.type == "cpu":
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16)
