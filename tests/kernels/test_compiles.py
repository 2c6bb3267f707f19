"""Every Triton kernel compiles for an H200 and fits there; the interpreter accepts more."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_for_gpu.py")
KERNELS = Path(__file__).parents[2] / "src" / "meshwright" / "kernels"
SHARED = 227 << 10  # bytes that one program may have
SPILLED = 64  # bytes of a thread; a few cost little


@pytest.mark.whole
@pytest.mark.timeout(300)
def test_every_kernel_compiles():
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "error", SCRIPT], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = re.findall(
        r"^(\w+)\.(\w+): .* (\d+) bytes of shared memory, (\d+) spilled$", done.stdout, re.M
    )
    assert rows, done.stdout
    for file, name, shared, spilled in rows:
        assert int(shared) <= SHARED and int(spilled) <= SPILLED, (file, name, shared, spilled)
    missing = {path.stem for path in KERNELS.glob("triton/[a-z]*.py")} - {file for file, *_ in rows}
    assert not missing, f"add calls of {missing} to {SCRIPT.name}"
