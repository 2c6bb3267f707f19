"""The versions of this program and of installed packages, without importing them."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

PROJECT = Path(__file__).parents[2] / "pyproject.toml"  # there in a clone only


def our_version() -> str:
    """Return this code's version; in a clone an older installation may have left other metadata."""
    with contextlib.suppress(OSError):
        text = PROJECT.read_text(encoding="utf-8")
        found = re.search(r'^version = "(.+)"', text, re.M)
        if found and re.search('^name = "meshwright"', text, re.M):
            return found[1]
    return installed_version("meshwright") or "uninstalled"


def installed_version(package: str) -> str | None:
    """Return the version of an installed package without importing it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None
