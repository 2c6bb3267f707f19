"""Splitting into heads: the model's own values and gradients, the bias's gradient, no copies."""

import pytest
import torch
from test_activation import ERROR, Total, distance
from torch.utils.checkpoint import checkpoint

from meshwright.kernels.heads import rotate, split, split_heads

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
    qkv = torch.randn(b, t, groups * (per_group + 2) * d).to(dtype).requires_grad_()
    bias = torch.nn.Parameter(torch.randn(qkv.shape[-1]).to(dtype))
    full = torch.float64 if dtype is torch.float64 else torch.float32
    angles = torch.randn(b if own_positions else 1, t, 1, rotating // 2, dtype=full)
    rotation = (angles.cos(), angles.sin()) if rotating else None
    grads = tuple(torch.randn(b, t, n, d).to(dtype) for n in (groups * per_group, groups, groups))
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
    return split_heads(qkv, *SHAPES[shape][:3], rotation, bias)


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("own_positions", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(shape, own_positions, dtype):
    qkv, bias, rotation, grads = case(shape, dtype, own_positions=own_positions)
    outputs = run(shape, qkv, rotation, bias)
    torch.autograd.backward(outputs, grads)
    want, dqkv = wanted(shape, qkv, rotation, grads)
    for got, exact in zip(outputs, want, strict=True):
        assert got.dtype is dtype and got.shape == exact.shape and distance(got, exact) < ERROR[dtype]
    assert qkv.grad.dtype is bias.grad.dtype is dtype and distance(qkv.grad, dqkv) < ERROR[dtype]
    assert distance(bias.grad, dqkv.sum((0, 1))) < 2 * ERROR[dtype]


def test_views_where_nothing_moves():
    for shape, viewed in {"gpt": "qkv", "one-group-plain": "qkv", "grouped": "kv", "grouped-rope": "v"}.items():
        qkv, bias, rotation, _ = case(shape, torch.float32)
        for name, x in zip("qkv", run(shape, qkv, rotation, bias), strict=True):
            same = x.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()
            assert same == (name in viewed), (shape, name)
            assert x.stride(-1) == 1


@pytest.mark.parametrize("adds", [False, True])
def test_the_bias_has_a_sink(adds):
    qkv, bias, rotation, grads = case("grouped-rope", torch.bfloat16)
    bias.sink = Total(bias, adds)
    torch.autograd.backward(run("grouped-rope", qkv, rotation, bias), grads)
    assert bias.grad is None and bias.sink.ended == 1
    assert distance(bias.sink.total - int(adds), wanted("grouped-rope", qkv, rotation, grads)[1].sum((0, 1))) < 1e-2


@pytest.mark.parametrize("shape", SHAPES)
def test_recomputed_unused_outputs_and_no_gradients(shape):
    """An output may be unused, such as the values of a probe; gradients may have any strides."""
    qkv, bias, rotation, grads = case(shape, torch.float64)
    x = qkv * 1.0  # not a leaf, as in a network
    q, k, v = checkpoint(run, shape, x, rotation, bias, use_reentrant=False)
    turned = grads[0].transpose(1, 2).contiguous().transpose(1, 2)
    torch.autograd.backward((q, k), (turned, torch.ones(()).double().expand(k.shape)))
    ones = torch.ones_like(k)
    want = wanted(shape, qkv, rotation, (grads[0], ones, torch.zeros_like(v)))[1]
    assert distance(qkv.grad, want) < 1e-15 and distance(bias.grad, want.sum((0, 1))) < 1e-14
    with torch.no_grad():
        assert not any(y.requires_grad for y in run(shape, qkv, rotation, bias))
