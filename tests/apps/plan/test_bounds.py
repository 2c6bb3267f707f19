"""The least time of a step is never above its time, and near it where a search needs that."""

from __future__ import annotations

import itertools
import random

import pytest
from plans import LARGE, STILL, planned

from meshwright.apps.plan import timeline
from meshwright.apps.plan.bounds import Bounds, Parts, Passes, PassOrder, least_passes
from meshwright.apps.plan.prediction import Prediction, find_machine
from meshwright.config import checks
from meshwright.config.grammar import split_layers
from meshwright.parallel.pipeline_schedule import SPLIT_BACKWARD, ScheduleName

KINDS: tuple[ScheduleName, ...] = ("1f1b", "gpipe", "zero-bubble", "zbv")


def draw(rng: random.Random, kind: ScheduleName) -> tuple[PassOrder, int, int, int, Parts]:
    """Draw a schedule, numbers of ranks, micro-batches and layers, and the seconds of passes."""

    def seconds() -> float:
        return rng.choice([1.0, rng.uniform(0.2, 2)])

    def passes() -> Passes:
        return Passes(seconds(), seconds() if is_split else 2 * seconds(), seconds() * is_split)

    pp, is_split = rng.choice([2, 3, 4, 5, 8]), kind in SPLIT_BACKWARD
    chunks = {"gpipe": 1, "zbv": 2}.get(kind) or rng.choice([1, 1, 2, 3])
    layers, is_interleaved = pp * chunks * rng.choice([1, 2, 3]), chunks > 1 and kind != "zbv"
    layers += 0 if is_interleaved else rng.choice([0, rng.randrange(pp * chunks)])
    count = pp * rng.choice([1, 2, 3]) if is_interleaved else rng.choice([1, 2, pp, 2 * pp - 1, 2 * pp, 3 * pp + 1])
    layer, first, last = passes(), passes().times(0.3), passes()
    return (
        PassOrder(kind, chunks),
        pp,
        count,
        layers,
        Parts(layer, first, last, rng.choice([0, 0.1, 1.0]), layer, first),
    )


def stage_times(schedule: PassOrder, pp: int, layers: int, parts: Parts) -> timeline.StageTimes:
    stages = split_layers(None, layers, pp * schedule.chunks)
    each = [parts.layer.times(number) for number in stages]
    each[0] = Passes(*map(sum, zip(each[0], parts.first, strict=True)))
    each[-1] = Passes(*map(sum, zip(each[-1], parts.last, strict=True)))
    forward, backward, weights = zip(*each, strict=True)
    return timeline.StageTimes(forward, backward, weights if schedule.name in SPLIT_BACKWARD else (), parts.message)


@pytest.mark.parametrize("kind", KINDS)
def test_no_pipeline_is_faster_than_its_bound(kind: ScheduleName) -> None:
    rng, near = random.Random(0), []
    for _ in range(300):
        schedule, pp, count, layers, parts = drawn = draw(rng, kind)
        times = stage_times(schedule, pp, layers, parts)
        seconds = timeline.simulate(kind, pp, count, schedule.chunks, times).total
        least = least_passes(schedule, pp, count, layers, parts)
        assert least <= seconds * (1 + 1e-9), drawn
        near.append(least / seconds)
    assert sorted(near)[len(near) // 2] > 0.93


@pytest.mark.parametrize(
    "more",
    [
        "",
        "--recompute-granularity full",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
        "--num-layers 27 --window-size 256 --window-attn-skip-freq 2",
        "--fp8-format hybrid --first-last-layers-bf16",
        "--hidden-size 256 --seq-length 128",  # the host is slower
        "--attention-impl reference --fused-kernels off",
    ],
)
@pytest.mark.parametrize("gpu", ["h200", "v100"])
def test_no_step_is_faster_than_its_bound(more: str, gpu: str) -> None:
    """Neither that of a layout, nor that of all schedules and ZeRO stages, nor of all sizes."""
    machine, number = find_machine(gpu), 0
    more = more if "fp8" in machine.profile.peaks else more.removeprefix("--fp8-format hybrid --first-last-layers-bf16")
    schedules = [("1f1b", 1), ("1f1b", 2), ("zero-bubble", 1), ("zero-bubble", 2), ("zbv", 2)]
    for tp, pp in itertools.product((1, 2), (1, 2, 4)):
        bounds, ways = Bounds(machine), [PassOrder(*each) for each in (schedules if pp > 1 else schedules[:1])]
        busiest: list[float] = []
        times: list[float] = []
        for micro in (2, 1):  # few of them, so that the time of a pipeline is exact
            sizes = f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} --micro-batch-size {micro}"
            sizes += " --sequence-parallel" if tp > 1 else ""
            given = f"{LARGE} {STILL} {more} {sizes} --global-batch-size {4 * pp} --lr 1e-4 --train-iters 10"
            open_config = planned(given, 2 * tp * pp)
            padded = Prediction(open_config, machine, 50257).padded
            some = bounds.least(open_config, padded, ways, (0, 1, 2, 3))
            busiest += [bounds.least(open_config, padded, ways, (0, 1, 2, 3), is_busy=True)]
            for way, zero in itertools.product(ways, (0, 1, 2, 3)):
                virtual = (open_config.model.num_layers or 0) // (pp * way.chunks)
                words = f"{given} --pipeline-schedule {way.name} --zero-stage {zero}"
                words += f" --num-layers-per-virtual-pipeline-stage {virtual}" * (way.chunks > 1 and way.name != "zbv")
                config = planned(words, 2 * tp * pp)
                if checks.problems(config, needs_data=False):
                    continue
                seconds = Prediction(config, machine, 50257).time.seconds
                least = bounds.least(config, padded, [way], [zero])
                assert max(some, least) <= seconds * (1 + 1e-9), words
                times.append(seconds)
                number += 1
        assert busiest[0] <= min(times) * (1 + 1e-9), "the bound of the largest micro-batches is one of all"
    assert number > 20


def test_the_bound_of_open_layouts_holds_for_each() -> None:
    """Without ZeRO the steps are CUDA graphs; with it the slower host hides more of the sums."""
    given = f"--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 4096 --swiglu {STILL} --bf16 "
    given += "--normalization RMSNorm --tensor-model-parallel-size 8 --micro-batch-size 8 --global-batch-size 16 "
    given += "--lr 1e-4 --train-iters 10"
    machine, open_config, way = find_machine("h200", link=2.0), planned(given, 16), PassOrder("1f1b", 1)
    bounds, padded = Bounds(machine), Prediction(open_config, machine, 50257).padded
    least = bounds.least(open_config, padded, [way], (0, 1, 2))
    for zero in (0, 1, 2):
        config = planned(f"{given} --zero-stage {zero}", 16)
        seconds = Prediction(config, machine, 50257).time.seconds
        assert max(least, bounds.least(config, padded, [way], [zero])) <= seconds * (1 + 1e-9), zero
