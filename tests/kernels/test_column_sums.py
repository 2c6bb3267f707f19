"""Sums of columns, and where they go: into .grad, or into a parameter store's total."""

from __future__ import annotations

import pytest
import torch

from main_grads import Total
from meshwright.kernels import gradients, grid, references
from meshwright.kernels.linear import add_bias
from meshwright.parallel import comm, tensor


def parameter(shape, adds, device):
    made = torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16, device=device))
    if adds is not None:
        made.main_grad = Total(made, adds)
    return made


@pytest.fixture(params=["plain", "triton"])
def form(request, monkeypatch):
    """Run the reference, or the kernels with poisoned outputs; return the device."""
    monkeypatch.setattr(references, "is_triton", lambda x: request.param == "triton")
    if request.param == "triton":
        monkeypatch.setattr(grid, "SUM_PROGRAMS", 3)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
    return "cuda" if request.param == "triton" and torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("adds", [None, False, True])
def test_several_vectors(adds, form):
    partials = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(0)).to(form)
    partials[1] = float("nan")  # of no parameter
    first, last = parameter((6,), adds, form), parameter((2, 3), adds, form)
    out = gradients.from_several([first, None, last], partials)
    exact = partials.double().sum(1)
    for p, got, want in ((first, out[0], exact[0]), (last, out[2], exact[2].view(2, 3))):
        if adds is None:
            assert got.dtype is p.dtype
            # the interpreter truncates
            torch.testing.assert_close(got.double(), want, rtol=2**-7, atol=0)
        else:
            assert got is None and p.main_grad.ended == 1
            torch.testing.assert_close(p.main_grad.total, (want + (3.0 if adds else 0.0)).float())
    assert out[1] is None


@pytest.mark.parametrize("adds", [None, False, True])
def test_a_matrix(adds, form):
    grad = torch.randn(50, 6, generator=torch.Generator().manual_seed(0)).to(form, torch.bfloat16)
    p = parameter((6,), adds, form)
    got = gradients.from_rows(p, grad)
    want = grad.double().sum(0)
    if adds is None:
        # the interpreter truncates
        torch.testing.assert_close(got.double(), want, rtol=2**-7, atol=0)
    else:
        assert got is None
        torch.testing.assert_close(p.main_grad.total, (want + (3.0 if adds else 0.0)).float())
    assert gradients.from_rows(None, grad) is None


@pytest.mark.parametrize("shape", [(1, 5), (70, 130), (300, 40), (129, 257)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shapes(shape, dtype, form):
    """One and several programs along both axes, rows and columns beyond the end, row strides."""
    x = torch.randn(shape[0], 2 * shape[1], generator=torch.Generator().manual_seed(0)).to(
        form, dtype
    )
    for matrix in (x[:, : shape[1]], x[:, ::2], x[:, : shape[1]].contiguous()):
        total = torch.full(shape[1:], 3.0, device=form)
        gradients.reduce_into([(total, True)], gradients.column_sums(matrix)[None])
        torch.testing.assert_close(
            total.double(), matrix.double().sum(0) + 3.0, rtol=1e-6, atol=1e-5
        )


class OneRank:
    """Products of tensor parallelism on one rank."""

    def multiply_scatter(self, x, weight, bias):
        return comm.Started(x @ weight.t() + bias, None)

    def back_gather_multiply(self, grad, weight):
        return grad @ weight, grad


def row_parallel(x, bias):
    return tensor._RowParallel.apply(x.flatten(0, 1), torch.eye(24), bias, OneRank())


@pytest.mark.parametrize("product", [add_bias, row_parallel])
def test_sums_kept_with_a_gradient(product, monkeypatch):
    """The norm's backward pass has summed what the product before it needs, if unchanged."""
    from meshwright.kernels import norm

    torch.manual_seed(0)
    weights = norm.NormWeights(torch.ones(24), torch.zeros(24), 1e-5)
    grads, summed, real = [], [], gradients.column_sums
    monkeypatch.setattr(
        gradients, "column_sums", lambda x: summed.append(hasattr(x, "column_sums")) or real(x)
    )
    for changed in (False, True):
        x, bias, residual = (
            torch.randn(shape, requires_grad=True) for shape in ((1, 10, 24), (24,), (1, 10, 24))
        )
        pending = product(x, bias)
        if changed:
            pending.register_hook(lambda grad: grad.mul_(2.0))
        joined, y = norm.add_norm(residual, pending, None, None, 0.0, weights)
        (joined.square().sum() + (y * torch.arange(24)).sum()).backward()
        assert summed.pop() and not summed
        grads.append((bias.grad, x.grad.sum((0, 1))))
    for ours, want in grads:
        torch.testing.assert_close(ours, want)
