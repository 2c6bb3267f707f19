"""Sums of columns, and where they go: into .grad, or into a parameter store's total."""

from __future__ import annotations

import pytest
import torch

from meshwright.kernels import gradients


class Total:
    """A sink as the parameter store's: a float32 total, poisoned if it is to be overwritten."""

    def __init__(self, shape, adds):
        self.total, self.adds, self.ended = torch.full(shape, 3.0 if adds else float("nan")), adds, 0

    def begin(self):
        return self.total, self.adds

    def end(self):
        self.ended += 1


def parameter(shape, adds=None, dtype=torch.bfloat16):
    made = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
    if adds is not None:
        made.sink = Total(shape, adds)
    return made


@pytest.mark.parametrize("adds", [None, False, True])
def test_several_vectors(adds):
    partials = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(0))
    partials[1] = float("nan")  # of no parameter
    first, last = parameter((6,), adds), parameter((2, 3), adds)
    out = gradients.from_several([first, None, last], partials)
    exact = partials.double().sum(1)
    for p, got, want in ((first, out[0], exact[0]), (last, out[2], exact[2].view(2, 3))):
        if adds is None:
            assert got.dtype is p.dtype
            torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=0)
        else:
            assert got is None and p.sink.ended == 1
            torch.testing.assert_close(p.sink.total, (want + (3.0 if adds else 0.0)).float())
    assert out[1] is None


@pytest.mark.parametrize("adds", [None, False, True])
def test_a_matrix(adds):
    grad = torch.randn(50, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    p = parameter((6,), adds)
    got = gradients.from_rows(p, grad)
    want = grad.double().sum(0)
    if adds is None:
        torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=0)
    else:
        assert got is None
        torch.testing.assert_close(p.sink.total, (want + (3.0 if adds else 0.0)).float())
    assert gradients.from_rows(None, grad) is None
