"""Entry of `python -m mutants`."""

import sys

from mutants.program import main

if __name__ == "__main__":
    sys.exit(main())
