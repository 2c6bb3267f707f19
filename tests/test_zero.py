"""The parameter store: equal to torch's AdamW with clipping on separate tensors, in every format."""

import pytest
import torch

from conftest import TINY
from meshwright import config
from meshwright.model.attention import Where
from meshwright.model.gpt import GPT
from meshwright.model.loss import loss_sum
from meshwright.parallel.zero import ALIGN, ParameterStore
from test_model import CPU, make, tokens


def losses_of(model, batches, scale=1.0):
    for batch in batches:
        (loss_sum(model.eval()(batch, Where()), batch, None) / 50 * scale).backward()


@pytest.mark.parametrize("clip", [0.0, 0.1, 1e9])
def test_steps_equal_plain_torch(clip):
    """Ten steps of float64 against torch.optim.AdamW over separate parameters, two groups, clip_grad_norm_."""
    ours, _ = make(dtype=torch.float64)
    plain, _ = make(dtype=torch.float64)
    o = config.Optimizer(weight_decay=0.1, clip_grad=clip, adam_beta2=0.95)
    store = ParameterStore(ours, o, torch.float64, CPU)
    for (_, p), (_, q) in zip(store.masters(), plain.named_parameters(), strict=False):
        p.copy_(q.detach()) if p.shape == q.shape else None
    named = dict(plain.named_parameters())
    for name, p in store.masters():
        p.copy_(named[name].detach())
    for p in named.values():
        p.grad = None
        p.data = p.data.clone()
    groups = [
        {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for step in range(10):
        batches = [(tokens() + step + k) % 61 for k in range(2)]
        store.clear_gradients()
        adamw.zero_grad()
        losses_of(ours, batches)
        losses_of(plain, batches)
        norm = store.step(1e-2, 0.1, 1.0)
        want = torch.nn.utils.clip_grad_norm_(named.values(), clip or float("inf"))
        adamw.step()
        torch.testing.assert_close(norm, want, rtol=1e-12, atol=0)
    for name, p in store.masters():
        torch.testing.assert_close(p, named[name].detach(), rtol=1e-9, atol=1e-12, msg=name)
    assert store.steps == 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_keeps_full_masters(dtype):
    """One step stays within the format's rounding of float64; masters are float32 and gradients are summed there."""
    exact, a = make(dtype=torch.float64)
    low, b = make(dtype=dtype)
    scale = 256.0 if dtype is torch.float16 else 1.0
    for model, store, s in ((exact, a, 1.0), (low, b, scale)):
        store.clear_gradients()
        losses_of(model, [tokens(), tokens() + 0], s)
    norms = a.step(1e-3, 0.0, 1.0).item(), b.step(1e-3, 0.0, scale).item()
    assert norms[1] == pytest.approx(norms[0], rel=0.03)
    for g in b.groups:
        assert g.master.dtype is g.gradients.dtype is torch.float32
    for (name, p), (_, q) in zip(a.masters(), b.masters(), strict=True):
        assert (p - q).abs().max() < 2.2e-3, name  # Adam's first step is +-lr
    assert torch.equal(low.wte.weight, dict(b.masters())["wte.weight"].to(dtype))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_non_finite_gradient_changes_nothing(bad, dtype):
    model, store = make(dtype=dtype)
    losses_of(model, [tokens()])
    store.step(1e-3, 0.1, 1.0)
    before = {n: t.clone() for n, (_, _, t) in store.named_state().items()}
    store.clear_gradients()
    losses_of(model, [tokens()])
    store.groups[1].gradients[3] = bad
    assert not store.step(1e-3, 0.1, 1.0).isfinite()
    assert all(torch.equal(before[n], t) for n, (_, _, t) in store.named_state().items())
    assert store.steps == 1
    store.clear_gradients()
    losses_of(model, [tokens()])
    assert store.step(1e-3, 0.1, 1.0).isfinite()
    assert store.steps == 2


def test_every_parameter_lives_in_a_buffer_aligned():
    model, store = make()
    for g in store.groups:
        start = g.weights.data_ptr()
        for name, (offset, shape) in g.spans.items():
            p = model.get_parameter(name)
            assert p.data_ptr() == start + offset * 4 and offset % ALIGN == 0 and p.shape == shape
            assert p.grad.data_ptr() == g.gradients.data_ptr() + offset * 4


def test_decay_reaches_matrices_only():
    _, store = make()
    before = {n: p.clone() for n, p in store.masters()}
    store.clear_gradients()
    store.step(0.5, 0.1, 1.0)  # zero gradients: only decay moves anything
    for name, p in store.masters():
        assert torch.allclose(p, before[name] * (0.95 if p.ndim > 1 else 1.0)), name


def test_padded_rows_stay_zero():
    m = TINY
    with torch.device("meta"):
        model = GPT(m, 61, 64, 16)
    store = ParameterStore(model, config.Optimizer(), torch.float32, CPU)
    for _, p in store.masters():
        p.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
    dict(store.masters())["wte.weight"][61:] = 0
    for _ in range(3):
        store.clear_gradients()
        losses_of(model, [tokens()])
        store.step(1e-2, 0.1, 1.0)
    assert (model.wte.weight[61:] == 0).all() and model.wte.weight[:61].abs().min() > 0
