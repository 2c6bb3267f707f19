"""Numbers that JSON lacks, and columns."""

import json
import math

from meshwright.base.records import align_columns, json_ready


def test_a_number_that_is_not_finite_is_read_back_by_float():
    values = {"a": [math.inf, {"b": -math.inf}], "c": math.nan, "d": 1.5, "e": None, "f": "nan"}
    text = json.dumps(json_ready(values), allow_nan=False)
    again = json.loads(text)
    assert float(again["a"][0]) == math.inf and float(again["a"][1]["b"]) == -math.inf
    assert math.isnan(float(again["c"])) and (again["d"], again["e"]) == (1.5, None)
    assert json_ready(values, lambda x: None)["c"] is None


def test_columns():
    rows = [["name", "n"], ["a", "100"]]
    assert align_columns(rows) == ["name  n", "a     100"]
    assert align_columns(rows, to_the_right=True) == ["name    n", "   a  100"]
