"""Embedding: its gradient is added to the table's total, each token's rows in one order."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from helpers import TINY
from meshwright.base import device as devices
from meshwright.config.schema import Optimizer
from meshwright.kernels import embedding
from meshwright.parallel.flat import FlatStore
from meshwright.parallel.store import StoreSpec
from stores import CPU, VOCAB, gradient, losses_of, make, tokens

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.setattr(devices, "has_kernels", lambda device: True)


@pytest.mark.parametrize(
    ("width", "high", "dtype"),
    [
        (8, 5, torch.float32),
        (136, 3, torch.bfloat16),
        (520, 1, torch.float16),
        (40, 1000, torch.bfloat16),
    ],
)
def test_rows_are_added_to_their_tokens(kernels, width, high, dtype):
    """Up to 70 rows of one token, more than one tile; untouched rows keep their bits."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, high, (70,), generator=g).to(DEVICE)
    rows = torch.randn(70, width, generator=g).to(DEVICE, dtype)
    total = torch.randn(1000, width, generator=g).to(DEVICE)
    want = total.double().index_add_(0, ids, rows.double())
    before = total.clone()
    embedding.add_rows(total, ids, rows)
    assert (total - want).norm() < 1e-7 * want.norm()
    rest = torch.ones(1000, dtype=torch.bool, device=DEVICE)
    rest[ids] = False
    assert torch.equal(total[rest], before[rest]) and not torch.equal(total, before)


class Table(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(VOCAB, 16, device="meta"))


def test_without_a_main_grad_it_is_torchs(kernels):
    """A custom model's parameters have none."""
    table = Table()
    FlatStore([table], StoreSpec(Optimizer(), torch.float32, CPU, VOCAB))
    out = embedding.embedding(tokens(), table.weight)
    assert "EmbeddingBackward" in type(out.grad_fn).__name__
    assert torch.equal(out, F.embedding(tokens(), table.weight))


@pytest.mark.parametrize("untied", [False, True])
def test_a_models_tables_have_the_gradients_of_torchs(untied, monkeypatch):
    """Compare two micro-batches, whose second is added, with the store's own additions."""
    m = dataclasses.replace(TINY, untie_embeddings_and_output_weights=untied)
    both = []
    for adds in (False, True):
        model, store = make(m)
        store.clear_gradients()
        for i in range(2):
            with monkeypatch.context() as patch:
                patch.setattr(embedding, "adds_rows", lambda weight, adds=adds: adds)
                losses_of(model, [(tokens() + 9 * i) % VOCAB])
        assert store.added == set(store.bucket_of)
        both.append([gradient(store, name).clone() for name in ("wte.weight", "wpe.weight")])
    for ours, theirs in zip(both[1], both[0], strict=True):
        assert theirs.any() and (ours - theirs).norm() < 1e-6 * theirs.norm()
