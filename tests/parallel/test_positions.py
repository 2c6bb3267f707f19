"""The positions by which every rank draws its dropout: together they are those of one process."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
import torch
from torch.distributed import ProcessGroup

from meshwright.config.schema import Model
from meshwright.data.loader import Batch
from meshwright.model.gpt import GPT
from meshwright.parallel.layout import Layout
from meshwright.parallel.parallel_model import ParallelModel
from meshwright.parallel.tensor import SampleColumns, shard_layers

META = torch.device("meta")


def batch(samples: list[int], columns: int) -> Batch:
    """Return a micro-batch of these samples."""
    tokens = torch.zeros(len(samples), columns, dtype=torch.int64)
    return Batch(tokens, tokens, torch.tensor(samples), None, None)


@pytest.mark.parametrize("tp", [2, 4])
def test_sequence_parallel_rows_are_those_of_the_whole_batch(tp: int) -> None:
    samples, columns = [5, 9], 8
    drawn, columns_drawn = list[int](), list[int]()
    for rank in range(tp):
        model = ParallelModel(parts=[], device=META, layout=Layout(tp=tp, rank=rank), sequence=True)
        stream = model.where(batch(samples, columns), seed=1).stream
        assert stream is not None and stream.samples is not None
        drawn += stream.samples[0].tolist()
        columns_drawn += stream.columns[0].tolist()
    assert drawn == [5] * columns + [9] * columns
    assert columns_drawn == 2 * [*range(columns)]


def test_context_ranks_number_their_own_heads() -> None:
    model = Model(num_layers=1, hidden_size=16, num_attention_heads=4)
    heads = []
    for rank in range(2):
        layout = replace(Layout(cp=2, rank=rank), groups={"cp": cast(ProcessGroup, object())})
        with META:
            network = GPT(model, 64, 64, 8)
        heads.append(shard_layers(network, layout, None, SampleColumns()))
    assert heads == [range(2), range(2, 4)]
