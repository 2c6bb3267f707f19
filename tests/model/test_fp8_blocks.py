"""Blocks whose norms, activations and heads are fused with fp8 products compute the same bits."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
import torch

from helpers import TINY
from main_grads import Total
from meshwright.config.schema import Precision
from meshwright.kernels.fp8 import Fp8Product
from meshwright.model import fp8
from meshwright.model.fused import FusedBlock
from meshwright.model.gpt import GPT, Block, Options, initialise
from meshwright.model.loss import loss_sum, token_losses
from meshwright.model.positions import Positions, Shared

pytestmark = pytest.mark.whole
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LLAMA = dict(
    position_embedding_type="rope", normalization="RMSNorm", swiglu=True, add_bias_linear=False
)
MODELS = {
    "gpt2": {},
    "no-dropout": {"hidden_dropout": 0.0, "apply_layernorm_1p": True},
    "llama": {**LLAMA, "num_query_groups": 2},
    "half-rotated": {**LLAMA, "rotary_percent": 0.5, "add_qkv_bias": True, "hidden_dropout": 0.0},
    "qk-norm": {**LLAMA, "num_query_groups": 2, "qk_layernorm": True},
    "qk-norm-biased": {"qk_layernorm": True, "apply_layernorm_1p": True},
    "parallel": {"use_parallel_residual": True, "squared_relu": True},
    "neox": {**LLAMA, "use_parallel_residual": True, "qk_layernorm": True, "hidden_dropout": 0.0},
}
HYBRID = Precision(bf16=True, fp8_format="hybrid")


def build(m, options, p=HYBRID, block=FusedBlock):
    model = GPT(m, 61, 64, 16, block, options)
    initialise(model.named_parameters(), m, 61, 1)
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for x in model.parameters():
            x.add_(torch.randn(x.shape, generator=random) * (0.3 if x.ndim == 1 else 0.0))
    model = model.to(DEVICE, torch.bfloat16)
    return model, fp8.attach_fp8([model], p, DEVICE)


def steps(m, is_fused, with_main_grads, options):
    """Return what two steps of two micro-batches compute, and an evaluation before and after."""
    model, scales = build(m, options)
    assert all("enter" in vars(block) and "transform" in vars(block) for block in model.h.values())
    if not is_fused:
        for block in model.h.values():
            del block.enter, block.transform
    if with_main_grads:
        for x in model.parameters():
            x.main_grad = Total(x)
    random = torch.Generator().manual_seed(4)
    out = []
    for i in range(6):
        tokens = torch.randint(61, (3, 17), generator=random).to(DEVICE)
        where = Positions(
            samples=torch.arange(5 + i, 8 + i, device=DEVICE), seed=9, first_sample=5 + i
        )
        model.train(0 < i < 5)
        with torch.set_grad_enabled(0 < i < 5):
            losses = token_losses(model(tokens[:, :-1], where), tokens[:, 1:], 61)
            out.append(losses.detach())
            if 0 < i < 5:
                (loss_sum(losses, None) / 48 * (8 if i == 3 else 1)).backward()
        if i in (2, 4):
            scales.update()
            scales.refresh()
        out += [scales.amax.clone(), scales.scale.clone()]
    if with_main_grads:
        assert all(x.grad is None for x in model.h.parameters())
        return out + [x.main_grad.total if x.grad is None else x.grad for x in model.parameters()]
    return out + [x.grad for x in model.parameters()]


@pytest.mark.parametrize(
    ("name", "with_main_grads", "options"),
    [
        *((name, False, Options()) for name in MODELS),
        ("gpt2", True, Options(fp32_residual=True)),
        ("llama", True, Options(recompute="full")),
        ("qk-norm-biased", True, Options(recompute="full")),
        ("parallel", True, Options(fp32_residual=True)),
    ],
)
def test_equals_the_separate_functions(name, with_main_grads, options):
    m = dataclasses.replace(TINY, attention_dropout=0.0, **MODELS[name])
    apart, fused = (steps(m, is_fused, with_main_grads, options) for is_fused in (False, True))
    assert len(apart) == len(fused)
    # A GPU's attention adds up gradients in any order, and so may round a few to the next in fp8.
    most = 0.0 if DEVICE.type == "cpu" else 0.02
    for i, (a, b) in enumerate(zip(apart, fused, strict=True)):
        assert (
            a.isfinite().all() and (a.double() - b.double()).norm() <= most * a.double().norm()
        ), i


def test_which_blocks_are_fused():
    def fused(m=TINY, block=FusedBlock, **precision):
        model, _ = build(m, Options(), dataclasses.replace(HYBRID, **precision), block)
        return [sorted(vars(each).keys() & {"enter", "transform"}) for each in model.h.values()]

    both = ["enter", "transform"]
    assert fused() == [both, both] and fused(block=Block) == [[], []]
    assert fused(num_layers_at_end_in_bf16=0, first_last_layers_bf16=True) == [[], both]
    assert fused(dataclasses.replace(TINY, apply_residual_connection_post_layernorm=True)) == [
        [],
        [],
    ]


def test_collectives_around_products_stay():
    model, _ = build(TINY, Options(), Precision(bf16=True))
    model.h["0"].attn.qkv.product = model.h["0"].mlp.fc.product = (
        lambda x, weight, bias=None, by=None: by(x, weight, bias)
    )
    fp8.attach_fp8([model], HYBRID, DEVICE)
    assert not vars(model.h["0"]).keys() & {"enter", "transform"}
    assert vars(model.h["1"]).keys() >= {"enter", "transform"}
    assert isinstance(model.h["1"].mlp.fc.product, Fp8Product)


def test_what_is_added_does_not_stay_in_memory():
    model, _ = build(TINY, Options())
    block = model.h["0"]
    leaf = torch.randn(
        2, 16, TINY.hidden_size, dtype=torch.bfloat16, device=DEVICE, requires_grad=True
    )
    for join in (
        lambda x, y: block.enter(x, y, None, Shared(Positions())),
        lambda x, y: block.transform(x, y, None, None),
    ):
        residual, pending = leaf.neg(), leaf.neg()
        out, gone = join(residual, pending), [weakref.ref(residual), weakref.ref(pending)]
        del residual, pending
        assert [x() for x in gone] == [None, None]
        sum(x.sum() for x in out).backward()
    assert leaf.grad.isfinite().all()
