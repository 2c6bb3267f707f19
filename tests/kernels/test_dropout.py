"""Dropout: a function of (seed, site, sample, position, column), the same on every device."""

import pytest
import torch

from meshwright.kernels import dropout, references

SAMPLES, POSITIONS = torch.arange(7, 11)[:, None], torch.arange(64)


def rows(seed, site, samples=SAMPLES, positions=POSITIONS):
    return dropout.at_site(dropout.rows(seed, samples, positions), site)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_neighbours_are_independent(axis):
    keep = dropout.keep(rows(1, 0), 256, 0.5).float()
    a, b = (
        keep.narrow(axis, 0, keep.shape[axis] - 1) - 0.5,
        keep.narrow(axis, 1, keep.shape[axis] - 1) - 0.5,
    )
    assert abs((a * b).mean().item() / 0.25) < 5 / a.numel() ** 0.5


def test_sites_and_seeds_differ():
    pairs = [(seed, site) for seed in (1, 2, 2**40) for site in (0, 1, ~0)]
    masks = [dropout.keep(rows(seed, site), 64, 0.5) for seed, site in pairs]
    for i, a in enumerate(masks):
        for b in masks[:i]:
            assert 0.45 < (a == b).float().mean().item() < 0.55


def test_sites_together_are_the_sites_alone():
    """Rows may have any number of axes, such as heads in attention."""
    base = dropout.rows(3, SAMPLES[:, None], torch.arange(5)[:, None], POSITIONS)
    assert base.shape == (4, 5, 64) and base.dtype is torch.int32
    together = dropout.at_sites(base, 8)
    assert torch.equal(together, torch.stack([dropout.at_site(base, site) for site in range(8)]))
    assert not torch.equal(dropout.at_site(base, ~3), dropout.at_site(base, 3))
    assert not torch.equal(dropout.at_site(base, 0), base)


@pytest.mark.parametrize("seed", [1, 2**31, 2**40 + 1])
def test_sites_in_one_kernel(seed, monkeypatch):
    """Triton's hashes are the reference's, also for numbers beyond 32 bits."""
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    every, columns = (
        torch.tensor([0, 5, 2**31, 2**32 + 5, 2**40], device=device)[:, None],
        torch.arange(301),
    )
    columns = columns.to(device)
    monkeypatch.setattr(references, "is_triton", lambda x: True)
    for samples in (every, every[1:2]):
        want = dropout.at_sites(dropout.rows(seed, samples, columns), 5)
        got = dropout.site_rows(seed, 5, samples, columns)
        assert got.dtype is torch.int32 and torch.equal(got, want)


def test_backward_uses_the_same_mask():
    x = torch.randn(4, 64, 16, dtype=torch.float64, requires_grad=True)
    y = dropout.dropout(x, rows(1, 7), 0.3)
    y.sum().backward()
    torch.testing.assert_close(
        x.grad, dropout.keep(rows(1, 7), 16, 0.3) / torch.tensor(0.7, dtype=torch.float64)
    )
    assert torch.equal(y.detach(), dropout.mask_and_scale(x.detach(), rows(1, 7), 0.3))


def test_golden_bits():
    """The mask must not change between versions: a resumed run draws it again."""
    bits = dropout.keep(rows(1234, 3, torch.tensor([[99]]), torch.arange(4)), 16, 0.5).int()[0]
    assert ["".join(map(str, row)) for row in bits.tolist()] == GOLDEN


GOLDEN = ["1010100011011100", "1000011010010110", "0011100111100010", "0110100110101100"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the Triton kernel needs a GPU")
@pytest.mark.parametrize("columns", [64, 1000, 1024, 2560])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("site", [0, 49, ~5])
def test_triton_equals_plain(columns, dtype, site):
    from meshwright.kernels.triton.dropout import drop

    here = rows(77, site, SAMPLES.cuda(), POSITIONS.cuda())
    x = torch.randn(4, 64, columns, device="cuda", dtype=dtype)
    y = drop(x, here, 0.1)
    assert torch.equal(y != 0, dropout.keep(here, columns, 0.1) & (x != 0))
    torch.testing.assert_close(y, dropout.mask_and_scale(x, here, 0.1))
    assert torch.equal(here.cpu(), rows(77, site))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the Triton kernel needs a GPU")
def test_triton_forward_and_backward_have_one_mask():
    """The kernel also accepts a view whose rows are not contiguous."""
    here = rows(77, 3, SAMPLES.cuda(), POSITIONS.cuda())
    x = torch.randn(64, 4, 32, device="cuda").transpose(0, 1).requires_grad_()
    y = dropout.dropout(x, here, 0.3)
    y.backward(torch.ones_like(y))
    torch.testing.assert_close(y, dropout.mask_and_scale(x, here, 0.3))
    torch.testing.assert_close(x.grad, dropout.mask_and_scale(torch.ones_like(x), here, 0.3))


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_triton_interpreted(p):
    from meshwright.kernels.triton.dropout import drop

    here, x = rows(77, 49, SAMPLES[:1], POSITIONS[:3]), torch.ones(1, 3, 100)
    torch.testing.assert_close(drop(x, here, p), dropout.mask_and_scale(x, here, p))
