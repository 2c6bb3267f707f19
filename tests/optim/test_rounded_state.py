"""--optimizer-state-dtype: moments in 16 or 8 bits follow plain formulas, whatever the store."""

import math
import zlib

import pytest
import torch

import stores
from meshwright.base import device as devices
from meshwright.config import checks, flags
from meshwright.config.schema import Optimizer, TrainConfig
from meshwright.kernels import moments
from meshwright.optim import elementwise
from meshwright.optim.rules import StepScalars
from stores import (
    GATED,
    VOCAB,
    gradient,
    kinds,
    losses_of,
    make,
    masters,
    snapshot,
    state,
    tokens,
)

PAIRS = pytest.mark.parametrize(
    ("rule", "dtype"),
    [
        ("adam", "bfloat16"),
        ("adam", "float8"),
        ("sgd", "bfloat16"),
        ("lion", "float8"),
        ("muon", "float8"),
    ],
)
GPU_OR_CPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def settings(rule, dtype, **more):
    return Optimizer(optimizer=rule, optimizer_state_dtype=dtype, clip_grad=0.5, **more)


def step(model, store, i, spoil=None, lr=1e-2):
    store.clear_gradients()
    losses_of(model, [(tokens() + 3 * i) % VOCAB])
    if spoil is not None:
        gradient(store, spoil).view(-1)[3] = math.nan
    return store.step(StepScalars(lr, 0.1))


def rounded_at(values, name, key, dtype, number):
    """Round a full moment by the hash of each position, as moments.py says."""
    place = moments.Place(zlib.crc32(name.encode()), 0, 0, values.numel(), 0)
    bits = moments.draw(place, torch.tensor(float(number)), values.numel())
    half = (bits >> 16 if key == "exp_avg_sq" else bits) & 0xFFFF
    code = {
        "bfloat16": torch.bfloat16,
        "float8": torch.uint8 if key == "exp_avg_sq" else torch.int8,
    }[dtype]
    return moments.rounded(values.flatten(), code, half).view(values.shape)


@pytest.mark.flag("optimizer_state_dtype")
@PAIRS
def test_moments_follow_a_plain_formula(monkeypatch, rule, dtype):
    """Every code is that of the formula; the weights follow moments that are not rounded yet."""
    monkeypatch.setattr(elementwise, "CHUNK", 300)
    o = settings(rule, dtype)
    model, store = make(GATED, o, torch.float64)
    chosen = {name: param_group.rule for name, param_group in kinds(store).items()}
    for i in range(1, 4):
        before = {
            n: (p.clone(), {k: moments.expanded(x, p.dtype) for k, x in state(store, n).items()})
            for n, p in masters(store)
        }
        store.clear_gradients()
        losses_of(model, [(tokens() + 3 * i) % VOCAB])
        norm = float(store.gradients.norm())
        grads = {n: gradient(store, n) * min(1.0, 0.5 / (norm + 1e-6)) for n in before}
        store.step(StepScalars(1e-2, 0.1))
        for name, p in masters(store):
            (old, moment), g, codes = before[name], grads[name], state(store, name)
            decays = 0.1 * (p.ndim > 1 and not name.endswith("bias"))
            if chosen[name] == "adamw":
                m, v = moment["exp_avg"].lerp(g, 0.1), moment["exp_avg_sq"] * 0.999 + 0.001 * g * g
                want = {"exp_avg": m, "exp_avg_sq": v}
                new = old - 1e-2 * (
                    decays * old + m / (1 - 0.9**i) / ((v / (1 - 0.999**i)).sqrt() + 1e-8)
                )
            elif chosen[name] == "sgd":
                want = {"momentum_buffer": 0.9 * moment["momentum_buffer"] + g + decays * old}
                new = old - 1e-2 * want["momentum_buffer"]
            elif chosen[name] == "lion":
                want = {"exp_avg": 0.99 * moment["exp_avg"] + 0.01 * g}
                new = None
            else:
                want, new = {"momentum_buffer": moment["momentum_buffer"].lerp(g, 0.05)}, None
            for key, values in want.items():
                expected = rounded_at(values, name, key, dtype, i)
                assert codes[key].dtype is expected.dtype
                apart = (moments.expanded(codes[key]) != moments.expanded(expected)).float().mean()
                # float32's last bit may differ
                assert apart <= 2e-3 or name.endswith("qkv.bias"), (name, key, apart)
            if new is not None and not name.endswith("qkv.bias"):
                torch.testing.assert_close(p, new, rtol=1e-9, atol=1e-12)
    assert store.steps == 3


@pytest.mark.parametrize(("rule", "dtype"), [("adam", "float8"), ("muon", "bfloat16")])
def test_kernels_round_as_torch_does(monkeypatch, rule, dtype):
    """The update in Triton stores the codes of the plain one, but for roundings of float32."""
    pytest.importorskip("triton", reason="Triton is not installed")
    outcomes = []
    for uses_kernels in (True, False):
        monkeypatch.setattr(
            devices, "has_kernels", lambda device, uses_kernels=uses_kernels: uses_kernels
        )
        model, store = make(GATED, settings(rule, dtype), device=GPU_OR_CPU)
        assert (store.flat is not None) == uses_kernels
        grads = (
            torch.randn(store.size, generator=torch.Generator().manual_seed(3)).to(GPU_OR_CPU)
            * 1e-3
        )
        for i in range(2):
            store.clear_gradients()
            monkeypatch.setattr(devices, "has_kernels", lambda device: False)
            losses_of(model, [tokens()], device=GPU_OR_CPU)
            monkeypatch.setattr(
                devices, "has_kernels", lambda device, uses_kernels=uses_kernels: uses_kernels
            )
            for name in store.shapes:
                view = stores.view(store, store.gradients, name)
                view.copy_(grads[: view.numel()].view(view.shape) * (i + 1))
            store.step(StepScalars(1e-2, 0.1))
        assert store.steps == 2
        outcomes.append(snapshot(store))
    ours, theirs = outcomes
    assert ours.keys() == theirs.keys()
    for name in (n for n in ours if "/" in n):
        assert ours[name].dtype is theirs[name].dtype
        apart = (moments.expanded(ours[name]) != moments.expanded(theirs[name])).float().mean()
        assert apart < 0.02, (name, apart)
        assert moments.expanded(ours[name]).any()


@pytest.mark.parametrize(
    ("line", "fits"),
    [("--adam-eps 1e-10", False), ("", True), ("--optimizer lion --adam-eps 1e-10", True)],
)
def test_float8_needs_a_term_that_its_second_moments_do_not_fall_below(line, fits):
    words = ["--num-layers", "1", "--optimizer-state-dtype", "float8", *line.split()]
    config = flags.parse_settings(TrainConfig, words, "meshwright train", check=False).config
    assert any("adam_eps" in problem.about for problem in checks.problems(config)) != fits
