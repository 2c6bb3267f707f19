"""The memory that a search estimates, beside that of the plan of each layout."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from plans import STILL, planned

from meshwright.apps.plan.estimates import MemoryEstimates
from meshwright.apps.plan.prediction import Prediction, find_machine
from meshwright.config import checks
from meshwright.config.schema import TrainConfig

PADDED = 50_304
MODEL = f"--hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --bf16 {STILL} --lr 1e-4 --train-iters 10"
SCHEDULES = [
    (1, ""),
    (2, "--pipeline-schedule 1f1b"),
    (4, "--pipeline-schedule 1f1b --num-layers-per-virtual-pipeline-stage {half}"),
    (4, "--pipeline-schedule zero-bubble"),
    (2, "--pipeline-schedule zero-bubble --num-layers-per-virtual-pipeline-stage {half}"),
    (4, "--pipeline-schedule zbv"),
]


def layouts(more: str) -> Iterator[TrainConfig]:
    """Yield legal layouts of all schedules by layers of a rank, micro-batch and ZeRO stage."""
    ways = 2 if "--tensor" in more else 1
    for pp, schedule in SCHEDULES:
        for depth in (2, 4, 8):
            for micro, stage in ((micro, stage) for micro in (1, 8) for stage in range(4)):
                sizes = f"--num-layers {depth * pp} --pipeline-model-parallel-size {pp} --zero-stage {stage}"
                batch = f"--micro-batch-size {micro} --global-batch-size {micro * 2 * 16}"
                words = f"{MODEL} {sizes} {batch} {schedule.format(half=depth // 2)} {more}"
                config = planned(words, 2 * pp * ways)
                if not checks.problems(config, needs_data=False):
                    yield config


@pytest.mark.parametrize(
    "more",
    [
        "",
        "--recompute-granularity full",
        "--recompute-granularity full --recompute-num-layers 2",
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--tensor-model-parallel-size 2 --untie-embeddings-and-output-weights --swiglu --normalization RMSNorm",
    ],
)
def test_estimates_agree_with_plans(more: str) -> None:
    """They are within 1 % without ZeRO 2 and 3, and never more than that above the plan."""
    machine = find_machine("h200")
    for config in layouts(more):
        prediction, estimates = Prediction(config, machine, PADDED), MemoryEstimates()  # of one model
        ends = [prediction.ranks[0], prediction.ranks[-1]]
        need = max(rank.allocated + rank.context for rank in ends)
        share = estimates.at_least(prediction) / need
        assert share <= 1.01, (config.parallel, config.micro_batch)
        if config.parallel.zero_stage < 2:
            assert share >= 0.99, (config.parallel, config.micro_batch)
        assert estimates.held(prediction) <= estimates.waiting(prediction) <= need * 1.001
