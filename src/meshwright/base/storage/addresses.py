"""Addresses of object storage, such as s3://bucket/run, and the local folders that stand for them.

Each address has one folder on this machine, below a folder with the name MARK. Its path says the
address, so every part of the program works with plain paths, and messages show the address.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

MARK = "meshwright-storage"
SCHEMES = ("s3", "gs")
SPELT = re.compile(rf"({'|'.join(SCHEMES)})://([^/\s]+)((?:/[^/]+)*)/*")
LOCAL = re.compile(rf"[^\s'\"]*/{MARK}/({'|'.join(SCHEMES)})/")


def is_address(text: object) -> bool:
    return isinstance(text, str) and SPELT.fullmatch(text) is not None


def as_typed(value: object) -> object:
    """Return a path as it was typed: as a Path, an address has lost one of two slashes."""
    if isinstance(value, os.PathLike):
        return re.sub(r"^(\w+):/(?!/)", r"\1://", str(value))
    return value


def default_root() -> str:
    """Return the folder of local copies that no flag names."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(cache, "meshwright")


def localize(text: str, root: str | None = None) -> str:
    """Return the local folder that stands for an address; other text as it is."""
    match = SPELT.fullmatch(text)
    if match is None:
        return text
    scheme, bucket, key = match.groups()
    root = os.path.realpath(root or default_root())
    # Without what would lead out of the folder.
    parts = [part for part in key.split("/") if part not in ("", ".", "..")]
    return os.path.join(root, MARK, scheme, bucket, *parts)


def address_of(path: str | Path) -> str | None:
    """Return the address that a local path stands for, or None."""
    # Only the text is looked at: the folder need not be there.
    text = os.path.abspath(path)
    match = LOCAL.match(text)
    return f"{match[1]}://{text[match.end() :]}" if match else None


def shown(text: str) -> str:
    """Return text in which local folders that stand for addresses are written as these."""
    return LOCAL.sub(r"\1://", text) if MARK in text else text


def shown_in(value: Any) -> Any:
    """Return a value of JSON with `shown` for its texts."""
    if isinstance(value, dict):
        return {key: shown_in(part) for key, part in value.items()}
    if isinstance(value, list):
        return [shown_in(part) for part in value]
    return shown(value) if isinstance(value, str) else value
