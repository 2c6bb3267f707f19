"""`python3 -m oneflow --doctor`, which names versions there: `meshwright doctor`."""

import sys

from meshwright.__main__ import main

if __name__ == "__main__":
    if sys.argv[1:] != ["--doctor"]:
        sys.exit("oneflow: only --doctor is known here, which is `meshwright doctor`")
    main(["doctor"])  # what it finds wrong does not end a script, as there
