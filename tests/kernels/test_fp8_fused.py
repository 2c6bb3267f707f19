"""Kernels that write fp8 write what a cast of their output in bfloat16 would be, bit for bit."""

from __future__ import annotations

import pytest
import torch

from meshwright.kernels import activation, dropout, fp8, heads, norm, qk_norm, references
from meshwright.kernels.fp8 import E4M3, E5M2, LARGEST, Into
from meshwright.kernels.norm import NormWeights, Operands

pytestmark = pytest.mark.whole  # Triton's interpreter takes seconds
# there Triton's interpreter runs the kernels
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(params=["plain", "triton"], autouse=True)
def form(request, monkeypatch):
    """Run the references, or the kernels with poisoned outputs.

    The interpreter rounds to fp8 in its own way, in each kernel alike.
    """
    monkeypatch.setattr(references, "is_triton", lambda x: request.param == "triton")
    for name in ("empty", "empty_like"):
        empty = getattr(torch, name)
        monkeypatch.setattr(
            torch,
            name,
            lambda *a, empty=empty, **k: (
                poison(empty(*a, **k)) if k.get("dtype") else empty(*a, **k)
            ),
        )


def poison(x):
    return (
        x.view(torch.uint8).fill_(0x55).view(x.dtype)
        if x.element_size() == 1
        else x.fill_(float("nan"))
    )


def draw(*shape):
    return torch.randn(shape, device=DEVICE).bfloat16()


def same(make, shape, dtype, amax):
    """Compare make(into) with a cast of make(None), of which some numbers are clamped."""
    y, *rest = make(None)
    results = []
    for is_fused in (False, True):
        out, _ = fp8.empty_casts(shape, dtype, y.device, False)
        out = poison(out)
        high = None if amax is None else torch.tensor([amax], device=DEVICE)
        scale = torch.tensor([0.7 * LARGEST[dtype] / y.float().abs().max().item()], device=DEVICE)
        into = Into(out, scale, high)
        if is_fused:
            got, *again = make(into)
            assert got.data_ptr() == out.data_ptr()
            for a, b in zip(rest, again, strict=True):
                # a GPU adds columns up in tiles of another shape
                torch.testing.assert_close(
                    a, b, rtol=0, atol=0 if DEVICE == "cpu" else 1e-5 * float(a.abs().max())
                )
        else:
            into.fill(y)
        results.append((out.view(torch.uint8), torch.zeros(1) if high is None else high))
    (bytes_, high), (ours, our_high) = results
    assert bytes_.count_nonzero() > 0.9 * bytes_.numel() or dtype is E5M2
    assert torch.equal(bytes_, ours) and torch.equal(high, our_high)


AMAX = pytest.mark.parametrize("amax", [None, 0.01])
GRADIENT = pytest.mark.parametrize("dtype", [E4M3, E5M2])


@pytest.mark.parametrize(
    ("kind", "n", "width", "amax"),
    [
        ("LayerNorm", 5, 48, None),
        ("LayerNorm", 3, 1024, 0.01),
        ("unbiased", 3, 1024, None),
        ("RMSNorm", 5, 48, 0.01),
    ],
)
def test_norm(kind, n, width, amax):
    residual, weight, shift = (
        draw(n, width),
        draw(width),
        draw(width) if kind == "LayerNorm" else None,
    )
    if shift is not None:  # only in rows beyond the last, where x is 0, is y 40
        residual[:, 0], weight[0], shift[0] = -100.0, 8.0, 40.0
    weights = NormWeights(weight, shift, 1e-5, centers=kind != "RMSNorm")
    join = Operands(
        residual, draw(n, width), None, dropout.rows(1, torch.arange(n, device=DEVICE)), 0.1
    )

    def make(into):
        x, y, mean, rstd = norm.forward(join, weights, into)
        return y, x, rstd, *([] if mean is None else [mean])

    same(make, (n, width), E4M3, amax)


@AMAX
@pytest.mark.parametrize("kind", ["gelu-tanh", "swiglu"])
def test_activation(kind, amax):
    u = draw(5, 96)
    same(
        lambda into: (activation.forward(kind, u, into),),
        (5, 48 if kind == "swiglu" else 96),
        E4M3,
        amax,
    )


@AMAX
@GRADIENT
@pytest.mark.parametrize("kind", ["gelu-tanh", "swiglu"])
def test_gradient_of_an_activation(kind, amax, dtype):
    u, grad = draw(37, 96), draw(37, 48 if kind == "swiglu" else 96)
    same(lambda into: activation.backward(kind, u, grad, True, into), (37, 96), dtype, amax)


@AMAX
@GRADIENT
@pytest.mark.parametrize("rotating", [0, 8, 16])
def test_gradient_of_heads(rotating, amax, dtype):
    sizes, b, t = heads.HeadSizes(2, 2, 16), 2, 5
    angles = torch.randn(1, t, 1, rotating // 2, device=DEVICE)
    rotation = (angles.cos(), angles.sin()) if rotating else None
    grads = draw(b, 4, t, 16).transpose(1, 2), draw(b, t, 2, 16), draw(b, t, 2, 16) * 9
    same(lambda into: heads.pack(grads, sizes, rotation, True, into), (b * t, 128), dtype, amax)


@AMAX
@pytest.mark.parametrize("dtype", [E5M2])
@pytest.mark.parametrize(("rotating", "centers"), [(0, True), (8, False), (16, True)])
def test_gradient_of_normed_heads(rotating, centers, amax, dtype):
    sizes, b, t = heads.HeadSizes(2, 2, 16), 2, 5
    angles = torch.randn(1, t, 1, rotating // 2, device=DEVICE)
    rotation = (angles.cos(), angles.sin()) if rotating else None
    weights = NormWeights(draw(16), draw(16) if centers else None, 1e-5, 1.0, centers)
    qkv = draw(b, t, 128)
    grads = draw(b, 4, t, 16).transpose(1, 2), draw(b, t, 2, 16), draw(b, t, 2, 16) * 9

    def make(into):
        return qk_norm.pack(
            grads, qkv, sizes, rotation, qk_norm.HeadNorms(weights, weights), True, into
        )

    same(make, (b * t, 128), dtype, amax)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_nothing_infinite_becomes_finite(value):
    u = draw(4, 32)
    u[1, 3] = value
    out, _ = fp8.empty_casts((4, 32), E4M3, u.device, False)
    high = torch.zeros(1, device=DEVICE)
    activation.backward(
        "squared-relu", u, torch.ones_like(u), False, Into(out, torch.ones(1, device=DEVICE), high)
    )
    assert bool(out.float()[1, 3].isfinite()) == (value == -torch.inf) and 0 < high < torch.inf
