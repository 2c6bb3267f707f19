"""Curves of the live page: thinned without losing extremes, on three axes, zoomed."""

import json
import math

import numpy as np
import pytest
from pages import check_row, step_row

from meshwright.apps.watch.curves import View, curves, loss_units
from meshwright.base.runs.follow import RunTail


@pytest.fixture
def run(tmp_path):
    rows = [{"event": "start", "attempt": 1, "iteration": 0, "time": 1.7e9}]
    losses = 2 + np.sin(np.arange(1, 5001) / 300) + 0.05 * (np.arange(5000) * 7919 % 13)
    losses[3210], losses[1234] = 50.0, -7.0
    rows += [step_row(i, float(loss), memory=2**30) for i, loss in enumerate(losses, 1)]
    rows[100]["loss"] = "nan"
    rows += [
        check_row(1000, 3.0),
        check_row(5000, 2.5),
        {"event": "scores", "iteration": 2000, "scores": {"a": 0.5}},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "config.toml").write_text("[data]\nseq_length = 8\n")
    out = RunTail(tmp_path)
    out.read_new(lambda: None)
    return out


def test_thinned_lines_keep_their_extremes(run):
    loss = curves(run, View(points=100))["lines"]["loss"]
    assert len(loss["x"]) <= 100 and max(loss["y"]) == 50.0 and min(loss["y"]) == -7.0
    assert loss["x"] == sorted(loss["x"]) and loss["bad"] == [100.0]
    assert loss["x"][loss["y"].index(50.0)] == 3211.0
    assert 190 <= loss["width"] <= 210 and max(loss["my"]) < 3.4


def test_axes(run):
    step, tokens, time = (curves(run, View(axis)) for axis in ("step", "tokens", "time"))
    assert step["range"] == [1.0, 5000.0] and tokens["range"] == [32.0, 160000.0]
    assert time["range"] == pytest.approx([0.01, 50.0])
    for found, x in ((step, [1000, 5000]), (tokens, [32000, 160000]), (time, [10, 50])):
        assert found["checks"]["validation"]["x"] == pytest.approx(x)
        assert found["checks"]["validation"]["y"] == [3.0, 2.5]
    assert tokens["scores"] == {"a": {"x": [64000.0], "y": [0.5], "step": [2000], "unit": ""}}
    assert set(step["lines"]["memory"]["y"]) == {1.0} and "mfu" not in step["lines"]


def test_samples_that_grow_are_counted_as_samples(run):
    run.settings["seq_length_schedule"] = "4,8:1000"
    assert curves(run, View("tokens"))["range"] == [4.0, 20000.0]


def test_a_zoom_reads_all_steps_of_its_range(run):
    loss = curves(run, View(begin=3200, end=3220, smooth=0))["lines"]["loss"]
    assert (
        loss["x"] == [float(i) for i in range(3199, 3222)]
        and "mx" not in loss
        and max(loss["y"]) == 50.0
    )
    by_time = curves(run, View("time", begin=32.0, end=32.2, smooth=0))["lines"]["loss"]
    assert by_time["y"] == pytest.approx(loss["y"], abs=0.01)
    assert curves(run, View(begin=9000))["lines"]["loss"]["x"] == [5000.0]


def test_a_median_at_a_border_reads_beyond_it(run):
    zoomed = curves(run, View(begin=2000, end=2400, smooth=0.25))["lines"]["loss"]
    whole = np.asarray(run.column("loss"))
    first = zoomed["mx"].index(2000.0)
    assert zoomed["my"][first] == pytest.approx(np.median(whole[1949:2050]), rel=1e-7)


def test_nothing_yet(tmp_path):
    found = curves(RunTail(tmp_path), View())
    assert found == {"range": None, "lines": {}, "checks": {}, "scores": {}, "resumed": []}


@pytest.fixture
def run_of(tmp_path):
    def read(name, size, vocabulary):
        start = {
            "event": "start",
            "attempt": 1,
            "iteration": 0,
            "time": 1.7e9,
            "bytes_per_token": size,
        }
        rows = [
            start,
            step_row(1, 2 * math.log(2)),
            check_row(1, math.log(2)) | {"ema_loss": 4 * math.log(2)},
        ]
        folder = tmp_path / name
        folder.mkdir()
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "config.toml").write_text(f'[data]\ntokenizer = "{vocabulary}"\n')
        out = RunTail(folder)
        out.read_new(lambda: None)
        return out

    return read


def test_losses_of_two_vocabularies_are_drawn_in_bits_per_byte(run_of):
    a, b, other = run_of("a", 4.0, "x"), run_of("b", 2.0, "x"), run_of("c", 4.01, "x")
    assert (
        loss_units([a]) == ("", [1.0])
        and loss_units([a, other]) == ("", [1.0, 1.0])
        and loss_units([]) == ("", [])
    )
    unit, factors = loss_units([a, b])
    assert unit == "bits"
    drawn = [curves(run, View(), factor) for run, factor in zip((a, b), factors, strict=True)]
    assert [one["lines"]["loss"]["y"] for one in drawn] == [
        [pytest.approx(0.5)],
        [pytest.approx(1.0)],
    ]
    assert [one["checks"]["validation"]["y"] for one in drawn] == [
        [pytest.approx(0.25)],
        [pytest.approx(0.5)],
    ]
    assert drawn[0]["checks"]["validation, average"]["y"] == [pytest.approx(1.0)]
    assert drawn[0]["lines"]["lr"] == curves(a, View())["lines"]["lr"]


@pytest.mark.parametrize(
    ("size", "vocabulary", "unit"), [(None, "x", ""), (None, "y", "mixed"), (4.0, "y", "bits")]
)
def test_losses_that_cannot_be_compared_are_said_to_be_so(run_of, size, vocabulary, unit):
    """Where a run, as of an earlier release, does not say how many bytes a token has."""
    assert loss_units([run_of("a", 4.0, "x"), run_of("b", size, vocabulary)])[0] == unit
