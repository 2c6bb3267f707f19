"""OneFlow's launcher where OneFlow is not installed: `meshwright launch` with its flags.

`python3 -m` finds it from the folder of `oneflow/`, or with that in PYTHONPATH. It starts one rank
unless a number is given.
"""

import sys
from pathlib import Path

# runs from a clone too, without an install
sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "src"))

from meshwright.__main__ import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(["launch", "--nproc_per_node=1", "--wait=600", *sys.argv[1:]]))
