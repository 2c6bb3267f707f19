"""The table of faults names tests that exist, and its lines say how they ended."""

from __future__ import annotations

from types import SimpleNamespace

from faults import table


def test_every_fault_has_tests_that_exist() -> None:
    assert list(table.FAULTS) == [f"F{n}" for n in range(1, 36)]
    assert all(table.tests_of(fault) for fault in table.FAULTS)
    known = table.existing()
    for name in table.NAMED:
        assert known.count(name) == 1, name


def report(node: str, outcome: str = "passed", when: str = "call", **figures: object) -> SimpleNamespace:
    return SimpleNamespace(nodeid=node, outcome=outcome, when=when, user_properties=[("figures", figures)])


def test_lines() -> None:
    one, two = "checkpoint/test_native.py::test_200_bit_flips_never_load", "test_kill.py::test_kills_at_random_moments"
    reports = [report(one, flips="200/200"), report(one, when="teardown"), report("test_other.py::test_x", flips="1/1")]
    reports += [report(f"{two}[a]", kills=8, differing="0/160", mttr=[1.0, 3.0])]
    reports += [report(f"{two}[b]", kills=20, differing="0/400", mttr=[2.0])]
    reports[-1].user_properties.append(("figures", {"kills": 2}))
    assert table.lines(reports) == [
        "F1  held   kill -9 of a rank or of the launcher at a random moment: 2 passed kills=30 differing=0/560 "
        "mttr_p50=2.00 mttr_max=3.00",
        "F8  held   one bit flipped in a checkpoint: 1 passed flips=200/200",
        "faults=2/2 kills=30 differing=0/560 mttr_p50=2.00 mttr_max=3.00 flips=200/200",
    ]
    assert table.lines([]) == []


def test_a_failure_counts_at_any_stage() -> None:
    node = "checkpoint/test_native.py::test_200_bit_flips_never_load"
    for when in ("setup", "call", "teardown"):
        ends = [report(node)] if when == "teardown" else []
        first, last = table.lines([*ends, report(node, "failed", when)])
        assert first == "F8  FAILED one bit flipped in a checkpoint: 1 failed" and last == "faults=0/1"
    skipped, last = table.lines([report(node, "skipped", "setup")])
    assert skipped == "F8  FAILED one bit flipped in a checkpoint: 1 skipped"  # what did not run did not hold
