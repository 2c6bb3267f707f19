"""The maps that compute in float32 on a CPU round float16 once, at the end."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F

from meshwright.kernels.linear import compute, deferred, linear
from meshwright.kernels.products import affine


@pytest.mark.parametrize("biased", [False, True])
def test_float16_on_a_cpu_is_float32_rounded_once(biased):
    torch.manual_seed(0)
    shapes = [(2, 5, 96), (40, 96), (40,)][: 3 if biased else 2]
    half = [torch.randn(shape).half().requires_grad_() for shape in shapes]
    single = [x.detach().float().requires_grad_() for x in half]
    grad = torch.randn(2, 5, 40).half()
    outputs = []
    for f, given in ((affine, half), (F.linear, single)):
        y = f(*given)
        y.backward(grad.to(y.dtype))
        outputs.append([y.detach(), *(x.grad for x in given)])
    for ours, exact in zip(*outputs, strict=True):
        assert ours.dtype == torch.float16
        torch.testing.assert_close(ours, exact.half(), rtol=2**-10, atol=1e-6)


def test_a_deferred_gradient_in_float16():
    torch.manual_seed(0)
    x, w = (torch.randn(shape).half().requires_grad_() for shape in ((6, 8), (4, 8)))
    linear(x, w).sum().backward()
    wanted, w.grad = w.grad, None
    with deferred() as waiting:
        linear(x, w).sum().backward()
    assert w.grad is None
    compute(waiting)
    assert torch.equal(w.grad, wanted)


def test_deferred_gradients_let_go_of_a_stages_input():
    """Only the two factors are kept: neither the graph that made them nor its input."""
    received, w = (torch.randn(shape).requires_grad_() for shape in ((6, 8), (4, 8)))
    with deferred() as waiting:
        y = linear(received * 2, w) * 2
        y.backward(y)  # a gradient with a graph, as the loss writes it over the logits
        gone = weakref.ref(received)
        del received, y
        assert waiting and gone() is None


def test_a_deferred_gradient_frees_its_factors_before_the_next():
    given, w = [torch.randn(6, 8) for _ in range(2)], torch.randn(4, 8).requires_grad_()
    inputs, left = [weakref.ref(x) for x in given], list[int]()
    waiting = [(w, torch.randn(6, 4), x) for x in given]
    del given
    w.register_post_accumulate_grad_hook(
        lambda _: left.append(sum(x() is not None for x in inputs))
    )
    compute(waiting)
    assert left == [2, 1] and not waiting
