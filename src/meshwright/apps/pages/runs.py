"""What pages say of runs: their commands, and the settings in which they differ."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from meshwright.config import flags

CERTIFICATE = "layout-certificate.json"  # in a run's folder; see apps/verify/certificate.py


def shell_line(words: object) -> str:
    return shlex.join(map(str, words)) if isinstance(words, list) else str(words or "")


def differing(settings: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the settings that differ, paths last: those differ almost always and rarely matter."""
    names = flags.differing(settings)
    names.sort(key=lambda n: n in ("save", "load") or n.endswith(("_path", "_dir", "_file")))
    return {n: [s.get(n) for s in settings] for n in names}
