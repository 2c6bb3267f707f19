"""The README's two commands from nothing: a fresh clone, a fresh virtual environment. Minutes, so
in `make test-long`.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("target", ["demo", "test"])
def test_fresh_clone(tmp_path_factory: pytest.TempPathFactory, target: str) -> None:
    clone = tmp_path_factory.mktemp("fresh") / "clone"
    subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
    done = subprocess.run(
        ["make", "-C", clone, target, f"PYTHON={sys.executable}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    if target == "demo":
        assert (
            "the GPT is better" in done.stdout and (clone / "demo" / "run" / "report.html").exists()
        )
    left = subprocess.run(
        ["git", "-C", clone, "status", "--porcelain"], capture_output=True, text=True, check=True
    )
    assert left.stdout == ""  # what they make is ignored by git
