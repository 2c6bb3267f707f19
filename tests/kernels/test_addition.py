"""Sums of two vectors of a lower precision are rounded once, to the higher one."""

import pytest
import torch

from meshwright import device as devices
from meshwright.kernels import addition

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("is_kernel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 4096, 10007])
def test_add_into(monkeypatch, is_kernel, dtype, size):
    monkeypatch.setattr(devices, "has_kernels", lambda device: is_kernel)
    a, b, c = torch.randn(3, size, device=DEVICE).to(dtype)
    out = torch.full((size + 1,), torch.nan, device=DEVICE)
    addition.add_into(out[:size], a, b)
    assert torch.equal(out[:size], a.float() + b.float()) and out[size].isnan()
    addition.add_into(out[:size], out[:size], c)
    assert torch.equal(out[:size], a.float() + b.float() + c.float())
