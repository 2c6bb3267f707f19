"""Entry of `python -m mutants`."""

import signal
import sys

from mutants.program import end, main

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, end)
    sys.exit(main())
