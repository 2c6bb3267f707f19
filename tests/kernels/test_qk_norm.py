"""Heads with norms of queries and keys: the model's own values, and all gradients of them.

The Triton kernels run on a GPU if there is one, else in Triton's interpreter.
"""

import pytest
import torch
import torch.nn.functional as F
from test_activation import DEVICE, ERROR, distance, nan_in_new_memory  # noqa: F401
from torch.utils.checkpoint import checkpoint

from main_grads import Total
from meshwright.kernels import references
from meshwright.kernels.heads import HeadSizes, rotate, split
from meshwright.kernels.norm import NormWeights
from meshwright.kernels.qk_norm import HeadNorms, split_and_norm_heads

EPS = 1e-5
# groups, queries per group, head_dim, rotated dimensions
SHAPES = {
    "gpt": (3, 1, 8, 0),
    "rope": (2, 1, 8, 8),
    "grouped": (2, 3, 6, 0),
    "grouped-rope": (2, 2, 12, 8),
    "one-group": (1, 4, 10, 10),
}
# whether rows are centered, whether there is a bias, what is added to the weight
NORMS = {
    "rms": (False, False, 0.0),
    "rms-1p": (False, False, 1.0),
    "layer": (True, True, 0.0),
    "layer-1p-unbiased": (True, False, 1.0),
}


class Case:
    """A product's output, its bias (already added), and what the heads need."""

    def __init__(self, shape, kind, dtype, rows=(2, 5), own_positions=False):
        self.groups, self.per_group, d, rotating = SHAPES[shape]
        self.centers, has_bias, self.plus = NORMS[kind]
        b, t = rows

        def draw(*sizes):
            return torch.randn(*sizes).to(DEVICE, dtype)

        def weights():
            bias = torch.nn.Parameter(draw(d)) if has_bias else None
            return NormWeights(torch.nn.Parameter(draw(d)), bias, EPS, self.plus, self.centers)

        columns = self.groups * (self.per_group + 2) * d
        self.dim = d
        self.qkv = draw(b, t, columns).requires_grad_()
        self.bias = torch.nn.Parameter(draw(columns))
        self.norms = HeadNorms(weights(), weights())
        full = torch.float64 if dtype is torch.float64 else torch.float32
        turns = torch.randn(
            b if own_positions else 1, t, 1, rotating // 2, dtype=full, device=DEVICE
        )
        self.rotation = (turns.cos(), turns.sin()) if rotating else None
        heads = self.groups * self.per_group
        self.grads = tuple(draw(b, t, n, d) for n in (heads, self.groups, self.groups))

    @property
    def sizes(self):
        return HeadSizes(self.groups, self.per_group, self.dim)

    @property
    def vectors(self):
        return [vector for vector in self.norms.vectors if vector is not None]

    def run(self, qkv=None):
        qkv = self.qkv if qkv is None else qkv
        return split_and_norm_heads(qkv, self.sizes, self.rotation, self.bias, self.norms)

    def wanted(self):
        """Return values, and gradients of qkv and of the norms' vectors, in float64."""
        x = self.qkv.detach().double().requires_grad_()
        exact = [vector.detach().double().requires_grad_() for vector in self.vectors]
        each = len(exact) // 2
        heads = list(split(x, self.per_group, self.dim))
        for i in range(2):
            weight, *bias = exact[i * each : (i + 1) * each]
            y = heads[i]
            if self.centers:
                y = F.layer_norm(y, y.shape[-1:], weight + self.plus, *bias, eps=EPS)
            else:
                y = F.rms_norm(y, y.shape[-1:], weight + self.plus, EPS)
            if self.rotation is not None:
                y = rotate(y, tuple(angles.double() for angles in self.rotation))
            heads[i] = y
        torch.autograd.backward(heads, [grad.double() for grad in self.grads])
        return [y.detach() for y in heads], x.grad, [vector.grad for vector in exact]


def compare(case, dtype):
    outputs = case.run()
    torch.autograd.backward(outputs, case.grads)
    values, of_qkv, of_vectors = case.wanted()
    for got, exact in zip(outputs, values, strict=True):
        assert got.dtype is dtype and got.shape == exact.shape
        assert distance(got, exact) < ERROR[dtype]
    assert case.qkv.grad.dtype is case.bias.grad.dtype is dtype
    assert distance(case.qkv.grad, of_qkv) < ERROR[dtype]
    assert distance(case.bias.grad, of_qkv.sum((0, 1))) < 2 * ERROR[dtype]
    for vector, exact in zip(case.vectors, of_vectors, strict=True):
        assert vector.grad.dtype is dtype and distance(vector.grad, exact) < 2 * ERROR[dtype]


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(shape, kind, dtype):
    compare(Case(shape, kind, dtype), dtype)


@pytest.mark.parametrize(
    ("shape", "kind", "dtype", "own_positions"),
    [
        ("gpt", "layer", torch.float16, False),
        ("rope", "rms", torch.bfloat16, False),
        ("grouped", "rms-1p", torch.bfloat16, False),
        ("grouped-rope", "layer-1p-unbiased", torch.bfloat16, True),
        ("grouped-rope", "layer", torch.float32, False),
        ("one-group", "rms", torch.float32, True),
    ],
)
def test_kernels(shape, kind, dtype, own_positions, monkeypatch):
    """Positions and samples that fill no tile; with some shapes each sample has its positions."""
    monkeypatch.setattr(references, "is_triton", lambda x: True)
    compare(Case(shape, kind, dtype, (3, 33), own_positions), dtype)


def test_values_are_views(with_kernels):
    case = Case("grouped-rope", "rms", torch.float32)
    q, k, v = case.run()
    storage = case.qkv.untyped_storage().data_ptr()
    assert [x.untyped_storage().data_ptr() == storage for x in (q, k, v)] == [False, False, True]


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("adds", [False, True])
def test_vectors_have_a_main_grad(adds, kind, with_kernels):
    """Their gradients reach the totals without being rounded to the parameters' format."""
    case = Case("grouped-rope", kind, torch.bfloat16)
    vectors = [*case.vectors, case.bias]
    for vector in vectors:
        vector.main_grad = Total(vector, adds)
    torch.autograd.backward(case.run(), case.grads)
    _, of_qkv, of_vectors = case.wanted()
    for vector, exact in zip(vectors, [*of_vectors, of_qkv.sum((0, 1))], strict=True):
        assert vector.grad is None and vector.main_grad.ended == 1
        assert distance(vector.main_grad.total - 3 * adds, exact) < 1e-5


def test_recomputed_unused_outputs_and_frozen_norms(with_kernels):
    """An output may be unused; gradients may have any strides; a norm may need no gradient."""
    case = Case("grouped-rope", "layer", torch.float32)
    case.norms.k.weight.requires_grad_(False)
    x = case.qkv * 1.0  # not a leaf, as in a network
    q, k, v = checkpoint(case.run, x, use_reentrant=False)
    turned = case.grads[0].transpose(1, 2).contiguous().transpose(1, 2)
    torch.autograd.backward((q, k), (turned, torch.ones_like(k[0, 0, 0, 0]).expand(k.shape)))
    case.grads = case.grads[0], torch.ones_like(k), torch.zeros_like(v)
    _, of_qkv, of_vectors = case.wanted()
    assert distance(case.qkv.grad, of_qkv) < 1e-6
    assert distance(case.bias.grad, of_qkv.sum((0, 1))) < 1e-6
    assert case.norms.k.weight.grad is None
    for vector, exact in zip(case.vectors, of_vectors, strict=True):
        assert vector.grad is None or distance(vector.grad, exact) < 1e-6
    with torch.no_grad():
        assert not any(y.requires_grad for y in case.run())


def test_every_tile_gives_the_same_sums():
    from meshwright.kernels.triton import heads as heads_triton
    from meshwright.kernels.triton import qk_norm as qk_norm_triton

    case = Case("grouped-rope", "layer", torch.float32, (3, 5))
    _, of_qkv, (wq, bq, wk, bk) = case.wanted()
    given = case.grads, case.qkv.detach(), case.sizes, case.rotation, case.norms
    for tile in (qk_norm_triton.PACK_TILE, heads_triton.SlotTile(4, 1, 3, 2)):
        got = qk_norm_triton.pack(*given, True, tile=tile)
        parts = -(-5 // tile.step) * -(-3 // tile.samples)
        assert got.sums.shape == (parts, of_qkv.shape[-1])
        assert got.of_q.shape == (2, 4 * parts, 12) and got.of_k.shape == (2, 2 * parts, 12)
        assert distance(got.of_qkv, of_qkv) < 1e-6
        assert distance(got.sums.sum(0), of_qkv.sum((0, 1))) < 1e-6
        assert distance(got.of_q.sum(1), torch.stack([wq, bq])) < 1e-6
        assert distance(got.of_k.sum(1), torch.stack([wk, bk])) < 1e-6
    assert qk_norm_triton.pack(*given, False).sums is None
