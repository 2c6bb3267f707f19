"""One machine of many vanishes: when the others know, and when they go on."""

from __future__ import annotations

import pytest

from simulated import LostMachine
from meshwright.launch import members


@pytest.mark.parametrize("machines", [16, 48])
def test_all_know_and_go_on_soon(machines: int) -> None:
    run = LostMachine(machines).simulate()
    assert len(run.started) == machines and len(run.learned) == machines - 1
    known, resumed = max(run.learned.values()) - run.lost_at, max(run.resumed.values()) - run.lost_at
    assert members.SILENT_SECONDS - 1 <= known <= members.SILENT_SECONDS + 1
    assert known + 5 <= resumed <= known + 6
    [line] = {line for line in run.lines if "was lost" in line}
    assert line.startswith(
        f"machine {machines - 1} was lost; going on with {(machines - 8) * 8} of {machines * 8} ranks"
    )


def test_what_a_machine_asks_does_not_grow() -> None:
    """In each second a machine beats once and looks five times whether there is a decision."""
    for machines in (16, 48):
        requests, sizes = LostMachine(machines).simulate().steady
        others = range(1, machines)
        assert max(requests[n] for n in others) <= 10 * 8 and max(sizes[n] for n in others) <= 10 * 350
        assert requests[0] <= 10 * 15  # machine 0 reads all records at once
