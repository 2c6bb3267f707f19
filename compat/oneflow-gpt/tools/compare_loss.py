"""OneFlow-GPT's script name: compares runs by their folders, as `meshwright report` does."""

import sys
from pathlib import Path

# runs from a clone too, without an install
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "src"))

from meshwright.__main__ import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(["report", *sys.argv[1:]]))
