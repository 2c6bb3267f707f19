"""`pip install -r requirements.txt` installs Meshwright, from this clone, and `deepspeed`.

DeepSpeed's own command stays where there is one; then Meshwright alone is installed.
"""

import os
import sysconfig
from pathlib import Path

from setuptools import setup

CLONE = Path(__file__).resolve().parents[2]


def has_deepspeed() -> bool:
    """Return whether the command is there, where pip would put ours or in PATH, and is not ours."""
    folders = [sysconfig.get_path("scripts"), *os.get_exec_path()]
    commands = [Path(folder, "deepspeed") for folder in folders]
    return any(
        command.is_file() and b"meshwright" not in command.read_bytes() for command in commands
    )


setup(
    name="megatron-deepspeed-by-meshwright",
    version="0.0",
    py_modules=[],
    scripts=[] if has_deepspeed() else ["bin/deepspeed"],
    install_requires=[f"meshwright @ {CLONE.as_uri()}"],
)
