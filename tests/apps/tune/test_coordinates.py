"""The coordinate check: slopes are 0 with µP and are not without, for widths, depths and Muon."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from meshwright.__main__ import main
from meshwright.apps.tune import coordinates
from meshwright.apps.tune.coordinates import ACTIVATIONS, Growth, at_width, make_small, measure
from meshwright.base.errors import DONE, UNEQUAL, UserError
from meshwright.config import flags
from meshwright.config.schema import TrainConfig

RUN = (
    "--hidden-size=32 --num-attention-heads=4 --num-layers=2 --seq-length=8 --micro-batch-size=4 --vocab-size=64 "
    "--mock-data --lr=1e-3 --params-dtype=float64 --hidden-dropout=0 --num-workers=0 --device=cpu --train-iters=9"
).split()
SIZES: dict[coordinates.Axis, list[int]] = {"width": [32, 64, 128], "depth": [2, 4, 8]}
BASES = {"width": "--mup-base-hidden-size=32", "depth": "--mup-base-num-layers=2"}


def parse(*words: str) -> TrainConfig:
    return flags.parse_settings(TrainConfig, [*RUN, *words], "meshwright test").config


@pytest.mark.parametrize(("axis", "optimizer"), [("width", "adamw"), ("depth", "muon")])
def test_changes_depend_on_the_size_only_without_a_base(
    axis: coordinates.Axis, optimizer: str
) -> None:
    made = []
    for more in ([], [BASES[axis]]):
        config = make_small(parse("--optimizer", optimizer, *more))
        made.append(measure(config, axis, SIZES[axis], 2, torch.device("cpu"), lambda line: None))
    without, carried = made
    judged = [
        name for name in ACTIVATIONS if axis == "width" or name not in coordinates.OF_BRANCHES
    ]
    for name in judged:
        assert all(abs(x) < 0.25 for x in carried.slopes(name)), (name, carried.slopes(name))
        assert carried.initial_slope(name) < 0.1
    for name in ("qkv", "stream", "logits"):
        assert without.slopes(name)[0] > 0.5, (name, without.slopes(name))
    assert not carried.faults(0.25) and len(without.faults(0.25)) >= 3
    if axis == "depth":
        assert carried.slopes("mlp")[0] == pytest.approx(-1, abs=0.1)


@pytest.mark.flag("widths depths tolerance coordinates.steps coordinates.picture coordinates.json")
def test_the_command_prints_a_table_draws_and_has_a_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = ["coordinates", "--widths", "64", "32", "--steps=1", "--", *RUN]
    assert main([*run, "--mup-base-hidden-size=32"]) == DONE
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == "slope over width initial step 1".split()
    assert [line.split()[0] for line in lines[1:7]] == list(ACTIVATIONS)
    assert lines[-2].startswith("stable") and lines[-1] == "coordinates.svg"
    drawn = (tmp_path / "coordinates.svg").read_text()
    assert drawn.startswith("<?xml") and all(name in drawn for name in ACTIVATIONS)
    more = ["--depths", "1", "2", "--json", "--picture=more/a.svg", "--tolerance=1e-9"]
    assert main([*run[:4], *more, *run[4:], "--mup-base-hidden-size=32"]) == UNEQUAL
    record = json.loads(capsys.readouterr().out)
    width, depth = record["measured"]
    assert not record["is_stable"] and record["faults"] and (tmp_path / "more/a.svg").exists()
    assert (width["sizes"], depth["sizes"]) == ([32, 64], [1, 2])
    assert [len(width["changes"]["qkv"]), len(width["initial"]["qkv"])] == [1, 2]


def test_flags_that_the_check_does_not_use_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    check = ["coordinates", "--widths", "32", "64", "--dry-run", "--", *RUN]
    assert main([*check, "--save=run", "--seq-length-schedule=0:4,5:8"]) == DONE
    note = capsys.readouterr().err
    assert note == "note: the check does not use --train-iters, --seq-length-schedule, --save\n"
    # An older switch is named by the flag that it stands for.
    assert main([*check, "--use-distributed-optimizer"]) == DONE
    assert "--zero-stage" in capsys.readouterr().err
    # What a preset sets is not a flag that was typed.
    typed = [word for word in check if not word.startswith("--train-iters")]
    assert main([*typed, "--recipe=modern"]) == DONE
    assert "does not use" not in capsys.readouterr().err


def test_slopes_and_faults() -> None:
    assert coordinates.slope([1, 2, 4], [3, 6, 12]) == pytest.approx(1)
    assert math.isnan(coordinates.slope([1, 2], [0, 1])) and coordinates.slope([1, 2], [0, 0]) == 0
    growth = Growth("width", [32, 64])
    flat = dict.fromkeys(ACTIVATIONS, 1.0)
    growth.add(flat | {"stream": 1.0, "logits": 2.0}, [flat | {"qkv": 1.0}])
    growth.add(flat | {"stream": 2.0, "logits": 1.0}, [flat | {"qkv": 0.5}])
    faults = growth.faults(0.25)
    assert faults == [
        "the change of qkv goes with width^-1.00",
        "the initial stream goes with width^1.00",
    ]
    growth.changes["mlp"] = [[math.nan, 1.0]]
    assert "the change of mlp goes with width^nan" in growth.faults(0.25)


def test_wider_models_keep_the_shares_of_heads_groups_and_mlp() -> None:
    m = parse("--num-query-groups=2", "--ffn-hidden-size=80").model
    wide = at_width(m, 64)
    assert (wide.num_attention_heads, wide.num_query_groups, wide.ffn, wide.head_dim) == (
        8,
        4,
        160,
        8,
    )
    with pytest.raises(
        UserError, match="--widths 40: heads of 8 and their groups need multiples of 16"
    ):
        at_width(m, 40)
