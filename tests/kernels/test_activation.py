"""The activation: torch's values and gradients, the bias's gradient, its sink, recomputation."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from meshwright.kernels.activation import activate

KINDS = {
    "gelu-tanh": lambda u: F.gelu(u, approximate="tanh"),
    "gelu": F.gelu,
    "squared-relu": lambda u: F.relu(u) ** 2,
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "geglu": lambda gate, up: F.gelu(gate) * up,
    "reglu": lambda gate, up: F.relu(gate) * up,
    "liglu": lambda gate, up: gate * up,
}
ERROR = {torch.float64: 1e-15, torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


class Total:
    """A sink: a float32 total that holds one gradient already, or rubbish."""

    def __init__(self, parameter, adds):
        self.total = torch.full_like(parameter, 1.0 if adds else float("nan"), dtype=torch.float32)
        self.adds, self.ended = adds, 0

    def begin(self):
        return self.total, self.adds

    def end(self):
        self.ended += 1


def distance(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def case(kind, rows, columns, dtype):
    """Return the first product, the bias (already added) and the gradient of the activation."""
    gated = kind.endswith("glu")
    u = torch.randn(*rows, columns * (1 + gated)).to(dtype).requires_grad_()
    bias = torch.nn.Parameter(torch.randn((2, columns) if gated else columns).to(dtype))
    return u, bias, torch.randn(*rows, columns).to(dtype)


def wanted(kind, u, grad):
    """Return values and gradients in float64, with torch's functions."""
    x = u.detach().double().requires_grad_()
    y = KINDS[kind](*x.chunk(2, -1)) if kind.endswith("glu") else KINDS[kind](x)
    y.backward(grad.double())
    return y.detach(), x.grad, x.grad.flatten(0, -2).sum(0)


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(kind, dtype):
    u, bias, grad = case(kind, (3, 7), 10, dtype)
    a = activate(kind, u, bias)
    a.backward(grad)
    y, du, db = wanted(kind, u, grad)
    assert a.dtype is u.grad.dtype is bias.grad.dtype is dtype and bias.grad.shape == bias.shape
    assert distance(a, y) < ERROR[dtype] and distance(u.grad, du) < ERROR[dtype]
    assert distance(bias.grad.flatten(), db) < 2 * ERROR[dtype]


@pytest.mark.parametrize("adds", [False, True])
def test_the_bias_has_a_sink(adds):
    u, bias, grad = case("swiglu", (5,), 6, torch.bfloat16)
    bias.sink = Total(bias, adds)
    activate("swiglu", u, bias).backward(grad)
    assert bias.grad is None and bias.sink.ended == 1
    assert distance(bias.sink.total.flatten() - int(adds), wanted("swiglu", u, grad)[2]) < 1e-2


def test_without_a_bias_recomputed_and_without_gradients():
    u, bias, grad = case("gelu-tanh", (5,), 6, torch.float64)
    activate("gelu-tanh", u).backward(grad)
    first, u.grad = u.grad, None
    checkpoint(activate, "gelu-tanh", u, bias, use_reentrant=False).backward(grad)
    assert torch.equal(u.grad, first)
    torch.testing.assert_close(bias.grad, first.sum(0))
    with torch.no_grad():
        assert not activate("gelu-tanh", u, bias).requires_grad
