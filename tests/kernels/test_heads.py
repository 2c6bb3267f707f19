"""Splitting into heads: the model's own values and gradients, the bias's gradient, no copies.

The Triton kernels run on a GPU if there is one, else in Triton's interpreter.
"""

import pytest
import torch
from test_activation import DEVICE, ERROR, distance, nan_in_new_memory  # noqa: F401
from torch.utils.checkpoint import checkpoint

from main_grads import Total
from meshwright.kernels import references
from meshwright.kernels.heads import HeadSizes, rotate, split, split_heads

# groups, queries per group, head_dim, rotated dimensions
SHAPES = {
    "gpt": (3, 1, 8, 0),
    "rope": (2, 1, 8, 8),
    "grouped": (2, 3, 6, 0),
    "grouped-rope": (2, 2, 6, 4),
    "one-group": (1, 4, 10, 10),
    "one-group-plain": (1, 4, 10, 0),
}


def case(shape, dtype, rows=(2, 5), own_positions=False):
    """Return the product's output, bias (already added), rotation and the gradients of q, k, v."""
    groups, per_group, d, rotating = SHAPES[shape]
    b, t = rows
    qkv = torch.randn(b, t, groups * (per_group + 2) * d).to(DEVICE, dtype).requires_grad_()
    bias = torch.nn.Parameter(torch.randn(qkv.shape[-1]).to(DEVICE, dtype))
    full = torch.float64 if dtype is torch.float64 else torch.float32
    angles = torch.randn(b if own_positions else 1, t, 1, rotating // 2, dtype=full, device=DEVICE)
    rotation = (angles.cos(), angles.sin()) if rotating else None
    grads = tuple(
        torch.randn(b, t, n, d).to(DEVICE, dtype) for n in (groups * per_group, groups, groups)
    )
    return qkv, bias, rotation, grads


def wanted(shape, qkv, rotation, grads):
    """Return values and gradients in float64, by the model's own functions."""
    _, per_group, d, _ = SHAPES[shape]
    x = qkv.detach().double().requires_grad_()
    q, k, v = split(x, per_group, d)
    if rotation is not None:
        exact = tuple(r.double() for r in rotation)
        q, k = rotate(q, exact), rotate(k, exact)
    torch.autograd.backward((q, k, v), tuple(g.double() for g in grads))
    return (q.detach(), k.detach(), v.detach()), x.grad


def run(shape, qkv, rotation, bias):
    return split_heads(qkv, HeadSizes(*SHAPES[shape][:3]), rotation, bias)


def compare(shape, dtype, rows, own_positions):
    qkv, bias, rotation, grads = case(shape, dtype, rows, own_positions)
    outputs = run(shape, qkv, rotation, bias)
    torch.autograd.backward(outputs, grads)
    want, dqkv = wanted(shape, qkv, rotation, grads)
    for got, exact in zip(outputs, want, strict=True):
        assert (
            got.dtype is dtype and got.shape == exact.shape and distance(got, exact) < ERROR[dtype]
        )
    assert qkv.grad.dtype is bias.grad.dtype is dtype and distance(qkv.grad, dqkv) < ERROR[dtype]
    assert distance(bias.grad, dqkv.sum((0, 1))) < 2 * ERROR[dtype]


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("own_positions", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(shape, own_positions, dtype):
    compare(shape, dtype, (2, 5), own_positions)


FORMATS = {
    "gpt": torch.float16,
    "rope": torch.bfloat16,
    "grouped": torch.bfloat16,
    "grouped-rope": torch.bfloat16,
    "one-group": torch.float32,
    "one-group-plain": torch.float32,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_kernels(shape, monkeypatch):
    """Positions and samples that fill no tile; with some shapes each sample has its positions."""
    monkeypatch.setattr(references, "is_triton", lambda x: True)
    compare(shape, FORMATS[shape], (3, 33), "grouped" in shape)


def test_views_where_nothing_moves(with_kernels):
    for shape, viewed in {
        "gpt": "qkv",
        "one-group-plain": "qkv",
        "grouped": "kv",
        "grouped-rope": "v",
    }.items():
        qkv, bias, rotation, _ = case(shape, torch.float32)
        for name, x in zip("qkv", run(shape, qkv, rotation, bias), strict=True):
            same = x.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()
            assert same == (name in viewed), (shape, name)
            assert x.stride(-1) == 1


@pytest.mark.parametrize("adds", [False, True])
def test_the_bias_has_a_main_grad(adds, with_kernels):
    """Its gradient reaches the total without being rounded to the parameter's format."""
    qkv, bias, rotation, grads = case("grouped-rope", torch.bfloat16)
    bias.main_grad = Total(bias, adds)
    torch.autograd.backward(run("grouped-rope", qkv, rotation, bias), grads)
    assert bias.grad is None and bias.main_grad.ended == 1
    assert (
        distance(
            bias.main_grad.total - 3 * adds,
            wanted("grouped-rope", qkv, rotation, grads)[1].sum((0, 1)),
        )
        < 1e-5
    )


@pytest.mark.parametrize("shape", ["gpt", "grouped-rope"])
def test_recomputed_unused_outputs_and_no_gradients(shape, with_kernels):
    """An output may be unused, such as the values of a probe; gradients may have any strides."""
    qkv, bias, rotation, grads = case(shape, torch.float32)
    x = qkv * 1.0  # not a leaf, as in a network
    q, k, v = checkpoint(run, shape, x, rotation, bias, use_reentrant=False)
    turned = grads[0].transpose(1, 2).contiguous().transpose(1, 2)
    torch.autograd.backward((q, k), (turned, torch.ones_like(k[0, 0, 0, 0]).expand(k.shape)))
    ones = torch.ones_like(k)
    want = wanted(shape, qkv, rotation, (grads[0], ones, torch.zeros_like(v)))[1]
    assert distance(qkv.grad, want) < 1e-6 and distance(bias.grad, want.sum((0, 1))) < 1e-6
    with torch.no_grad():
        assert not any(y.requires_grad for y in run(shape, qkv, rotation, bias))


def test_every_tile_gives_the_same_sums():
    from meshwright.kernels.triton import heads as heads_triton

    qkv, _, rotation, grads = case("rope", torch.float32, (3, 5))
    want = wanted("rope", qkv, rotation, grads)[1]
    sizes = HeadSizes(*SHAPES["rope"][:3])
    for tile in (heads_triton.TILE, heads_triton.SlotTile(8, 1, 3, 2)):
        grad, partials = heads_triton.pack(grads, sizes, rotation, True, tile=tile)
        assert partials.shape == (-(-5 // tile.step) * -(-3 // tile.samples), qkv.shape[-1])
        assert distance(grad, want) < 1e-6 and distance(partials.sum(0), want.sum((0, 1))) < 1e-6
    assert heads_triton.pack(grads, sizes, rotation, False)[1] is None
