"""SGD, Lion, Muon and AdamW over flat buffers: assignment, equality with torch, resume, offload."""

import dataclasses
import itertools
import math

import pytest
import torch
from torch import nn

from helpers import TINY
from meshwright.checkpoint import loading, native
from meshwright.config.schema import Optimizer
from meshwright.optim import elementwise
from meshwright.optim.rules import StepScalars
from meshwright.parallel.flat import FlatStore
from meshwright.parallel.store import StoreSpec
from stores import (
    CPU,
    GATED,
    VOCAB,
    gradient,
    is_equal,
    kinds,
    losses_of,
    make,
    masters,
    one_of_each_kind,
    separate,
    snapshot,
    state,
    tokens,
    view,
)

pytestmark = pytest.mark.whole  # seconds, not moments

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="the offload's copies need a GPU")
RULES = ["adam", "sgd", "lion", "muon"]
CAUTIOUS = ["adam", "lion", "muon"]


def optimizer_of(rule, **more):
    if rule == "cautious":
        return Optimizer(cautious_weight_decay=True, **more)
    return Optimizer(optimizer=rule, **more)


def batches(step, count=2):
    return [(tokens() + step + 3 * k) % VOCAB for k in range(count)]


def steps(model, store, n, lr=1e-2, wd=0.1, first=0, device=CPU, scale=1.0):
    """Take a few steps; return their losses."""
    losses = []
    for i in range(first, first + n):
        store.clear_gradients()
        losses.append(losses_of(model, batches(i), scale, device))
        store.step(StepScalars(lr, wd, scale))
    return losses


# Rules


def kind_of_piece(store, piece):
    (kind,) = (
        k.param_group
        for bucket in store.buckets.values()
        for k, begin, end in bucket.kinds
        if bucket.begin + begin == piece.begin and end - begin == piece.master.numel()
    )
    return kind


def test_every_parameter_has_its_rule():
    """Muon updates the layers' matrices; AdamW the embeddings, the head, norms and biases."""
    m = dataclasses.replace(GATED, qk_layernorm=True, embed_layernorm=True)
    model, store = make(m, Optimizer(optimizer="muon"))
    found = kinds(store)
    layers = [f"h.{i}" for i in range(2)]
    matrices = {
        f"{i}.{n}.weight" for i in layers for n in ("attn.qkv", "attn.proj", "mlp.fc", "mlp.proj")
    }
    tables = {"wte.weight", "wpe.weight", "lm_head.weight"}
    vectors = {f"{n}.{p}" for n in ("ln_f", "ln_emb") for p in ("weight", "bias")}
    vectors |= {
        f"{i}.{n}.{p}"
        for i in layers
        for n in ("ln_1", "ln_2", "attn.ln_q", "attn.ln_k")
        for p in ("weight", "bias")
    }
    vectors |= {n.replace("weight", "bias") for n in matrices}
    assert found == (
        dict.fromkeys(matrices, ("muon", 1, 1))
        | dict.fromkeys(tables, ("adamw", 1, 1))
        | dict.fromkeys(vectors, ("adamw", 1, 0))
    )
    assert (
        model.get_parameter("h.0.mlp.fc.bias").ndim
        == 2
        == len(model.get_parameter("h.0.mlp.fc.bias"))
    )
    for rule, torchs in (("sgd", "sgd"), ("lion", "lion"), ("adam", "adamw"), ("adamw", "adamw")):
        _, store = make(m, Optimizer(optimizer=rule))
        assert kinds(store) == (
            dict.fromkeys(matrices | tables, (torchs, 1, 1))
            | dict.fromkeys(vectors, (torchs, 1, 0))
        )
        assert store.updates.keys() == {(torchs, 1, 1), (torchs, 1, 0)}
        for kind, update in store.updates.items():  # each parameter is updated once
            masters = [id(p.master) for p in store.update_ranges if kind_of_piece(store, p) == kind]
            assert list(map(id, update.param_groups[0]["params"])) == masters != []


@pytest.mark.parametrize("rule", RULES)
def test_kinds_of_parameters_have_their_own_rates(rule):
    """Each kind moves as in a run whose only rate is its own; a tied table is an embedding."""
    rates = {"": 0.02, "embedding_lr": 0.04, "head_lr": 0.005, "vector_lr": 0.0}
    given = {name: rate for name, rate in rates.items() if name}
    for m in (GATED, TINY):
        model, store = make(m, Optimizer(optimizer=rule, lr=0.02, **given), torch.float64)
        steps(model, store, 1, lr=0.01)  # half of the peak
        kinds_found = set()
        for kind, rate in rates.items():
            other, alone = make(m, Optimizer(optimizer=rule), torch.float64)
            start = {name: p.clone() for name, p in masters(alone)}
            steps(other, alone, 1, lr=rate / 2)
            for (name, p), (_, want) in zip(masters(store), masters(alone), strict=True):
                is_vector = p.ndim == 1 or name.endswith("bias")
                table = {"wte": "embedding_lr", "wpe": "embedding_lr", "lm_head": "head_lr"}.get(
                    name.split(".")[0], ""
                )
                if kind == ("vector_lr" if is_vector else table):
                    torch.testing.assert_close(p, want, rtol=1e-12, atol=1e-15, msg=name)
                    assert torch.equal(p, start[name]) == (kind == "vector_lr"), name
                    kinds_found.add(kind)
        assert kinds_found == rates.keys() - ({"head_lr"} if m is TINY else set())


# SGD


@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_sgd_equals_torchs(momentum, clip, dtype):
    """Compare ten clipped steps with torch.optim.SGD, whose decay is added to the gradient."""
    # at a higher rate, roundings grow from step to step
    lr = 0.3 if dtype is torch.float64 else 0.03
    ours, store = make(
        o=Optimizer(optimizer="sgd", sgd_momentum=momentum, clip_grad=clip), dtype=dtype
    )
    plain = separate(ours)
    named = dict(plain.named_parameters())
    kinds = [
        (0.1, [p for p in named.values() if p.ndim > 1]),
        (0.0, [p for p in named.values() if p.ndim == 1]),
    ]
    sgd = torch.optim.SGD(
        [{"params": p, "weight_decay": wd} for wd, p in kinds], lr=lr, momentum=momentum
    )
    for i in range(10):
        steps(ours, store, 1, lr, 0.1, i)
        sgd.zero_grad()
        losses_of(plain, batches(i))
        torch.nn.utils.clip_grad_norm_(named.values(), clip or math.inf)
        sgd.step()
    tolerance = (
        {"rtol": 1e-10, "atol": 1e-13} if dtype is torch.float64 else {"rtol": 1e-4, "atol": 1e-6}
    )
    moved = store.named_state()
    for name, p in masters(store):
        torch.testing.assert_close(p, named[name].detach(), **tolerance, msg=name)
        buffer = sgd.state[named[name]].get("momentum_buffer")
        rows = VOCAB if name == "wte.weight" else p.shape[0]
        want = torch.zeros_like(p) if buffer is None else buffer
        torch.testing.assert_close(moved[f"{name}/momentum"][2], want[:rows], **tolerance, msg=name)
    assert store.steps == 0  # Adam's t


# Cautious weight decay


@pytest.mark.parametrize("rule", CAUTIOUS)
@pytest.mark.parametrize(
    ("dtype", "offload"), [(torch.float64, False), (torch.float32, False), (torch.bfloat16, True)]
)
def test_a_cautious_decay_follows_its_formula(rule, dtype, offload):
    """Two steps without decay, and a third in which one of two stores decays."""
    lr, wd, scale = 0.01, 0.5, 1024.0
    o = Optimizer(optimizer=rule, clip_grad=0.5, cautious_weight_decay=True)
    found = []
    for decay in (0.0, wd):
        model, store = make(GATED, o, dtype=dtype, offload=offload)
        steps(model, store, 2, lr, 0.0, scale=scale)
        before = {name: p.clone() for name, p in masters(store)}
        steps(model, store, 1, lr, decay, first=2, scale=scale)
        found.append({name: p.clone() for name, p in masters(store)})
    exact = (
        {"rtol": 1e-12, "atol": 1e-15} if dtype is torch.float64 else {"rtol": 1e-5, "atol": 1e-7}
    )
    for name, w in before.items():
        moved, got = found[0][name], found[1][name]
        is_decayed = (w - moved) * w >= 0
        if w.ndim == 1 or name.endswith("bias"):
            assert torch.equal(got, moved), name
            continue
        rows = VOCAB if name in ("wte.weight", "lm_head.weight") else len(w)
        assert 0.1 < is_decayed[:rows].float().mean() < (1 if name == "wpe.weight" else 0.9), name
        # else a rounding hides the update
        clear = (dtype is torch.float64) | ((w - moved).abs() > 1e-6 * w.abs())
        torch.testing.assert_close(
            got[clear], (moved - lr * wd * w * is_decayed)[clear], **exact, msg=name
        )


# Lion


def lion_step(weight, grad, moment, lr, wd, beta1=0.9, beta2=0.99):
    update = torch.sign(beta1 * moment + (1 - beta1) * grad)
    return weight - lr * (update + wd * weight), beta2 * moment + (1 - beta2) * grad


@pytest.mark.parametrize(
    ("chunk", "betas", "clip", "dtype"),
    [
        (100, (0.9, 0.99), 0.05, torch.float32),
        (elementwise.CHUNK, (0.5, 0.8), 0.0, torch.float64),
    ],
)
def test_lion_follows_its_formula(monkeypatch, chunk, betas, clip, dtype):
    """Compare five steps of a scaled loss with the formula; biases and norms do not decay."""
    monkeypatch.setattr(elementwise, "CHUNK", chunk)
    o = Optimizer(optimizer="lion", lion_beta1=betas[0], lion_beta2=betas[1], clip_grad=clip)
    model, store = make(GATED, o, dtype=dtype)
    named = {n: (p.clone(), torch.zeros_like(p)) for n, p in masters(store)}
    lr, wd, scale = 0.01, 0.3, 1024.0
    exact = (
        {"rtol": 1e-12, "atol": 1e-15} if dtype is torch.float64 else {"rtol": 1e-5, "atol": 1e-8}
    )
    for i in range(5):
        store.clear_gradients()
        losses_of(model, batches(i), scale)
        norm = float(store.gradients.double().norm()) / scale
        shrink = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        assert shrink == 1.0 if not clip else shrink < 1.0
        grads = {n: gradient(store, n) * shrink / scale for n in named}
        store.step(StepScalars(lr, wd, scale))
        for name, p in masters(store):
            weight, moment = named[name]
            grad, decays = grads[name][: len(weight)], p.ndim > 1 and not name.endswith("bias")
            want, want_m = lion_step(weight, grad, moment, lr, wd if decays else 0.0, *betas)
            ahead = betas[0] * moment + (1 - betas[0]) * grad
            clear = ahead.abs() > 1e-6 * ahead.abs().max() + 1e-12  # else its sign is a rounding's
            clear |= (ahead == 0) & (grad == 0)  # rows of ids that do not occur stay where they are
            assert name.endswith("qkv.bias") or clear.float().mean() > 0.99, name
            torch.testing.assert_close(p[clear], want[clear], **exact, msg=name)
            assert ((p - weight).abs() <= lr * (1.001 + wd * weight.abs())).all()
            torch.testing.assert_close(
                state(store, name)["exp_avg"][: len(weight)], want_m, **exact, msg=name
            )
            named[name] = p.clone(), want_m
    assert store.steps == 0  # Adam's t


def test_lion_gives_roundings_no_sign_in_float64():
    """The sums of a layout would decide on the sign of a gradient that is 0 but for rounding."""
    for dtype, moved in ((torch.float64, [0.0, -1.0]), (torch.float32, [-1.0, -1.0])):
        p = nn.Parameter(torch.zeros(2, dtype=dtype))
        update = elementwise.Lion([p])
        update.state[p]["exp_avg"], p.grad = (
            torch.zeros_like(p),
            torch.tensor([1e-14, 1e-8], dtype=dtype),
        )
        update.param_groups[0]["lr"] = 1.0
        update.step()
        assert p.tolist() == moved


# Muon


def newton_schulz(x, low, count=5):
    """Approximate the nearest orthogonal matrix by Muon's quintic; `low` rounds to bfloat16."""
    a, b, c = 3.4445, -4.775, 2.0315

    def rounded(y):
        return y.bfloat16().double() if low else y

    x = rounded(x.double())
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = rounded(x / rounded(x.norm().clamp(min=1e-7)))
    for _ in range(count):
        gram = rounded(x @ x.T)
        x = rounded(a * x + rounded(b * gram + c * gram @ gram) @ x)
    return x.T if tall else x


def muon_step(weight, grad, moment, lr, wd, beta=0.95, low=False, count=5):
    """Return the new weight and momentum, in float64 except for the quintic."""
    moment = beta * moment + (1 - beta) * grad
    ahead = beta * moment + (1 - beta) * grad  # Nesterov
    size = 0.2 * math.sqrt(max(weight.shape))
    return weight * (1 - lr * wd) - lr * size * newton_schulz(ahead, low, count), moment


def momentum(store, name):
    return state(store, name)["momentum_buffer"]


@pytest.mark.parametrize("m", [TINY, GATED], ids=["plain", "gated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_muon_follows_its_formula(m, dtype):
    """Three steps match the formula: in float32 within bfloat16's rounding, in float64 exactly."""
    model, store = make(m, Optimizer(optimizer="muon", clip_grad=0.5), dtype=dtype)
    names = [n for n, (rule, *_) in kinds(store).items() if rule == "muon"]
    assert len(names) == 8
    lr, wd = 0.02, 0.3
    for i in range(3):
        store.clear_gradients()
        losses_of(model, batches(i))
        norm = math.sqrt(float(store.gradients.double().square().sum()))
        shrink = min(1.0, 0.5 / (norm + 1e-6))
        before = {
            n: [
                x.double().clone()
                for x in (view(store, store.master, n), gradient(store, n), momentum(store, n))
            ]
            for n in names
        }
        assert store.step(StepScalars(lr, wd, 1.0)) == pytest.approx(norm, rel=1e-5)
        for name, (weight, grad, moment) in before.items():
            parts = [(weight, grad, moment, view(store, store.master, name), momentum(store, name))]
            parts = list(zip(*parts[0], strict=True)) if weight.ndim == 3 else parts
            assert len(parts) == (2 if m is GATED and name.endswith("mlp.fc.weight") else 1)
            for w, dw, v, new, new_v in parts:
                exact, want_v = muon_step(w, dw * shrink, v, lr, wd)
                rounded, _ = muon_step(w, dw * shrink, v, lr, wd, low=dtype is torch.float32)
                torch.testing.assert_close(new_v.double(), want_v, rtol=1e-5, atol=1e-9)
                update = lr * 0.2 * math.sqrt(max(w.shape))  # of each singular value, roughly
                moved = (exact - w * (1 - lr * wd)).norm()
                close = 0.02 if dtype is torch.float32 else 1e-10
                assert (new - rounded).norm() < close * moved and (
                    new - exact
                ).norm() < 0.25 * moved, name
                singular = torch.linalg.svdvals((w * (1 - lr * wd) - new).double()) / update
                assert 0.6 < singular.max() < 1.3, name


# State


@pytest.mark.parametrize(
    ("rule", "dtype"),
    [
        ("adam", torch.bfloat16),
        ("sgd", torch.float32),
        ("lion", torch.bfloat16),
        ("muon", torch.float32),
    ],
)
def test_a_loaded_store_continues_bit_for_bit(rule, dtype, tmp_path):
    o = Optimizer(optimizer=rule)
    model, store = make(GATED, o, dtype=dtype)
    steps(model, store, 3)
    native.save_step(tmp_path, 3, store.named_state(), {"iteration": 3}, {})
    named = store.named_state()
    names = {n for n, _ in model.named_parameters()}
    want = {
        "adamw": {"exp_avg", "exp_avg_sq"},
        "sgd": {"momentum"},
        "lion": {"exp_avg"},
        "muon": {"momentum"},
    }
    assert named.keys() == names | {
        f"{n}/{suffix}" for n, (rule, *_) in kinds(store).items() for suffix in want[rule]
    }
    assert all(t.any() for n, (_, _, t) in named.items() if "/" in n and not n.startswith("wpe"))
    assert all(t.dtype is torch.float32 for _, _, t in named.values())

    other, again = make(GATED, o, dtype=dtype, seed=2)
    loading.load_checkpoint(tmp_path, again.named_state())
    again.publish_weights()
    again.steps = store.steps
    assert is_equal(snapshot(store), snapshot(again))
    assert steps(model, store, 3, first=3) == steps(other, again, 3, first=3)
    assert is_equal(snapshot(store), snapshot(again)) and again.steps == (
        0 if rule in ("sgd", "lion") else 6
    )


def test_a_run_resumes_with_its_momentum(run, tmp_path):
    """Three steps and three more equal six."""
    save = str(tmp_path / "save")
    rule = "--cautious-weight-decay --weight-decay-incr-style rate --embedding-lr 3e-3"
    flags = (*rule.split(), "--eval-iters", "0", "--lr-decay-iters", "6")
    whole = run(*flags).losses
    first = run(*flags, "--save", save, "--train-iters", "3").losses
    rest = run(*flags, "--load", save).losses
    assert first + rest == whole
    assert run(*flags, "--load", save, "--no-load-optim").losses != rest


# Non-finite steps


@pytest.mark.parametrize("rule", [*RULES, "cautious"])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_non_finite_gradients_change_nothing(rule, offload, dtype):
    """A non-finite gradient of any kind leaves all state as it was; the next step is applied."""
    model, store = make(GATED, optimizer_of(rule), dtype=dtype, offload=offload)
    steps(model, store, 2)
    before, weights = snapshot(store), store.weights.clone()
    names = one_of_each_kind(store)
    assert len(names) == len(store.updates) == (3 if rule == "muon" else 2)
    for name, bad in itertools.product(names, (math.nan, -math.inf)):
        store.clear_gradients()
        losses_of(model, batches(2))
        gradient(store, name).view(-1)[5] = bad
        assert not store.step(StepScalars(1e-2, 0.1, 1.0)).isfinite()
        assert is_equal(before, snapshot(store)), name
        assert torch.equal(weights, store.weights), name
    other, undisturbed = make(GATED, optimizer_of(rule), dtype=dtype, offload=offload)
    steps(other, undisturbed, 2)
    assert steps(model, store, 2, first=2) == steps(other, undisturbed, 2, first=2)
    assert is_equal(snapshot(store), snapshot(undisturbed))


# Offload


@pytest.mark.flag("cpu_optimizer")
@pytest.mark.parametrize(
    "flags",
    [["--fp16"], ["--optimizer", "lion", "--bf16"]],
    ids=lambda f: "".join(f) or "fp32",
)
def test_offload(run, tmp_path, monkeypatch, flags):
    """A run saved with --cpu-optimizer and resumed without it has the losses of one without."""
    made, real = [], FlatStore.__init__

    def init(self, *args):
        real(self, *args)
        made.append(self.offload)

    monkeypatch.setattr(FlatStore, "__init__", init)
    flags, save = [*flags, "--eval-iters", "0", "--lr-decay-iters", "6"], str(tmp_path / "save")
    if "--fp16" in flags:
        flags += ["--initial-loss-scale", "1024"]
    whole = run(*flags)
    first = run(*flags, "--cpu-optimizer", "--train-iters", "3", "--save", save)
    rest = run(*flags, "--load", save)
    assert made == [False, True, False] and first.losses + rest.losses == whole.losses
    assert first.column("grad_norm") + rest.column("grad_norm") == whole.column("grad_norm")


@gpu
@pytest.mark.parametrize("rule", ["adam", "sgd", "lion"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offload_from_a_gpu(rule, dtype):
    """Masters and moments are in host memory, gradients pinned, and weights on the device."""
    device = torch.device("cuda")
    outcomes = []
    for offload in (False, True):
        model, store = make(
            o=Optimizer(optimizer=rule), dtype=dtype, device=device, offload=offload
        )
        assert (
            store.weights.device.type
            == store.gradients.device.type
            == store.share.device.type
            == "cuda"
        )
        assert store.host_share.is_pinned() == offload
        for p in store.update_ranges:
            kept = [store.master, store.host_share, p.master, p.master.grad, *p.state.values()]
            assert {x.device.type for x in kept} == {"cpu" if offload else "cuda"}
            assert p.master.grad.is_pinned() == offload
        first = {n: p.detach().cpu().clone() for n, p in masters(store)}
        losses = steps(model, store, 8, device=device)
        assert {p.device.type for p in model.parameters()} == {"cuda"}
        outcomes.append(
            (
                losses,
                torch.cat([(p.detach().cpu() - first[n]).flatten() for n, p in masters(store)]),
            )
        )
        assert torch.equal(store.weights.cpu(), store.master.to(dtype).cpu())
    (a, moved_a), (b, moved_b) = outcomes
    exact = dtype is torch.float32
    assert a == pytest.approx(b, rel=1e-4 if exact else 2e-2) and a[-1] < a[0]
    assert (moved_a - moved_b).norm() < (0.02 if exact else 0.2) * moved_a.norm()


# Statistics


class Odd(nn.Module):
    """A module with gaps after every parameter."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 7, device="meta")
        self.b = nn.Linear(3, 43, device="meta")
        self.norm = nn.LayerNorm(5, device="meta")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_zeros_and_norm_count_no_gaps(rule, dtype):
    model = Odd()
    store = FlatStore([model], StoreSpec(Optimizer(optimizer=rule), dtype, CPU, 5))
    g = torch.Generator().manual_seed(4)
    squares = 0.0
    for _, p in masters(store):
        p.normal_(generator=g)
        squares += float(p.double().square().sum())
    store.publish_weights()
    store.clear_gradients()
    zeros = total = 0
    for p in model.parameters():
        factor = (torch.rand(p.shape, generator=g) < 0.6).to(dtype)
        (p * factor).sum().backward()
        zeros += int((factor == 0).sum())
        total += p.numel()
    assert int(store.count_zero_gradients()) == zeros and 0 < zeros < total
    assert store.weights.numel() > total
    assert float(store.weight_norm()) == pytest.approx(math.sqrt(squares), rel=1e-6)
    store.step(StepScalars(0.0, 0.0, 1.0))
    assert int(store.count_zero_gradients()) == zeros  # clipping changes none
    store.clear_gradients()
    store.step(StepScalars(0.0, 0.0, 1.0))
    assert int(store.count_zero_gradients()) == total


def test_zeros_and_norm_in_a_run(run):
    """Zeros exclude padded rows; the norm is that of the weights after the step."""
    got = run(
        "--log-num-zeros-in-grad", "--log-params-norm", "--train-iters", "2", "--eval-iters", "0"
    )
    # fewer than 64 padded rows would have
    assert all(0 <= n < 64 * 32 for n in got.column("num_zeros"))
    norms = got.column("params_norm")
    assert len(set(norms)) == 2 and all(0 < n < 100 for n in norms)
    assert "num zeros: " in got.out and "params norm: " in got.out
