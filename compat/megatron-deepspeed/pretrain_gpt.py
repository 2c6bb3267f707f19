"""The script name of Megatron-DeepSpeed, and of Ascend's scripts that use it: `meshwright train`.

There, --save without --load starts anew and writes over the checkpoints of an earlier run. Here
they are moved aside (--save-overwrite), which the log says.
"""

import sys
from pathlib import Path

# runs from a clone too, without an install
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from meshwright.__main__ import main  # noqa: E402


def words(argv: list[str]) -> list[str]:
    names = {word.split("=")[0] for word in argv}
    starts_anew = "--save" in names and not names & {"--load", "--config", "--save-overwrite"}
    return ["train", *argv, *(["--save-overwrite"] if starts_anew else [])]


if __name__ == "__main__":
    sys.exit(main(words(sys.argv[1:])))
