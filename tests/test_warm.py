"""Warm programs have what they were started with, and end as real ones."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

import warm

pytestmark = pytest.mark.whole

SCRIPT = """
import os, sys
print(sys.argv[1:], os.environ["WORD"], os.getcwd(), sys.stdin.read(), os.path.basename(sys.executable), flush=True)
print("to stderr", file=sys.stderr)
if sys.argv[1] == "kill":
    os.kill(os.getpid(), 9)
raise SystemExit({"text": "a reason", "none": None}.get(sys.argv[1], 7))
"""


@pytest.mark.parametrize(
    ("word", "status"), [("number", 7), ("none", 0), ("text", 1), ("kill", -9)]
)
def test_a_program(word: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [warm.python(), "-u", "script.py", word, "a b"]
    done = subprocess.run(
        words,
        input="in",
        cwd=tmp_path,
        env=os.environ | {"WORD": "é"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == status
    assert done.stdout == f"{[word, 'a b']} é {tmp_path} in python\n"
    assert done.stderr == ("to stderr\na reason\n" if word == "text" else "to stderr\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL])
def test_signals_reach_the_fork(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "wait.py").write_text(
        "import os, signal\nprint(os.getpid(), flush=True)\nsignal.pause()\n"
    )
    with subprocess.Popen(
        [warm.python(), str(tmp_path / "wait.py")], stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout
        fork = int(program.stdout.readline())
        program.send_signal(number)
        assert program.wait(10) == -number
    assert fork != program.pid


def test_other_words_are_for_the_interpreter() -> None:
    """Its modules are not imported; the variables say which programs are first in PATH."""
    code = "import sys; print('torch' in sys.modules, sys.executable)"
    done = subprocess.run([warm.python(), "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("False ") and str(warm.programs()) not in done.stdout
