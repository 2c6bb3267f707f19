"""The commands of OneFlow-GPT, on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from documents import ROUNDING, SCRIPT, SEED_004, as_one_process, assert_same, run, smaller, steps, with_values

pytestmark = [pytest.mark.whole, pytest.mark.timeout(180)]


@pytest.mark.long  # real launchers, whose ranks import torch one by one
def test_seed_004_starts_its_own_ranks(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data and tensor parallelism on one node, as examples/pretrain_1n8d_2x4x1_16_1536x16.sh, by
    OneFlow's flags alone.
    """
    sizes = {"tensor_model_parallel_size": 2, "num_gpus_per_node": 4, "micro_batch_size": 2, "global_batch_size": 8}
    flags = with_values(smaller(SEED_004, train_iters=18, vocab_size=320).split() + ["--eval-iters", "1"], **sizes)
    (log,) = run(place, f"python {SCRIPT} {' '.join(flags)}")
    assert "data-parallel-size: 2, tensor-model-parallel size: 2" in log
    assert_same(steps(place / "checkpoint"), as_one_process(place, flags, monkeypatch), ROUNDING)
