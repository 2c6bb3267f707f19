"""OneFlow-GPT's script name: makes of Megatron's checkpoint one of Meshwright, for --load."""

import argparse
import sys
from pathlib import Path

# runs from a clone too, without an install
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "src"))

from meshwright.__main__ import main  # noqa: E402

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--py_model_dir", required=True, help="model_optim_rng.pt, or its checkpoint"
    )
    parser.add_argument(
        "--of_dump_path", default="./convert_pt_to_of_gpt_release", help="folder to write"
    )
    given, more = parser.parse_known_args()
    sys.exit(main(["convert", given.py_model_dir, given.of_dump_path, "--to", "native", *more]))
