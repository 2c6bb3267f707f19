"""The parameter store: equal to torch's AdamW with clipping on separate tensors, in every format."""

import dataclasses

import pytest
import torch
from test_model import tokens

from helpers import TINY
from meshwright.model.attention import Where
from meshwright.model.gpt import GPT, initialise
from meshwright.model.loss import loss_sum, token_losses
from meshwright.parallel.zero import ALIGN, ParameterStore, StoreSpec
from meshwright.settings import schema as config

CPU = torch.device("cpu")
VOCAB = 61


def make(m=TINY, o=None, dtype=torch.float32, device=CPU, seed=1, padded=64, **more):
    """A model and the store that owns its memory, as a run starts."""
    with torch.device("meta"):
        model = GPT(m, VOCAB, padded, 16)
    store = ParameterStore(model, StoreSpec(o or config.Optimizer(), dtype, device, VOCAB, **more))
    store.initialise(lambda masters: initialise(masters, m, VOCAB, seed))
    store.publish_weights()
    return model, store


def losses_of(model, batches, scale=1.0, device=CPU):
    """Gradients of a few batches, added up; returns the loss."""
    total = 0.0
    for batch in batches:
        batch = batch.to(device)
        loss = loss_sum(token_losses(model.eval()(batch, Where()), batch, VOCAB), None) / 50
        (loss * scale).backward()
        total += loss.item()
    return total


def snapshot(store):
    """Every number that a checkpoint would hold, and Adam's t."""
    return {n: t.clone() for n, (_, _, t) in store.named_state().items()} | {"t": torch.tensor(store.steps)}


def span(store, name):
    """Where a parameter lies in the flat buffers of one process, and its shape."""
    (bucket,) = (b for b in store.buckets.values() if name in b.spans)
    offset, shape = bucket.spans[name]
    return bucket.begin + offset, shape


def view(store, flat, name):
    """A parameter's part of weights, gradients or masters."""
    begin, shape = span(store, name)
    return flat.detach()[begin : begin + shape.numel()].view(shape)


def gradient(store, name):
    return view(store, store.gradients, name)


def state(store, name):
    """What its rule remembers of a parameter, by torch's names."""
    begin, shape = span(store, name)
    (piece,) = (p for p in store.pieces if p.begin <= begin < p.begin + p.master.numel())
    at = begin - piece.begin
    return {key: flat[at : at + shape.numel()].view(shape) for key, flat in piece.state.items()}


def kinds(store):
    """The rule of each parameter, and whether it decays."""
    found = {}
    for bucket in store.buckets.values():
        for name, (offset, _) in bucket.spans.items():
            (found[name],) = ((k.rule, k.decays) for k, begin, end in bucket.kinds if begin <= offset < end)
    return found


def one_of_each_kind(store):
    return list({kind: name for name, kind in kinds(store).items()}.values())


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def separate(model):
    """The same weights as separate tensors, which any optimizer of torch's can update."""
    with torch.device("meta"):
        plain = GPT(model.m, VOCAB, 64, 16)
    plain = plain.to(model.wte.weight.dtype).to_empty(device="cpu")
    plain.load_state_dict({n: p.detach().clone() for n, p in model.named_parameters()})
    return plain


@pytest.mark.parametrize("clip", [0.0, 0.1, 1e9])
def test_steps_equal_plain_torch(clip):
    """Ten steps of float64 against torch.optim.AdamW over separate parameters, two groups, clip_grad_norm_."""
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
        store.clear_gradients()
        adamw.zero_grad()
        losses_of(ours, batches)
        losses_of(plain, batches)
        norm = store.step(1e-2, 0.1, 1.0)
        want = torch.nn.utils.clip_grad_norm_(named.values(), clip or float("inf"))
        adamw.step()
        torch.testing.assert_close(norm, want, rtol=1e-12, atol=0)
    for name, p in store.masters():
        torch.testing.assert_close(p, named[name].detach(), rtol=1e-9, atol=1e-12, msg=name)
    assert store.steps == 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_keeps_full_masters(dtype):
    """One step stays within the format's rounding of float64; masters are float32 and gradients are summed there."""
    exact, a = make(dtype=torch.float64)
    low, b = make(dtype=dtype)
    scale = 256.0 if dtype is torch.float16 else 1.0
    for model, store, s in ((exact, a, 1.0), (low, b, scale)):
        store.clear_gradients()
        losses_of(model, [tokens(), tokens() + 0], s)
    norms = a.step(1e-3, 0.0, 1.0).item(), b.step(1e-3, 0.0, scale).item()
    assert norms[1] == pytest.approx(norms[0], rel=0.03)
    assert b.master.dtype is b.gradients.dtype is b.share.dtype is torch.float32
    for piece in b.pieces:
        assert {x.dtype for x in (piece.master, piece.master.grad, *piece.state.values())} == {torch.float32}
    for (name, p), (_, q) in zip(a.masters(), b.masters(), strict=True):
        assert (p - q).abs().max() < 2.2e-3, name  # Adam's first step is +-lr
    assert torch.equal(low.wte.weight, dict(b.masters())["wte.weight"].to(dtype))


@pytest.mark.parametrize("where", ["vector", "matrix", "loss"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_non_finite_number_changes_nothing(bad, dtype, where):
    """One such gradient of either kind, or a loss with finite gradients; the next steps are as if it had not been."""
    model, store = make(dtype=dtype)
    other, undisturbed = make(dtype=dtype)
    for m, s in ((model, store), (other, undisturbed)):
        s.clear_gradients()
        losses_of(m, [tokens()])
        s.step(1e-3, 0.1, 1.0)
    before, weights = snapshot(store), store.weights.clone()
    store.clear_gradients()
    losses_of(model, [tokens()])
    loss = torch.tensor(1.0)
    if where == "loss":
        loss.fill_(bad)
    else:
        name = next(n for n, kind in kinds(store).items() if kind == ("adamw", where == "matrix"))
        gradient(store, name).view(-1)[3] = bad
    assert store.step(1e-3, 0.1, 1.0, loss).isfinite() == (where == "loss")
    assert same(before, snapshot(store)) and store.steps == 1
    assert torch.equal(weights, store.weights)
    for m, s in ((model, store), (other, undisturbed)):
        for _ in range(2):
            s.clear_gradients()
            losses_of(m, [tokens()])
            assert s.step(1e-3, 0.1, 1.0, torch.tensor(1.0)).isfinite()
    assert same(snapshot(undisturbed), snapshot(store)) and store.steps == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_gradients_are_summed_in_full_precision_and_begin_anew(dtype):
    """Each step's are the sums of its own batches; what no loss reaches has zeros, whatever was there before."""
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
        assert store.gradients.dtype is full and torch.equal(store.gradients, want), some
    store.clear_gradients()
    model.wpe.weight.float().sum().backward()
    norm = store.step(0.0, 0.0, 1.0)
    assert norm == pytest.approx(model.wpe.weight.numel() ** 0.5)
    for name in kinds(store):
        assert name == "wpe.weight" or not gradient(store, name).any(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_every_parameter_lives_in_a_buffer_aligned(dtype):
    """A view of the weights at a multiple of ALIGN, and no two overlap; the gaps stay 0."""
    model, store = make(dtype=dtype)
    names = [name for bucket in store.buckets.values() for name in bucket.spans]
    assert sorted(names) == sorted(n for n, _ in model.named_parameters()) and len(set(names)) == len(names)
    taken = torch.zeros(store.size, dtype=torch.int)
    for name in names:
        begin, shape = span(store, name)
        p = model.get_parameter(name)
        assert p.data_ptr() == store.weights.data_ptr() + begin * dtype.itemsize and begin % ALIGN == 0
        assert p.shape == shape and p.is_contiguous() and p.dtype is dtype
        taken[begin : begin + p.numel()] += 1
    assert taken.max() == 1 and store.size == store.weights.numel() == store.master.numel()
    end = 0
    for bucket in store.buckets.values():  # one after the other, each made of its kinds
        assert bucket.begin == end and bucket.gradients.data_ptr() == store.gradients[end:].data_ptr()
        end += bucket.size
        inner = 0
        for _, low, high in bucket.kinds:
            assert low == inner
            inner = high
        assert bucket.size - ALIGN < inner <= bucket.size
    assert end == store.size
    for _ in range(2):
        store.clear_gradients()
        losses_of(model, [tokens()])
        store.step(1e-2, 0.1, 1.0)
    for flat in (store.weights, store.gradients, store.master):
        assert flat.any() and not flat[taken == 0].any()


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_gradients_land_where_they_belong(dtype, count):
    """Each parameter's is what autograd gives a separate tensor, added in full precision, and frees at once."""
    model, store = make(dtype=dtype)
    plain = separate(model)
    batches = [tokens(), (tokens() + 7) % VOCAB][:count]
    store.clear_gradients()
    losses_of(model, batches)
    want = {n: torch.zeros_like(p, dtype=store.full) for n, p in plain.named_parameters()}
    for batch in batches:
        plain.zero_grad()
        losses_of(plain, [batch])
        for name, p in plain.named_parameters():
            want[name] += p.grad
    for name, p in model.named_parameters():
        assert p.grad is None and want[name].any(), name
        assert torch.equal(gradient(store, name), want[name]), name
    assert store.share is store.gradients is store.host_share
    for piece in store.pieces:  # what the update reads
        part = slice(piece.begin, piece.begin + piece.master.numel())
        assert piece.master.grad.data_ptr() == store.gradients[part].data_ptr()
        assert piece.master.data_ptr() == store.master[part].data_ptr()


def test_decay_reaches_matrices_only():
    _, store = make()
    before = {n: p.clone() for n, p in store.masters()}
    store.clear_gradients()
    store.step(0.5, 0.1, 1.0)  # zero gradients: only decay moves anything
    for name, p in store.masters():
        assert torch.allclose(p, before[name] * (0.95 if p.ndim > 1 else 1.0)), name


@pytest.mark.parametrize("rule", ["adam", "sgd", "muon"])
def test_padded_rows_stay_zero_and_are_not_saved(rule):
    m = dataclasses.replace(TINY, untie_embeddings_and_output_weights=True)
    model, store = make(m, config.Optimizer(optimizer=rule))
    for _ in range(3):
        store.clear_gradients()
        losses_of(model, [tokens()])
        store.step(1e-2, 0.1, 1.0)
    for p in (model.wte.weight, model.lm_head.weight):
        assert (p[VOCAB:] == 0).all() and p[:VOCAB].abs().min() > 0
    named = store.named_state()
    for name in ("wte.weight", "lm_head.weight"):
        for suffix in ("", "/momentum") if rule == "sgd" else ("", "/exp_avg", "/exp_avg_sq"):
            shape, boxes, tensor = named[name + suffix]
            assert shape == tuple(tensor.shape) == (VOCAB, 32) and boxes == [((0, 0), (VOCAB, 32))]
    assert store.named_state(False).keys() == {n for n, _ in model.named_parameters()}


def test_scale_is_taken_out_before_clipping():
    """A power of two changes no bit."""
    outcomes = []
    for scale in (1.0, 2.0**16):
        model, store = make(o=config.Optimizer(clip_grad=0.05))
        for _ in range(3):
            store.clear_gradients()
            losses_of(model, [tokens()], scale)
            norm = store.step(1e-2, 0.1, scale)
        outcomes.append((snapshot(store), norm))
    assert same(outcomes[0][0], outcomes[1][0]) and outcomes[0][1] == outcomes[1][1] > 0.05


def test_norm_of_a_large_buffer():
    """Float32 squares added one after the other would lose 0.04 % of ten million numbers."""
    big = torch.nn.Module()
    big.weight = torch.nn.Parameter(torch.empty(10_000, 1_000, device="meta"))
    store = ParameterStore(big, StoreSpec(config.Optimizer(lr=1.0), torch.float32, CPU, vocab=1))
    (piece,) = store.pieces
    store.master.normal_(generator=torch.Generator().manual_seed(1))
    store.clear_gradients()
    (big.weight * (store.master * 0.1).view_as(big.weight)).sum().backward()
    exact = torch.linalg.vector_norm(piece.master.detach().double()).item()
    assert store.norm().item() == pytest.approx(exact, rel=2e-7)
    assert store.step(0.0, 0.0, 1.0).item() == pytest.approx(0.1 * exact, rel=2e-7)
