"""Entry of `python -m fuzz`."""

import sys

if __name__ == "__main__":  # not in a rank, whose server imports this file under another name
    from fuzz.program import main

    sys.exit(main())
