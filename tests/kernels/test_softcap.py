"""The bound of the logits: torch's values and gradients, rounded once, in the logits' memory.

The Triton kernels run on a GPU if there is one, else in Triton's interpreter, which cuts off what
bfloat16 has no room for.
"""

import pytest
import torch

from meshwright.kernels import references
from meshwright.kernels import softcap as module
from meshwright.kernels.cross_entropy import cross_entropy
from meshwright.kernels.softcap import softcap

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDING = {torch.float64: 1e-15, torch.float32: 4e-7, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.fixture(params=["plain", "triton"])
def with_kernels(request, monkeypatch):
    """Run the plain reference, or the kernels whatever the device."""
    monkeypatch.setattr(references, "is_triton", lambda x: request.param == "triton")
    return request.param == "triton"


@pytest.mark.parametrize("dtype", ROUNDING)
def test_values_and_gradients(dtype, with_kernels, monkeypatch):
    """Small, ordinary and infinite logits, in portions with a rest."""
    if with_kernels and dtype is torch.float64:
        pytest.skip("the kernels have no float64")
    monkeypatch.setattr(module, "PORTION", 1000)
    x = (torch.randn(3, 11, 101, dtype=torch.float64) * 40).to(DEVICE, dtype)
    x[0, 0, :4] = torch.tensor([0.0, 1e-3, float("inf"), -float("inf")])
    grad = torch.randn_like(x)
    exact = x.clone().double().requires_grad_()
    want = 30 * torch.tanh(exact / 30)
    want.backward(grad.double())
    logits = x.clone().requires_grad_()
    got = softcap(logits, 30.0)
    assert got.dtype is dtype and torch.equal(logits.detach(), x)
    got.backward(grad)
    near = {"rtol": ROUNDING[dtype], "atol": 30 * 2e-7 if dtype is not torch.float64 else 1e-14}
    torch.testing.assert_close(got.double(), want.detach(), **near)
    torch.testing.assert_close(logits.grad.double(), exact.grad, **near)
    assert torch.isnan(softcap(torch.full_like(x, float("nan")), 30.0)).all()


def test_before_the_loss(with_kernels):
    """Both overwrite what they were given; a second backward pass is refused."""
    x, labels = torch.randn(5, 40, device=DEVICE), torch.arange(5, device=DEVICE)
    want = x.clone().requires_grad_()
    torch.nn.functional.cross_entropy(2 * torch.tanh(want / 2), labels, reduction="sum").backward()
    got = x.clone().requires_grad_()
    cross_entropy(softcap(got * 1, 2.0), labels, 40).sum().backward()
    torch.testing.assert_close(got.grad, want.grad)
    bounded = softcap(got * 1, 2.0)
    bounded.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        bounded.sum().backward()
