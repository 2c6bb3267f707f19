"""The addition and the norm in one function: equal to model/gpt.join and model/layers.Norm."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from main_grads import Total
from meshwright.config.schema import Model
from meshwright.kernels import dropout, references
from meshwright.kernels.norm import NormWeights, add_norm
from meshwright.model.gpt import join
from meshwright.model.layers import Norm

KERNELS = "cuda" if torch.cuda.is_available() else "cpu"  # there Triton's interpreter runs them
UNIT = {torch.float64: 2**-53, torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}


class Case:
    """Random inputs on which the function and its reference, in float64, run."""

    def __init__(
        self,
        shape,
        dtype,
        residual=None,
        biased=True,
        p=0.1,
        kind="LayerNorm",
        plus=0.0,
        seed=0,
        device="cpu",
    ):
        random = torch.Generator().manual_seed(seed)
        width = shape[-1]

        def draw(shape, dtype, mean=0.0):
            return (torch.randn(shape, generator=random, dtype=torch.float64) + mean).to(
                device, dtype
            )

        self.p, self.eps, self.plus, self.centers = p, 1e-5, plus, kind != "RMSNorm"
        self.tensors = {
            "residual": None if residual is None else draw(shape, residual, 0.5),
            "pending": draw(shape, dtype),
            "bias": draw((width,), dtype) if biased else None,
            "weight": draw((width,), dtype, 1.0 - plus),
            "shift": draw((width,), dtype) if kind == "LayerNorm" else None,
        }
        self.grads = draw(shape, residual or dtype), draw(shape, dtype)
        self.rows = (
            dropout.rows(seed, torch.arange(shape[:-1].numel(), device=device).view(shape[:-1]))
            if p
            else None
        )

    def leaves(self, dtype=None):
        return {
            name: None if t is None else t.to(dtype or t.dtype).clone().requires_grad_()
            for name, t in self.tensors.items()
        }

    def run(self, t):
        weights = NormWeights(t["weight"], t["shift"], self.eps, self.plus, self.centers)
        return add_norm(t["residual"], t["pending"], t["bias"], self.rows, self.p, weights)

    def ours(self, run=None, grads=True):
        t = self.leaves()
        x, y = (run or self.run)(t)
        grad_x, grad_y = self.grads
        torch.autograd.backward([x, y] if grads else [y], [grad_x, grad_y] if grads else [grad_y])
        return {"x": x.detach(), "y": y.detach()} | {
            name: v.grad for name, v in t.items() if v is not None
        }

    def wanted(self, grads=True):
        """Return what the modules give in float64; y of x as it is stored."""
        t = self.leaves(torch.float64)
        kind = "LayerNorm" if self.centers else "RMSNorm"
        m = Model(
            normalization=kind, apply_layernorm_1p=bool(self.plus), layernorm_epsilon=self.eps
        )
        m = dataclasses.replace(m, layernorm_bias=t["shift"] is not None)
        layer = Norm(m, t["weight"].shape[0])
        layer.weight = torch.nn.Parameter(t["weight"])
        if t["shift"] is not None:
            layer.bias = torch.nn.Parameter(t["shift"])
        t["weight"], t["shift"] = layer.weight, layer.bias
        pending = t["pending"] if t["bias"] is None else t["pending"] + t["bias"]
        x = join(t["residual"], pending, self.rows, self.p)
        stored = x + (x.to(self.grads[0].dtype).double() - x).detach()
        y = layer(stored)
        grad_x, grad_y = (g.double() for g in self.grads)
        torch.autograd.backward([x, y] if grads else [y], [grad_x, grad_y] if grads else [grad_y])
        return {"x": x.detach(), "y": y.detach()} | {
            name: v.grad for name, v in t.items() if v is not None
        }


def compare(ours, wanted, case):
    assert ours.keys() == wanted.keys()
    for name, exact in wanted.items():
        got = ours[name]
        like = (
            case.grads[0] if name == "x" else case.grads[1] if name == "y" else case.tensors[name]
        )
        assert got.dtype is like.dtype and got.shape == exact.shape
        worst = (
            3 * UNIT[got.dtype]
            + 20 * UNIT[torch.float32 if got.dtype is not torch.float64 else got.dtype]
        )
        error = ((got.double() - exact).norm() / exact.norm()).item()
        assert error < worst, f"{name}: {error:.1e}, more than {worst:.1e}"


CASES = {
    "first": dict(),
    "middle": dict(residual="same"),
    "without dropout": dict(residual="same", p=0.0),
    "without bias": dict(residual="same", biased=False),
    "nothing to add": dict(biased=False, p=0.0),
    "RMSNorm": dict(residual="same", biased=False, p=0.0, kind="RMSNorm"),
    "RMSNorm with all": dict(residual="same", kind="RMSNorm", plus=1.0),
    "LayerNorm without bias": dict(residual="same", kind="LayerNorm without bias"),
    "1p": dict(residual="same", plus=1.0),
    "float32 residual": dict(residual=torch.float32),
    "float32 residual without dropout": dict(residual=torch.float32, p=0.0),
}


def make(name, dtype, shape=(3, 5, 40), device="cpu"):
    options = CASES[name] | {"device": device}
    residual = options.get("residual")
    return Case(
        torch.Size(shape),
        dtype,
        **options | {"residual": dtype if residual == "same" else residual},
    )


@pytest.mark.parametrize("name", [name for name in CASES if "float32" not in name])
def test_float64(name):
    case = make(name, torch.float64)
    compare(case.ours(), case.wanted(), case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_plain(name, dtype):
    case = make(name, dtype)
    compare(case.ours(), case.wanted(), case)


@pytest.fixture
def triton(monkeypatch):
    """Run the Triton kernels with poisoned outputs."""
    from meshwright.kernels.triton import gradients as gradients_triton

    monkeypatch.setattr(references, "is_triton", lambda x: True)
    if KERNELS == "cpu":  # the interpreter takes long for each program
        monkeypatch.setattr(gradients_triton, "REDUCED_COLUMNS", 1024)
    for name in ("empty", "empty_like"):
        empty = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda *a, empty=empty, **k: empty(*a, **k).fill_(float("nan"))
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_triton(name, dtype, triton):
    case = make(name, dtype, device=KERNELS)
    compare(case.ours(), case.wanted(), case)


@pytest.mark.parametrize(
    "shape", [(1, 64), (37, 64), (3, 1000), (2, 1024), (9, 1536), (2, 2560), (2, 8192)], ids=str
)
def test_triton_shapes(shape, triton):
    """One and several rows a program, one and several programs, and masked rows and columns."""
    case = make("middle", torch.bfloat16, shape, KERNELS)
    compare(case.ours(), case.wanted(), case)


def test_the_mask_is_that_of_dropout(triton):
    case = make("first", torch.float32, (4, 5, 1000), KERNELS)
    x, _ = case.run(case.tensors)
    assert torch.equal(x != 0, dropout.keep(case.rows, 1000, case.p))


@pytest.mark.parametrize("form", ["plain", "triton"])
def test_y_is_the_norm_of_x_as_it_is_stored(form, request):
    """The next function that reads x sees no other numbers; backward neither."""
    if form == "triton":
        request.getfixturevalue("triton")
    t = make("middle", torch.bfloat16, device=KERNELS).leaves()
    weight, shift = t["weight"].float(), t["shift"].float()
    x, y = add_norm(
        t["residual"], t["pending"], t["bias"], None, 0.0, NormWeights(weight, shift, 1e-5)
    )
    assert x.dtype is torch.bfloat16 and y.dtype is torch.float32
    torch.testing.assert_close(
        y, torch.nn.functional.layer_norm(x.float(), weight.shape, weight, shift)
    )


def test_gradients_go_into_the_totals(triton):
    """A frozen weight gets none."""
    case = make("middle", torch.float32, device=KERNELS)
    wanted, t = case.wanted(), case.leaves()
    for name in ("bias", "shift", "weight"):
        t[name].main_grad = Total(t[name], name == "bias")
    t["weight"].requires_grad_(False)
    torch.autograd.backward(case.run(t), list(case.grads))
    assert t["bias"].grad is t["shift"].grad is t["weight"].grad is None
    assert [t[name].main_grad.ended for name in ("bias", "shift", "weight")] == [1, 1, 0]
    torch.testing.assert_close(
        t["bias"].main_grad.total.double(), wanted["bias"] + 3.0, rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        t["shift"].main_grad.total.double(), wanted["shift"], rtol=1e-5, atol=1e-5
    )
