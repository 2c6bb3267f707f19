"""Kills of runs whose disk and storage take seconds to minutes, by a clock of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from faults.slow_kills import kill_slow_runs


@pytest.mark.timeout(1800)
@pytest.mark.fault("F18")
@pytest.mark.parametrize("kills", [1, pytest.param(40, marks=pytest.mark.long)])
def test_no_step_is_lost(kills: int, tmp_path: Path, figures: Callable[..., None]) -> None:
    made = kill_slow_runs(kills, 2, 1, tmp_path)
    assert made["kills"] >= kills and made["lost"] == 0 == made["differing"], made
    figures(slow_kills=made["kills"], steps_lost=made["lost"])
