"""The parameter store's update in Triton equals torch's, for whatever AdamW owns.

The kernels run on a GPU if there is one, else in Triton's interpreter.
"""

import dataclasses
import functools
import math

import pytest
import torch

import stores
from meshwright.base import device as devices
from meshwright.config.schema import Optimizer
from meshwright.kernels import adamw
from meshwright.optim.rules import StepScalars
from stores import GATED, gradient, is_equal, kinds, masters, snapshot, tokens

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
make, losses_of = (functools.partial(f, device=DEVICE) for f in (stores.make, stores.losses_of))


@pytest.fixture
def uses_kernels(monkeypatch):
    """uses_kernels(True) lets the store use Triton, whose interpreter runs on a CPU."""
    pytest.importorskip("triton", reason="Triton is not installed")
    return lambda value: monkeypatch.setattr(devices, "has_kernels", lambda device: value)


class Pair:
    """A store that updates with torch, and one that does so in Triton, with equal gradients."""

    def __init__(self, uses_kernels, m, o, dtype):
        self.uses_kernels = uses_kernels
        self.plain = make(m, o, dtype=dtype)
        uses_kernels(True)
        self.flat = make(m, o, dtype=dtype)
        uses_kernels(False)

    def step(self, i, numbers, spoil=None):
        grads = None
        for model, store in (self.plain, self.flat):
            store.clear_gradients()
            losses_of(model, [(tokens() + i) % 61], numbers.scale)
            if spoil is not None:
                gradient(store, spoil).view(-1)[3] = math.nan
            grads = store.gradients.clone() if grads is None else store.gradients.copy_(grads)
        want = self.plain[1].step(numbers)
        self.uses_kernels(True)
        got = self.flat[1].step(numbers)
        self.uses_kernels(False)
        return want, got


@pytest.mark.parametrize(
    ("rule", "dtype", "scale", "clip"),
    [
        ("adam", torch.float32, 1.0, 0.0),
        ("adam", torch.bfloat16, 1.0, 0.05),
        ("adam", torch.float16, 512.0, 0.05),
        ("muon", torch.float32, 1.0, 0.05),
        ("muon", torch.bfloat16, 1.0, 0.05),
        ("muon", torch.float16, 512.0, 0.05),
        ("rates", torch.bfloat16, 1.0, 0.05),
        ("cautious", torch.float16, 512.0, 0.05),
    ],
)
def test_the_store_equals_torchs(uses_kernels, rule, dtype, scale, clip):
    """Compare four steps, of which the second is not finite and changes nothing."""
    o = Optimizer(optimizer="muon" if rule == "muon" else "adam", clip_grad=clip, adam_beta2=0.95)
    if rule == "rates":
        o = dataclasses.replace(o, lr=1e-2, embedding_lr=3e-2, head_lr=2e-3, vector_lr=5e-3)
    o = dataclasses.replace(o, cautious_weight_decay=rule == "cautious")
    pair = Pair(uses_kernels, GATED, o, dtype)
    store = pair.flat[1]
    assert store.flat is not None and store.updates.keys() == (
        {("muon", 1, 1)} if rule == "muon" else set()
    )
    owned = sum(p.numel() for n, p in masters(store) if kinds(store)[n][0] == "adamw")
    assert owned <= store.flat.buffers.exp_avg.numel() < owned + 128 * 30
    for i in range(4):
        before, weights = snapshot(store), store.weights.clone()
        want, got = pair.step(
            i, StepScalars(1e-2 / (i + 1), 0.1 * i, scale), "h.1.ln_2.weight" if i == 1 else None
        )
        assert got.isfinite() == (i != 1)
        torch.testing.assert_close(got, want, rtol=3e-7, atol=0, equal_nan=True)
        if i == 1:
            assert is_equal(before, snapshot(store)) and torch.equal(weights, store.weights)
    assert store.steps == pair.plain[1].steps == 3
    ours, theirs = snapshot(store), snapshot(pair.plain[1])
    assert ours.keys() == theirs.keys()
    # Muon's tests are elsewhere
    owned_names = {n for n, (owner, *_) in kinds(store).items() if owner == "adamw"}
    for name, x in ((n, x) for n, x in theirs.items() if n.partition("/")[0] in owned_names):
        torch.testing.assert_close(
            ours[name], x, rtol=2e-6, atol=float(x.abs().max()) * 1e-6, msg=name
        )
    copy = store.weights.float()
    torch.testing.assert_close(copy, store.master, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    if dtype is torch.bfloat16 and DEVICE.type == "cpu":
        return  # the interpreter truncates bfloat16
    for name, p in masters(store):
        assert torch.equal(pair.flat[0].get_parameter(name), p.to(dtype)), name


def test_numbers_on_the_device_equal_floats(uses_kernels):
    """A store that reads its numbers from tensors, as in a CUDA graph, takes the same steps."""
    outcomes = []
    for on_device in (False, True):
        pair = Pair(uses_kernels, GATED, Optimizer(clip_grad=0.05), torch.float16)
        for i in range(3):
            values = StepScalars(1e-2 / (i + 1), 0.1 * i, 256.0)
            model, store = pair.flat
            store.clear_gradients()
            losses_of(model, [tokens() + 0], values.scale)
            uses_kernels(True)
            if on_device:
                values = StepScalars(
                    *(torch.tensor(x, dtype=torch.float64, device=DEVICE) for x in values)
                )
            store.step(values, torch.tensor([1.0, 0.0], dtype=torch.float64, device=DEVICE))
            uses_kernels(False)
        outcomes.append(snapshot(store))
    assert is_equal(*outcomes)


def test_resume_is_exact(uses_kernels):
    """State filled as a checkpoint does it, and Adam's t, continue bit for bit."""
    pair = Pair(uses_kernels, GATED, Optimizer(), torch.float32)
    pair.step(0, StepScalars(1e-2, 0.1))
    again = Pair(uses_kernels, GATED, Optimizer(), torch.float32)
    for _, store in (again.plain, again.flat):
        for name, (_, _, tensor) in store.named_state().items():
            tensor.copy_(pair.flat[1].named_state()[name][2])
        store.publish_weights()
        store.steps = pair.flat[1].steps
    assert is_equal(snapshot(pair.flat[1]), snapshot(again.flat[1]))
    assert is_equal(snapshot(pair.flat[1]), snapshot(again.plain[1]))
    pair.step(1, StepScalars(1e-2, 0.1))
    again.step(1, StepScalars(1e-2, 0.1))
    assert again.flat[1].steps == again.plain[1].steps == 2


def test_offloaded_and_float64_stores_keep_torchs(uses_kernels):
    uses_kernels(True)
    for more in ({"offload": True}, {"dtype": torch.float64}):
        _, store = make(GATED, **more)
        assert store.flat is None and len(store.updates) == 2
    assert adamw.BLOCK == 128
