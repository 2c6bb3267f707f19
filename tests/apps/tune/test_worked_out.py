"""Draws, values, compared steps and shares of a sweep, beside ones that were worked out by hand."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers import TINY_FLAGS
from meshwright.apps.tune import points, results, sweep
from meshwright.apps.tune.points import Axis, Point, read_space
from meshwright.base.runs.follow import RunTail
from meshwright.config.fields import as_text, config_fields
from meshwright.config.schema import TrainConfig

DRAWS = 1500


def draw(word: str, draws: int = DRAWS, seed: int = 0) -> list[Point]:
    return list(read_space([], [word]).points(draws, seed))


# Draws


@pytest.mark.parametrize(
    ("word", "share_below"),
    [
        ("lr=1e-4..1e-2", lambda x: math.log(x / 1e-4) / math.log(100)),
        ("init-method-std=0.01..1", lambda x: math.log(x / 0.01) / math.log(100)),
        ("weight-decay=0..0.2", lambda x: x / 0.2),
        ("adam-beta2=-1..1", lambda x: (x + 1) / 2),
    ],
)
def test_the_distribution_of_draws(word: str, share_below: Callable[[float], float]) -> None:
    """It is the one that is written out here: not only its middle, but everywhere."""
    found = sorted(float(value) for point in draw(word) for value in point.values())
    farthest = max(
        max(share_below(x) - n / DRAWS, (n + 1) / DRAWS - share_below(x))
        for n, x in enumerate(found)
    )
    assert farthest < 1.95 / math.sqrt(DRAWS)  # as in all but one of a thousand such lists of draws


def test_whole_numbers_are_rounded_and_both_ends_occur() -> None:
    """2..5, log-uniform: the part of the logarithms that is rounded to each number."""
    borders = [2.0, 2.5, 3.5, 4.5, 5.0]
    counts = Counter(point["num_layers"] for point in draw("num-layers=2..5"))
    assert sorted(counts) == ["2", "3", "4", "5"]
    for number, (low, high) in zip("2345", itertools.pairwise(borders), strict=True):
        want = DRAWS * math.log(high / low) / math.log(2.5)
        assert abs(counts[number] - want) < 4 * math.sqrt(want)
    listed = Counter(point["optimizer"] for point in draw("optimizer=adam,muon,lion"))
    assert all(
        abs(listed[name] - DRAWS / 3) < 4 * math.sqrt(DRAWS / 3)
        for name in ("adam", "muon", "lion")
    )


def test_no_draw_follows_from_another() -> None:
    """Neither that of another flag, nor the one before, nor the one of another seed."""
    drawn = draw("lr=1e-4..1e-2 min-lr=1e-6..1e-4 weight-decay=0..1")
    columns = [[float(point[name]) for point in drawn] for name in ("lr", "min_lr", "weight_decay")]
    columns += [
        columns[0][1:] + columns[0][:1],
        [float(point["lr"]) for point in draw("lr=1e-4..1e-2", seed=1)],
    ]
    places = [{x: place for place, x in enumerate(sorted(column))} for column in columns]
    ranks = [[place[x] for x in column] for place, column in zip(places, columns, strict=True)]
    for a, b in itertools.combinations(ranks, 2):
        assert abs(statistics.correlation(a, b)) < 4 / math.sqrt(DRAWS)


def test_draws_are_those_of_every_release() -> None:
    """They depend on the seed, the number and the flag alone, so --draws can be raised later."""
    word = "lr=1e-4..1e-2 weight-decay=0..0.2 num-layers=2..8"
    values = [("0.000628", "0.113", "6"), ("0.000543", "0.0975", "6"), ("0.000141", "0.00962", "2")]
    assert [tuple(point.values()) for point in draw(word, 3)] == values
    assert [point["lr"] for point in draw("lr=1e-4..1e-2", 2, seed=7)] == ["0.000938", "0.000232"]
    for n, (rate, decay, layers) in enumerate(values):  # the definition, worked out
        u = {
            name: random.Random(f"0/{n}/{name}").random()
            for name in ("lr", "weight_decay", "num_layers")
        }
        assert float(rate) == pytest.approx(1e-4 * 100 ** u["lr"], rel=5e-3)
        assert float(decay) == pytest.approx(0.2 * u["weight_decay"], rel=5e-3)
        assert int(layers) == round(2 * 4 ** u["num_layers"])
    assert [point["lr"] for point in draw("weight-decay=0..0.2 lr=1e-4..1e-2", 3)] == [
        rate for rate, *_ in values
    ]


def test_a_draw_stays_within_its_ends() -> None:
    """Also where three digits, or six, would leave them."""
    for low, high in (
        ("0.99951", "0.99962"),
        ("1.234567", "1.2345678"),
        ("-0.0012341", "-0.001234"),
    ):
        drawn = [float(point["weight_decay"]) for point in draw(f"weight-decay={low}..{high}", 20)]
        assert all(float(low) <= x <= float(high) for x in drawn)
    assert {Axis(("lr",), ends=(3e-4, 3.0001e-4)).draw(str(n))["lr"] for n in range(9)} == {
        "0.0003"
    }


# The values that a run gets

TYPED: list[tuple[str, str, Any]] = [
    ("lr", "0.00012345678901234", 0.00012345678901234),
    ("lr", "0.1000000000000001", 0.1000000000000001),
    ("weight-decay", "0", 0.0),
    ("train-iters", "1e3", 1000),
    ("train-samples", "123456789012345678", 123456789012345678),
    ("swiglu", "true", True),
    ("optimizer", "muon", "muon"),
    ("ffn-hidden-size", "none", None),
    ("micro-batch-size", "auto", "auto"),
    ("split", "969,30,1|9,1,0", "969,30,1"),
    ("data-path", "0.3 a 0.7 b", ["0.3", "a", "0.7", "b"]),
]


@pytest.mark.parametrize(("flag", "typed", "want"), TYPED)
def test_a_run_gets_exactly_the_value(flag: str, typed: str, want: Any, tmp_path: Path) -> None:
    """What is typed, what its record says and what train reads from its command are one value."""
    ours = [word for word in TINY_FLAGS if not word.startswith((f"--{flag}=", "--train-iters"))]
    ours += ["--train-iters=9"] * (not flag.startswith("train-")) + ["--bf16"]
    plan = sweep.SweepPlan(
        tmp_path, tuple(word for word in ours if word != "--mock-data" or flag != "data-path")
    )
    point = next(read_space([f"{flag}={typed}"], []).points(1, 0))
    runs = sweep.join_runs(tmp_path, [point], [])
    sweep.Sweep(plan, runs, []).write()
    (recorded,) = sweep.read_runs_of_sweep(tmp_path).values()
    for name, each in ((points.name_of_point(point), point), (recorded.name, recorded.point)):
        config = plan.read_settings(name, each)
        group, *_ = config_fields(TrainConfig)[next(iter(each))]
        value = as_text(getattr(getattr(config, group), next(iter(each))))
        assert value == want and type(value) is type(want)
        assert config.checkpoint.run_dir == str(tmp_path / name)


def test_equal_values_are_one_run_and_others_are_others() -> None:
    assert (
        len(
            {
                points.name_of_point(point)
                for point in read_space(["lr=1e-4,0.0001,1.0e-04"], []).points(1, 0)
            }
        )
        == 1
    )
    close = ["lr=0.1,0.10000000000000002", "train-samples=9007199254740993,9007199254740992"]
    for word in close:
        assert (
            len({points.name_of_point(point) for point in read_space([word], []).points(1, 0)}) == 2
        )


# The step at which runs are compared


def rows(folder: Path, *events: dict[str, Any]) -> RunTail:
    """Write rows of a run of 100 steps, adding what every row has, and read them."""
    folder.mkdir(parents=True, exist_ok=True)
    known = {
        "attempt": 1,
        "time": 1.7e9,
        "name": "validation",
        "ppl": 1.0,
        "seconds": 0.0,
        "skipped": False,
        "train_iters": 100,
    }
    known |= dict.fromkeys(("grad_norm", "lr", "ms", "tokens_per_second"), 1.0)
    lines = [{**known, "consumed_samples": 4 * event["iteration"], **event} for event in events]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tail = RunTail(folder)
    tail.read_new(lambda: None)
    return tail


START = {"event": "start", "iteration": 0}


def steps(
    first: int, last: int, loss: Callable[[int], float] = float, **more: Any
) -> list[dict[str, Any]]:
    return [
        {"event": "step", "iteration": i, "loss": loss(i), **more} for i in range(first, last + 1)
    ]


def check(iteration: int, loss: float, **more: Any) -> dict[str, Any]:
    return {"event": "validation", "iteration": iteration, "loss": loss, **more}


def test_the_loss_of_a_step(tmp_path: Path) -> None:
    """The last validation up to it, neither the best nor a later one; else a mean of losses."""
    plain = rows(tmp_path / "a", START, *steps(1, 60))
    assert sweep.loss_at(plain, 50) == 45.5  # of 41 to 50
    assert sweep.loss_at(plain, 4) == 2.5
    long = rows(tmp_path / "b", START, *steps(1, 1000))
    assert sweep.loss_at(long, 1000) == 990.5  # a fiftieth: 981 to 1000
    checked = rows(
        tmp_path / "c",
        START,
        *steps(1, 60),
        check(10, 3.0),
        check(20, 1.0),
        check(40, 2.0),
        check(60, 0.5),
    )
    assert [sweep.loss_at(checked, step) for step in (10, 19, 20, 39, 40, 59, 60)] == [
        3,
        3,
        1,
        1,
        2,
        2,
        0.5,
    ]
    two = rows(tmp_path / "d", START, *steps(1, 9), check(5, 1.0, set="x"), check(5, 2.5, set="y"))
    assert sweep.loss_at(two, 8) == 1.75
    undone = rows(
        tmp_path / "e",
        START,
        *steps(1, 8),
        check(4, 1.0),
        check(8, 7.0),
        {**START, "iteration": 4},
        *steps(5, 6),
    )
    assert sweep.loss_at(undone, 6) == 1.0
    bad = rows(tmp_path / "f", START, *steps(1, 9), check(5, math.nan))
    assert sweep.loss_at(bad, 8) == math.inf


def test_steps_that_were_not_applied_have_no_loss(tmp_path: Path) -> None:
    skipping = rows(
        tmp_path, START, *steps(1, 4), *steps(5, 6, lambda i: math.nan, skipped=True), *steps(7, 8)
    )
    assert sweep.loss_at(skipping, 8) == (1 + 2 + 3 + 4 + 7 + 8) / 6
    assert (
        sweep.loss_at(rows(tmp_path, START, *steps(1, 2, lambda i: math.nan, skipped=True)), 2)
        == math.inf
    )


@pytest.mark.parametrize(
    ("fraction", "total", "step"),
    [
        (0.29, 100, 29),
        (0.57, 100, 57),
        (0.001, 100, 1),
        (0.99, 1000, 990),
    ],
)
def test_the_step_of_a_fraction(tmp_path: Path, fraction: float, total: int, step: int) -> None:
    plan = sweep.SweepPlan(tmp_path, stop_at=(fraction,))
    run = sweep.SweepRun("a", {})
    rows(tmp_path / "a", {**START, "train_iters": total}, *steps(1, total))
    sweep.Sweep(plan, {"a": run}, []).note_rungs(run)
    assert list(run.rungs) == [step]


def test_runs_are_compared_once_they_have_left_the_step(tmp_path: Path) -> None:
    """The validation after a step counts, whenever the sweep looks; it is logged after the step."""
    plan, run = sweep.SweepPlan(tmp_path, stop_at=(0.04, 0.08)), sweep.SweepRun("a", {})
    written: list[dict[str, Any]] = []
    seen = []
    for event in (
        START,
        *steps(1, 4),
        check(4, 9.0, set="x"),
        check(4, 8.0, set="y"),
        *steps(5, 8),
        check(8, 7.0, set="x"),
    ):
        written.append(event)
        rows(tmp_path / "a", *written)
        sweep.Sweep(plan, {"a": run}, []).note_rungs(run)
        seen.append(dict(run.rungs))
    assert seen == [{}] * 7 + [{4: 8.5}] * 5
    rows(
        tmp_path / "a",
        *written,
        check(8, 6.0, set="y"),
        {"event": "end", "iteration": 8, "reason": "", "status": 0},
    )
    sweep.Sweep(plan, {"a": run}, []).note_rungs(run)
    assert run.rungs == {4: 8.5, 8: 6.5}


@pytest.mark.flag("stop_share")
@pytest.mark.parametrize(
    ("share", "count", "best"),
    [
        (0.5, 2, 1),
        (0.5, 3, 2),
        (0.3, 7, 3),
        (0.07, 100, 7),
        (0.01, 5, 1),
    ],
)
def test_how_many_go_on(tmp_path: Path, share: float, count: int, best: int) -> None:
    plan = sweep.SweepPlan(tmp_path, stop_at=(0.5,), share=share)
    runs = {str(n): sweep.SweepRun(str(n), {}, rungs={4: float(n)}) for n in range(count)}
    made = sweep.Sweep(plan, runs, [])
    assert [n for n in range(count) if not made.reason_to_stop(runs[str(n)])] == list(range(best))
    runs["0"].rungs[8] = 5.0  # nobody else has come to it
    assert not made.reason_to_stop(runs["0"])
    runs["0"].rungs[4] = math.inf
    assert bool(made.reason_to_stop(runs["0"])) == (best < count)


def test_the_table_has_last_losses_and_all_tokens(tmp_path: Path) -> None:
    end = {"event": "end", "iteration": 12, "reason": "done", "status": 0}
    runs = [
        sweep.SweepRun(name, {"lr": "1", "seed": seed}, "done")
        for name, seed in (("a", "1"), ("b", "2"))
    ]
    for run, losses in zip(runs, ((4.0, 2.0, 3.0), (5.0, 1.0, 6.0)), strict=True):
        checks = [check(4 * n, loss) for n, loss in enumerate(losses, 1)]
        rows(tmp_path / run.name, START, *steps(1, 12), *checks, end)
        (tmp_path / run.name / "config.toml").write_text(
            "[data]\nseq_length = 16\n[logging]\nlog_interval = 4\n"
        )
        run.read(tmp_path)
    (one,) = results.swept_points(runs)
    assert (one.held_out, one.training, one.tokens, one.seeds) == (4.5, 10.5, 12 * 4 * 16, 2)
    assert one.spread == pytest.approx(math.sqrt(4.5))
    # The lengths of samples that grow stand in the rows of the steps, which these lack.
    (tmp_path / "b" / "config.toml").write_text(
        '[data]\nseq_length = 16\n[training]\nseq_length_schedule = "4,16:9"\n'
    )
    runs[1].tail = None
    runs[1].read(tmp_path)
    (grown,) = results.swept_points(runs)
    assert grown.tokens is None and results.table([grown])
    lengths = [step | {"length": 8 if step["iteration"] <= 4 else 16} for step in steps(1, 12)]
    rows(tmp_path / "b", START, *lengths, end)
    runs[1].tail = None
    runs[1].read(tmp_path)
    (stated,) = results.swept_points(runs[1:])
    assert stated.tokens == 4 * 4 * 8 + 8 * 4 * 16
