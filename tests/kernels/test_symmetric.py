"""Symmetric products: the lower triangle mirrored, of many sizes, against float64."""

import pytest
import torch

from meshwright.kernels import references, symmetric

kernel = pytest.importorskip(
    "meshwright.kernels.triton.symmetric", reason="Triton is not installed"
)

TILES = [
    kernel.SymmetricTiles(32, 32, 16, 4, 2),
    kernel.SymmetricTiles(32, 32, 32, 4, 2),
    kernel.SymmetricTiles(16, 32, 32, 4, 2),
    kernel.SymmetricTiles(64, 128, 32, 4, 2),
]
ON_GPU = torch.cuda.is_available()
# bfloat16 is rounded towards 0 by the interpreter.
DTYPES = [torch.float16, torch.bfloat16] if ON_GPU else [torch.float16]


@pytest.fixture(autouse=True)
def on_the_gpu_if_there_is_one():
    with torch.device("cuda" if ON_GPU else "cpu"):
        yield


def farthest(got, want):
    """Return the largest distance of an element in units of its last place."""
    wide = want.double()
    unit = torch.finfo(got.dtype).eps * wide.abs().clamp(min=0.125)
    return float(((got.double() - wide).abs() / unit).max())


def is_mirrored(x, tiles):
    """Whether the elements above the squares of the diagonal have the bits of those below.

    Within such a square a GPU's products are symmetric too. Triton's interpreter multiplies by
    numpy's BLAS, whose sums may have another order for the transposed element.
    """
    square = torch.arange(x.shape[-1]) // tiles.rows
    mirrored = square[:, None] != square
    return torch.equal(x, x.mT) if ON_GPU else torch.equal(x[:, mirrored], x.mT[:, mirrored])


def with_order(x, by_row):
    return x if by_row else x.mT.contiguous().mT


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize(("m", "k"), [(64, 64), (112, 48)])
@pytest.mark.parametrize("by_row", [True, False])
def test_a_matrix_times_its_transpose(tiles, dtype, m, k, by_row):
    """Every tile is computed once, and rounded once; the other half has its very bits."""
    x = with_order(torch.randn(2, m, k).to(dtype), by_row)
    got = kernel.half_product(x, x, None, 0.5, 0.0, 0.0, tiles)
    assert got.is_contiguous() and is_mirrored(got, tiles)
    assert farthest(got, 0.5 * x.double() @ x.double().mT) < 0.55


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("m", [64, 80])
def test_a_polynomial(tiles, dtype, m):
    """The square and multiples of the matrix and the identity are added before the rounding."""
    x = torch.randn(3, m, 2 * m).double() / (2 * m) ** 0.5
    r = (x @ x.mT).to(dtype)
    numbers = 2.0315, -4.775, 3.4445
    got = kernel.half_product(r, r, r, *numbers, tiles)
    exact = r.double()
    want = numbers[0] * exact @ exact + numbers[1] * exact + numbers[2] * torch.eye(m)
    assert is_mirrored(got, tiles) and farthest(got, want) < 0.55


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("c_is_given", [False, True])
def test_the_lower_half_is_taken(tiles, c_is_given):
    """Squares of so many rows as a tile above the diagonal are those below it, where they differ.

    Products of matrices that commute are symmetric but for their rounding.
    """
    a, b, c = (torch.randn(2, 96, 96).half() for _ in range(3))
    got = kernel.half_product(a, b, c if c_is_given else None, 1.0, 0.25, 0.0, tiles)
    full = a.double() @ b.double().mT + (0.25 * c.double() if c_is_given else 0.0)
    square = torch.arange(96) // tiles.rows
    assert farthest(got, torch.where(square[:, None] >= square, full, full.mT)) < 0.55


@pytest.mark.parametrize(
    ("shape", "dtype", "is_kernel"),
    [
        ((2, 256, 48), torch.float16, True),
        ((2, 264, 48), torch.float16, False),
        ((2, 256, 40), torch.float16, False),
        ((2, 240, 48), torch.float16, False),
        ((2, 256, 48), torch.float64, False),
    ],
)
def test_small_odd_and_float64_matrices_take_torchs_product(monkeypatch, shape, dtype, is_kernel):
    for name in ("has_kernels", "is_hopper_or_later"):
        monkeypatch.setattr(references.devices, name, lambda device: True)
    monkeypatch.setattr(kernel, "half_product", lambda *_: None)
    x = torch.randn(shape, dtype=dtype)
    got = symmetric.symmetric_product(x, x, scale=2.0)
    assert (got is None) == is_kernel
    if not is_kernel:
        torch.testing.assert_close(got, (2 * x.double() @ x.double().mT).to(dtype))
