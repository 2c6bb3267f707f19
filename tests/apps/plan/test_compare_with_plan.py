"""Predicted beside measured: a run that is as planned, and one that is not."""

from __future__ import annotations

import dataclasses
import re
import threading

import pytest

from meshwright.apps.plan import compare as comparison
from meshwright.apps.plan.compare import HELD, STEPS, compare, plan_of_run, suggest
from meshwright.apps.plan.memory import RankMemory
from meshwright.apps.plan.prediction import Prediction, find_machine
from meshwright.base.device_profiles import DeviceProfile
from meshwright.config import flags
from meshwright.config.schema import TrainConfig

WORDS = "--preset gpt2-345m --bf16 --mock-data --micro-batch-size 8"


def estimate(
    config: TrainConfig, padded: int, profile: DeviceProfile, ranks: list[int]
) -> list[RankMemory]:
    one = Prediction(config, comparison.Machine(profile, profile.links), 50_257)
    return [one.ranks[rank] for rank in ranks]


def config_of(words: str) -> TrainConfig:
    return flags.parse_settings(TrainConfig, words.split(), "meshwright train").config


def test_the_term_that_is_off_is_named_after_ten_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "measure_in_child", estimate)
    config = config_of(WORDS)
    plan = plan_of_run(config, 50_257, "NVIDIA H200")
    assert (
        plan is not None
        and plan.child is not None
        and plan_of_run(config, 50_257, "GeForce 256") is None
    )
    plan.child.join()
    assert plan.memory is not None
    memory, step = plan.memory, plan.prediction.time.seconds
    held = sum(memory.kinds.get(kind, 0) for kind in HELD)
    stats = {"allocated_bytes.all.current": held, "allocated_bytes.all.peak": memory.allocated}
    stats["reserved_bytes.all.peak"] = memory.reserved
    assert [plan.note(step) for _ in range(STEPS)] == [False] * (STEPS - 1) + [True]
    lines = plan.compare(stats)
    assert len(lines) == 2 and "(+0.0 %)" in lines[0]
    assert not any(";" in line.partition("reserved")[2] for line in lines)
    assert plan.compare({}) == [
        "plan: could not be compared with the first steps: KeyError: 'allocated_bytes.all.current'"
    ]
    # Gradients that other ranks map are none of torch's tensors.
    assert (
        plan.compare({key: size - (2 << 30) for key, size in stats.items()}, mapped=2 << 30)
        == lines
    )
    monkeypatch.setattr(comparison, "suggest", lambda *_: "plan: faster")
    assert plan.compare(stats) == [*lines, "plan: faster"]
    more = stats | {"allocated_bytes.all.peak": memory.allocated + (9 << 30)}
    more["reserved_bytes.all.peak"] = memory.reserved + (9 << 30)
    slow, off = compare(plan.prediction, memory, [1.0] * 3 + [1.2 * step] * 7, more)
    assert "(+20.0 %); the largest part predicted is products" in slow
    assert off.endswith("; activations and other tensors of a step take +9.00 GiB")


def test_steps_wait_for_no_measurement_and_none_that_fails_is_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More steps than needed may pass until the child has ended."""
    ended = threading.Event()
    monkeypatch.setattr(comparison, "measure_in_child", lambda *_: ended.wait() and None)
    plan = plan_of_run(config_of(WORDS), 50_257, "NVIDIA H200")
    assert plan is not None and plan.child is not None
    assert not any(plan.note(1.0) for _ in range(3 * STEPS))
    ended.set()
    plan.child.join()
    assert plan.note(1.0) and plan.compare({}) == []


ALONE = "without recomputation"
RECOMPUTED = "--checkpoint-activations --fp16 --micro-batch-size 8 --global-batch-size 16"


@pytest.mark.parametrize(
    ("words", "gib", "changes"),
    [
        (RECOMPUTED, 141, r"with --micro-batch-size 16 and without recomputation"),
        # Enough for one of the two.
        (RECOMPUTED, 16, ALONE),
        (RECOMPUTED, 12, None),
        ("--bf16 --micro-batch-size 1 --global-batch-size 8", 141, r"with --micro-batch-size \d"),
        ("--bf16 --micro-batch-size 16 --global-batch-size 16", 141, None),
        # Another size would not divide each batch of a ramp-up, or change the loss or the batch.
        (f"{RECOMPUTED} --rampup-batch-size 8 8 100 --train-samples 1000", 141, ALONE),
        (f"{RECOMPUTED} --loss-mean microbatch", 141, ALONE),
        ("--bf16 --micro-batch-size 1 --num-accumulation-steps 512", 141, None),
    ],
)
def test_a_faster_setting_that_fits_is_named(words: str, gib: int, changes: str | None) -> None:
    config = config_of(f"--preset gpt2-345m --mock-data {words}")
    machine = find_machine("h200")
    small = dataclasses.replace(machine.profile, memory_bytes=gib << 30)
    prediction = Prediction(config, dataclasses.replace(machine, profile=small), 50_257)
    line = suggest(prediction, 2 * prediction.time.seconds)
    if changes is None:
        assert line is None
        return
    assert line is not None
    found = re.fullmatch(
        rf"plan: {changes} a step takes about (\S+) ms, (\d+) % less, and (\S+) of {gib}\.00 GiB",
        line,
    )
    assert found is not None, line
    # The share is that of the plan, the time that of the run.
    ms, share, need = map(float, found.groups())
    assert ms == pytest.approx(20 * prediction.time.seconds * (100 - share), rel=0.02)
    assert share >= 10 and need <= 0.95 * gib
