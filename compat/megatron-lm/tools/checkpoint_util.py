"""Megatron-LM's tool that cuts a checkpoint for other ranks: `meshwright convert --to torch`."""

import argparse
import json
import sys
from pathlib import Path

# runs from a clone too, without an install
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "src"))

from meshwright.__main__ import main  # noqa: E402
from meshwright.base.errors import UserError  # noqa: E402
from meshwright.checkpoint import steps  # noqa: E402
from meshwright.compat.formats.megatron import reader as megatron  # noqa: E402
from meshwright.compat.formats.table import MEGATRON  # noqa: E402


def command(argv: list[str]) -> list[str]:
    """Return the words of `meshwright convert`; it takes the flags that are not known here."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model-type", choices=["GPT"], required=True)
    for flag in ("--loader", "--saver"):
        parser.add_argument(flag, choices=["megatron"], default="megatron")
    parser.add_argument("--load-dir", required=True)
    parser.add_argument("--save-dir", required=True)
    for flag in ("--target-tensor-parallel-size", "--target-pipeline-parallel-size"):
        parser.add_argument(flag, type=int, help="default: as in --load-dir")
    parser.add_argument("--true-vocab-size", type=int)
    parser.add_argument("--vocab-file", help="vocab.json, whose number of entries is the true size")
    parser.add_argument("--max-queue-size", help="no effect: tensors pass one by one")
    parser.add_argument(
        "--no-checking", action="store_true", help="no effect: checking costs nothing"
    )
    parser.add_argument("--megatron-path", help="no effect: no other program is needed")
    args, rest = parser.parse_known_args(argv)
    size = args.true_vocab_size
    if size is None and args.vocab_file:
        try:
            size = len(json.loads(Path(args.vocab_file).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            parser.error(f"--vocab-file {args.vocab_file}: {error}")
    before = ranks_of(args.load_dir)
    tp, pp = (
        args.target_tensor_parallel_size or before[0],
        args.target_pipeline_parallel_size or before[1],
    )
    words = [
        "convert",
        args.load_dir,
        args.save_dir,
        "--to",
        "torch",
        f"--target-tensor-parallel-size={tp}",
    ]
    words += [f"--target-pipeline-parallel-size={pp}"] + (
        [] if size is None else [f"--true-vocab-size={size}"]
    )
    return words + rest


def ranks_of(folder: str) -> tuple[int, int]:
    """Return the ranks of a Megatron checkpoint, (1, 1) of any other."""
    try:
        place, _ = steps.find_step(folder)
        is_theirs = place is not None and place.kind == MEGATRON
        found = list(megatron.model_files(place.folder)) if place is not None and is_theirs else []
    except UserError:
        found = []
    return (1 + max(t for t, _ in found), 1 + max(p for _, p in found)) if found else (1, 1)


if __name__ == "__main__":
    sys.exit(main(command(sys.argv[1:])))
