"""Bytes sent: by hand in a ring, and counted in real runs of CPU ranks."""

from __future__ import annotations

import pytest
from plans import SMALL, planned

from meshwright.plan.sizes import parameters_of_ranks
from meshwright.plan.traffic import bytes_sent

BATCH = "--micro-batch-size 2 --global-batch-size {}"
STREAM = 2 * 32 * 64 * 2  # bytes of a micro-batch's activations at one place


def sent(words: str, batch: int, world: int = 4) -> dict[str, int]:
    return bytes_sent(planned(f"{SMALL} {BATCH.format(batch)} {words}", world), 128)


def test_data_parallel_bytes_match_a_ring_counted_by_hand():
    """In a ring of four ranks a buffer takes 3 rounds of a quarter to reduce, and 3 to gather."""
    parameters = parameters_of_ranks(planned(SMALL), 128)[0]
    reduced, gathered = 3 * parameters * 4 // 4, 3 * parameters * 2 // 4
    for stage, wanted in {
        0: 2 * reduced,
        1: reduced + gathered,
        2: 5 * reduced + gathered,
        3: 5 * (reduced + 2 * gathered),
    }.items():
        assert sent(f"--zero-stage {stage}", 40) == {"data": pytest.approx(wanted, abs=1)}


def test_replicas_of_shards_add_their_own_sum():
    both = sent("--zero-stage 1 --num-distributed-optimizer-instances 2", 8)
    parameters = parameters_of_ranks(planned(SMALL), 128)[0]
    assert both == {"data": pytest.approx(parameters * 6 / 2, abs=1), "replicas": pytest.approx(parameters * 2, abs=1)}


def test_the_other_dimensions_by_hand():
    layers, count = 4, 3
    loss = 2 * 3 * 64 * 3 * 4 // 4  # three numbers for each of 64 tokens
    tensor = count * (2 * (4 * layers + 2) * 3 * STREAM // 4 + loss)
    assert sent("--tensor-model-parallel-size 4", 6) == {"tensor": tensor}
    again = count * 3 * STREAM // 4 * (2 * layers + 1)
    assert sent("--tensor-model-parallel-size 4 --sequence-parallel", 6) == {"tensor": tensor + again}
    # To each of the three others: its heads for this rank's tokens
    context = sent("--context-parallel-size 4", 6)
    assert context["context"] == count * 2 * 4 * layers * 3 * (STREAM // 16)
    pipeline = sent("--pipeline-model-parallel-size 4", 6)
    assert pipeline == {"pipeline": 2 * count * STREAM, "embedding": 128 * 64 * 4}
    assert sent("", 2, world=1) == {}
