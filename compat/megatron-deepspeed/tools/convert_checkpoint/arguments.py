"""The arguments of this folder's scripts, and the way from them to a command of Meshwright."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import NoReturn

# runs from a clone too, without an install
sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "src"))

from meshwright.__main__ import main as run  # noqa: E402, F401


def parse(about: str | None) -> tuple[argparse.Namespace, list[str]]:
    """Return the old arguments and the others, which are flags of the command."""
    parser = argparse.ArgumentParser(description=about, allow_abbrev=False)
    parser.add_argument(
        "--input_folder", required=True, help="folder of checkpoints, or of one step"
    )
    parser.add_argument("--output_folder", required=True, help="folder to write, which is made")
    parser.add_argument("--target_tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--target_pp", type=int, default=1, help="pipeline stages")
    parser.add_argument(
        "--for_release", action="store_true", help="weights alone, without optimizer state"
    )
    return parser.parse_known_args()


def refuse(message: str) -> NoReturn:
    print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr)
    sys.exit(2)


def refuse_layout(a: argparse.Namespace, what: str) -> NoReturn:
    """Say how a checkpoint is loaded in another layout, which DeepSpeed needs a conversion for."""
    load = f"--load {shlex.quote(a.input_folder)}"
    sizes = (
        f"--tensor-model-parallel-size {a.target_tp} --pipeline-model-parallel-size {a.target_pp}"
    )
    refuse(
        f"{what} is not written and not needed; pretrain_gpt.py {load} {sizes} continues from that folder as it is, "
        "with its optimizer state"
    )
