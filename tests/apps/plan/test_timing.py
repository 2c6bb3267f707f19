"""The time of a step: terms, schedules and counts that training and plans share, measured steps."""

from __future__ import annotations

import dataclasses

import pytest
from plans import LARGE, STILL, planned

from meshwright.apps.plan import saving, timeline, timing
from meshwright.apps.plan.timing import measured_operations, terms_of
from meshwright.base.device_profiles import DeviceProfile, load_profile
from meshwright.config import matrices
from meshwright.model import counts
from meshwright.parallel import pipeline, pipeline_schedule
from meshwright.training import graph_rule, network

BATCH = f"{LARGE} {STILL} --micro-batch-size 2 --global-batch-size"
H200 = load_profile("h200")
PP4 = "--pipeline-model-parallel-size 4"


def predicted(words: str, world: int = 1, padded: int = 50304, **more: object) -> timing.StepTime:
    """Predict a step by the closed form."""
    return terms_of(planned(words, world), padded, H200, **more).result()


def measured(
    words: str, world: int = 1, padded: int = 50304, profile: DeviceProfile = H200
) -> timing.StepTime:
    """Predict a step from its measured operations."""
    config = planned(words, world)
    operations = measured_operations(config, padded, profile)
    assert operations is not None
    return terms_of(config, padded, profile, measured=operations).result()


@pytest.mark.parametrize("predict", [predicted, measured])
def test_terms_add_up_to_the_step(predict):
    for words, world in [
        (
            "16 --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 --zero-stage 1",
            8,
        ),
        ("16 --zero-stage 3 --recompute-granularity full", 8),
    ]:
        config, step = planned(f"{BATCH} {words}", world), predict(f"{BATCH} {words}", world)
        assert step.seconds == pytest.approx(sum(step.parts.values()))
        assert min(step.parts.values()) > 0
        assert step.tokens_per_second == pytest.approx(config.global_batch * 2048 / step.seconds)
        flops = counts.flops_per_token(config.model, 50304, 2048)
        assert step.mfu == pytest.approx(step.tokens_per_second * flops / world / 989.4e12)


@pytest.mark.parametrize("count", [4, 8, 24])
def test_the_bubble_of_1f1b_is_that_of_the_literature(count):
    """(p - 1) / m of the work without latency; a little less, as one stage has the head."""
    links = timing.Links(8, *(timing.LinkSpeed(1e18, 0.0),) * 2)
    step = predicted(f"{BATCH} {2 * count} {PP4}", 4, padded=128, links=links)
    work = sum(step.parts.get(name, 0.0) for name in ("products", "attention", "passes", "host"))
    assert 0.94 * 3 / count < step.parts["pipeline"] / work <= 3 / count


def test_one_schedule_moves_training_and_plan():
    assert pipeline.schedule is timeline.schedule is pipeline_schedule.schedule


def test_one_count_moves_training_and_plan(monkeypatch):
    config = planned(f"{BATCH} 8")
    before, flops = (
        predicted(f"{BATCH} 8").seconds,
        counts.flops_per_token(config.model, 50304, 2048),
    )
    more = matrices.MATRICES["mlp.fc"]._replace(shape=lambda m: (4 * 2048, 2048))
    monkeypatch.setitem(matrices.MATRICES, "mlp.more", more)
    assert counts.flops_per_token(config.model, 50304, 2048) > 1.2 * flops  # of training's MFU
    assert predicted(f"{BATCH} 8").seconds > 1.2 * before


@pytest.mark.parametrize(
    ("words", "world", "part", "off"),
    [
        ("16", 1, "attention", 0.001),
        ("16", 1, "passes", 0.06),
        ("16", 1, "update", 0.01),
        ("16 --recompute-granularity full", 1, "products", 0.001),
        (f"16 {PP4}", 4, "pipeline", 0.1),
        ("16 --tensor-model-parallel-size 2 --sequence-parallel", 2, "tensor", 0.001),
    ],
)
def test_the_closed_form_is_near_what_is_measured(words, world, part, off):
    """Communication is the same in both; what is measured knows nothing of the closed form."""
    estimate, known = predicted(f"{BATCH} {words}", world), measured(f"{BATCH} {words}", world)
    assert estimate.parts[part] == pytest.approx(known.parts[part], rel=off)


def test_without_graphs_the_host_takes_its_time_for_each_launch():
    words = "--num-layers 12 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --bf16 --micro-batch-size 1"
    words += f" --global-batch-size 1 {STILL}"
    assert "host" not in measured(words).parts
    without = f"{words} --cuda-graphs off"
    config, before = planned(without), measured(without).seconds
    ((stage,), update) = measured_operations(config, 50304, H200)
    for key, kind in (
        ("launch", "triton"),
        ("launch_torch", "torch"),
        ("launch_view", "view"),
        ("launch_node", "node"),
    ):
        slower = dataclasses.replace(H200, seconds={**H200.seconds, key: H200.seconds[key] + 1e-3})
        launches = sum(
            n for part in (*stage, update) for op, n in part.items() if op.launch == kind
        )
        assert measured(without, profile=slower).seconds - before == pytest.approx(launches * 1e-3)
    slower = dataclasses.replace(
        H200, seconds={**H200.seconds, "prepare": H200.seconds["prepare"] + 1e-3}
    )
    assert measured(without, profile=slower).seconds - before == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("more", "graphs"),
    [
        ("--fp16", "on"),
        ("--bf16 --on-nonfinite skip:3", "off"),
        ("--bf16 --timing-log-level 1", "off"),
    ],
)
def test_the_device_waits_for_a_step_that_is_prepared_after_the_last_one(more, graphs):
    """The device takes longer than the host for these steps."""
    words = f"{LARGE} {STILL} --micro-batch-size 8 --global-batch-size 8".replace("--bf16", "")
    words += f" --cuda-graphs {graphs}"
    parts, ahead = predicted(f"{words} {more}").parts, predicted(f"{words} --bf16").parts
    assert "host" not in ahead
    assert parts["between steps"] - ahead["between steps"] == pytest.approx(H200.seconds["prepare"])


def test_steps_that_cannot_be_measured_are_not():
    words = f"{BATCH} 16"
    assert (
        measured_operations(planned(f"{words} --compile on --cuda-graphs off"), 50304, H200) is None
    )
    assert measured_operations(planned(words), 50304, load_profile("cpu")) is None


def test_one_rule_says_whether_a_step_is_a_graph(monkeypatch):
    assert network.graph_rule is timing.graph_rule is graph_rule
    assert "host" not in predicted(f"{BATCH} 2").parts
    monkeypatch.setattr(graph_rule, "reason_against", lambda *_: "of a test")
    small = "--num-layers 12 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --bf16 --micro-batch-size 1"
    assert predicted(small).parts["host"] > 0.5 * predicted(small).seconds


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        ("--recompute-granularity full", {"products": 4 / 3, "attention": (2, 1.2)}),
        ("--attention-dropout 0.1", {"attention": (2.4, 1.2), "products": 1}),
        ("--fp8-format e4m3", {"products": (0.65, 0.5), "passes": (2.0, 1.1)}),
        ("--optimizer muon", {"update": (20, 4)}),
        ("--optimizer lion --cautious-weight-decay", {"update": (6, 4)}),
        ("--qk-layernorm", {"passes": (1.2, 1.05)}),
        ("--qk-layernorm --compile on", {"passes": (1.8, 1.4)}),
        ("--use-parallel-residual", {"passes": (1.1, 1.01)}),
        ("--cpu-optimizer", {"update": (120, 60)}),
    ],
)
def test_a_setting_moves_its_terms(more, parts):
    words = f"{LARGE} {STILL} --micro-batch-size 8 --global-batch-size 8"
    plain, changed = predicted(words), predicted(f"{words} {more}")
    for name, want in parts.items():
        ratio = changed.parts[name] / plain.parts[name]
        most, least = want if isinstance(want, tuple) else (want * 1.1, want * 0.9)
        assert least <= ratio <= most, name


def test_homes_share_the_work_of_muon():
    words = f"{LARGE} {STILL} --optimizer muon --micro-batch-size 8 --global-batch-size 16"
    alone, two = predicted(words).parts["update"], predicted(words, 2).parts["update"]
    tensor = predicted(f"{words} --tensor-model-parallel-size 2", 2).parts["update"]
    assert 0.5 < two / alone < 0.8 and 0.4 < tensor / alone < 0.6
    assert "muon" in predicted(words, 2).bytes_sent and "muon" not in predicted(words).bytes_sent


@pytest.mark.parametrize(
    ("words", "world", "ms"),
    [
        # benchmarks/records/2026-11-22-h200-overlap
        (
            "--num-layers 24 --hidden-size 1024 --micro-batch-size 32 --global-batch-size 64",
            2,
            154.1,
        ),
        (
            "--num-layers 24 --hidden-size 2048 --micro-batch-size 32 --global-batch-size 32 --fp8-format e4m3",
            1,
            325.6,
        ),
    ],
)
@pytest.mark.parametrize("predict", [predicted, measured])
def test_measured_steps(predict, words, world, ms):
    words += f" --num-attention-heads 16 --seq-length 1024 --bf16 {STILL}"
    assert 1000 * predict(words, world).seconds == pytest.approx(ms, rel=0.04)


def test_saves_are_the_bytes_of_the_native_format():
    small = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --bf16"
    config = planned(small)
    save = saving.save_time(config, 50304, H200)
    # benchmarks/records/2026-11-22-cpu-file-sizes
    assert save.bytes == pytest.approx(4_257_970_632, rel=1e-3)
    averaged = saving.save_time(planned(f"{small} --ema 0.999"), 50304, H200)
    # four numbers of a parameter in place of three
    assert averaged.bytes == pytest.approx(save.bytes * 4 / 3)
    # benchmarks/records/2026-11-22-h200-checkpoints: training waits 0.323 s, 7.5 s until saved
    config = planned(
        "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 1024 --bf16"
    )
    save = saving.save_time(config, 50304, H200)
    assert save.stall == pytest.approx(0.323, rel=0.05) and save.seconds == pytest.approx(
        7.5, rel=0.1
    )
