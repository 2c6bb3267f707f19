"""The maps that compute in float32 on a CPU round float16 once, at the end."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from meshwright.kernels.matmul import affine


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
