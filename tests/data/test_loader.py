"""Batches: their order, their slices over ranks, the thread's end and its errors."""

import sys
import threading
from itertools import islice

import numpy as np
import pytest
import torch

from meshwright.data.loader import Batch, Cyclic, Loader
from meshwright.errors import BAD_DATA, UserError
from meshwright.settings.schema import TrainConfig, Training


class Counting:
    """Sample k is k x 10, k x 10 + 1, ...; it notes what was read, where."""

    def __init__(self, length=100, bad=-1, ids=(0, 1, 99_999, -3, 4)):
        self.length, self.bad, self.ids, self.read = length, bad, np.array(ids), []

    def __len__(self):
        return self.length

    def __getitem__(self, k):
        self.read.append((k, threading.current_thread().name))
        return np.arange(k * 10, k * 10 + 5) if k != self.bad else self.ids

    def locate(self, k, position):
        return f"place {k}/{position}"


def sixes(consumed):
    return 6


def numbers(steps):
    return [[b.sample_ids.tolist() for b in batches] for batches in steps]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_tokens_labels_and_order(workers):
    loader = Loader(Counting(), 2, sixes, consumed=12, workers=workers, vocab_size=1000)
    steps = list(islice(loader, 3))
    assert numbers(steps) == [
        [[12, 13], [14, 15], [16, 17]],
        [[18, 19], [20, 21], [22, 23]],
        [[24, 25], [26, 27], [28, 29]],
    ]
    batch = steps[0][1]
    assert batch.tokens.tolist() == [[140, 141, 142, 143], [150, 151, 152, 153]]
    assert batch.labels.tolist() == [[141, 142, 143, 144], [151, 152, 153, 154]]
    assert {t.dtype for t in (batch.tokens, batch.labels, batch.sample_ids)} == {torch.int64}
    assert batch.tokens.is_contiguous() and batch.labels.is_contiguous()
    assert (batch.loss_mask, batch.position_ids, batch.doc_ids) == (None, None, None)


def test_ranks_cut_each_block_of_micro_batches():
    def of(rank, ranks):
        return numbers(islice(Loader(Counting(), 2, lambda _: 12, 12, 0, 1000, None, rank, ranks), 2))

    assert of(1, 3) == [[[14, 15], [20, 21]], [[26, 27], [32, 33]]]
    for ranks in (1, 2, 3, 6):
        parts = [of(rank, ranks) for rank in range(ranks)]
        for step, first in enumerate((12, 24)):  # together: the same samples, whatever the number of ranks
            together = [n for micro in zip(*[p[step] for p in parts], strict=True) for part in micro for n in part]
            assert together == list(range(first, first + 12))


def test_any_step_is_a_function_of_the_consumed_samples():
    whole = numbers(islice(Loader(Counting(), 2, lambda _: 4, 0, 2, 1000), 10))
    for done in range(10):
        assert numbers(islice(Loader(Counting(), 2, lambda _: 4, done * 4, 2, 1000), 10 - done)) == whole[done:]


RAMP = TrainConfig(
    training=Training(micro_batch_size=2, global_batch_size=24, rampup_batch_size=[8, 8, 60], train_samples=200)
)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_ramp_reads_every_sample_once_from_any_step_on(ranks, workers):
    def together(consumed, steps):
        """The samples of each step, all ranks' slices put back in order."""
        loaders = [Loader(Counting(200), 2, RAMP.batch, consumed, workers, 9999, None, r, ranks) for r in range(ranks)]
        out = []
        for parameters_of_ranks in zip(*[numbers(islice(loader, steps)) for loader in loaders], strict=True):
            out.append([k for blocks in zip(*parameters_of_ranks, strict=True) for slice_ in blocks for k in slice_])
        return out

    steps = together(0, 10)
    assert [len(step) for step in steps] == [8, 8, 8, 8, 16, 16, 24, 24, 24, 24]
    assert [k for step in steps for k in step] == list(range(160))
    for n in range(10):
        assert together(sum(map(len, steps[:n])), 10 - n) == steps[n:]


def test_a_step_that_ranks_cannot_share_is_refused():
    for ranks, size in ((3, 8), (8, 8), (1, 7), (1, 0)):
        with pytest.raises(
            UserError, match=rf"{size} samples is not a multiple of 2 \(--micro-batch-size\) x {ranks} "
        ):
            next(iter(Loader(Counting(), 2, lambda _, size=size: size, 0, 0, 1000, None, 0, ranks)))


def megatron_cyclic(total, consumed, micro, dp_rank, dp_size):
    """MegatronPretrainingRandomSampler of 2023 with data sharding, without its checks: endless micro-batches."""
    last_batch_size = total % (micro * dp_size)
    active = total - last_batch_size
    while True:
        epoch = consumed // active
        offset = consumed % active
        bucket = total // (micro * dp_size) * micro
        generator = torch.Generator()
        generator.manual_seed(epoch)
        order = torch.randperm(bucket, generator=generator).tolist()
        batch = []
        for k in [dp_rank * bucket + x for x in order[offset // dp_size :]]:
            batch.append(k)
            if len(batch) == micro:
                consumed += micro * dp_size
                yield batch
                batch = []


def first_ids(steps):
    return [b.tokens[:, 0].tolist() for batches in steps for b in batches]


def test_cyclic_is_megatrons_with_one_rank():
    for consumed in (0, 4, 36, 40, 116):
        ours = islice(Loader(Cyclic(Counting(40)), 4, lambda _: 4, consumed, 2, 9999), 35)
        theirs = islice(megatron_cyclic(40, consumed, 4, 0, 1), 35)
        assert first_ids(ours) == [[k * 10 for k in batch] for batch in theirs]


@pytest.mark.parametrize("micro,ranks", [(1, 1), (4, 1), (1, 2), (2, 2)])
def test_cyclic_epochs_whatever_the_layout(micro, ranks):
    n = 7  # no multiple of a batch: steps lie in two epochs
    loaders = [Loader(Cyclic(Counting(n)), micro, lambda _: 4, 0, 0, 9999, None, r, ranks) for r in range(ranks)]
    parameters_of_ranks = [first_ids(islice(loader, 14)) for loader in loaders]
    ids = [k // 10 for blocks in zip(*parameters_of_ranks, strict=True) for part in blocks for k in part]
    epochs = [ids[start : start + n] for start in range(0, 56, n)]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == len(epochs)
    alone = Cyclic(Counting(n))
    assert ids == [int(alone[k][0]) // 10 for k in range(56)]
    assert alone.locate(20, 3) == f"place {ids[20]}/3"
    assert len(alone) == sys.maxsize


def test_cyclic_keeps_few_orders(monkeypatch):
    drawn, real = [], torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda n, generator: drawn.append(n) or real(n, generator=generator))
    data = Cyclic(Counting(10))
    for k in [*range(100), *range(89, 92)]:
        data[k]
    assert len(drawn) == 10  # one an epoch; going back one draws nothing
    assert data._order.cache_info().maxsize == 2


def test_reading_ahead_is_bounded_and_in_a_thread_that_ends():
    data = Counting()
    steps = iter(Loader(data, 1, lambda _: 1, 0, 2, 10_000))
    next(steps)
    for _ in range(5):
        next(steps)
    steps.close()
    assert 6 <= len(data.read) <= 6 + 2
    assert all(name.startswith("read-ahead") for _, name in data.read)
    assert not [t for t in threading.enumerate() if t.name.startswith("read-ahead")]
    none = Counting()
    next(iter(Loader(none, 1, lambda _: 1, 0, 0, 10_000)))
    assert none.read == [(0, threading.current_thread().name)]


@pytest.mark.parametrize("workers", [0, 2])
def test_running_out(workers):
    steps = iter(Loader(Counting(7), 2, lambda _: 2, 0, workers, 1000))
    assert numbers(islice(steps, 3)) == [[[0, 1]], [[2, 3]], [[4, 5]]]  # the last, partial block is not used
    with pytest.raises(UserError, match="samples 6 to 7 are wanted, but the data set has 7") as caught:
        next(steps)
    assert caught.value.status == BAD_DATA
    around = list(islice(Loader(Counting(7), 2, lambda _: 2, 0, workers, 1000, wrap=True), 5))
    assert numbers(around) == [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]], [[8, 9]]]
    assert [b.tokens[:, 0].tolist() for [b] in around] == [[0, 10], [20, 30], [40, 50], [60, 0], [10, 20]]
    with pytest.raises(UserError, match="no sample"):
        Loader(Counting(0), 1, lambda _: 1, 0, 0, 9)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_id_outside_the_vocabulary_names_sample_and_place(workers):
    steps = iter(Loader(Counting(bad=5), 2, lambda _: 2, 0, workers, 1000))
    assert len(list(islice(steps, 2))) == 2  # read ahead, but told when it is its turn
    with pytest.raises(UserError, match=r"sample 5 has id 99999 \(place 5/2\).*ids are 0 ... 999") as caught:
        next(steps)
    assert caught.value.status == BAD_DATA
    with pytest.raises(UserError, match=r"sample 0 has id -1 \(place 0/4\)"):
        next(iter(Loader(Counting(bad=0, ids=(0, 1, 2, 3, -1)), 2, lambda _: 2, 0, workers, 1000)))
    assert not [t for t in threading.enumerate() if t.name.startswith("read-ahead")]


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        (np.arange(4), r"sample 1 .* int64 of shape \(4,\): give 5 int64, --seq-length \+ 1"),
        (np.arange(10).reshape(2, 5), r"sample 1 .* int64 of shape \(2, 5\)"),
        (np.arange(5.0), r"sample 1 .* float64 of shape \(5,\)"),
        (["a"] * 5, r"sample 1 .* <U1 of shape \(5,\)"),
    ],
)
def test_a_sample_that_is_not_s_plus_1_ids_is_named(ids, told):
    data = type("Own", (Counting,), {"__getitem__": lambda self, k: np.arange(5) if k != 1 else ids})()
    with pytest.raises(UserError, match=told) as caught:
        next(iter(Loader(data, 2, lambda _: 2, 0, 0, 1000, length=5)))
    assert caught.value.status == BAD_DATA


@pytest.mark.parametrize("ids", [torch.arange(5), np.arange(5, dtype=np.uint16), list(range(5))])
def test_ids_of_any_integer_kind_are_read(ids):
    data = type("Own", (Counting,), {"__getitem__": lambda self, k: ids})()
    [batch] = next(iter(Loader(data, 2, lambda _: 2, 0, 0, 1000, length=5)))
    assert batch.labels.dtype == torch.int64 and batch.labels.tolist() == [[1, 2, 3, 4]] * 2


def test_to_moves_what_is_there():
    [batch] = next(iter(Loader(Counting(), 2, lambda _: 2, 0, 0, 1000)))
    moved = Batch(batch.tokens, batch.labels, batch.sample_ids, doc_ids=batch.tokens).to("meta")
    assert {t.device.type for t in (moved.tokens, moved.labels, moved.sample_ids, moved.doc_ids)} == {"meta"}
    assert moved.loss_mask is None and moved.position_ids is None
    same = batch.to("cpu")
    assert torch.equal(same.tokens, batch.tokens)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("ahead", [False, True])
def test_to_a_gpu(ahead):
    gpu = torch.device("cuda")
    loader = Loader(Counting(), 2, lambda _: 2, 0, 2, 1000, device=gpu if ahead else None)
    batches = [b for [b] in islice(loader, 5)]
    assert all(b.tokens.is_cuda == ahead for b in batches)
    want = [b.tokens.tolist() for [b] in islice(Loader(Counting(), 2, lambda _: 2, 0, 2, 1000), 5)]
    assert [b.to("cuda").tokens.tolist() for b in batches] == want and [b.first_sample for b in batches] == [
        0,
        2,
        4,
        6,
        8,
    ]
