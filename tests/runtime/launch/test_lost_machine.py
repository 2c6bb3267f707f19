"""One machine of many vanishes: when the others know, and when they go on."""

from __future__ import annotations

import pytest
from simulated import LostMachine

from meshwright.runtime.launch import members


@pytest.fixture(scope="module", params=[16, 32])
def run(request: pytest.FixtureRequest) -> LostMachine:
    return LostMachine(request.param).simulate()


def test_all_know_and_go_on_soon(run: LostMachine) -> None:
    assert len(run.started) == run.machines and len(run.learned) == run.machines - 1
    known, resumed = (
        max(run.learned.values()) - run.lost_at,
        max(run.resumed.values()) - run.lost_at,
    )
    assert members.SILENT_SECONDS - 1 <= known <= members.SILENT_SECONDS + 1
    assert known + run.stop_seconds <= resumed <= known + run.stop_seconds + 1
    [line] = {line for line in run.lines if "was lost" in line}
    ranks = run.machines * run.ranks
    assert line.startswith(
        f"machine {run.lost} was lost; going on with {ranks - 64} of {ranks} ranks"
    )


def test_what_a_machine_asks_does_not_grow(run: LostMachine) -> None:
    """In each second a machine beats once and looks five times whether there is a decision."""
    requests, sizes = run.steady
    others = range(1, run.machines)
    assert max(requests[n] for n in others) <= 10 * 8 and max(sizes[n] for n in others) <= 10 * 350
    assert requests[0] <= 10 * 15  # machine 0 reads all records at once
