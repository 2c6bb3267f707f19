"""The versions of this program and of installed packages, without importing them."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

PROJECT = Path(__file__).parents[3] / "pyproject.toml"  # there in a clone only

TESTED = ((2, 11), (2, 15))  # versions of torch, first and last; with Python 3.10 the last is 2.14
RANGE = f"torch>={TESTED[0][0]}.{TESTED[0][1]},<{TESTED[1][0]}.{TESTED[1][1] + 1}"


def our_version() -> str:
    """Return this code's version; in a clone an older installation may have left other metadata."""
    if found := re.search(r'^version = "(.+)"', project_text(), re.M):
        return found[1]
    return installed_version("meshwright") or "uninstalled"


def numbers_of(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version: 2 and 11 for 2.11.0+cu130."""
    major, minor, *_ = re.findall(r"\d+", version)
    return int(major), int(minor)


def project_text() -> str:
    """Return the pyproject.toml of the clone that this code is in, or an empty string."""
    with contextlib.suppress(OSError):
        # The folder may be another project's, into which this package was copied.
        text = PROJECT.read_text(encoding="utf-8")
        if re.search('^name = "meshwright"', text, re.M):
            return text
    return ""


def installed_version(package: str) -> str | None:
    """Return the version of an installed package without importing it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None
