"""The table of the columns of metrics.jsonl, and its page."""

import ast
import json
from pathlib import Path

import pytest
import torch
from metrics import COMMON_COLUMNS, EVENTS, PAGE, describe_columns

import meshwright
from meshwright.training.log.columns import STEP_COLUMNS
from meshwright.training.log.metrics import peak_flops

SOURCE = Path(meshwright.__file__).parent


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == describe_columns(), "run python docs/metrics.py"


def test_every_row_that_is_written_is_described():
    """The table has the name and the keywords of each `metrics.row("name", ...)` and the like."""
    written = set()
    for path in SOURCE.glob("training/**/*.py"):
        for call in (
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
        ):
            if not (
                isinstance(call.func, ast.Attribute)
                and call.func.attr in ("row", "event")
                and call.args
            ):
                continue
            if isinstance(name := call.args[0], ast.Constant):
                written.add(name.value)
                keywords = {k.arg for k in call.keywords if k.arg}
                assert keywords <= EVENTS[name.value][1].keys(), (path, name.value, keywords)
    assert written == EVENTS.keys() - {"start", "evaluate"}  # these two have a variable name


def test_rows_have_the_columns_of_the_table(run, tmp_path):
    flags = "--log-num-zeros-in-grad --log-params-norm --weight-decay-incr-style linear".split()
    flags += [
        "--start-weight-decay",
        "0",
        "--end-weight-decay",
        "0.1",
        "--save",
        f"{tmp_path}/save",
    ]
    flags += ["--z-loss-coef", "1e-4", "--seq-length-schedule", "0:8 2:16"]
    got = run(*flags, "--skip-train-iteration-range", "2-3")
    seen = {}
    for row in map(json.loads, (got.folder / "metrics.jsonl").read_text().splitlines()):
        assert row.keys() >= COMMON_COLUMNS.keys()
        seen.setdefault(row["event"], set()).update(row.keys() - COMMON_COLUMNS.keys())
    assert seen.keys() >= {"start", "step", "validation", "save", "skip", "end"}
    for event, columns in seen.items():
        assert columns <= EVENTS[event][1].keys(), event
    assert seen["step"] == {column.name for column in STEP_COLUMNS}
    assert seen["start"] == EVENTS["start"][1].keys()


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H200 NVL", 835),
        ("Abacus", None),
    ],
)
def test_the_peak_of_a_device(name, teraflops, monkeypatch):
    monkeypatch.setattr("meshwright.base.device.device_name", lambda device: name)
    assert peak_flops(torch.device("cpu")) == (teraflops and teraflops * 1e12)
