"""Megatron-LM's evaluations; of them `meshwright evaluate` has perplexity on a text now."""

import argparse
import shlex
import sys

parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
parser.add_argument("--task", required=True)
parser.add_argument("--load", default="DIR")
parser.add_argument("--valid-data", nargs="*", default=["FILE"])
args, _ = parser.parse_known_args()
instead = shlex.join(["meshwright", "evaluate", args.load, "--input", *args.valid_data])
what = f"tasks/main.py --task {args.task} is not there yet"
print(f"{what}; loss, perplexity and bits per byte of a text: {instead}", file=sys.stderr)
sys.exit(2)
