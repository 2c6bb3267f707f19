"""Two runs of one seed are the same run, whatever the environment of their processes says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.harness import write_data
from helpers import TINY_FLAGS, printed_losses
from meshwright.__main__ import main

pytestmark = [pytest.mark.whole, pytest.mark.timeout(300)]

PLAIN = {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "TZ": "UTC"}
OTHERS: dict[str, dict[str, str]] = {
    "all": {
        "PYTHONHASHSEED": "12345",
        "LC_ALL": "C",
        "LANG": "tr_TR.UTF-8",
        "TZ": "Asia/Kathmandu",
    },
    "hash seed": {"PYTHONHASHSEED": "random"},
    "locale": {"LC_ALL": "C", "LC_NUMERIC": "de_DE.UTF-8"},
    "time zone": {"TZ": "Pacific/Chatham"},
    "columns": {"COLUMNS": "40", "TERM": "dumb", "NO_COLOR": "1"},
}


@pytest.mark.parametrize("name", [*OTHERS])
@pytest.mark.fault("F34")
def test_a_run_does_not_depend_on_the_environment(
    tmp_path: Path, name: str, figures: Callable[..., None]
) -> None:
    """Each interpreter is new, in a folder of its own; threads are fixed, for sums may differ."""
    data = write_data(tmp_path / "data")
    argv = [
        *TINY_FLAGS,
        "--no-mock-data",
        "--data-path",
        str(data),
        "--hidden-dropout=.1",
        "--attention-dropout=.1",
    ]
    assert main(["train", *argv, "--save", str(tmp_path / "here")]) == 0
    (folder := tmp_path / "elsewhere" / "é").mkdir(parents=True)
    words = [sys.executable, "-m", "meshwright", "train", *argv, "--save", "run"]
    environ = (
        os.environ | PLAIN | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")} | OTHERS[name]
    )
    done = subprocess.run(words, env=environ, cwd=folder, capture_output=True, timeout=200)
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    want, found = (printed_losses(path) for path in (tmp_path / "here", folder / "run"))
    figures(
        environments=1,
        environment_differing=f"{sum(a != b for a, b in zip(want, found, strict=True))}/{len(want)}",
    )
    assert want == found and len(want) == 6
