"""The activation: torch's values and gradients, the bias's gradient, its main_grad, recomputation.

The Triton kernels run on a GPU if there is one, else in Triton's interpreter.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from main_grads import Total
from meshwright.kernels import references
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
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def nan_in_new_memory():
    """Let torch.empty return NaN, which shows where nothing was written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def distance(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def case(kind, rows, columns, dtype):
    """Return the first product, the bias (already added) and the gradient of the activation."""
    gated = kind.endswith("glu")
    u = torch.randn(*rows, columns * (1 + gated)).to(DEVICE, dtype).requires_grad_()
    bias = torch.nn.Parameter(torch.randn((2, columns) if gated else columns).to(DEVICE, dtype))
    return u, bias, torch.randn(*rows, columns).to(DEVICE, dtype)


def wanted(kind, u, grad):
    """Return values and gradients in float64, with torch's functions."""
    x = u.detach().double().requires_grad_()
    y = KINDS[kind](*x.chunk(2, -1)) if kind.endswith("glu") else KINDS[kind](x)
    y.backward(grad.double())
    return y.detach(), x.grad, x.grad.flatten(0, -2).sum(0)


def compare(kind, dtype, rows, columns):
    u, bias, grad = case(kind, rows, columns, dtype)
    a = activate(kind, u, bias)
    a.backward(grad.transpose(0, 1).contiguous().transpose(0, 1))
    y, du, db = wanted(kind, u, grad)
    assert a.dtype is u.grad.dtype is bias.grad.dtype is dtype and bias.grad.shape == bias.shape
    assert distance(a, y) < ERROR[dtype] and distance(u.grad, du) < ERROR[dtype]
    assert distance(bias.grad.flatten(), db) < 2 * ERROR[dtype]


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(kind, dtype):
    compare(kind, dtype, (3, 7), 10)


FORMATS = [(kind, torch.bfloat16) for kind in KINDS] + [
    ("gelu", torch.float16),
    ("gelu-tanh", torch.float32),
    ("geglu", torch.float32),
]


@pytest.mark.parametrize(("kind", "dtype"), FORMATS)
def test_kernels(kind, dtype, monkeypatch):
    """Sizes that fill no tile, and a gradient that is not contiguous."""
    monkeypatch.setattr(references, "is_triton", lambda x: True)
    compare(kind, dtype, (3, 13), 130)


def test_every_tile_gives_the_same_sums():
    from meshwright.kernels.triton import activation as activation_triton

    u, _, grad = case("swiglu", (40,), 12, torch.float32)
    want = wanted("swiglu", u, grad)
    for tile in (
        activation_triton.TILE,
        activation_triton.BackwardTile(8, 4, 16),
        activation_triton.BackwardTile(16, 8, 8, 3, 2),
    ):
        du, partials = activation_triton.backward("swiglu", u.detach(), grad, True, tile=tile)
        assert partials.dtype is torch.float32 and partials.shape == (-(-40 // tile.rows), 24)
        assert distance(du, want[1]) < 1e-6 and distance(partials.sum(0), want[2]) < 1e-6
    assert activation_triton.backward("swiglu", u.detach(), grad, False)[1] is None


@pytest.mark.parametrize("adds", [False, True])
def test_the_bias_has_a_main_grad(adds, with_kernels):
    """Its gradient reaches the total without being rounded to the parameter's format."""
    u, bias, grad = case("swiglu", (5,), 6, torch.bfloat16)
    bias.main_grad = Total(bias, adds)
    activate("swiglu", u, bias).backward(grad)
    assert bias.grad is None and bias.main_grad.ended == 1
    assert distance(bias.main_grad.total.flatten() - 3 * adds, wanted("swiglu", u, grad)[2]) < 1e-5


def test_without_a_bias_recomputed_and_without_gradients(with_kernels):
    u, bias, grad = case("gelu-tanh", (5,), 6, torch.float32)
    activate("gelu-tanh", u).backward(grad)
    first, u.grad = u.grad, None
    checkpoint(activate, "gelu-tanh", u, bias, use_reentrant=False).backward(grad)
    assert torch.equal(u.grad, first)
    torch.testing.assert_close(bias.grad, first.sum(0))
    with torch.no_grad():
        assert not activate("gelu-tanh", u, bias).requires_grad


# numpy's, in the interpreter
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_large_numbers_and_nan(kind, with_kernels):
    """Large inputs give no NaN; a NaN is not hidden, so that a bad loss is seen."""
    u, _, grad = case(kind, (1,), 8, torch.float32)
    u.data[0, :4] = torch.tensor([-1e4, 1e4, -50.0, 0.0])
    y, du, _ = wanted(kind, u, grad)
    u.data[0, 4] = float("nan")
    a = activate(kind, u)
    a.backward(grad)
    fine = [n for n in range(u.shape[1]) if n % 8 != 4]
    assert a[0, 4].isnan() and u.grad[0, 4].isnan() == (kind not in ("reglu", "liglu"))
    torch.testing.assert_close(a[0, fine[:7]].double(), y[0, fine[:7]], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(u.grad[0, fine].double(), du[0, fine], rtol=1e-5, atol=1e-6)
