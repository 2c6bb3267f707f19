"""List the tensors of a DeepSpeed checkpoint: the same as `meshwright inspect FOLDER --tensors`."""

import argparse
import sys

import arguments

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--folder", required=True, help="folder of checkpoints, or of one step")
    for flag in ("--target_tp", "--target_pp"):
        parser.add_argument(flag, type=int, help="without effect: whole tensors are listed")
    a, others = parser.parse_known_args()
    if a.target_tp or a.target_pp:
        print(
            "--target_tp and --target_pp have no effect: whole tensors are listed", file=sys.stderr
        )
    sys.exit(arguments.run(["inspect", a.folder, "--tensors", *others]))
