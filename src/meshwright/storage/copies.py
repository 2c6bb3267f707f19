"""Local copies of objects: complete ones, and sparse ones that are filled as they are read.

A token file of any size is a sparse file here, as long as the object. Its blocks are read from
storage when they are first needed; a map beside it says which are here.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from meshwright import files
from meshwright.storage.addresses import address_of
from meshwright.storage.store import BucketObjects, Entry, locate

PART = 64 << 20  # bytes of a complete copy that are read at once
BLOCK = 1 << 20  # bytes of a sparse one
THREADS = 16


def download(
    store: BucketObjects, key: str, path: Path, entry: Entry, count: Callable[[int], None] = lambda size: None
) -> None:
    """Copy an object to a file, in parts, complete or not at all; `count` gets the size of each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as file:
        for begin in range(0, entry.size, PART):
            file.write(part := store.read(key, begin, min(PART, entry.size - begin)))
            count(len(part))


def prepare_tokens(prefix: str) -> None:
    """Copy the .idx and the tokenizer of token files at an address, and make a sparse .bin."""
    if address_of(prefix) is None:
        return
    folder, stem = Path(prefix).parent, Path(prefix).name
    store, key = locate(folder)
    objects = {name: entry for name, entry in store.entries(key).items() if name.startswith(f"{stem}.")}
    if not {f"{stem}.idx", f"{stem}.bin"} <= set(objects):
        return  # whoever opens them names what is missing
    folder.mkdir(parents=True, exist_ok=True)
    with files.lock(folder / f".{stem}.lock"):
        about = folder / f".{stem}.json"
        kept = read_note(about)
        boot = boot_id()
        for name, entry in objects.items():
            path, is_sparse = folder / name, name == f"{stem}.bin"
            state = [entry.size, entry.tag, boot if is_sparse else ""]
            if kept.get(name) == state and path.exists():
                continue
            if is_sparse:
                make_sparse(path, entry.size)
            else:
                download(store, f"{key}/{name}" if key else name, path, entry)
            kept[name] = state
        write_note(about, kept)


def boot_id() -> str:
    """Return a name of the time since this machine started: a map may outlive blocks in a crash."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def map_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.blocks")


def make_sparse(path: Path, size: int) -> None:
    for each, length in ((map_of(path), -(-size // BLOCK)), (path, size)):
        each.unlink(missing_ok=True)  # another process may have the old one open
        with open(each, "wb") as file:
            file.truncate(length)


class SparseCopy:
    """A sparse copy of an object; several processes may fill the same one."""

    def __init__(self, path: Path) -> None:
        self.store, self.key = locate(path)
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.size = os.fstat(self.fd).st_size
        with open(map_of(path), "r+b") as file:
            self.present = mmap.mmap(file.fileno(), 0) if self.size else None

    def need(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Bring all bytes between the ends of these ranges here."""
        if (present := self.present) is None:
            return
        touched = {n for begin, end in ranges if begin < end for n in range(begin // BLOCK, (end - 1) // BLOCK + 1)}
        lacking = sorted(n for n in touched if n < len(present) and not present[n])
        if len(lacking) == 1:
            self.fetch(lacking[0])
        elif lacking:
            with ThreadPoolExecutor(THREADS) as pool:
                list(pool.map(self.fetch, lacking))

    def fetch(self, number: int) -> None:
        assert self.present is not None
        begin = number * BLOCK
        data = self.store.read(self.key, begin, min(BLOCK, self.size - begin))
        done = 0
        while done < len(data):
            done += os.pwrite(self.fd, data[done:], begin + done)
        self.present[number] = 1


@functools.cache
def sparse_copy(path: str) -> SparseCopy | None:
    """Return the copy of an object, or None for a file of this machine."""
    is_sparse = address_of(path) is not None and map_of(Path(path)).exists()
    return SparseCopy(Path(path)) if is_sparse else None


def need(path: str, ranges: Iterable[tuple[int, int]]) -> None:
    """Bring bytes of a file here that is a sparse copy."""
    if (copy := sparse_copy(path)) is not None:
        copy.need(ranges)


def read_note(path: Path) -> dict[str, Any]:
    """Return what write_note wrote; nothing if there is no such file."""
    try:
        value = json.loads(files.read_small(path, files.RECORD_LIMIT))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def write_note(path: Path, value: dict[str, Any]) -> None:
    with files.replacing(path) as file:
        file.write(json.dumps(value).encode())
