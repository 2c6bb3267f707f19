"""fp8: the cast in both layouts, the three products, and how scales are chosen and kept."""

from __future__ import annotations

import pytest
import torch

from main_grads import Total
from meshwright.base import device as devices
from meshwright.kernels import fp8
from meshwright.kernels.fp8 import E4M3, E5M2, LARGEST, Recipe, Scales

fp8_triton = pytest.importorskip("meshwright.kernels.triton.fp8", reason="Triton is not installed")

pytestmark = pytest.mark.whole  # Triton's interpreter takes seconds
KERNELS = "cuda" if torch.cuda.is_available() else "cpu"  # there Triton's interpreter runs them


def casts(quantise, x, scale, dtype, is_transposed=True, is_recorded=True, amax=0.25):
    """Return both layouts and the amax, from poisoned memory."""
    out, transposed = fp8.empty_casts(x.shape, dtype, x.device, is_transposed)
    for y in (out, transposed):
        if y is not None:
            y.view(torch.uint8).fill_(0x55)
    high = torch.tensor([amax], device=x.device)
    quantise(
        x, torch.tensor([scale], device=x.device), high if is_recorded else None, out, transposed
    )
    return out, transposed, high.item()


def bits(x):
    return x.contiguous().view(torch.uint8)


def some(n, c, dtype, scale, is_exact):
    """Return bfloat16 numbers, some beyond the largest; exact ones are rounded by no cast."""
    x = torch.randn(n, c, device=KERNELS).mul(LARGEST[dtype] / 2)
    return (
        (x.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype).float() if is_exact else x) / scale
    ).bfloat16()


# Triton's interpreter loses the carry of a rounding (1.94 becomes 1), so it gets exact numbers.
BOTH = [(fp8_triton.quantise, KERNELS == "cpu"), (fp8.quantise.plain, False)]
KINDS = pytest.mark.parametrize(("quantise", "is_exact"), BOTH)


@KINDS
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize(
    ("n", "c", "scale"), [(64, 128, 1.0), (70, 136, 32.0), (3, 16, 2.0**-9), (130, 264, 2.0**20)]
)
def test_cast_is_torchs_in_both_layouts(quantise, is_exact, dtype, n, c, scale):
    x = some(n, c, dtype, scale, is_exact)
    x[0, 0] = 3 * LARGEST[dtype] / scale
    out, transposed, amax = casts(quantise, x, scale, dtype)
    wanted = (x.float() * scale).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)
    assert torch.equal(bits(out), bits(wanted))
    assert transposed.shape == (c, -(-n // 16) * 16)
    assert (
        torch.equal(bits(transposed[:, :n]), bits(wanted.t())) and not bits(transposed[:, n:]).any()
    )
    assert amax == max(0.25, x.abs().max().item())


@pytest.mark.parametrize(
    "quantise", [fp8_triton.quantise, fp8.quantise.plain], ids=["triton", "plain"]
)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_nothing_infinite_becomes_finite(quantise, dtype):
    x = torch.tensor([[1.0, torch.inf, -torch.inf, torch.nan] * 4], device=KERNELS)
    out, _, amax = casts(quantise, x, 2.0, dtype)
    assert torch.equal(out.float().isfinite(), x.isfinite()) and amax == 1.0


@pytest.mark.parametrize(
    "quantise", [fp8_triton.quantise, fp8.quantise.plain], ids=["triton", "plain"]
)
def test_what_is_not_asked_for_stays(quantise):
    x = torch.full((20, 16), 0.125, device=KERNELS).t()  # not contiguous
    out, transposed, amax = casts(
        quantise, x, 1.0, E4M3, is_transposed=False, is_recorded=False, amax=0.0
    )
    assert transposed is None and amax == 0.0 and bool((out.float() == 0.125).all())
    assert casts(quantise, x, 1.0, E4M3)[2] == 0.25  # a smaller amax does not lower it


@pytest.mark.parametrize(
    "transpose", [fp8_triton.transpose_into, fp8.transpose_into.plain], ids=["triton", "plain"]
)
@pytest.mark.parametrize(("n", "c"), [(128, 128), (70, 136), (3, 16), (133, 272)])
def test_transpose(transpose, n, c):
    q = torch.randint(256, (n, c), dtype=torch.uint8, device=KERNELS)
    transposed = torch.full((c, -(-n // 16) * 16), 0x55, dtype=torch.uint8, device=KERNELS)
    transpose(q, transposed)
    assert torch.equal(transposed[:, :n], q.t()) and not transposed[:, n:].any()


@pytest.mark.parametrize("pack", [1, 2, 4, 8])
@pytest.mark.parametrize("down", [True, False])
def test_every_tile_gives_the_same_bytes(monkeypatch, pack, down):
    x = some(70, 48, E4M3, 1.0, True)
    wanted = casts(fp8.quantise.plain, x, 1.0, E4M3)
    for name in ("CAST", "TRANSPOSE"):
        monkeypatch.setattr(fp8_triton, name, fp8_triton.CastTile(32, 16, 2, pack, down))
    got = casts(fp8_triton.quantise, x, 1.0, E4M3)
    assert (
        all(torch.equal(bits(a), bits(b)) for a, b in zip(got[:2], wanted[:2], strict=True))
        and got[2] == wanted[2]
    )


PLAIN = Recipe()


def network(recipe=PLAIN, inside=32, outside=48, rows=40, dtype=torch.bfloat16):
    """Return scales with one map, its weight and bias, an input and a gradient."""
    scales = Scales(recipe, torch.device("cpu"))
    product = scales.add(["h.0.mlp.fc"])["h.0.mlp.fc"]
    weight = torch.nn.Parameter(torch.randn(outside, inside, dtype=dtype) * 0.02)
    bias = torch.nn.Parameter(torch.randn(outside, dtype=dtype))
    x = torch.randn(2, rows // 2, inside, dtype=dtype).requires_grad_()
    return scales, product, weight, bias, x, torch.randn(2, rows // 2, outside, dtype=dtype) * 1e-4


def emulated(x, dtype):
    """Return x as it is after a cast by its own amax."""
    # a number / x is a product with 1 / x
    scale = torch.tensor(LARGEST[dtype]) / x.float().abs().max()
    return (x.float() * scale).to(dtype).float() / scale


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_products(hybrid, biased):
    _, product, weight, bias, x, grad = network(Recipe(hybrid))
    y = product(x, weight, bias if biased else None)
    y.backward(grad)
    q_x, q_w = emulated(x.detach().flatten(0, 1), E4M3), emulated(weight.detach(), E4M3)
    q_g = emulated(grad.flatten(0, 1), E5M2 if hybrid else E4M3)
    near = dict(rtol=2**-7, atol=1e-7)  # a rounding to bfloat16 either way
    wanted = q_x @ q_w.t() + (bias.detach().float() if biased else 0)
    torch.testing.assert_close(y.detach().flatten(0, 1).float(), wanted, rtol=2**-7, atol=1e-5)
    torch.testing.assert_close(x.grad.flatten(0, 1).float(), q_g @ q_w, **near)
    torch.testing.assert_close(weight.grad.float(), q_g.t() @ q_x, **near)
    if biased:
        torch.testing.assert_close(
            bias.grad.double(), grad.double().sum((0, 1)), rtol=2**-7, atol=1e-6
        )
    # e4m3 has 3 bits behind the point and rounds by at most 2^-4 of a number, e5m2 by 2^-3; in a
    # sum of products they add up as independent errors do.
    exact = grad.double().flatten(0, 1).t() @ x.detach().double().flatten(0, 1)
    error = (weight.grad.double() - exact).norm() / exact.norm()
    assert 0.01 < error < (0.08 if hybrid else 0.05)


def test_each_tensor_has_a_scale_of_its_own():
    """Also where others are cast between a tensor's forward and backward pass."""
    _, product, weight, _, x, grad = network(Recipe(hybrid=True, is_tensorwise=True))
    outputs = [product(x * factor, weight) for factor in (1.0, 100.0, 1e-3)]
    q_w, q_g = emulated(weight.detach(), E4M3), emulated(grad.flatten(0, 1), E5M2)
    for factor, y in zip((1.0, 100.0, 1e-3), outputs, strict=True):
        q_x = emulated((x.detach() * factor).flatten(0, 1), E4M3)
        torch.testing.assert_close(
            y.detach().flatten(0, 1).float(), q_x @ q_w.t(), rtol=2**-7, atol=1e-5 * factor
        )
        weight.grad = None
        y.backward(grad)
        torch.testing.assert_close(weight.grad.float(), q_g.t() @ q_x, rtol=2**-7, atol=1e-7)


def test_scales_of_single_tensors_are_not_kept():
    scales, product, weight, _, x, grad = network(Recipe(is_tensorwise=True))
    product(x, weight).backward(grad)
    scales.update()
    assert scales.is_settled  # CUDA graphs may record the next step
    (name,) = scales.state()["scales"]
    assert name.endswith(".weight")
    # What delayed scales have saved is of no use here, nor the other way round.
    delayed, *_ = network(Recipe())
    assert delayed.state()["recipe"] != scales.state()["recipe"]


def test_weight_gradients_go_into_the_total():
    _, product, weight, _, x, grad = network()
    product(x, weight).backward(grad)
    wanted, weight.grad = weight.grad.float(), None
    weight.main_grad = Total(weight)
    for n in (1, 2):
        product(x, weight).backward(grad)
        assert weight.grad is None and weight.main_grad.ended == n
        torch.testing.assert_close(weight.main_grad.total, n * wanted, rtol=2**-7, atol=0)


def chosen(scales, role="input"):
    return scales.scale[scales.slots[f"h.0.mlp.fc.{role}"], 0].item()


@pytest.mark.parametrize("margin", [0, 2])
def test_scales_follow_by_a_step(margin):
    """The first use takes its own amax; then each step has the scale of the step before."""
    scales, product, weight, _, x, _ = network(Recipe(margin=margin))
    for factor in (1.0, 4.0, 0.5):
        amax = (x.detach() * factor).abs().max().item()
        with torch.no_grad():
            before = chosen(scales) if factor != 1.0 else 448 / amax / 2**margin
        product(x.detach() * factor, weight)
        assert chosen(scales) == pytest.approx(before)
        scales.update()
        assert chosen(scales) == pytest.approx(448 / amax / 2**margin)


def test_zeros_choose_no_scale():
    """As of gradients behind projections that start at 0, which are small in the step after."""
    scales, product, weight, _, x, grad = network()
    for factor, is_settled in ((0.0, False), (torch.nan, False), (0.0, False), (1e-3, True)):
        assert not scales.is_set[scales.slots["h.0.mlp.fc.gradient"]]
        product(x, weight).backward(grad * factor)
        scales.update()
        assert scales.is_settled == is_settled
    assert chosen(scales, "gradient") == pytest.approx(
        448 / (grad.abs().max().item() * 1e-3), rel=1e-2
    )
    assert weight.grad.isnan().any() and x.grad.isnan().any()  # of the step with NaN
    weight.grad = None
    product(x, weight).backward(grad * 1e-3)
    error = weight.grad.double() - 1e-3 * grad.double().flatten(
        0, 1
    ).t() @ x.detach().double().flatten(0, 1)
    assert error.norm() < 0.05 * weight.grad.double().norm()


@pytest.mark.parametrize("uses_max", [False, True])
def test_history(uses_max):
    scales, product, weight, _, x, _ = network(Recipe(history=3, uses_max=uses_max))
    x = x.detach() / x.detach().abs().max()
    seen = []
    for size in (1.0, 8.0, 2.0, 4.0, 1.0, 1.0):
        product(x * size, weight)
        scales.update()
        seen.append(size)
        assert chosen(scales) == pytest.approx(448 / (max(seen[-3:]) if uses_max else size))


def test_amaxes_that_say_nothing_keep_the_scale():
    scales, product, weight, _, x, _ = network()
    product(x, weight)
    before = chosen(scales)
    scales.update()
    scales.update()  # no use between: an amax of 0
    assert chosen(scales) == before
    product(torch.full_like(x, torch.inf), weight)
    scales.update()
    assert chosen(scales) == before
    product(torch.full_like(x, 1e-38), weight)  # 448 / 1e-38 is beyond float32
    scales.update()
    assert chosen(scales) == 2.0**100


def test_the_first_scale_is_combined():
    """Processes with the same weights begin with the scale of the largest amax among them."""
    scales, product, weight, _, x, grad = network()
    scales.combine = lambda amax: amax.mul_(2)
    product(x, weight).backward(grad)
    assert chosen(scales) == pytest.approx(224 / x.abs().max().item())
    assert chosen(scales, "gradient") == pytest.approx(224 / grad.abs().max().item())
    assert chosen(scales, "weight") == pytest.approx(224 / weight.abs().max().item())
    scales.update()
    assert chosen(scales) == pytest.approx(224 / x.abs().max().item())


def test_weights_are_cast_once_into_the_same_memory():
    scales, product, weight, _, x, _ = network()
    y = product(x, weight)
    place = product.cast.rows.data_ptr(), product.cast.transposed.data_ptr()
    weight.data.mul_(0.5)
    assert torch.equal(product(x, weight), y)
    scales.update()
    scales.refresh()
    assert torch.equal(product(x, weight), y / 2)
    assert (product.cast.rows.data_ptr(), product.cast.transposed.data_ptr()) == place


def test_casts_of_many_weights_in_one_launch(monkeypatch):
    """After a weight has moved too."""
    scales = Scales(PLAIN, torch.device(KERNELS))
    maps = list(scales.add(["a", "b", "c", "unused"]).values())[:3]
    weights = [
        torch.randn(r, c, device=KERNELS).to(E4M3).bfloat16()
        for r, c in ((32, 16), (16, 160), (144, 48))
    ]
    for weight in weights:
        weight[0, 0] = 7.0  # a scale of 64
    monkeypatch.setattr(fp8_triton, "CAST", fp8_triton.CastTile(32, 64, 2))
    for product, weight in zip(maps, weights, strict=True):
        product.know(weight)
    wanted = [x.clone() for product in maps for x in (product.cast.rows, product.cast.transposed)]
    amax, launched = scales.amax.clone(), []
    assert scales.amax.count_nonzero() == 3
    for moved in (False, True):
        if moved:
            maps[0].parameter = weights[0].clone()
        for product in maps:
            product.cast.rows.view(torch.uint8).fill_(0x55)
            product.cast.transposed.view(torch.uint8).fill_(0x55)
        scales.amax.zero_()
        with monkeypatch.context() as patch:
            patch.setattr(devices, "has_kernels", lambda device: True)
            launch = fp8_triton.quantise_many
            patch.setattr(
                fp8_triton,
                "quantise_many",
                lambda *a, launch=launch: (launched.append(a), launch(*a)),
            )
            scales.refresh()
            first = scales.weight_casts
            scales.refresh()
            assert scales.weight_casts is first
        got = [x for product in maps for x in (product.cast.rows, product.cast.transposed)]
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(got, wanted, strict=True))
        assert torch.equal(scales.amax, amax)
    assert len(launched) == 4


def test_state():
    recipe = Recipe(history=2)
    scales, product, weight, _, x, grad = network(recipe)
    for factor in (1.0, 3.0):
        product(x * factor, weight).backward(grad)
        scales.update()
        scales.refresh()
    again, there, *_ = network(recipe)
    again.load(scales.state())
    for name in ("scale", "inverse", "history"):
        assert torch.equal(getattr(scales, name)[:, 0], getattr(again, name)[:, 0])
    assert torch.equal(there(x, weight), product(x, weight))
    assert again.state() == scales.state()
    for other in (None, scales.state() | {"recipe": {"hybrid": True, "margin": 0}}):
        fresh, *_ = network(recipe)
        fresh.load(other)
        assert not any(fresh.is_set)
    some = scales.state()
    some["scales"]["h.1.mlp.fc.input"] = some["scales"].pop("h.0.mlp.fc.input")
    fresh.load(some)
    assert fresh.is_set == [False, True, True]


def test_a_run_that_goes_back_has_the_scales_of_one_that_resumes():
    """Also those that were not chosen yet when the state was saved."""
    scales, product, weight, _, x, grad = network()
    product(x, weight).backward(grad * 0)
    scales.update()
    saved = scales.state()
    product(x, weight).backward(grad)
    scales.update()
    assert all(scales.is_set)
    again, *_ = network()
    for each in (scales, again):
        each.load(saved)
        assert each.is_set == [True, True, False] and not each.is_settled and each.steps == 1
    for name in ("scale", "inverse", "history"):
        assert torch.equal(getattr(scales, name), getattr(again, name))


def test_a_tensor_may_be_zero_for_ever():
    """Then steps become CUDA graphs after all."""
    scales, product, weight, _, x, grad = network()
    settled = []
    for _ in range(fp8.BEGINNING + 2):
        product(x, weight).backward(grad * 0)
        scales.update()
        settled.append(scales.is_settled)
    assert settled == [False] * fp8.BEGINNING + [True] * 2


def test_processes_share_in_a_trial_if_they_all_have_it():
    scales, product, weight, *_ = network()
    product.know(weight)
    scales.combine = lambda amax: amax.mul_(2)
    with scales.trial(is_shared=True):
        scales.refresh()
        assert chosen(scales, "weight") == pytest.approx(224 / weight.abs().max().item())
    with scales.trial():
        scales.refresh()
        assert chosen(scales, "weight") == pytest.approx(448 / weight.abs().max().item())


def test_a_trial_leaves_casts_where_they_are():
    """A CUDA graph goes on reading them."""
    scales, product, weight, _, x, grad = network()
    product(x, weight).backward(grad)
    scales.update()
    scales.refresh()
    cast, kept = product.cast, [t.float() for t in (product.cast.rows, product.cast.transposed)]
    with scales.trial():
        product(x * 100, weight).backward(grad)
    assert product.cast is cast and all(
        map(torch.equal, kept, (cast.rows.float(), cast.transposed.float()))
    )
