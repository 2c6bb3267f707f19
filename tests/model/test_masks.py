"""Masks and positions at ends of documents, compared with a loop over single tokens."""

import itertools

import numpy as np
import pytest
import torch

from meshwright.data.loader import DocumentEnds, Loader, LoaderSpec

EOD = 3


class Fixed:
    """A data set of an array's rows."""

    def __init__(self, rows):
        self.rows = np.asarray(rows)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, k):
        return self.rows[k]

    def locate(self, k, position):
        return f"{k}/{position}"


def batches(rows, micro, marks, workers=0):
    steps = Loader(Fixed(rows), LoaderSpec(micro, lambda _: micro, 10, workers, marks))
    return [b for [b] in itertools.islice(steps, len(rows) // micro)]


def marks_of(row):
    """Return positions, documents and the loss mask of one sample, token by token."""
    positions, documents, mask = [], [], []
    position = document = 0
    for token in row[:-1]:
        positions.append(position)
        documents.append(document)
        mask.append(0.0 if token == EOD else 1.0)
        position += 1
        if token == EOD:
            position, document = 0, document + 1
    return positions, documents, mask


def test_by_hand():
    [batch] = batches([[7, 3, 3, 5, 6, 3, 8, 9]], 1, DocumentEnds(EOD, True, True, True))
    assert batch.loss_mask.tolist() == [[1, 0, 0, 1, 1, 0, 1]]
    assert batch.position_ids.tolist() == [[0, 1, 0, 0, 1, 2, 0]]
    assert batch.doc_ids.tolist() == [[0, 0, 1, 2, 2, 2, 3]]
    assert (batch.loss_mask.dtype, batch.position_ids.dtype) == (torch.float32, torch.int64)
    assert batch.doc_ids.dtype == torch.int32


@pytest.mark.parametrize("length", [1, 2, 17])
@pytest.mark.parametrize("kinds", [2, 4, 10])  # 2: no end at all; 4: a quarter of the tokens
def test_random_samples(length, kinds):
    rows = np.random.default_rng(length + kinds).integers(0, kinds, (60, length + 1))
    rows[:3], rows[3:6, -1] = EOD, EOD  # only ends; an end among the labels only
    for first, batch in zip(
        range(0, 60, 4), batches(rows, 4, DocumentEnds(EOD, True, True, True)), strict=True
    ):
        wanted = [marks_of(row) for row in rows[first : first + 4].tolist()]
        got = (batch.position_ids, batch.doc_ids, batch.loss_mask)
        for field, part in zip(got, zip(*wanted, strict=True), strict=True):
            assert field.tolist() == list(part)
            assert field.is_contiguous()


@pytest.mark.parametrize("on", list(itertools.product([False, True], repeat=3)))
def test_marks_that_are_off_are_none(on):
    [batch] = batches([[1, 3, 2]], 1, DocumentEnds(EOD, *on), workers=1)
    fields = (batch.loss_mask, batch.position_ids, batch.doc_ids)
    assert tuple(field is not None for field in fields) == on
    moved = batch.to("meta")
    assert all(
        f.device.type == "meta"
        for f in (moved.loss_mask, moved.position_ids, moved.doc_ids)
        if f is not None
    )
