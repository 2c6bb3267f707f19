"""Closed forms beside what they stand for: measured memory, and schedules that are run."""

from __future__ import annotations

import statistics

import pytest
from plans import STILL, planned

from meshwright.apps.plan import estimate
from meshwright.apps.plan.estimate import WITHIN, LayoutSizes, Run, layout_of
from meshwright.apps.plan.memory import memory_of_rank
from meshwright.apps.plan.prediction import Prediction, find_machine
from meshwright.base.device import NVIDIA
from meshwright.config import checks
from meshwright.config.schema import TrainConfig
from meshwright.training import graph_rule

PADDED = 50_304
MODEL = "--hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --bf16 --lr 1e-4 --train-iters 10"
LLAMA = "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --num-query-groups 4"
ALONE = [  # flags, and the number of ranks
    (f"{STILL} --untie-embeddings-and-output-weights {LLAMA}", 1),
    ("--recompute-granularity full --recompute-num-layers 4", 1),
    ("--tensor-model-parallel-size 4 --sequence-parallel --zero-stage 1", 8),
    ("--zero-stage 3", 4),
]
PIPELINES = [
    "--pipeline-schedule 1f1b",
    "--pipeline-schedule 1f1b --num-layers-per-virtual-pipeline-stage 1",
    "--pipeline-schedule gpipe",
    "--pipeline-schedule 1f1b --zero-stage 3",
]


def config_of(words: str, world: int) -> TrainConfig:
    config = planned(
        f"{MODEL} --num-layers 12 --micro-batch-size 4 --global-batch-size {16 * world} {words}",
        world,
    )
    assert not checks.problems(config, needs_data=False)
    return config


def error(config: TrainConfig, rank: int) -> float:
    """Return by how much the estimated memory of a rank is off."""
    profile = find_machine("h200").profile
    measured = memory_of_rank(config, PADDED, rank, profile)
    estimated = estimate.memory_of_ranks(config, PADDED, profile)[rank]
    assert estimated.context == measured.context
    return (estimated.allocated + estimated.context) / (measured.allocated + measured.context) - 1


@pytest.mark.whole
def test_memory_without_a_pipeline_is_near_what_is_measured() -> None:
    errors = {words: error(config_of(words, world), 0) for words, world in ALONE}
    assert not {words: off for words, off in errors.items() if abs(off) > WITHIN}
    assert statistics.median(map(abs, errors.values())) < WITHIN / 5


@pytest.mark.whole
def test_memory_of_pipelines_is_near_what_is_measured() -> None:
    errors = {}
    for words in PIPELINES:
        config = config_of(f"{words} --pipeline-model-parallel-size 4", 8)
        errors |= {(words, rank): error(config, rank) for rank in (0, 3)}
    assert not {case: off for case, off in errors.items() if abs(off) > WITHIN}
    assert statistics.median(map(abs, errors.values())) < WITHIN / 3


@pytest.mark.parametrize("words", PIPELINES)
def test_the_seconds_of_a_pipeline_are_near_those_of_its_schedule(words: str) -> None:
    """The closed form knows the slowest rank and gaps; `step_time` runs the schedule's lists."""
    config, machine = (
        config_of(f"{words} --pipeline-model-parallel-size 4", 8),
        find_machine("h200"),
    )
    layout = layout_of(config)
    run = Run(config, PADDED, machine.profile, machine.links)
    ((seconds,),) = estimate.step_seconds(
        run, layout, [layout.micro_batch_size], [layout.num_layers_per_virtual_pipeline_stage]
    )
    assert seconds == pytest.approx(Prediction(config, machine, PADDED).time.seconds, rel=0.02)


@pytest.mark.parametrize(
    ("words", "ranks", "in_graphs"),
    [
        ("--pipeline-model-parallel-size 4", 4, True),
        # More than 256 passes of a stage.
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", 2, False),
    ],
)
def test_a_pipeline_alone_is_estimated_with_its_own_graphs(
    words: str, ranks: int, in_graphs: bool
) -> None:
    """Small layers, whose launches by the host take longer than the device."""
    batch = "--micro-batch-size 1 --global-batch-size 160"
    config = config_of(f"--hidden-size 256 --num-attention-heads 4 {batch} {words}", ranks)
    machine = find_machine("h200")
    run = Run(config, PADDED, machine.profile, machine.links)
    layout = layout_of(config)
    predicted = Prediction(config, machine, PADDED)
    assert (graph_rule.reason_against(config, NVIDIA) is None) == in_graphs
    ((seconds,),) = estimate.step_seconds(
        run, layout, [1], [layout.num_layers_per_virtual_pipeline_stage]
    )
    assert seconds == pytest.approx(predicted.time.seconds, rel=0.05)


def test_parts_are_shared_by_layouts_that_do_not_differ_in_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each layout has the figures that it has if its parts are computed for itself alone."""
    config, machine = config_of("--zero-stage 1", 8), find_machine("h200")
    shapes = (
        (1, 1, 1, 4),
        (2, 1, 2, 4),
        (2, 2, 1, 2),
        (2, 2, 2, 4),
        (1, 4, 0, 1),
        (2, 1, 1, 8),
        (1, 2, 3, 2),
    )
    layouts = [
        LayoutSizes(tp, tp > 1, 1, pp, None, micro, name, virtual, zero, recompute)
        for tp, pp, zero, micro in shapes
        for recompute in (None, "full")
        for name, virtual in ((("1f1b", None), ("1f1b", 1)) if pp > 1 else (("1f1b", None),))
    ]

    def figures(run: Run, layout: LayoutSizes) -> tuple[int, float]:
        micro, virtual = layout.micro_batch_size, layout.num_layers_per_virtual_pipeline_stage
        ((seconds,),) = estimate.step_seconds(run, layout, [micro], [virtual])
        return estimate.need_of(run, layout), seconds

    run = Run(config, PADDED, machine.profile, machine.links)
    shared = [figures(run, layout) for layout in layouts]
    monkeypatch.setattr(estimate, "without_passes", lambda run, layout: layout)
    monkeypatch.setattr(estimate, "without_stages", lambda layout: layout)
    # What ZeRO 3 launches in a pipeline is added to the work without it.
    monkeypatch.setattr(
        estimate,
        "work_key",
        lambda run, layout: layout._replace(zero_stage=min(layout.zero_stage, 2)),
    )
    for layout, (need, seconds) in zip(layouts, shared, strict=True):
        alone = figures(Run(config, PADDED, machine.profile, machine.links), layout)
        assert alone == (need, pytest.approx(seconds, rel=0.01)), layout
