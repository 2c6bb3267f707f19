"""The lines of the faults say how their tests ended."""

from __future__ import annotations

from types import SimpleNamespace

from faults import summary


def report(
    node: str, fault: str, outcome: str = "passed", when: str = "call", **figures: object
) -> SimpleNamespace:
    properties = [("figures", figures), *([("faults", [fault])] if fault else [])]
    return SimpleNamespace(nodeid=node, outcome=outcome, when=when, user_properties=properties)


def test_lines() -> None:
    one, two = (
        "checkpoint/test_native.py::test_bit_flips_never_load",
        "test_kill.py::test_kills_at_random_moments",
    )
    reports = [report(one, "F8", flips="200/200"), report(one, "F8", when="teardown")]
    reports += [report("test_other.py::test_x", "", flips="1/1")]
    reports += [report(f"{two}[a]", "F1", kills=8, differing="0/160", mttr=[1.0, 3.0])]
    reports += [report(f"{two}[b]", "F1", kills=20, differing="0/400", mttr=[2.0])]
    reports[-1].user_properties.append(("figures", {"kills": 2}))
    assert summary.lines(reports) == [
        "F1  held   kill -9 of a rank or of the launcher at a random moment: 2 passed kills=30 differing=0/560 "
        "mttr_p50=2.00 mttr_max=3.00",
        "F8  held   one bit flipped in a checkpoint: 1 passed flips=200/200",
        "faults=2/2 kills=30 differing=0/560 mttr_p50=2.00 mttr_max=3.00 flips=200/200",
    ]
    assert summary.lines([]) == []


def test_a_failure_counts_at_any_stage() -> None:
    node = "checkpoint/test_native.py::test_bit_flips_never_load"
    for when in ("setup", "call", "teardown"):
        ends = [report(node, "F8")] if when == "teardown" else []
        first, last = summary.lines([*ends, report(node, "F8", "failed", when)])
        assert (
            first == "F8  FAILED one bit flipped in a checkpoint: 1 failed" and last == "faults=0/1"
        )
    skipped, last = summary.lines([report(node, "F8", "skipped", "setup")])
    # what did not run did not hold
    assert skipped == "F8  FAILED one bit flipped in a checkpoint: 1 skipped"
