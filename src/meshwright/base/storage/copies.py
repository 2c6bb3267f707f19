"""Local copies of objects: complete ones, and sparse ones that are filled as they are read.

A token file of any size is a sparse file here, as long as the object. Its blocks are read from
storage when they are first needed. The map beside it names the objects that the copy was made of,
and has a mark for each block that is here. A mark counts if it was made since this machine started:
until then every process sees what another has written. A crash may leave a mark without its block,
so the checksum in an older mark decides: a block that does not match is read from storage again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from meshwright.base import files
from meshwright.base.errors import bad_data
from meshwright.base.storage.addresses import address_of
from meshwright.base.storage.store import BucketObjects, Entry, locate

PART = 64 << 20  # bytes of a complete copy that are read at once
BLOCK = 1 << 20  # bytes of a sparse one
# bytes of a block in the map: its checksum and a signature; zeros for one that is not here
MARK = 8
THREADS = 16


def download(
    store: BucketObjects,
    key: str,
    path: Path,
    entry: Entry,
    count: Callable[[int], None] = lambda size: None,
) -> None:
    """Copy an object to a file, in parts, complete or not at all; `count` gets the size of each.

    Raise ChangedObject if it is not the one of this entry any more.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as file:
        for begin in range(0, entry.size, PART):
            file.write(part := store.read(key, begin, min(PART, entry.size - begin), entry.tag))
            count(len(part))


def prepare_tokens(prefix: str) -> None:
    """Copy the .idx and the tokenizer of token files at an address, and make a sparse .bin."""
    if address_of(prefix) is None:
        return
    folder = Path(prefix).parent
    stem = Path(prefix).name
    store, key = locate(folder)
    objects = store.entries(key)
    index = f"{stem}.idx"
    binary = folder / f"{stem}.bin"
    if not {index, binary.name} <= set(objects):
        return  # whoever opens them names what is missing
    pair = {name: objects[name] for name in (binary.name, index)}
    tokenizer = f"{stem}.tokenizer/"
    beside = {name: entry for name, entry in objects.items() if name.startswith(tokenizer)}
    folder.mkdir(parents=True, exist_ok=True)

    def copy(name: str) -> None:
        download(store, f"{key}/{name}" if key else name, folder / name, objects[name])

    # All ranks of this machine share the copies, and one of them makes them.
    with files.lock(folder / f".{stem}.lock"):
        note = folder / f".{stem}.json"
        # The tokenizer's files are small, and copied whole if they have changed.
        kept = read_note(note)
        for name, entry in beside.items():
            if kept.get(name) != list(entry) or not (folder / name).exists():
                copy(name)
        write_note(note, beside)
        if is_copy(folder, pair, read_record(binary)):
            return
        # Whoever opens the files meanwhile misses the map, or finds another .bin than it mapped.
        map_of(binary).unlink(missing_ok=True)
        binary.unlink(missing_ok=True)  # another process may have the old one open
        with open(binary, "wb") as sparse:
            sparse.truncate(pair[binary.name].size)
        copy(index)
        with files.replacing(map_of(binary)) as file:
            file.write(encode_record(pair))
        sparse_copy.cache_clear()  # this process may have read the old one


def map_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.blocks")


def encode_record(objects: dict[str, Entry]) -> bytes:
    """Encode what a map begins with: the objects that the copies here were made of, by name."""
    return json.dumps(objects).encode() + b"\n"


def read_record(path: Path) -> dict[str, Entry]:
    """Return these objects; nothing without a map, or with one of an earlier release."""
    try:
        with open(map_of(path), "rb") as file:
            return {name: Entry(*entry) for name, entry in json.loads(file.readline()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def is_copy(folder: Path, objects: dict[str, Entry], record: dict[str, Entry]) -> bool:
    """Return whether the files here were made of these objects."""
    return record == objects and all(
        (folder / name).exists() and (folder / name).stat().st_size == entry.size
        for name, entry in objects.items()
    )


class SparseCopy:
    """A sparse copy of an object; several processes may fill the same one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.objects = read_record(path)
        if path.name not in self.objects:
            what = f"the local copy of {path} has no map of its blocks, which may be holes; nothing in it is read"
            raise bad_data(
                f"{what}. Start again, which makes the copy anew if the object is in storage"
            )
        self.size, self.tag = self.objects[path.name]
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.map = os.open(map_of(path), os.O_RDWR | os.O_CLOEXEC)
        self.count = -(-self.size // BLOCK)
        self.marks = len(encode_record(self.objects))  # where they begin
        self.signature = signature_of(self.fd)
        # the blocks that this process has found or brought here
        self.checked = bytearray(self.count)

    def need(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Bring all bytes between the ends of these ranges here.

        Raise bad_data if the copy was replaced since it was opened: the caller may have mapped
        either.
        """
        if not self.is_in_place():
            raise bad_data(
                f"the local copy of {self.path} was replaced while it was read; start again"
            )
        touched = set[int]()
        for begin, end in ranges:
            if begin < end:
                touched.update(range(begin // BLOCK, (end - 1) // BLOCK + 1))
        lacking = sorted(n for n in touched if n < self.count and not self.checked[n])

        # This thread brings a single block; a pool of threads brings several.
        if len(lacking) == 1:
            self.bring(lacking[0])
        elif lacking:
            with ThreadPoolExecutor(THREADS) as pool:
                list(pool.map(self.bring, lacking))

    def is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self.fd), os.stat(self.path))
        except FileNotFoundError:
            return False

    def bring(self, number: int) -> None:
        """Read a block from storage unless it is here, as its mark says."""
        begin = number * BLOCK
        at = self.marks + number * MARK
        size = min(BLOCK, self.size - begin)
        with files.naming_file(self.path):
            mark = os.pread(self.map, MARK, at)
            if not (any(mark) and mark.endswith(self.signature)):
                # Written before the machine started last, or never: its checksum tells. A block
                # that was lost in a crash has another one.
                data: bytes | memoryview = b""
                if any(mark):
                    data = os.pread(self.fd, size, begin)
                if not mark.startswith(checksum(data)):
                    store, key = locate(self.path)
                    data = store.read(key, begin, size, self.tag)
                    done = 0
                    while done < size:
                        done += os.pwrite(self.fd, data[done:], begin + done)
                # The mark comes after its block: another process believes it at once.
                os.pwrite(self.map, checksum(data) + self.signature, at)
        self.checked[number] = 1


def checksum(block: bytes | memoryview) -> bytes:
    # Zeros mean that a block is not here, so no checksum is 0.
    return (zlib.crc32(block) or 1).to_bytes(4, "little")


def signature_of(fd: int) -> bytes:
    """Return the 4 bytes that end the marks of this file until the machine starts again.

    A copy of the file has others: it may have been made while blocks were written.
    """
    try:
        boot = boot_id()
    except OSError:
        return os.urandom(4)  # only this process believes its marks
    status = os.fstat(fd)
    return hashlib.sha256(f"{boot} {status.st_dev} {status.st_ino}".encode()).digest()[:4]


def boot_id() -> str:
    """Return the kernel's id of this start of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text()


@functools.cache
def sparse_copy(path: str) -> SparseCopy | None:
    """Return the copy of an object, or None for a file of this machine."""
    return SparseCopy(Path(path)) if address_of(path) is not None else None


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
