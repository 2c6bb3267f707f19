"""Megatron-LM's server of generated text: `meshwright serve` on port 5000, with `PUT /api`.

Listens on this machine only; for others add --host and --api-key-file. Needs no torchrun: a
checkpoint of any layout is read by one process.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "src"))  # runs from a clone too, without an install

from meshwright.__main__ import main  # noqa: E402

SAMPLING = ("--temperature", "--top_p", "--top_k", "--out-seq-length")


def command(argv: list[str]) -> list[str]:
    """Return the words of `meshwright serve`; it takes the flags that are not known here."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, add_help=False)
    for flag in SAMPLING:
        parser.add_argument(flag, help="no effect: each request has its own")
    parser.add_argument("--greedy", action="store_true", help="no effect: each request has its own")
    args, rest = parser.parse_known_args(argv)
    if given := [f"--{name.replace('_', '-')}" for name, value in vars(args).items() if value]:
        print(f"note: {', '.join(given)} have no effect: each request has its own", file=sys.stderr)
    return ["serve", "--port", "5000", *rest]


if __name__ == "__main__":
    sys.exit(main(command(sys.argv[1:])))
