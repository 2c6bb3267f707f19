"""--seq-length-schedule: DeepSpeed's formulas, what a text means, and what its JSON file says."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.base.errors import UserError
from meshwright.compat.flags.deepspeed_json import curriculum
from meshwright.config import flags
from meshwright.config.length_schedule import LengthSchedule
from meshwright.config.schema import TrainConfig
from meshwright.optim.schedule import build_schedule

BASE = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --vocab-size 99 --mock-data "
    "--micro-batch-size 2 --global-batch-size 4 --lr 1e-3"
).split()


def deepspeeds(section: dict[str, Any], steps: int) -> list[int]:
    """Return the lengths of the first steps by the state machine of DeepSpeed's scheduler."""
    current, most = section["min_difficulty"], section["max_difficulty"]
    details, lengths = section["schedule_config"], []
    for step in range(1, steps + 1):
        if current < most and section["schedule_type"] == "fixed_discrete":
            ends = details["max_step"]
            place = next((i for i, end in enumerate(ends) if step <= end), len(ends))
            current = details["difficulty"][place]
        elif current < most:
            degree = details.get("root_degree", 1)
            part = (float(step) / details["total_curriculum_step"]) ** (1.0 / degree)
            first = section["min_difficulty"]
            current = math.floor(part * (most - first) + first)
            current -= current % details["difficulty_step"]
            current = min(current, most)
        lengths.append(current)
    return lengths


def section(low: int, high: int, kind: str, **details: Any) -> dict[str, Any]:
    return {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": low,
        "max_difficulty": high,
        "schedule_type": kind,
        "schedule_config": details,
    }


def test_curves_equal_deepspeeds() -> None:
    rng = random.Random(3)
    for _ in range(150):
        multiple = rng.choice([1, 3, 8, 16])
        low = rng.randint(multiple, 100)
        total = rng.randint(1, 200)
        details = {"total_curriculum_step": total, "difficulty_step": multiple}
        kind = rng.choice(["fixed_linear", "fixed_root"])
        if kind == "fixed_root":
            details["root_degree"] = rng.randint(1, 4)
        given = section(low, low + rng.randint(0, 300), kind, **details)
        schedule, want = curriculum(given), deepspeeds(given, 3 * total + 9)
        assert [schedule.length(step) for step in range(1, len(want) + 1)] == want, given
        for steps in (0, 1, total, 2 * total):
            assert schedule.tokens(steps) == sum(want[:steps])
            assert schedule.steps(schedule.tokens(steps)) == pytest.approx(steps)


def test_stages_equal_deepspeeds() -> None:
    for low, high, lengths, ends in (
        (8, 64, [8, 16, 64], [2, 5]),
        (8, 32, [8, 32, 64], [2, 5]),  # the highest is reached before the last stage
        (8, 99, [24, 48], [4]),
        (64, 64, [8, 16], [3]),  # DeepSpeed never asks for another
    ):
        given = section(low, high, "fixed_discrete", difficulty=lengths, max_step=ends)
        assert [curriculum(given).length(s) for s in range(1, 10)] == deepspeeds(given, 9), given


def test_what_a_text_means() -> None:
    assert LengthSchedule.read("0:8, 3:16").stages == ((0, 8), (3, 16))
    assert LengthSchedule.read("linear:8:24:4:8").stages == ((0, 8), (1, 16), (3, 24))
    root = LengthSchedule.read("root:8:24:4:8:2")
    assert root.stages == ((0, 16), (3, 24)) and root.longest == 24
    assert root.tokens(3.5) == 60 and root.steps(60) == 3.5


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"curriculum_type": "vocab"}, '"curriculum_type" is "vocab", and only "seqlen" is known'),
        ({"schedule_type": "custom"}, '"schedule_type" is "custom"; "fixed_linear", "fixed_root"'),
        ({"min_difficulty": 8.5}, "8.5 is not a whole number"),
        ({"max_difficulty": "auto"}, '"auto" is not a whole number'),
        ({"schedule_config": {}}, '"schedule_config" needs "total_curriculum_step"'),
        ({"schedule_config": None}, '"schedule_config" needs "total_curriculum_step"'),
        ({"difficulty": 3}, 'it has an unknown key "difficulty"'),
        ({"min_difficulty": 4}, "MIN 4, rounded down to a multiple of 8, is 0"),
        (
            {
                "schedule_type": "fixed_discrete",
                "schedule_config": {"difficulty": [8], "max_step": [3]},
            },
            'needs one more number in "difficulty" than in "max_step"',
        ),
        (
            {
                "schedule_type": "fixed_discrete",
                "schedule_config": {"difficulty": [16, 8], "max_step": [3]},
            },
            "steps and lengths must grow",
        ),
    ],
)
def test_a_section_that_is_refused(change: dict[str, Any], error: str) -> None:
    given = section(8, 64, "fixed_linear", total_curriculum_step=9, difficulty_step=8)
    with pytest.raises(ValueError) as e:
        curriculum(given | change)
    assert error in str(e.value)


Parse = Callable[..., flags.Parsed]


def parse(*words: str) -> TrainConfig:
    return flags.parse_settings(TrainConfig, [*BASE, *words], "meshwright test").config


@pytest.mark.parametrize("enabled", ["true", 1, [True]])
def test_a_curriculum_is_on_or_off(tmp_path: Path, enabled: Any) -> None:
    """DeepSpeed's is off without the key."""
    file = tmp_path / "ds.json"
    words = [*BASE, "--train-iters", "9", "--deepspeed_config", str(file)]
    given = section(8, 64, "fixed_linear", total_curriculum_step=9, difficulty_step=8)
    file.write_text(json.dumps({"curriculum_learning": given | {"enabled": enabled}}))
    with pytest.raises(
        UserError, match='"curriculum_learning": "enabled" is .*, not true or false'
    ):
        flags.parse_settings(TrainConfig, words, "meshwright test")
    del given["enabled"]
    file.write_text(json.dumps({"curriculum_learning": given}))
    got = flags.parse_settings(TrainConfig, words, "meshwright test")
    assert got.config.training.seq_length_schedule is None
    assert f'{file}: "curriculum_learning" is off, as it has no "enabled"' in got.notices


def test_deepspeeds_file_gives_the_schedule(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    given = section(8, 64, "fixed_linear", total_curriculum_step=9, difficulty_step=8)
    file.write_text(json.dumps({"train_batch_size": 4, "curriculum_learning": given}))
    words = [*BASE, "--train-iters", "9", "--deepspeed_config", str(file)]
    got = flags.parse_settings(TrainConfig, words, "meshwright test")
    assert str(got.config.training.seq_length_schedule) == "linear:8:64:9:8"
    assert any("sets --seq-length-schedule linear:8:64:9:8" in line for line in got.notices)
    # The same value may stand beside it, another not.
    flags.parse_settings(
        TrainConfig, [*words, "--seq-length-schedule=linear:8:64:9:8"], "meshwright test"
    )
    with pytest.raises(UserError, match='"curriculum_learning" is linear:8:64:9:8, but'):
        flags.parse_settings(TrainConfig, [*words, "--seq-length-schedule=0:8"], "meshwright test")
    with pytest.raises(UserError, match="but --seq-length-schedule is none; change one"):
        flags.parse_settings(TrainConfig, [*words, "--seq-length-schedule=none"], "meshwright test")
    file.write_text(json.dumps({"curriculum_learning": given | {"max_difficulty": 128}}))
    with pytest.raises(UserError, match="its 128 tokens are above --seq-length 64"):
        flags.parse_settings(TrainConfig, words, "meshwright test")
    file.write_text(json.dumps({"curriculum_learning": given | {"schedule_type": "custom"}}))
    with pytest.raises(UserError, match='"curriculum_learning": "schedule_type" is "custom"'):
        flags.parse_settings(TrainConfig, words, "meshwright test")


def test_the_length_of_a_run() -> None:
    """Steps read 4 x 16 tokens, then 4 x 32 from the third on, then 4 x 64 from the sixth on."""
    lengths = "--seq-length-schedule=0:16 2:32 5:64"
    assert parse("--train-tokens", "511", lengths).steps == 4
    assert parse("--train-tokens", "512", lengths).steps == 5
    assert parse("--train-tokens", "768", lengths).steps == 6
    # What is used up first ends the run, also steps beside tokens.
    both = parse("--train-tokens", "768", "--train-iters", "5", lengths)
    assert (both.steps, both.samples, both.lengths) == (5, None, ["train_iters"])
    both = parse("--train-tokens", "512", "--train-iters", "9", lengths)
    assert (both.steps, both.samples, both.lengths) == (5, 20, ["train_tokens"])
    both = parse("--train-tokens", "512", "--train-samples", "11", lengths)
    assert (both.steps, both.samples, both.lengths) == (2, 11, ["train_samples"])
    assert both.tokens_of(12) == 4 * (16 + 16 + 32)


def megatrons_rates(
    lengths: list[int], warmup: int, decay: int, warmup_tokens: int | None
) -> list[float]:
    """Return Megatron-DeepSpeed's rates: a warm-up by samples or tokens, a cosine by tokens.

    Its state is walked step by step, with 4 samples each.
    """
    rates, tokens, begun = [], 0, warmup_tokens
    for step, length in enumerate(lengths):
        if warmup_tokens is None and warmup and 4 * step <= warmup:
            begun = tokens
            rates.append(1e-3 * (4 * step) / warmup)
        elif warmup_tokens and tokens <= warmup_tokens:
            rates.append(1e-3 * tokens / warmup_tokens)
        elif tokens > decay:
            rates.append(1e-5)
        else:
            ratio = (tokens - (begun or 0)) / (decay - (begun or 0))
            rates.append(1e-5 + (1e-3 - 1e-5) * 0.5 * (math.cos(math.pi * ratio) + 1))
        tokens += 4 * length
    return rates


@pytest.mark.parametrize("warmup", ["--lr-warmup-samples=12", "--lr-warmup-tokens=200"])
def test_rates_follow_the_tokens(warmup: str) -> None:
    c = parse(
        "--train-samples=80", "--train-tokens=9000", "--lr-decay-tokens=3000", "--lr-decay-style=cosine",
        "--min-lr=1e-5", warmup, "--seq-length-schedule=linear:8:64:12:8",
    )  # fmt: skip
    schedule, in_tokens = build_schedule(c), "tokens" in warmup
    lengths = [c.sample_length(step) for step in range(1, 21)]
    want = megatrons_rates(lengths, 0 if in_tokens else 12, 3000, 200 if in_tokens else None)
    got = [schedule.lr(4 * step) for step in range(20)]
    assert got == pytest.approx(want, rel=1e-9) and 1e-5 in got


def test_the_tokens_that_were_read_decide() -> None:
    """After a change of the schedule they differ from those of its first steps."""
    words = "--train-samples=80 --lr-decay-tokens=3000 --lr-decay-style=linear --min-lr=0".split()
    lengths = "--seq-length-schedule=0:32 12:64"
    schedule = build_schedule(parse(*words, "--lr-warmup-samples=12", lengths))
    # The warm-up in samples gives 384 tokens by the schedule.
    assert schedule.lr(40, 3000) == 0 and schedule.lr(8, 2000) == pytest.approx(1e-3 * 8 / 12)
    assert schedule.lr(16, 1692) == pytest.approx(1e-3 / 2)
    assert schedule.lr(16, 200) == 1e-3  # and not more, for fewer
    schedule = build_schedule(parse(*words, "--lr-warmup-tokens=500", lengths))
    assert schedule.lr(40, 250) == pytest.approx(1e-3 / 2)


def test_a_warm_up_in_steps_beside_a_decay_in_tokens() -> None:
    """As in Megatron-DeepSpeed's ds_pretrain_gpt2.sh."""
    words = (
        "--train-iters=20 --train-tokens=9000 --lr-decay-tokens=3000 --lr-warmup-iters=3".split()
    )
    schedule = build_schedule(
        parse(*words, "--min-lr=1e-5", "--seq-length-schedule=linear:8:64:12:8")
    )
    assert (schedule.warmup, schedule.warmup_unit) == (12, "samples")
    with pytest.raises(UserError, match="both set the length of the run"):
        parse(*words)
