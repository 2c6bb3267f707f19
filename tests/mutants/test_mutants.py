"""The seeded defects: each fits the code, and the runner tells a defect from a harmless change."""

from __future__ import annotations

import dataclasses
import json

import pytest

from mutants import program
from mutants.table import ROOT, TIERS, mutated, read_table


def test_every_defect_fits_the_code():
    table = read_table()
    assert len(table) == len({m.name for m in table}) >= 40
    for m in table:
        assert mutated(m) and "test" in m.tiers and set(m.tiers) <= set(TIERS)
        for test in m.tests:
            file, _, name = test.partition("::")
            assert (
                f"def {name.partition('[')[0].rpartition('::')[2]}(" in (ROOT / file).read_text()
            ), test


def test_a_text_that_occurs_twice_or_never_is_refused():
    m = read_table()[0]
    for old, count in ((" = ", "[0-9]+"), ("no such text", "0")):
        with pytest.raises(
            ValueError, match=f"{m.name}: its old text occurs {count} times in {m.file}, not once"
        ):
            mutated(dataclasses.replace(m, old=old))


def test_a_defect_is_found_and_a_harmless_change_is_not(tmp_path, monkeypatch, capsys):
    """By a test that needs neither torch nor a fixture, so that pytest starts soon."""
    real = next(m for m in read_table() if m.name == "validations-take-no-time")
    harmless = dataclasses.replace(real, name="harmless", new=f"{real.old}  # as before")
    monkeypatch.setattr(program, "PYTEST", [*program.PYTEST, "--noconftest"])
    monkeypatch.setattr(program, "read_table", lambda: [real, harmless])
    record = tmp_path / "record.json"
    record.write_text(json.dumps({"named": {"control": {"outcome": "clean", "seconds": 0}}}))
    assert program.main(["--jobs", "2", "--json", str(record)]) == 1
    results = json.loads(record.read_text())["named"]
    assert results[real.name]["outcome"] == "found"
    assert results[real.name]["by"].startswith(tuple(real.tests))
    assert results["harmless"]["outcome"] == "survived"
    assert "not found, though the table says so: harmless" in capsys.readouterr().out
    assert program.main(["--only", real.name, "--json", str(record)]) == 0  # by the record alone


def test_a_test_that_fails_without_a_defect_is_left_out():
    for words in program.commands("check", ["tests/test_z.py"], ["tests/test_x.py::test_y"], 0):
        assert "--deselect=tests/test_x.py::test_y" in words
    assert program.FAILED.findall(
        "FAILED tests/a.py::test_b[1] - assert 0\nERROR tests/c.py\n"
    ) == ["tests/a.py::test_b[1]"]
