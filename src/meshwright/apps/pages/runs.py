"""What pages say of runs: their commands, and the settings in which they differ."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from meshwright.config import flags

CERTIFICATE = "layout-certificate.json"  # in a run's folder; see apps/verify/certificate.py


def shell_line(words: object) -> str:
    if isinstance(words, list):
        return shlex.join(map(str, words))
    return str(words or "")


def differing(settings: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the settings that differ, paths last: those differ almost always and rarely matter."""
    endings = ("_path", "_dir", "_file")
    names = flags.differing(settings)
    # A stable sort: within both groups the order of the flags stays.
    names.sort(key=lambda name: name in ("save", "load") or name.endswith(endings))
    return {name: [values.get(name) for values in settings] for name in names}
