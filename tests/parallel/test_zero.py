"""The parameter store equals torch's AdamW with clipping on separate tensors, in every format."""

import copy
import dataclasses
import threading
import time

import pytest
import torch

from helpers import TINY
from meshwright.config import schema as config
from meshwright.model.gpt import initialise
from meshwright.optim.rules import StepScalars
from meshwright.parallel import store as store_module
from meshwright.parallel.flat import FlatStore
from meshwright.parallel.shard import ALIGN
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
    separate,
    snapshot,
    span,
    take_step,
    tokens,
)

FORMATS = pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])


@pytest.mark.parametrize("clip", [0.0, 0.1, 1e9])
def test_steps_equal_plain_torch(clip):
    """Compare ten float64 steps with torch.optim.AdamW and clip_grad_norm_."""
    o = config.Optimizer(weight_decay=0.1, clip_grad=clip, adam_beta2=0.95)
    ours, store = make(o=o, dtype=torch.float64)
    plain = separate(ours)
    named = dict(plain.named_parameters())
    groups = [
        {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for step in range(10):
        batches = [(tokens() + step + k) % VOCAB for k in range(2)]
        adamw.zero_grad()
        losses_of(plain, batches)
        norm = take_step(ours, store, batches)
        want = torch.nn.utils.clip_grad_norm_(named.values(), clip or float("inf"))
        adamw.step()
        torch.testing.assert_close(norm, want, rtol=1e-12, atol=0)
    for name, p in masters(store):
        torch.testing.assert_close(p, named[name].detach(), rtol=1e-9, atol=1e-12, msg=name)
    assert store.steps == 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_keeps_full_masters(dtype):
    """One step is within the format's rounding of float64; masters and sums are float32."""
    exact, a = make(dtype=torch.float64)
    low, b = make(dtype=dtype)
    scales = (exact, a, 1.0), (low, b, 256.0 if dtype is torch.float16 else 1.0)
    norms = [
        take_step(m, store, [tokens()] * 2, 1e-3, 0.0, scale).item() for m, store, scale in scales
    ]
    assert norms[1] == pytest.approx(norms[0], rel=0.03)
    assert b.master.dtype is b.gradients.dtype is b.share.dtype is torch.float32
    for piece in b.update_ranges:
        assert {x.dtype for x in (piece.master, piece.master.grad, *piece.state.values())} == {
            torch.float32
        }
    for (name, p), (_, q) in zip(masters(a), masters(b), strict=True):
        assert (p - q).abs().max() < 2.2e-3, name  # Adam's first step is +-lr
    assert torch.equal(low.wte.weight, dict(masters(b))["wte.weight"].to(dtype))


@pytest.mark.parametrize("where", ["vector", "matrix", "loss"])
@FORMATS
@pytest.mark.fault("F20")
def test_a_non_finite_number_changes_nothing(dtype, where):
    """A non-finite gradient of either kind, or loss, leaves no trace in later steps."""
    model, store = make(dtype=dtype)
    other, undisturbed = make(dtype=dtype)
    for pair in ((model, store), (other, undisturbed)):
        take_step(*pair)
    before, weights = snapshot(store), store.weights.clone()
    for bad in (float("nan"), float("inf"), float("-inf")):
        store.clear_gradients()
        losses_of(model, [tokens()])
        loss = torch.tensor(1.0)
        if where == "loss":
            loss.fill_(bad)
        else:
            name = next(
                n for n, kind in kinds(store).items() if kind == ("adamw", 1, where == "matrix")
            )
            gradient(store, name).view(-1)[3] = bad
        assert store.step(StepScalars(1e-2, 0.1, 1.0), loss).isfinite() == (where == "loss")
        assert is_equal(before, snapshot(store)) and store.steps == 1
        assert torch.equal(weights, store.weights)
    for pair in ((model, store), (other, undisturbed)):
        assert all(take_step(*pair, loss=torch.tensor(1.0)).isfinite() for _ in range(2))
    assert is_equal(snapshot(undisturbed), snapshot(store)) and store.steps == 3


@FORMATS
def test_gradients_are_summed_in_full_precision_and_reset(dtype):
    """A step's gradients are the sums of its own batches; those that no loss reaches are zero."""
    model, store = make(dtype=dtype)
    full = torch.float64 if dtype is torch.float64 else torch.float32
    every = [tokens(), (tokens() + 7) % VOCAB, (tokens() + 20) % VOCAB]
    alone = []
    for batch in every:
        probe, other = make(dtype=dtype)
        other.clear_gradients()
        losses_of(probe, [batch])
        alone.append(other.gradients.clone())
    for some in ([0, 1, 2], [2], [1, 2]):
        store.clear_gradients()
        losses_of(model, [every[i] for i in some])
        want = torch.zeros_like(alone[0])
        for i in some:
            want += alone[i]
        assert store.gradients.dtype is full
        # the head's part and each token's row are added one by one
        begin, shape = span(store, "wte.weight")
        table = slice(begin, begin + shape.numel())
        torch.testing.assert_close(store.gradients[table], want[table], rtol=1e-6, atol=1e-8)
        want[table] = store.gradients[table]
        assert torch.equal(store.gradients, want), some
    store.clear_gradients()
    model.wpe.weight.float().sum().backward()
    norm = store.step(StepScalars(0.0, 0.0, 1.0))
    assert norm == pytest.approx(model.wpe.weight.numel() ** 0.5)
    for name in kinds(store):
        assert name == "wpe.weight" or not gradient(store, name).any(), name


@FORMATS
def test_parameters_are_aligned_views(dtype):
    """Parameters are views at multiples of ALIGN that do not overlap; the gaps stay 0."""
    model, store = make(dtype=dtype)
    names = [name for bucket in store.buckets.values() for name in bucket.spans]
    assert sorted(names) == sorted(n for n, _ in model.named_parameters()) and len(
        set(names)
    ) == len(names)
    taken = torch.zeros(store.size, dtype=torch.int)
    for name in names:
        begin, shape = span(store, name)
        p = model.get_parameter(name)
        assert (
            p.data_ptr() == store.weights.data_ptr() + begin * dtype.itemsize and begin % ALIGN == 0
        )
        assert p.shape == shape and p.is_contiguous() and p.dtype is dtype
        taken[begin : begin + p.numel()] += 1
    assert taken.max() == 1 and store.size == store.weights.numel() == store.master.numel()
    end = 0
    for bucket in store.buckets.values():  # contiguous, each made of its kinds
        assert (
            bucket.begin == end and bucket.gradients.data_ptr() == store.gradients[end:].data_ptr()
        )
        end += bucket.size
        ends = [0, *(high for _, _, high in bucket.kinds)]
        assert [low for _, low, _ in bucket.kinds] == ends[:-1] and bucket.size - ALIGN < ends[
            -1
        ] <= bucket.size
    assert end == store.size
    for _ in range(2):
        take_step(model, store)
    for flat in (store.weights, store.gradients, store.master):
        assert flat.any() and not flat[taken == 0].any()


@pytest.mark.parametrize("count", [1, 2])
@FORMATS
def test_gradients_land_where_they_belong(dtype, count):
    """Gradients equal autograd's for separate tensors, are added in full precision and freed.

    The token table receives a part for each batch as the head, then each token's row as the
    embedding. Kernels do not round their parts to a low format, as autograd does.
    """
    is_low = dtype in (torch.bfloat16, torch.float16)
    model, store = make(dtype=dtype)
    plain = separate(model)
    plain.lm_head = copy.deepcopy(plain.wte)
    batches = [tokens(), (tokens() + 7) % VOCAB][:count]
    store.clear_gradients()
    losses_of(model, batches)
    want = {n: torch.zeros_like(p, dtype=store.full_dtype) for n, p in plain.named_parameters()}
    for batch in batches:
        plain.zero_grad()
        losses_of(plain, [batch])
        for name, p in reversed(list(plain.named_parameters())):
            want[name.replace("lm_head", "wte")] += p.grad
    for name, p in model.named_parameters():
        assert p.grad is None and want[name].any(), name
        got = gradient(store, name)
        is_exact = not is_low and name != "wte.weight"
        bound = 0.0 if is_exact else torch.finfo(dtype).eps / (2 if is_low else 1)
        assert (got - want[name]).norm() <= bound * want[name].norm(), name
        assert not (is_low and count > 1 and torch.equal(got, got.to(dtype).to(got))), name
    assert store.share is store.gradients is store.host_share
    for piece in store.update_ranges:  # what the update reads
        part = slice(piece.begin, piece.begin + piece.master.numel())
        assert piece.master.grad.data_ptr() == store.gradients[part].data_ptr()
        assert piece.master.data_ptr() == store.master[part].data_ptr()


def test_only_matrices_decay():
    _, store = make()
    before = {n: p.clone() for n, p in masters(store)}
    store.clear_gradients()
    store.step(StepScalars(0.5, 0.1, 1.0))  # zero gradients: only decay moves anything
    for name, p in masters(store):
        assert torch.allclose(p, before[name] * (0.95 if p.ndim > 1 else 1.0)), name


@pytest.mark.parametrize("rule", ["adam", "sgd", "lion", "muon"])
def test_padded_rows_stay_zero_and_are_not_saved(rule):
    m = dataclasses.replace(TINY, untie_embeddings_and_output_weights=True)
    model, store = make(m, config.Optimizer(optimizer=rule))
    for _ in range(3):
        take_step(model, store)
    for p in (model.wte.weight, model.lm_head.weight):
        assert (p[VOCAB:] == 0).all() and p[:VOCAB].abs().min() > 0
    named = store.named_state()
    for name in ("wte.weight", "lm_head.weight"):
        for suffix in {"sgd": ("", "/momentum"), "lion": ("", "/exp_avg")}.get(
            rule, ("", "/exp_avg", "/exp_avg_sq")
        ):
            shape, boxes, tensor = named[name + suffix]
            assert shape == tuple(tensor.shape) == (VOCAB, 32) and boxes == [((0, 0), (VOCAB, 32))]
    assert store.named_state(False).keys() == {n for n, _ in model.named_parameters()}


def test_scale_is_removed_before_clipping():
    """A loss scale that is a power of two changes no bit."""
    outcomes = []
    for scale in (1.0, 2.0**16):
        model, store = make(o=config.Optimizer(clip_grad=0.05))
        for _ in range(3):
            norm = take_step(model, store, scale=scale)
        outcomes.append((snapshot(store), norm))
    assert is_equal(outcomes[0][0], outcomes[1][0]) and outcomes[0][1] == outcomes[1][1] > 0.05


def test_norm_of_a_large_buffer():
    """Adding float32 squares sequentially would lose 0.04 % over ten million elements."""
    big = torch.nn.Module()
    big.weight = torch.nn.Parameter(torch.empty(10_000, 1_000, device="meta"))
    store = FlatStore([big], StoreSpec(config.Optimizer(lr=1.0), torch.float32, CPU, vocab=1))
    (piece,) = store.update_ranges
    store.master.normal_(generator=torch.Generator().manual_seed(1))
    store.clear_gradients()
    (big.weight * (store.master * 0.1).view_as(big.weight)).sum().backward()
    exact = torch.linalg.vector_norm(piece.master.detach().double()).item()
    assert store.weight_norm().item() == pytest.approx(exact, rel=2e-7)
    assert store.step(StepScalars(0.0, 0.0, 1.0)).item() == pytest.approx(0.1 * exact, rel=2e-7)


LARGEST = 4 * 2 * 64 * 32  # bytes of GATED's mlp.fc, two matrices in one


@pytest.mark.parametrize("most, threads", [(1 << 30, 3), (2 * LARGEST, 2), (1, 1)])
def test_initial_weights_drawn_by_several_threads(monkeypatch, most, threads):
    """They are those of one thread, and no more are in memory at once than allowed."""
    _, alone = make(GATED, dtype=torch.bfloat16)
    _, store = make(GATED, dtype=torch.bfloat16, seed=2)
    assert not torch.equal(store.master, alone.master)
    alive, most_alive, lock = [0], [0], threading.Lock()

    def draw(masters):
        with lock:
            alive[0] += 1
            most_alive[0] = max(most_alive[0], alive[0])
        time.sleep(0.002)
        initialise(masters, GATED, VOCAB, 1)
        with lock:
            alive[0] -= 1

    monkeypatch.setattr(store_module, "DRAWN_BYTES", most)
    store.initialise(draw, threads=3)
    assert torch.equal(store.master, alone.master) and most_alive[0] == threads
