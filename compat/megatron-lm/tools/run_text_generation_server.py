"""Megatron-LM's server of generated text: `meshwright serve` on port 5000, with `PUT /api`."""

import argparse
import sys
from pathlib import Path

# runs from a clone too, without an install
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "src"))

from meshwright.__main__ import main  # noqa: E402

if __name__ == "__main__":
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--greedy", action="store_true")
    for flag in ("--temperature", "--top_p", "--top_k", "--out-seq-length"):
        parser.add_argument(flag)
    given, rest = parser.parse_known_args()
    if any(vars(given).values()):
        print(
            "note: flags of sampling have no effect here: each request has its own", file=sys.stderr
        )
    sys.exit(main(["serve", "--port", "5000", *rest]))
