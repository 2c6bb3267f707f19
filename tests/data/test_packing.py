"""Whole documents in samples, compared with one piece after the other in plain Python."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from corpora import build_and_capture, data_config, write_pair

from fuzz.plain import pack
from helpers import error_of
from meshwright.base.errors import BAD_DATA
from meshwright.data.files.indexed import Indexed
from meshwright.data.loader import Loader, LoaderSpec
from meshwright.data.packing import Packed, count_predicted, pack_documents, pack_files
from meshwright.data.sets import count_epochs


def packed_samples(sizes, documents, length, seed, **more):
    """Return (document, first token, tokens) of each piece of each sample."""
    pieces, bins = pack_documents(np.array(sizes, np.int32), documents, length, seed, **more)
    rows = [(n, at, min(length + 1, sizes[n] - at)) for n, at in pieces.tolist()]
    return [rows[a:b] for a, b in zip(bins[:-1].tolist(), bins[1:].tolist(), strict=True)]


def random_sizes(rng):
    most = int(rng.choice([3, 20, 200]))
    sizes = np.minimum(rng.geometric(1 / most, rng.integers(2, 120)), 5 * most) - rng.integers(0, 2)
    return [*sizes.tolist(), 2]


@pytest.mark.parametrize("seed", range(30))
def test_packing_is_best_fit_and_loses_no_token(seed):
    rng = np.random.default_rng(seed)
    sizes, length = random_sizes(rng), int(rng.integers(1, 40))
    documents = range(int(rng.integers(len(sizes) // 2)), len(sizes))
    made = packed_samples(sizes, documents, length, seed)
    assert made == pack(sizes, documents, length, seed)
    apart = packed_samples(sizes, documents, length, seed, window=int(rng.integers(1, 20)))
    for samples in (made, apart):
        assert all(sum(tokens for *_, tokens in pieces) <= length + 1 for pieces in samples)
        pieces = [piece for pieces in samples for piece in pieces]
        predicted = sorted((n, at + k) for n, at, tokens in pieces for k in range(1, tokens))
        assert predicted == [(n, k) for n in documents for k in range(1, sizes[n])]
        assert all(at % length == 0 for _, at, _ in pieces)
        assert len(predicted) == count_predicted(np.array(sizes), documents)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    """Documents of 1 to 30 tokens, the last of each a 99."""
    rng = np.random.default_rng(3)
    documents = [[[*rng.integers(1, 99, n % 30).tolist(), 99]] for n in rng.integers(0, 1000, 60)]
    return write_pair(tmp_path_factory.mktemp("packed") / "some", documents)


def test_samples_hold_documents_in_an_order_of_their_own_in_each_epoch(prefix):
    indexed = Indexed(prefix)
    short, long = (Packed(indexed, range(50), n, 16, 7) for n in (1, 150))
    bins = pack(indexed.sizes.tolist(), range(50), 16, 7)
    assert len(short) == len(bins) and len(long) == -(-150 // len(bins)) * len(bins)
    assert long.shuffle_idx[: len(short)].tolist() == short.shuffle_idx.tolist()
    first, second = long.shuffle_idx[: 2 * len(bins)].reshape(2, -1).tolist()
    assert sorted(first) == sorted(second) == list(range(len(bins))) and first != second
    for k, sample in enumerate(long.read(list(range(len(bins))))):
        tokens, positions = [], []
        for n, at, size in bins[first[k]]:
            begin = int(indexed.pointers[n]) // 2 + at
            tokens += indexed.tokens[begin : begin + size].tolist()
            positions += range(size)
        padding = [0] * (17 - len(tokens))
        assert sample.tolist() == [tokens + padding, positions + padding] == long[k].tolist()
        assert (
            long.locate(k, 0)
            == f"token {bins[first[k]][0][1]} of document {bins[first[k]][0][0]} in {prefix}"
        )


def test_batches_of_packed_samples(prefix):
    data = Packed(Indexed(prefix), range(60), 8, 16, 1)
    spec = LoaderSpec(2, lambda _: 2, 100, length=17, packed=True)
    for (batch,) in islice(Loader(data, spec), 8):
        tokens, places = np.stack([data[int(k)] for k in batch.sample_ids]).swapaxes(0, 1)
        assert (
            batch.tokens.tolist() == tokens[:, :-1].tolist()
            and batch.labels.tolist() == tokens[:, 1:].tolist()
        )
        assert batch.position_ids.tolist() == places[:, :-1].tolist()
        assert batch.loss_mask.tolist() == (places[:, 1:] > 0).tolist()
        begins = np.diff(batch.doc_ids.numpy(), axis=1, prepend=0)
        assert set(begins.flat) <= {0, 1} and (begins == (places[:, :-1] == 0)).all()
        assert batch.unmasked == (places > 0).sum()


def test_a_document_is_read_alone(prefix):
    """Logits of a packed sample are those of each of its documents by itself."""
    from meshwright.config.schema import Model
    from meshwright.model.gpt import GPT
    from meshwright.model.positions import Positions

    for position in ("learned", "rope", "alibi"):
        m = Model(
            num_layers=2, hidden_size=16, num_attention_heads=2, position_embedding_type=position
        )
        torch.manual_seed(0)
        model = GPT(m, 100, 104, 17).double().eval()
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.3)
        data = Packed(Indexed(prefix), range(60), 8, 16, 1)
        (batch,) = next(iter(Loader(data, LoaderSpec(3, lambda _: 3, 100, length=17, packed=True))))
        with torch.no_grad():
            out = model(
                batch.tokens, Positions(position_ids=batch.position_ids, documents=batch.doc_ids)
            )
            for row, k in enumerate(batch.sample_ids.tolist()):
                at = 0
                for _, _, size in data.pieces(k):
                    alone = model(batch.tokens[row : row + 1, at : at + size], Positions())
                    assert (out[row, at : at + size] - alone[0]).abs().max() < 1e-12
                    at += size


@pytest.mark.flag("packing")
def test_a_training_is_built_of_packed_sets(prefix, tmp_path):
    given = {
        "packing": "best-fit",
        "seq_length": 16,
        "data_cache_path": str(tmp_path),
        "full_validation": True,
    }
    config = data_config(data_path=[prefix], train_iters=20, split="70,30,0", **given)
    made, lines, _ = build_and_capture(config)
    assert (
        isinstance(made["train"], Packed)
        and isinstance(made["valid"], Packed)
        and made["valid"].epochs == 1
    )
    share = (
        count_predicted(Indexed(prefix).sizes, range(42)) / (len(made["train"].bin_idx) - 1) / 16
    )
    assert (
        f"    packed {len(made['train'].piece_idx)} pieces of documents; the samples are {share:.2%} full"
        in lines
    )
    again, lines, _ = build_and_capture(config)
    assert not any("could not find" in line for line in lines)
    assert again["train"].shuffle_idx.tolist() == made["train"].shuffle_idx.tolist()
    bins = len(made["train"].bin_idx) - 1
    by_epochs = replace(
        config, training=replace(config.training, train_iters=None, train_epochs=2.5)
    )
    assert count_epochs(by_epochs).training.train_samples == int(2.5 * bins)


def test_documents_of_one_token_cannot_be_packed(tmp_path):
    prefix = write_pair(tmp_path / "short", [[[7]]] * 3)
    message = error_of(lambda: pack_files(Indexed(prefix), range(3), 4, 0, None), BAD_DATA)
    assert "nothing can be packed" in message and prefix in message
