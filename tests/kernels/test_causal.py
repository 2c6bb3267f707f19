"""Attention by products on a CPU: as exact as torch's kernel, and chosen where it is faster.

Torch's own kernel is not run in bfloat16: some processors lack what it needs.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.config.schema import Model
from meshwright.kernels import causal
from meshwright.model import attention
from meshwright.model.positions import Positions, Shared

SPACING = 2.0**-8  # of bfloat16, relative


def by_torch(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def results(attend, inputs, grad):
    """Return the output and the gradients of q, k and v."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    o = attend(*leaves)
    return [o.detach(), *torch.autograd.grad(o, leaves, grad)]


def draw(batch, length, heads, groups, dim, spread=1.0):
    """Draw q, k, v as views of one product, and the gradient of the output; all in bfloat16."""
    torch.manual_seed(0)
    each = torch.randn(batch, length, groups, heads // groups + 2, dim)
    each[..., :-1, :] *= spread**0.5
    q, k, v = each.bfloat16().split([heads // groups, 1, 1], dim=3)
    grad = torch.randn(batch, length, heads, dim).bfloat16()
    return [x.reshape(batch, length, -1, dim) for x in (q, k, v)], grad


@pytest.mark.parametrize("spread", [1.0, 16.0])  # standard deviation of the scores
@pytest.mark.parametrize(
    "sizes",
    [
        (2, 256, 3, 3, 64),
        (1, 300, 2, 2, 48),  # the last block is short, the scale no power of two
        (3, 130, 4, 2, 32),  # two heads read the same keys
        (2, 64, 2, 1, 16),  # one block
    ],
)
def test_as_exact_as_torchs_kernel(sizes, spread, monkeypatch):
    """Torch's errors are up to 0.5 of bfloat16's spacing for the output and 2.2 for gradients.

    Scores that are rounded to bfloat16 have nine times as much at spread 16.
    """
    monkeypatch.setattr(causal, "SCORES", sizes[2] * 128 * sizes[1] * 2)  # of two samples at a time
    inputs, grad = draw(*sizes, spread=spread)
    exact = results(by_torch, [x.double() for x in inputs], grad.double())
    ours = results(causal.attend, inputs, grad)
    for mine, want, allowed in zip(ours, exact, (0.75, 2.2, 2.2, 2.2), strict=True):
        assert mine.dtype is torch.bfloat16 and mine.shape == want.shape
        assert (mine.double() - want).norm() <= allowed * SPACING * want.norm()


def test_no_scores_are_kept():
    kept = []
    inputs, _ = draw(2, 128, 2, 2, 32)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()), lambda x: x):
        causal.attend(*(x.requires_grad_() for x in inputs))
    assert sum(kept) == sum(x.numel() for x in inputs) + 2 * 2 * 128


@pytest.mark.parametrize(
    "length, dtype, impl, p, window, expected",
    [
        (64, torch.bfloat16, "auto", 0.0, None, True),
        (63, torch.bfloat16, "auto", 0.0, None, False),
        (1025, torch.bfloat16, "auto", 0.0, None, False),
        (64, torch.float32, "auto", 0.0, None, False),
        (64, torch.bfloat16, "sdpa", 0.0, None, False),
        (64, torch.bfloat16, "reference", 0.0, None, False),
        (64, torch.bfloat16, "auto", 0.1, None, False),
        (64, torch.bfloat16, "auto", 0.0, 16, False),
    ],
)
def test_where_it_is_chosen(length, dtype, impl, p, window, expected, monkeypatch):
    calls = []
    monkeypatch.setattr(causal, "has_products", lambda: True)
    monkeypatch.setattr(causal, "attend", lambda q, k, v: calls.append(1) or q)
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, **_: q)
    m = Model(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=2,
        attention_impl=impl,
        attention_dropout=p,
    )
    where = Positions(samples=torch.arange(2), columns=torch.arange(length))
    shared = Shared(where)
    if window:
        shared.mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril().triu(-window)
    (q, k, v), _ = draw(2, length, 2, 2, 16)
    attend: nn.Module = attention.Attend(m, 0, recompute=False)
    attend(q.to(dtype), k.to(dtype), v.to(dtype), shared)
    assert bool(calls) == expected
    monkeypatch.setattr(causal, "has_products", lambda: False)
    calls.clear()
    attend(q.to(dtype), k.to(dtype), v.to(dtype), shared)
    assert not calls


@pytest.mark.parametrize(
    "capabilities, expected",
    [
        ({"avx512_bf16": True}, True),
        ({"avx512_bf16": True, "amx_bf16": True}, False),
        ({"bf16": True}, False),
    ],
)
def test_processors_with_products(capabilities, expected, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert causal.has_products.__wrapped__() is expected
    monkeypatch.delattr(torch.cpu, "get_capabilities")  # of an older torch
    assert causal.has_products.__wrapped__() is False
