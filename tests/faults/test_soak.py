"""The soak of `make faults-soak`, with few kills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.soak import slope

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.fault("F35")
def test_soak(tmp_path: Path, figures: Callable[..., None]) -> None:
    words = "--kills 12 --jobs 2 --seconds 400 --steps 100 --programs 0 --json".split()
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("src", "tests"))
    }
    done = subprocess.run(
        [sys.executable, "-m", "faults.soak", *words, str(tmp_path / "figures")],
        env=environ,
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = json.loads((tmp_path / "figures").read_text())
    assert found["kills"] >= 12 and found["orphans"] == 0 and found["checkpoints_max"] <= 3
    figures(soak_kills=found["kills"], soak_differing=found["differing"])


def test_the_slope_compares_launches_of_one_launcher() -> None:
    """Ranks inherit ten more open files from torchrun, whose launches may come late."""
    kinds = ["meshwright"] * 4 + ["torchrun"] * 3
    files = [54.0 if kind == "meshwright" else 64.0 for kind in kinds]
    assert slope(files, kinds) == [0.0]
    growing = [number + 0.5 * n for n, number in enumerate(files)]
    assert slope(growing, kinds) == [pytest.approx(0.5)]
    assert (
        slope([54.0, 54.0, 54.0, 54.0], kinds[:4]) == [] == slope([1.0, 2, 3, 4, 5], list("abcde"))
    )
