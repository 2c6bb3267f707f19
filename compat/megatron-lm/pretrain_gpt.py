"""Megatron-LM's script name: `meshwright train` whose --save holds Megatron-LM's files alone.

Settings, curves, log and report page go to the folder of that name with -output at its end.
"""

import argparse
import sys
from pathlib import Path

# runs from a clone too, without an install
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from meshwright.__main__ import main  # noqa: E402

if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--save")
    save = parser.parse_known_args()[0].save
    before = ["--ckpt-format=torch", f"--run-dir={save.rstrip('/')}-output"] if save else []
    sys.exit(main(["train", *before, *sys.argv[1:]]))
