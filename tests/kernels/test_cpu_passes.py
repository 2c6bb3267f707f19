"""Passes that a CPU saves equal torch's own: RMSNorm, rotation, mixed sums, products."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from meshwright.kernels import matmul
from meshwright.kernels.heads import rotate, rotate_pairs
from meshwright.kernels.rms_norm import rms_norm

TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-2}


def gradients_of(function, grad, *inputs):
    """Return the output and the gradients of the inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


def assert_same(ours, exact):
    for x, want in zip(ours, exact, strict=True):
        assert (x.double() - want).norm() <= TOLERANCE[x.dtype] * want.norm()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(3, 7, 24), (2, 5, 4, 16)])
def test_rms_norm_equals_torchs(dtype, shape):
    torch.manual_seed(0)
    x, weight, grad = (torch.randn(s).to(dtype) for s in (shape, shape[-1:], shape))
    exact = gradients_of(
        lambda x, w: F.rms_norm(x, w.shape, w, 1e-5), grad.double(), x.double(), weight.double()
    )
    strided = grad.transpose(0, 1).contiguous().transpose(0, 1)
    for given in (grad, strided):
        ours = gradients_of(lambda x, w: rms_norm(x, w, 1e-5), given, x, weight)
        assert [y.dtype for y in ours] == [dtype] * 3
        assert_same(ours, exact)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rotating", [8, 4])  # whole heads of 8, and half of each
def test_rotation_equals_that_of_pairs(dtype, rotating):
    torch.manual_seed(0)
    angles = torch.randn(1, 5, 1, rotating // 2, dtype=torch.promote_types(dtype, torch.float32))
    rotation = angles.cos(), angles.sin()
    x, grad = (torch.randn(2, 5, 3, 8).to(dtype) for _ in range(2))
    wide = tuple(r.double() for r in rotation)
    exact = gradients_of(lambda x: rotate_pairs(x, wide), grad.double(), x.double())
    assert_same(gradients_of(lambda x: rotate(x, rotation), grad, x), exact)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("dtype", [*TOLERANCE, torch.float16])
def test_a_product_is_put_into_its_total(adds, dtype, monkeypatch):
    """Also piece by piece, the last one short."""
    monkeypatch.setattr(matmul, "PIECE", 7)
    torch.manual_seed(0)
    a, b = torch.randn(6, 4).to(dtype), torch.randn(4, 5).to(dtype)
    total = torch.randn(6, 5, dtype=torch.promote_types(dtype, torch.float32))
    want = a.double() @ b.double() + (total if adds else 0)
    matmul.multiply_into(total, a, b, adds)
    assert (total - want).norm() <= TOLERANCE.get(dtype, 1e-3) * want.norm()
