"""A tiny model and the parameter store that owns its memory, with views of what the store holds."""

import dataclasses

import torch

from helpers import TINY
from meshwright.config import schema as config
from meshwright.model.gpt import GPT, initialise
from meshwright.model.loss import loss_sum, token_losses
from meshwright.model.positions import Positions
from meshwright.optim.rules import StepScalars
from meshwright.parallel.flat import FlatStore
from meshwright.parallel.store import StoreSpec

CPU = torch.device("cpu")
VOCAB = 61
GATED = dataclasses.replace(
    TINY, swiglu=True, num_query_groups=2, untie_embeddings_and_output_weights=True
)


def tokens(b=3, t=16, vocab=VOCAB):
    return torch.randint(0, vocab, (b, t), generator=torch.Generator().manual_seed(0))


def make(m=TINY, o=None, dtype=torch.float32, device=CPU, seed=1, padded=64, **more):
    """Return an initialised model and its store, as at the start of a run."""
    with torch.device("meta"):
        model = GPT(m, VOCAB, padded, 16)
    store = FlatStore([model], StoreSpec(o or config.Optimizer(), dtype, device, VOCAB, **more))
    store.initialise(lambda masters: initialise(masters, m, VOCAB, seed))
    store.publish_weights()
    return model, store


def losses_of(model, batches, scale=1.0, device=CPU):
    """Accumulate the gradients of a few batches; return the loss."""
    total = 0.0
    for batch in batches:
        batch = batch.to(device)
        loss = loss_sum(token_losses(model.eval()(batch, Positions()), batch, VOCAB), None) / 50
        (loss * scale).backward()
        total += loss.item()
    return total


def take_step(model, store, batches=None, lr=1e-2, decay=0.1, scale=1.0, loss=None):
    """Take a step with the sum of the batches' gradients, times the scale; return the norm."""
    store.clear_gradients()
    losses_of(model, [tokens()] if batches is None else batches, scale)
    return store.step(StepScalars(lr, decay, scale), loss)


def snapshot(store):
    """Copy everything that a checkpoint would hold, and Adam's t."""
    return {n: t.clone() for n, (_, _, t) in store.named_state().items()} | {
        "t": torch.tensor(store.steps)
    }


def is_equal(a, b):
    """Whether two snapshots are equal bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def span(store, name):
    """Return a parameter's offset in the flat buffers of one process, and its shape."""
    (bucket,) = (b for b in store.buckets.values() if name in b.spans)
    offset, shape = bucket.spans[name]
    return bucket.begin + offset, shape


def view(store, flat, name):
    """Return a parameter's part of weights, gradients or masters."""
    begin, shape = span(store, name)
    return flat.detach()[begin : begin + shape.numel()].view(shape)


def masters(store):
    """Yield every parameter of one process in full precision, padded rows included."""
    assert store.layout.tp == store.shard_count == 1
    for bucket in store.buckets.values():
        for name in bucket.spans:
            yield name, view(store, store.master, name)


def gradient(store, name):
    return view(store, store.gradients, name)


def state(store, name):
    """Return a parameter's optimizer state by torch's names."""
    begin, shape = span(store, name)
    (piece,) = (p for p in store.update_ranges if p.begin <= begin < p.begin + p.master.numel())
    at = begin - piece.begin
    return {key: flat[at : at + shape.numel()].view(shape) for key, flat in piece.state.items()}


def kinds(store):
    """Return the parameter group of each parameter."""
    found = {}
    for bucket in store.buckets.values():
        for name, (offset, _) in bucket.spans.items():
            (found[name],) = (
                k.param_group for k, begin, end in bucket.kinds if begin <= offset < end
            )
    return found


def one_of_each_kind(store):
    return list({kind: name for name, kind in kinds(store).items()}.values())


def separate(model):
    """Copy the weights to separate tensors, which any torch optimizer can update."""
    with torch.device("meta"):
        plain = GPT(model.m, VOCAB, 64, 16)
    plain = plain.to(model.wte.weight.dtype).to_empty(device="cpu")
    plain.load_state_dict({n: p.detach().clone() for n, p in model.named_parameters()})
    return plain
