"""Texts in object storage: the objects that an address names, each read once and in order."""

from __future__ import annotations

import fnmatch
import io
import re
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO, NamedTuple, cast

from meshwright.base.storage.copies import BLOCK
from meshwright.base.storage.store import Entry, store_at

AHEAD = 16  # blocks that are read at once; this bounds the memory


class TextObject(NamedTuple):
    """An object, and the folder in which it was found, None if it was named."""

    address: str
    entry: Entry
    folder: str | None


def find_objects(address: str) -> list[TextObject]:
    """Return the object of this name, or those below it; or those that match a pattern, as glob's.

    Marks of empty folders, whose names end with a slash, are left out.
    """
    # An object of this very name.
    store, key = store_at(address)
    if key and (entry := store.entry(key)) is not None:
        return [TextObject(address, entry, None)]

    # All objects below the folder, or below the last folder before the first sign of a pattern.
    fixed = re.split(r"[*?\[]", key)[0]
    is_pattern = fixed != key
    prefix = fixed.rpartition("/")[0] if is_pattern else key
    start = f"{prefix}/" if prefix else ""
    below = store.entries(prefix)
    pattern = key.split("/")
    objects = []
    for name in sorted(below):
        if not name:
            continue
        object_key = start + name
        object_address = f"{store.bucket}/{object_key}"
        if not is_pattern:
            objects.append(TextObject(object_address, below[name], address))
            continue

        # The pattern may match the object, or a folder that holds it.
        parts = object_key.split("/")
        for depth in range(1, len(parts) + 1):
            if is_match(parts[:depth], pattern):
                folder = "/".join([store.bucket, *parts[:depth]]) if depth < len(parts) else None
                objects.append(TextObject(object_address, below[name], folder))
                break
    return objects


def is_match(parts: list[str], pattern: list[str]) -> bool:
    """Return whether the names in a path match a pattern; `**` stands for any number of folders."""
    if not pattern:
        return not parts
    first, *rest = pattern
    if first == "**":
        return any(is_match(parts[n:], rest) for n in range(len(parts) + 1))
    if not parts:
        return False
    name = parts[0]
    if name.startswith(".") and not first.startswith("."):
        return False  # a hidden name is matched by a pattern of hidden names alone
    return fnmatch.fnmatchcase(name, first) and is_match(parts[1:], rest)


def open_object(address: str, size: int, tag: str | None) -> BinaryIO:
    """Open an object to read; raise if it is replaced by another meanwhile."""
    return cast(
        BinaryIO, io.BufferedReader(cast(Any, _ObjectReader(address, Entry(size, tag))), BLOCK)
    )


class _ObjectReader(io.RawIOBase):
    """Reads blocks ahead as long as they are wanted in order."""

    def __init__(self, address: str, entry: Entry) -> None:
        self.store, self.key = store_at(address)
        self.entry = entry
        self.at = 0
        self.last = 0
        self.depth = 1
        self.blocks: dict[int, Future[memoryview]] = {}
        self.pool = ThreadPoolExecutor(AHEAD, "read")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + (0, self.at, self.entry.size)[whence]
        return self.at

    def readinto(self, buffer: Any) -> int:
        size = self.entry.size
        if self.at >= size:
            return 0
        number, skip = divmod(self.at, BLOCK)

        # Read further ahead with each block that follows the last; a jump begins anew.
        if number != self.last:
            self.depth = min(2 * self.depth, AHEAD) if number == self.last + 1 else 1
            self.last = number
        stop = min(number + self.depth, -(-size // BLOCK))

        # Keep the blocks that are still wanted, and ask for the others.
        blocks = {}
        for n in range(number, stop):
            blocks[n] = self.blocks.get(n) or self.pool.submit(self.fetch, n)
        self.blocks = blocks

        part = blocks[number].result()[skip : skip + len(buffer)]
        buffer[: len(part)] = part
        self.at += len(part)
        return len(part)

    def fetch(self, number: int) -> memoryview:
        size, tag = self.entry
        begin = number * BLOCK
        return self.store.read(self.key, begin, min(BLOCK, size - begin), tag)

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        super().close()
