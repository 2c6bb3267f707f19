"""A table of benchmarks from folders of logs: the same as `meshwright report --logs`."""

import sys
from pathlib import Path

# runs from a clone too, without an install
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from meshwright.__main__ import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(["report", "--logs", *sys.argv[1:]]))
