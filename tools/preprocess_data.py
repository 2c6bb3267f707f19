"""Megatron's name for `meshwright preprocess`, with Megatron's flags."""

import sys

from meshwright.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["preprocess", *sys.argv[1:]]))
