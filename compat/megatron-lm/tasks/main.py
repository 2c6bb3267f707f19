"""Megatron's evaluations LAMBADA and WIKITEXT103: `meshwright evaluate --task`."""

import argparse
import sys
from pathlib import Path

# runs from a clone too, without an install
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "src"))

from meshwright.__main__ import main  # noqa: E402


def command(argv: list[str]) -> list[str]:
    """Return the words of `meshwright evaluate`, without the flags of Megatron's other tasks.

    --batch-size is the micro-batch of its evaluate_zeroshot script. OneFlow's script names the file
    of --valid-data a second time, as the --dataset that its program always needs.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--epochs")
    parser.add_argument("--train-data", nargs="*")
    parser.add_argument("--keep-last", action="store_true")
    parser.add_argument("--pretrained-checkpoint")
    parser.add_argument("--batch-size")
    parser.add_argument("--dataset")
    found, rest = parser.parse_known_args(argv)
    if not any(word.split("=")[0] == "--load" for word in rest) and found.pretrained_checkpoint:
        rest += ["--load", found.pretrained_checkpoint]
    if found.batch_size is not None:
        rest += ["--micro-batch-size", found.batch_size]
    if found.dataset is not None and found.dataset not in rest:
        rest += ["--dataset", found.dataset]
    return ["evaluate", *rest]


if __name__ == "__main__":
    sys.exit(main(command(sys.argv[1:])))
