"""Symmetric products: the lower triangle mirrored, of any size, against float64."""

import pytest
import torch

from meshwright.kernels import symmetric

kernel = pytest.importorskip("meshwright.kernels.triton.symmetric", reason="Triton is not installed")
by_triton = kernel.symmetric_product
TILES = kernel.SymmetricTiles(16, 16, 4, 2)  # the interpreter is slow


@pytest.fixture(autouse=True)
def on_the_gpu_if_there_is_one():
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        yield


def by_twin(a, b, c, scale, keep, diagonal, tiles=None):
    return symmetric.full_product(a, b, c, scale, keep, diagonal)


def close(got, want):
    """Whether one rounding separates them, or two on the diagonal."""
    return float((got.double() - want).norm() / want.norm()) < torch.finfo(got.dtype).eps


@pytest.mark.parametrize(
    ("multiply", "dtype"), [(by_triton, torch.float16), (by_twin, torch.float16), (by_twin, torch.bfloat16)]
)
@pytest.mark.parametrize(("m", "k"), [(16, 16), (33, 40), (20, 7)])
@pytest.mark.parametrize("tall", [False, True])
def test_a_matrix_times_its_transpose(multiply, dtype, m, k, tall):
    x = torch.randn(2, k, m).to(dtype).mT if tall else torch.randn(2, m, k).to(dtype)
    got = multiply(x, x, None, 0.5, 0.0, 0.0, TILES)
    assert got.is_contiguous() and close(got, 0.5 * x.double() @ x.double().mT)
    if multiply is by_triton:
        assert torch.equal(got, got.mT)


@pytest.mark.parametrize(
    ("multiply", "dtype"), [(by_triton, torch.float16), (by_twin, torch.float16), (by_twin, torch.bfloat16)]
)
@pytest.mark.parametrize("m", [16, 35])
def test_a_polynomial(multiply, dtype, m):
    """A product of matrices that commute, plus a multiple of one of them and of the identity."""
    x = torch.randn(3, m, 2 * m).double() / (2 * m) ** 0.5
    r = (x @ x.mT).to(dtype)
    r = (r + r.mT) / 2
    got = multiply(r, r, r, 2.0315, -4.775, 3.4445, TILES)
    exact = r.double()
    want = 3.4445 * torch.eye(m) - 4.775 * exact + 2.0315 * exact @ exact
    assert close(got, want)
    q = want.to(dtype)
    got = multiply(q, r, None, 1.0, 0.0, 0.0, TILES)
    full = q.double() @ exact
    assert float((got.double() - full).norm() / full.norm()) < 4 * torch.finfo(dtype).eps


def test_every_tile_is_computed_once():
    """The rounded root misses no tile, and none of another matrix is written."""
    x = torch.randn(2, 16 * 7, 16).half()
    got = by_triton(x, x, None, 1.0, 0.0, 0.0, TILES)
    assert close(got, x.double() @ x.double().mT)


def test_small_and_plain_matrices_use_the_twin():
    assert not symmetric.is_halved(torch.empty(1, 1024, 8, dtype=torch.float16, device="cpu"))
    x = torch.randn(2, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(symmetric.symmetric_product(x, x, scale=2.0), 2 * x @ x.mT)
