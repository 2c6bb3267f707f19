"""Muon on batches of matrices: torch's update, chunk by chunk, without the host, in both forms."""

import math

import pytest
import torch
from torch import nn

from meshwright.kernels import symmetric
from meshwright.optim import muon
from meshwright.optim.muon import Muon, orthogonalise
from meshwright.optim.rule_table import MatrixForm

A, B, C = 3.4445, -4.7750, 2.0315
SHAPES = [(24, 8), (8, 24), (16, 16), (24, 8), (12, 8), (8, 24), (7, 13)]
# bfloat16 has 8 bits of precision: a rounding changes a number by at most 1/256 of it.
ROUNDING = 1 / 256


def parameters(shapes=SHAPES, gated=(2, 12, 8), seed=0, dtype=torch.float32):
    """Return matrices, and the two of a gated weight, as the parameter store hands them on."""
    g = torch.Generator().manual_seed(seed)
    whole = torch.randn(gated, generator=g, dtype=dtype)
    values = [torch.randn(s, generator=g, dtype=dtype) for s in shapes] + list(whole.unbind())
    return [nn.Parameter(x) for x in values]


def set_gradients(params, step, scale=1.0):
    g = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=g, dtype=p.dtype).to(p.device) * scale


def copies(params):
    return [nn.Parameter(p.detach().clone()) for p in params]


def set_rates(optimizer, lr=0.02, weight_decay=0.1):
    optimizer.param_groups[0].update(lr=lr, weight_decay=weight_decay)


def exact(x, steps=5):
    """Return the quintic's result in float64."""
    x = x.double()
    x = x / x.norm()
    for _ in range(steps):
        r = x @ x.T
        x = A * x + (B * r + C * r @ r) @ x
    return x


def distance(x, want):
    return float((x.double() - want).norm() / want.norm())


def with_singular_values(values, columns, seed=0):
    """Return a matrix with these singular values."""
    g = torch.Generator().manual_seed(seed)
    m = len(values)
    u = torch.linalg.qr(torch.randn(m, m, generator=g, dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(columns, m, generator=g, dtype=torch.float64))[0]
    return (u * values) @ v.T


# The update


def test_a_batch_equals_one_by_one():
    several = [nn.Parameter(p) for p in torch.randn(5, 16, 24)]
    single = copies(several)
    for params, chunk in ((several, muon.MUON_CHUNK), (single, 1)):
        optimizer = Muon(params, chunk=chunk)
        set_rates(optimizer)
        for i in range(3):
            set_gradients(params, i)
            optimizer.step()
    for a, b in zip(several, single, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=ROUNDING * 0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_scaled_gradient_is_divided(dtype):
    plain = parameters(dtype=dtype)
    scaled = copies(plain)
    for params, scale in ((plain, 1.0), (scaled, 512.0)):
        optimizer = Muon(params)
        set_rates(optimizer)
        optimizer.grad_scale = torch.tensor(scale)
        set_gradients(params, 0, scale)
        optimizer.step()
    assert all(map(torch.equal, plain, scaled))


def test_rates_may_be_tensors():
    plain = parameters()
    tensors = copies(plain)
    for params, kind in ((plain, float), (tensors, torch.tensor)):
        optimizer = Muon(params)
        set_rates(optimizer, kind(0.02), kind(0.1))
        set_gradients(params, 0)
        optimizer.step()
    for a, b in zip(plain, tensors, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_no_gradient_but_zeros():
    """Weights only decay where the momentum is 0, without a division by the norm."""
    params = parameters()
    before = [p.detach().clone() for p in params]
    optimizer = Muon(params)
    set_rates(optimizer)
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for p, old in zip(params, before, strict=True):
        torch.testing.assert_close(p.detach(), old * (1 - 0.02 * 0.1))


def test_the_kernels_give_the_same_update(monkeypatch):
    """With Triton's kernels and the gram form, weights differ from torch's form by its rounding."""
    pytest.importorskip("triton", reason="Triton is not installed")
    shapes = [(24, 8), (8, 24), (16, 16), (24, 8)]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    start = [p.detach().to(device) for p in parameters(shapes)]
    plain, kernels = copies(start), copies(start)
    for params, has in ((plain, False), (kernels, True)):
        monkeypatch.setattr("meshwright.base.device.has_kernels", lambda device, has=has: has)
        optimizer = Muon(params)
        set_rates(optimizer)
        set_gradients(params, 0)
        optimizer.step()
    for a, b, old in zip(plain, kernels, start, strict=True):
        moved = (a - old).norm()
        assert 0 < (a - b).norm() < 8 * ROUNDING * moved


@pytest.mark.parametrize("by_group", [False, True])
def test_queries_keys_and_values_are_orthogonalised_apart(by_group):
    """Rows lie by query groups: a group's queries, its keys, its values; then the next group's."""
    rows = {"queries": 8, "keys": 4, "values": 4}
    form = MatrixForm((32, 12), tuple(rows.values()), by_group)
    x = torch.randn(3, 32, 12, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    want = torch.empty_like(x)
    for parameter, to in zip(x, want, strict=True):
        kinds = torch.tensor(
            [i for _ in range(2) for i, n in enumerate(rows.values()) for _ in range(n)]
        )
        group = torch.arange(32) // 16 if by_group else torch.zeros(32)
        for kind, number in {*zip(kinds.tolist(), group.tolist(), strict=True)}:
            own = (kinds == kind) & (group == number)
            section = parameter[own]
            # The whole parameter's scale is 0.2 times the root of 32.
            ratio = math.sqrt(max(section.shape) / 32)
            is_tall = section.shape[0] > section.shape[1]
            to[own] = ratio * (exact(section.T).T if is_tall else exact(section))
    torch.testing.assert_close(muon.orthogonalise_all(x, form, 5), want, rtol=1e-9, atol=1e-9)


# Newton-Schulz


@pytest.mark.parametrize("is_gram", [False, True])
@pytest.mark.parametrize("tall", [False, True])
def test_products_of_which_one_half_is_computed(monkeypatch, is_gram, tall):
    """With the kernel for every symmetric product, the result is as close to float64's."""
    kernel = pytest.importorskip(
        "meshwright.kernels.triton.symmetric", reason="Triton is not installed"
    )
    monkeypatch.setattr(kernel, "TILES", kernel.SymmetricTiles(32, 32, 32, 4, 2))
    calls, real = [], kernel.half_product
    monkeypatch.setattr(kernel, "half_product", lambda *args: calls.append(args) or real(*args))
    x = torch.randn(2, 48, 112, generator=torch.Generator().manual_seed(1))
    low = (x / x.norm(dim=(1, 2), keepdim=True)).half()
    low = low.mT.contiguous().mT if tall else low
    low = low.cuda() if torch.cuda.is_available() else low
    torchs = orthogonalise(low, 5, is_gram)
    assert not calls  # it is too small for the kernel
    monkeypatch.setattr(symmetric, "SMALLEST", 16)
    for name in ("has_kernels", "is_hopper_or_later"):
        monkeypatch.setattr(f"meshwright.base.device.{name}", lambda device: True)
    got = orthogonalise(low, 5, is_gram)
    assert got.stride() == low.stride() and len(calls) == (16 if is_gram else 10)
    for matrix, one, start in zip(got.cpu(), torchs.cpu(), low.cpu(), strict=True):
        want = exact(start)
        assert distance(matrix, want) < min(2 * ROUNDING, 1.5 * distance(one, want))


@pytest.mark.parametrize("condition", [1e2, 1e4, 1e6])
@pytest.mark.parametrize("rank", [64, 4])
def test_the_gram_form_is_as_exact_as_torchs(condition, rank):
    """Whatever the condition, singular values stay as close to the exact ones as torch's."""
    values = torch.logspace(0, -math.log10(condition), 64, dtype=torch.float64)
    values[rank:] = values[rank:] * 1e-6
    x = with_singular_values(values, 256)
    want = exact(x)
    low = (x / x.norm()).float()
    gram = orthogonalise(low.half()[None], 5, True)[0]
    plain = orthogonalise(low.bfloat16()[None], 5, False)[0]
    assert distance(gram, want) < 0.6 * distance(plain, want)
    values, torchs, wanted = (torch.linalg.svdvals(y.double()) for y in (gram, plain, want))
    assert (values - wanted).abs().max() < max(0.02, (torchs - wanted).abs().max())


def test_the_gram_form_starts_again_after_three_iterations(monkeypatch):
    """From one Gram matrix only, rounding errors show in the singular values."""
    x = with_singular_values(torch.logspace(0, -2, 64, dtype=torch.float64), 256)
    low = (x / x.norm()).half()[None]
    good = distance(orthogonalise(low, 5, True)[0], exact(x))
    monkeypatch.setattr(muon, "MUON_RESTART", 5)
    assert distance(orthogonalise(low, 5, True)[0], exact(x)) > 4 * good
