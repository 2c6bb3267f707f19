"""Muon's elementwise passes: the kernels equal their references, also where a step is skipped."""

import math

import pytest
import torch

from meshwright.kernels import muon

muon_triton = pytest.importorskip(
    "meshwright.kernels.triton.muon", reason="Triton is not installed"
)

# more than a block, and addresses that 16 divides or not
CASES = [((4, 8), 0), ((64, 65), 4), ((64, 65), 1), ((3, 5), 0)]


@pytest.fixture(autouse=True)
def on_the_gpu_if_there_is_one():
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        yield


def number(x):
    return torch.tensor(float(x))


def matrices(shape, count=3, gap=0):
    """Return matrices that lie anywhere in one buffer, as in a parameter store."""
    size = math.prod(shape)
    flat = torch.randn(count, size + gap)
    return [row[gap:].view(shape) for row in flat]


@pytest.mark.parametrize(("shape", "gap"), CASES)
@pytest.mark.parametrize("skipped", [False, True])
@pytest.mark.parametrize("momentum", [0.95, 0.0])
def test_advance(shape, gap, skipped, momentum):
    gradients, moments = matrices(shape, gap=gap), matrices(shape, gap=gap)
    before = [x.clone() for x in moments]
    references = [x.clone() for x in moments]
    if skipped:
        gradients[0][0, 0] = math.nan
    args = number(2.0), number(skipped), momentum
    ahead, norms = muon_triton.advance(gradients, moments, *args)
    want, want_norms = muon.advance.plain(gradients, references, *args)
    assert ahead.dtype is want.dtype is torch.bfloat16
    if skipped:
        assert all(map(torch.equal, moments, before)) and all(map(torch.equal, references, before))
        return
    for x, reference, old, gradient in zip(moments, references, before, gradients, strict=True):
        exact = momentum * old.double() + (1 - momentum) * gradient.double() / 2
        torch.testing.assert_close(x.double(), exact, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(reference, x, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ahead, want, rtol=0.01, atol=1e-5)
    torch.testing.assert_close(norms, ahead.double().norm(dim=(1, 2)).float())
    # the interpreter rounds towards 0
    torch.testing.assert_close(norms, want_norms, rtol=1 / 128, atol=0)


@pytest.mark.parametrize(
    ("shape", "rows"), [((4, 8), 8), ((64, 65), 64), ((64, 80), 70), ((3, 5), 4)]
)
@pytest.mark.parametrize("scale", [1.0, 1e-9])
@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float16), (torch.float16, torch.float32)]
)
def test_normalise(shape, rows, scale, dtypes):
    """Both round alike: norms and quotients to the format of x, and only then to the other."""
    x = (torch.randn(3, rows, shape[1]) * scale).to(dtypes[0])[:, : shape[0]]
    x[2] = 0
    norms = x.double().norm(dim=(1, 2)).float()
    divisors = norms.to(x.dtype).float().clamp(min=1e-7).to(x.dtype).float()
    want = (x.float() / divisors[:, None, None]).to(x.dtype).to(dtypes[1])
    got = muon_triton.normalise(x, norms, dtypes[1])
    assert got.dtype is dtypes[1] and got.is_contiguous() and torch.isfinite(got).all()
    # The interpreter rounds to bfloat16 towards 0.
    exact = x.is_cuda or x.dtype is torch.float16
    torch.testing.assert_close(got, want, rtol=0 if exact else 1 / 64, atol=0 if exact else 1e-7)
    torch.testing.assert_close(muon.normalise.plain(x, norms, dtypes[1]), want, rtol=0, atol=0)


@pytest.mark.parametrize(("shape", "gap"), CASES)
@pytest.mark.parametrize("skipped", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_cautious", [False, True])
@pytest.mark.parametrize("copied", [None, torch.float16])
def test_subtract(shape, gap, skipped, dtype, is_cautious, copied):
    weights, updates = matrices(shape, gap=gap), torch.randn(3, *shape).to(dtype)
    if skipped:
        updates[0, 0, 0] = math.nan
    before, references = [x.clone() for x in weights], [x.clone() for x in weights]
    args = number(0.9), number(0.25), number(skipped), is_cautious
    # Copies of other numbers, which a skipped step leaves
    copies = copied and [torch.ones(shape, dtype=copied) for _ in weights]
    reference_copies = copied and [x.clone() for x in copies]
    muon_triton.subtract(weights, updates, *args, copies)
    muon.subtract.plain(references, updates, *args, reference_copies)
    for copy, weight in zip(copies or [], weights, strict=copied is not None):
        assert torch.equal(copy, torch.ones_like(copy) if skipped else weight.to(copied))
    for copy, weight in zip(reference_copies or [], references, strict=copied is not None):
        assert torch.equal(copy, torch.ones_like(copy) if skipped else weight.to(copied))
    for x, reference, old, update in zip(weights, references, before, updates, strict=True):
        kept = torch.where(update.float() * old < 0, 1.0, 0.9) if is_cautious else 0.9
        want = old if skipped else kept * old - 0.25 * update.float()
        torch.testing.assert_close(x, want, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(reference, want, rtol=1e-5, atol=1e-6)


def test_a_table_that_a_graph_reads_is_never_dropped():
    a, others = matrices((4, 8)), torch.empty(1001)
    table = muon_triton.addresses(a)
    for x in others.split(1):
        muon_triton.addresses([x])
    assert muon_triton.addresses(a) is table


def test_tables_of_gradients_that_move_are_dropped_at_last():
    for place in range(muon_triton.MOST_TABLES + 9):
        muon_triton._table(torch.device("cpu"), (place,))
    assert muon_triton._table.cache_info().currsize == muon_triton.MOST_TABLES
