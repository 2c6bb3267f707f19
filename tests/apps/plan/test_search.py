"""The search finds what trying all layouts finds, and the data of the pictures."""

from __future__ import annotations

import dataclasses
import itertools
import random
import subprocess
import sys

import pytest

from meshwright.apps.plan import memory, pictures, prediction
from meshwright.apps.plan.describe import layout_settings
from meshwright.apps.plan.estimate import NEAR, memory_of_ranks
from meshwright.apps.plan.goodput import Interruptions, expect
from meshwright.apps.plan.memory import RankMemory
from meshwright.apps.plan.prediction import Machine, Prediction, find_machine
from meshwright.apps.plan.search import Freedom, Search, least_change
from meshwright.base.device_profiles import DeviceProfile
from meshwright.config import checks, flags
from meshwright.config.check_layout import parallel_problems
from meshwright.config.fields import with_settings
from meshwright.config.schema import TrainConfig

VOCABULARY = 50_257


def config_of(words: str) -> TrainConfig:
    return flags.parse_settings(
        TrainConfig, [*words.split(), "--mock-data"], "meshwright train"
    ).config


def searched(config: TrainConfig, machine: Machine, keep: int = 10) -> Search:
    one = Search(machine, VOCABULARY, Freedom(), keep)
    one.run(config)
    return one


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let estimates stand for what is measured, which takes seconds: memory up to its margin off.

    How far a layout is off is drawn from its settings.
    """

    def measure(config: TrainConfig, padded: int, profile: DeviceProfile) -> list[RankMemory]:
        estimated = memory_of_ranks(config, padded, profile)
        off = 1 + NEAR * random.Random(str(layout_settings(config))).uniform(-0.9, 0.9)
        return [
            dataclasses.replace(rank, kinds={"all": round(rank.allocated * off)})
            for rank in estimated
        ]

    monkeypatch.setattr(prediction, "measured_operations", lambda config, padded, profile: None)
    monkeypatch.setattr(memory, "memory_of_ranks", measure)
    monkeypatch.setattr(
        memory,
        "memory_of_rank",
        lambda config, padded, rank, profile: measure(config, padded, profile)[rank],
    )


def every_layout(config: TrainConfig, machine: Machine) -> list[Prediction]:
    """Predict all combinations of all values that `Search` may set, one by one."""
    sizes = [n for n in range(1, config.world + 1) if config.world % n == 0]
    layers = config.model.num_layers or 1
    virtual = [None, *(n for n in range(1, layers) if layers % n == 0)]
    values = {
        "tensor_model_parallel_size": sizes,
        "sequence_parallel": [False, True],
        "context_parallel_size": sizes,
        "pipeline_model_parallel_size": sizes,
        "num_layers_per_virtual_pipeline_stage": virtual,
        "pipeline_schedule": ["1f1b"],
        "zero_stage": [0, 1, 2, 3],
        "micro_batch_size": [1, 2, 4, 8],
        "recompute_granularity": [None, "selective", "full"],
    }
    out = []
    for chosen in itertools.product(*values.values()):
        p = dict(zip(values, chosen, strict=True))
        model_ranks = (
            p["tensor_model_parallel_size"]
            * p["context_parallel_size"]
            * p["pipeline_model_parallel_size"]
        )
        if config.world % model_ranks or (
            p["sequence_parallel"] and p["tensor_model_parallel_size"] == 1
        ):
            continue
        if p["pipeline_model_parallel_size"] == 1 and (
            p["pipeline_schedule"] != "1f1b" or p[list(values)[4]]
        ):
            continue
        one = with_settings(config, **p)
        # nothing to shard over
        if p["zero_stage"] and one.dp * one.parallel.context_parallel_size == 1:
            continue
        if p["num_layers_per_virtual_pipeline_stage"] and one.chunks == 1:  # the same without
            continue
        if not checks.problems(one, needs_data=False):
            out.append(Prediction(one, machine, VOCABULARY).measured())
    least: dict[str, Prediction] = {}  # a layout with the least recomputation with which it fits
    for each in out:
        settings = layout_settings(each.config)
        if each.fits:
            least.setdefault(
                str({n: v for n, v in settings.items() if n != "recompute_granularity"}), each
            )
    return [*least.values()]


def is_estimated_to_fit(one: Prediction) -> bool:
    return dataclasses.replace(one, is_measured=False).tensors <= one.machine.profile.memory_bytes


@pytest.fixture(scope="module")
def machine() -> Machine:
    return find_machine("a100-40")


SMALL = "--preset gpt3-1.3b --num-layers 4 --global-batch-size 8 --bf16 --train-iters 10 --lr-decay-iters 10"


@pytest.fixture(scope="module")
def small() -> TrainConfig:
    return config_of(f"{SMALL} --world-size 2")


WORLDS = [  # flags, GiB of a device, and whether each is a machine of its own
    ("--world-size 2", 40, True),  # pipelines are the fastest
    ("--world-size 2", 7, False),  # recomputation and ZeRO 2 and 3 decide
    ("--world-size 4 --vocab-size 1000 --global-batch-size 4", 3, False),
]


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize(("words", "gib", "apart"), WORLDS)
def test_the_search_finds_the_fastest_of_all(
    words: str, gib: int, apart: bool, machine: Machine
) -> None:
    """The times are those of all layouts, predicted one by one: the ranking leaves none out.

    The fastest is found even if it is estimated to be too large. The others of the table are the
    fastest of those that are not.
    """
    config = config_of(f"{SMALL} {words}")
    links = (
        dataclasses.replace(machine.links.with_network(1e9), gpus_per_node=1)
        if apart
        else machine.links
    )
    limited = Machine(dataclasses.replace(machine.profile, memory_bytes=gib << 30), links)
    search = searched(config, limited)
    best = search.found.fitting
    everything = sorted(every_layout(config, limited), key=lambda p: p.time.seconds)
    expected = [everything[0], *(p for p in everything[1:] if is_estimated_to_fit(p))][:10]
    assert [p.time.seconds for p in best] == [p.time.seconds for p in expected]
    assert len(everything) > 10 and search.found.slower, "a search of a part of them"
    assert apart == (best[0].config.parallel.pipeline_model_parallel_size > 1)
    for one in best:
        assert one.fits and not checks.problems(one.config, needs_data=False)


@pytest.mark.usefixtures("pretended")
def test_refused_layouts_have_the_reasons_of_the_checks(
    small: TrainConfig, machine: Machine
) -> None:
    found = searched(with_settings(small, attention_dropout=0.1), machine).found
    refused = [reason for _, reason in found.refusals.listed()]
    wrong = with_settings(small, attention_dropout=0.1, context_parallel_size=2, micro_batch_size=1)
    assert str(parallel_problems(wrong)[0]) in refused
    assert all(p.config.parallel.context_parallel_size == 1 for p in found.fitting)


@pytest.mark.usefixtures("pretended")
def test_all_reasons_against_a_layout_are_found_before_it_is_ranked(machine: Machine) -> None:
    """No layout of the ranking is refused by the checks of the whole, whatever they depend on."""
    for words in (
        "--world-size 8 --num-distributed-optimizer-instances 2 --zero-stage 1",
        "--world-size 12",
    ):
        search = searched(
            config_of(f"{SMALL} {words}".replace("batch-size 8", "batch-size 24")), machine
        )
        assert search.found.ranked
        assert not any(checks.problems(one.config, needs_data=False) for one in search.found.ranked)


@pytest.mark.usefixtures("pretended")
def test_a_search_without_room_knows_the_nearest(machine: Machine) -> None:
    config = config_of("--preset gpt3-175b --world-size 2 --bf16")
    found = searched(config, machine).found
    assert (
        not found.fitting
        and found.too_large
        and found.nearest is not None
        and found.nearest.left < 0
    )


@pytest.mark.usefixtures("pretended")
def test_the_least_change_is_one_setting_if_one_is_enough(machine: Machine) -> None:
    config = config_of("--preset gpt3-1.3b --world-size 4 --bf16 --micro-batch-size 16")
    given = Prediction(config, machine, VOCABULARY).measured()
    assert not given.fits
    change = least_change(given)
    assert change is not None
    settings, changed = change
    assert (
        len(settings) == 1
        and changed.fits
        and not checks.problems(changed.config, needs_data=False)
    )


@pytest.mark.whole
def test_ten_thousand_devices_are_ranked_without_torch() -> None:
    words = (
        "--preset gpt3-175b --world-size 10240 --bf16 --global-batch-size 10240 --mock-data".split()
    )
    code = f"""
import itertools, sys
from meshwright.apps.plan.prediction import find_machine
from meshwright.apps.plan.search import Freedom, Search
from meshwright.config import flags
from meshwright.config.schema import TrainConfig
config = flags.parse_settings(TrainConfig, {words!r}, "meshwright train").config
search = Search(find_machine("h200"), {VOCABULARY}, Freedom())
assert len([*itertools.islice(search.ranked(search.run_of(config)), 40)]) == 40 and search.found.slower > 10_000
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# The data of the pictures


def test_the_pipelines_picture_has_every_pass_of_its_micro_batches(machine: Machine) -> None:
    words = "--preset gpt2-345m --world-size 4 --pipeline-model-parallel-size 4 --bf16 --global-batch-size 512"
    timeline = pictures.drawn_timeline(Prediction(config_of(words), machine, VOCABULARY))
    assert timeline is not None
    drawn = pictures.DRAWN_ROUNDS * 4
    for spans in timeline.spans:
        assert sorted((a.op, a.microbatch) for a in spans) == sorted(
            ("BF"[k], n) for k in (0, 1) for n in range(drawn)
        )
        ends = sorted(spans.values())
        assert all(a[1] <= b[0] + 1e-12 for a, b in itertools.pairwise(ends)), (
            "a rank does one thing at a time"
        )
    alone = with_settings(config_of(words), pipeline_model_parallel_size=1)
    assert pictures.drawn_timeline(Prediction(alone, machine, VOCABULARY)) is None


def test_every_kind_of_memory_has_a_colour(machine: Machine) -> None:
    """The last rank of a pipeline has all: logits beside messages, and what the process takes."""
    words = (
        "--preset gpt2-345m --num-layers 4 --world-size 2 --pipeline-model-parallel-size 2 --bf16"
    )
    one = Prediction(config_of(words), machine, VOCABULARY).measured()
    kinds = list(pictures.stacked_memory(one))
    assert {"logits", "communication", "allocator", "context"} <= {*kinds}
    assert [meaning for _, meaning in pictures.memory_drawing(one).legend] == kinds


def test_the_picture_of_goodput_without_a_step_between_failures() -> None:
    losses = Interruptions(between=0.1, stall=100, restart=300)
    assert {share for _, share in pictures.goodput_points(losses, step=1.0)} == {0.0}
    assert not pictures.goodput_points(losses, step=10.0)
    pictures.goodput_drawing(losses, expect(losses, 10.0, None), 10.0)


def test_the_picture_of_goodput_has_its_best_in_the_middle() -> None:
    losses = Interruptions(between=36_000, stall=20, restart=300)
    points = pictures.goodput_points(losses, step=1.0)
    minutes, share = max(points, key=lambda point: point[1])
    assert minutes == pytest.approx(losses.interval / 60, rel=0.3) and share == pytest.approx(
        losses.goodput(losses.interval), rel=1e-3
    )
