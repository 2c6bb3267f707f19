"""`meshwright inspect DIR`: what a checkpoint of any program holds, whether it is damaged, and how
two of them differ."""

from __future__ import annotations

import argparse

from meshwright.checkpoint import steps
from meshwright.checkpoint.inspect import Detail, compare, describe_folder
from meshwright.checkpoint.loading import OpenOptions
from meshwright.errors import BAD_DATA, DONE, UserError


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="meshwright inspect", description="Describe a checkpoint of any program, or compare two."
    )
    parser.add_argument("dir", help="a --save folder, one step's folder in it, or any folder that --load takes")
    parser.add_argument("other", nargs="?", help="a second one: print only the differences")
    parser.add_argument("--step", type=int, help="describe this step (none: all, and the newest in detail)")
    parser.add_argument("--tensors", action="store_true", help="list every tensor: shape, type, bytes")
    parser.add_argument("--boxes", action="store_true", help="and where each part of it lies: file, ranges of elements")
    parser.add_argument("--full", action="store_true", help="verify every byte")
    parser.add_argument("--num-attention-heads", type=int, help="of the model, where the checkpoint does not say")
    parser.add_argument("--trust-pickle", action="store_true", help="run any code in the checkpoint's pickles")
    args = parser.parse_args(argv)
    options = OpenOptions("full" if args.full else "read", args.trust_pickle, args.num_attention_heads)
    if args.other is not None:
        if args.step is not None or args.tensors or args.boxes:
            parser.error(
                "--step, --tensors and --boxes are for one checkpoint; to compare two steps, give their folders"
            )
        print("\n".join(compare(args.dir, args.other, options) or ["the two hold the same"]))
        return DONE
    lines, undamaged = describe_folder(args.dir, args.step, Detail(args.full, args.tensors, args.boxes), options)
    print("\n".join(lines))
    if not undamaged:
        root, _ = steps.split_path(args.dir)
        steps.latest(root)  # raises if all are damaged
        raise UserError(f"a checkpoint in {root} is damaged, see above", BAD_DATA)
    return DONE
