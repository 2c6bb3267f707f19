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
    store, key = store_at(address)
    if key and (entry := store.entry(key)) is not None:
        return [TextObject(address, entry, None)]
    fixed = re.split(r"[*?\[]", key)[0]
    prefix = key if fixed == key else fixed.rpartition("/")[0]
    below = store.entries(prefix)
    keys = {f"{prefix}/{name}" if prefix else name: entry for name, entry in below.items() if name}
    if fixed == key:
        return [TextObject(f"{store.bucket}/{name}", keys[name], address) for name in sorted(keys)]
    pattern, objects = key.split("/"), []
    for name in sorted(keys):
        parts = name.split("/")
        depth = next((n for n in range(1, len(parts) + 1) if is_match(parts[:n], pattern)), 0)
        if depth:
            folder = "/".join([store.bucket, *parts[:depth]]) if depth < len(parts) else None
            objects.append(TextObject(f"{store.bucket}/{name}", keys[name], folder))
    return objects


def is_match(parts: list[str], pattern: list[str]) -> bool:
    """Return whether the names in a path match a pattern; `**` stands for any number of folders."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(is_match(parts[n:], pattern[1:]) for n in range(len(parts) + 1))
    if not parts or (parts[0].startswith(".") and not pattern[0].startswith(".")):
        return False
    return fnmatch.fnmatchcase(parts[0], pattern[0]) and is_match(parts[1:], pattern[1:])


def open_object(address: str, size: int, tag: str | None) -> BinaryIO:
    """Open an object to read; raise if it is replaced by another meanwhile."""
    return cast(
        BinaryIO, io.BufferedReader(cast(Any, _ObjectReader(address, Entry(size, tag))), BLOCK)
    )


class _ObjectReader(io.RawIOBase):
    """Reads blocks ahead as long as they are wanted in order."""

    def __init__(self, address: str, entry: Entry) -> None:
        self.store, self.key = store_at(address)
        self.entry, self.at, self.last, self.depth = entry, 0, 0, 1
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
        number, skip = divmod(self.at, BLOCK)
        if self.at >= self.entry.size:
            return 0
        if number != self.last:
            self.depth = min(2 * self.depth, AHEAD) if number == self.last + 1 else 1
            self.last = number
        wanted = range(number, min(number + self.depth, -(-self.entry.size // BLOCK)))
        self.blocks = {n: self.blocks.get(n) or self.pool.submit(self.fetch, n) for n in wanted}
        part = self.blocks[number].result()[skip : skip + len(buffer)]
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
