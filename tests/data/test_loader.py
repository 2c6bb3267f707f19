"""Batches: their order, their slices over ranks, the thread's end and its errors."""

import re
import sys
import threading
from itertools import islice

import numpy as np
import pytest
import torch

from helpers import error_of
from meshwright.base.errors import USAGE
from meshwright.data.loader import Cyclic, Loader, LoaderSpec


class Counting:
    """Sample k is k x 10, k x 10 + 1, ...; notes what was read, and in which thread."""

    def __init__(self, length=100, bad=-1, ids=(0, 1, 99_999, -3, 4)):
        self.length, self.bad, self.ids, self.read = length, bad, np.array(ids), []

    def __len__(self):
        return self.length

    def __getitem__(self, k):
        self.read.append((k, threading.current_thread().name))
        return np.arange(k * 10, k * 10 + 5) if k != self.bad else self.ids

    def locate(self, k, position):
        return f"place {k}/{position}"


def loader(data, micro=2, size=2, consumed=0, **spec):
    return Loader(data, LoaderSpec(micro, lambda _: size, **{"vocab_size": 1000, **spec}), consumed)


def numbers(steps):
    return [[b.sample_ids.tolist() for b in batches] for batches in steps]


def first_ids(steps):
    return [b.tokens[:, 0].tolist() for batches in steps for b in batches]


def read_ahead_threads():
    return [t for t in threading.enumerate() if t.name.startswith("read-ahead")]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_tokens_labels_and_order(workers):
    steps = list(islice(loader(Counting(), 2, 6, consumed=12, workers=workers), 3))
    assert numbers(steps) == [
        [[n, n + 1] for n in range(first, first + 6, 2)] for first in (12, 18, 24)
    ]
    batch = steps[0][1]
    assert batch.tokens.tolist() == [[140, 141, 142, 143], [150, 151, 152, 153]]
    assert batch.labels.tolist() == [[141, 142, 143, 144], [151, 152, 153, 154]]
    assert {t.dtype for t in (batch.tokens, batch.labels, batch.sample_ids)} == {torch.int64}
    assert batch.tokens.is_contiguous() and batch.labels.is_contiguous()
    assert (batch.loss_mask, batch.position_ids, batch.doc_ids) == (None, None, None)
    assert (batch.first_sample, batch.unmasked) == (14, 8)


def test_ranks_cut_each_block_of_micro_batches():
    def of_rank(rank, ranks):
        return numbers(islice(loader(Counting(), 2, 12, 12, rank=rank, ranks=ranks), 2))

    assert of_rank(1, 3) == [[[14, 15], [20, 21]], [[26, 27], [32, 33]]]
    for ranks in (1, 2, 3, 6):
        parts = [of_rank(rank, ranks) for rank in range(ranks)]
        # together the same samples, for any number of ranks
        for step, first in enumerate((12, 24)):
            together = [
                n
                for micro in zip(*[p[step] for p in parts], strict=True)
                for part in micro
                for n in part
            ]
            assert together == list(range(first, first + 12))


@pytest.mark.parametrize(("ranks", "size"), [(3, 8), (8, 8), (1, 7), (1, 0)])
def test_a_step_that_ranks_cannot_share_is_refused(ranks, size):
    message = error_of(lambda: next(iter(loader(Counting(), 2, size, ranks=ranks))), USAGE)
    assert f"{size} samples is not a multiple of 2 (--micro-batch-size) x {ranks} " in message


def megatron_cyclic(total, consumed, micro, dp_rank, dp_size):
    """Megatron's MegatronPretrainingRandomSampler of 2023, sharded, without its checks."""
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


@pytest.mark.parametrize("consumed", [0, 4, 36, 40, 116])
def test_cyclic_is_megatrons_with_one_rank(consumed):
    ours = islice(loader(Cyclic(Counting(40)), 4, 4, consumed, workers=2), 35)
    theirs = islice(megatron_cyclic(40, consumed, 4, 0, 1), 35)
    assert first_ids(ours) == [[k * 10 for k in batch] for batch in theirs]


@pytest.mark.parametrize("micro,ranks", [(1, 1), (4, 1), (1, 2), (2, 2)])
@pytest.mark.fault("F5")
def test_cyclic_epochs_do_not_depend_on_the_layout(micro, ranks):
    n = 7  # no multiple of a batch: some steps lie in two epochs
    of_ranks = [
        first_ids(islice(loader(Cyclic(Counting(n)), micro, 4, rank=r, ranks=ranks), 14))
        for r in range(ranks)
    ]
    ids = [k // 10 for blocks in zip(*of_ranks, strict=True) for part in blocks for k in part]
    epochs = [ids[start : start + n] for start in range(0, 56, n)]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == len(epochs)
    alone = Cyclic(Counting(n))
    assert ids == [int(alone[k][0]) // 10 for k in range(56)]
    assert alone.locate(20, 3) == f"place {ids[20]}/3"
    assert len(alone) == sys.maxsize


@pytest.mark.flag("num_workers")
def test_reading_ahead_is_bounded_and_in_a_thread_that_ends():
    data = Counting()
    steps = iter(loader(data, 1, 1, workers=2))
    for _ in range(6):
        next(steps)
    steps.close()
    assert 6 <= len(data.read) <= 6 + 2
    assert all(name.startswith("read-ahead") for _, name in data.read)
    assert not read_ahead_threads()
    none = Counting()
    next(iter(loader(none, 1, 1)))
    assert none.read == [(0, threading.current_thread().name)]


@pytest.mark.parametrize("workers", [0, 2])
def test_running_out(workers):
    steps = iter(loader(Counting(7), workers=workers))
    # the last, partial block is not used
    assert numbers(islice(steps, 3)) == [[[0, 1]], [[2, 3]], [[4, 5]]]
    assert "needs samples 6 to 7, but the data set has 7" in error_of(lambda: next(steps))
    around = list(islice(loader(Counting(7), workers=workers, at_end="wrap"), 5))
    assert numbers(around) == [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]], [[8, 9]]]
    assert first_ids(around) == [[0, 10], [20, 30], [40, 50], [60, 0], [10, 20]]
    assert "no sample" in error_of(lambda: loader(Counting(0)))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.fault("F24")
@pytest.mark.promise("An id outside of the vocabulary stops the run and is named")
def test_an_id_outside_the_vocabulary_names_sample_and_place(workers):
    steps = iter(loader(Counting(bad=5), workers=workers))
    assert len(list(islice(steps, 2))) == 2  # read ahead, but raised when its step is asked for
    assert re.search(
        r"sample 5 has id 99999 \(place 5/2\).*ids are 0 ... 999", error_of(lambda: next(steps))
    )
    steps = iter(loader(Counting(bad=0, ids=(0, 1, 2, 3, -1)), workers=workers))
    assert "sample 0 has id -1 (place 0/4)" in error_of(lambda: next(steps))
    assert not read_ahead_threads()


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (np.arange(4), r"sample 1 .* int64 of shape \(4,\); give 5 int64, --seq-length \+ 1"),
        (np.arange(10).reshape(2, 5), r"sample 1 .* int64 of shape \(2, 5\)"),
        (np.arange(5.0), r"sample 1 .* float64 of shape \(5,\)"),
        (["a"] * 5, r"sample 1 .* <U1 of shape \(5,\)"),
    ],
)
def test_a_sample_that_is_not_s_plus_1_ids_is_named(ids, words):
    data = type(
        "Own", (Counting,), {"__getitem__": lambda self, k: np.arange(5) if k != 1 else ids}
    )()
    assert re.search(words, error_of(lambda: next(iter(loader(data, length=5)))))


@pytest.mark.parametrize("ids", [torch.arange(5), np.arange(5, dtype=np.uint16), list(range(5))])
def test_ids_of_any_integer_type_are_read(ids):
    data = type("Own", (Counting,), {"__getitem__": lambda self, k: ids})()
    [batch] = next(iter(loader(data, length=5)))
    assert batch.labels.dtype == torch.int64 and batch.labels.tolist() == [[1, 2, 3, 4]] * 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("device", [None, torch.device("cuda")])
def test_to_a_gpu(device):
    """Batches for a GPU are pinned; the step copies them."""
    batches = [b for [b] in islice(loader(Counting(), workers=2, device=device), 5)]
    assert all(
        b.tokens.is_pinned() == (device is not None) and not b.tokens.is_cuda for b in batches
    )
    expected = [b.tokens.tolist() for [b] in islice(loader(Counting(), workers=2), 5)]
    assert [b.to("cuda").tokens.tolist() for b in batches] == expected
    assert [b.first_sample for b in batches] == [0, 2, 4, 6, 8]
