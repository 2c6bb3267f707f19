"""Stand-in for OneFlow, of which scripts for LiBai use the launcher, the version and the doctor."""

import sys
from pathlib import Path

# runs from a clone too, without an install
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "src"))

from meshwright import __version__  # noqa: E402

__git_commit__ = f"meshwright-{__version__}"
