"""Index arrays in files, built once per machine and mapped by all processes; rebuilt if damaged.

The arrays lie under a hash of everything that they depend on; a `.json` file, written last, makes
them a valid entry. They are built in memory-mapped files, so that billions of samples need little
memory. A process that finds no entry waits while another one of the machine builds it; on a shared
folder, rank 0 has built before the others look. Where a file system has no locks, several processes
may build the same arrays, and the last one to finish names the files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.base.console import notice, say
from meshwright.base.errors import TOO_OLD
from meshwright.base.files import RECORD_LIMIT, crc32, lock, read_small, replacing

Ints = npt.NDArray[np.integer[Any]]
# Files up to this size are checked byte by byte at every start of every rank: a second for those of
# a thousand data sets. Of larger ones the size is compared; `meshwright data verify` reads them.
SMALL = 1 << 20


class Storage:
    """The place of a build's arrays: here in memory, in a subclass in files."""

    def array(self, part: str, length: int, dtype: npt.DTypeLike) -> Ints:
        """Return an array to be filled in any order."""
        return np.empty(length, dtype)

    def stream(
        self, part: str, shape: tuple[int, ...], dtype: npt.DTypeLike, blocks: Iterable[Ints]
    ) -> Ints:
        """Return the blocks one after the other; together they have this shape."""
        out = np.empty(shape, dtype)
        done = 0
        for block in blocks:
            out[done : done + len(block)] = block
            done += len(block)
        return out


IN_MEMORY = Storage()
Build = Callable[[Storage], list[Ints]]


class OnDisk(Storage):
    """Arrays in files under temporary names."""

    def __init__(self, paths: dict[str, Path]) -> None:
        # the word keeps writers on several machines apart
        self.paths = paths
        word = secrets.token_hex(4)
        self.temporary = {
            part: path.with_name(f"{path.name}.{word}.tmp") for part, path in paths.items()
        }

    def array(self, part: str, length: int, dtype: npt.DTypeLike) -> Ints:
        path = self.temporary[part]
        array = np.lib.format.open_memmap(path, "w+", np.dtype(dtype), (length,))
        # Reserve the space: on a full disk, a write to a mapped file kills the process.
        if hasattr(os, "posix_fallocate"):  # macOS lacks it
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        return np.asarray(array)

    def stream(
        self, part: str, shape: tuple[int, ...], dtype: npt.DTypeLike, blocks: Iterable[Ints]
    ) -> Ints:
        path = self.temporary[part]
        with path.open("wb") as file:
            descr = np.lib.format.dtype_to_descr(np.dtype(dtype))
            np.lib.format.write_array_header_1_0(
                file, {"descr": descr, "fortran_order": False, "shape": shape}
            )
            for block in blocks:
                file.write(np.ascontiguousarray(block, dtype).data)
        return open_array(path)

    def publish(self, record: Path, key: dict[str, Any]) -> None:
        for part, path in self.paths.items():
            # a smaller one's checksum shows what a power cut has lost
            if self.temporary[part].stat().st_size > SMALL:
                with self.temporary[part].open("rb") as file:
                    os.fsync(file.fileno())
            os.replace(self.temporary[part], path)
        facts = {
            **key,
            "bytes": {part: path.stat().st_size for part, path in self.paths.items()},
            "crc32": {part: crc32(path) for part, path in self.paths.items()},
        }
        with replacing(record) as file:
            file.write(json.dumps(facts, indent=1).encode() + b"\n")

    def clear(self) -> None:
        with contextlib.suppress(OSError):  # the folder may be what takes no file
            for path in self.temporary.values():
                path.unlink(missing_ok=True)


def open_array(path: Path) -> Ints:
    """Map a file as a plain array: indexing numpy's memmap class is several times slower."""
    array: Ints = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    return array


def cached_indices(
    folder: str | Path | None, key: dict[str, Any], parts: Sequence[str], build: Build
) -> list[Ints]:
    """Return the arrays from the cache; build and store them where they are missing or damaged.

    Without a folder they are built in memory.
    """
    if folder is None:
        return build(IN_MEMORY)
    folder = Path(folder)
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    record = folder / f"{name}.json"
    arrays = find_entry(record, parts)
    if arrays is not None:
        return arrays

    # One process of those that share the folder builds; the others wait and find the entry.
    files = OnDisk({part: array_path(record, part) for part in parts})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with lock(folder / f"{name}.lock") as is_locked:
            # by a process that was killed
            for left in folder.glob(f"{name}_*.tmp") if is_locked else ():
                left.unlink(missing_ok=True)
            # Another process may have built it meanwhile.
            arrays = find_entry(record, parts)
            if arrays is None:
                say(
                    " > WARNING: could not find index map files, building the indices on rank 0 ..."
                )
                built = build(files)
                files.publish(record, key)
                # Another process may have removed it.
                arrays = find_entry(record, parts) or built
            return arrays
    except OSError as error:
        notice(
            f"cannot write the index cache to {folder} ({error.strerror or error}); indices are kept in memory for "
            "this run; choose another folder with --data-cache-path"
        )
        files.clear()
        return build(IN_MEMORY)
    finally:
        files.clear()


def find_entry(record: Path, parts: Sequence[str]) -> list[Ints] | None:
    """Return the arrays of a valid entry, None if there is none; remove a damaged one."""
    if not record.exists():
        return None
    start = time.perf_counter()
    try:
        entry = open_entry(record)
        arrays = [entry[part] for part in parts]
    except INVALID as error:
        notice(f"{record} is damaged ({error}): building the indices again")
        with contextlib.suppress(OSError):
            record.unlink()  # so that it is reported once
        return None
    for part in parts:
        say(f" > loading {part}-idx mapping from {array_path(record, part)}")
    say(f"    loaded indexed file in {time.perf_counter() - start:.3f} seconds")
    return arrays


# raised by a damaged entry
INVALID = (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError)


def open_entry(record: Path, in_full: bool = False) -> dict[str, Ints]:
    """Return the arrays of an entry, memory-mapped; `in_full`: verify large ones too."""
    facts = json.loads(read_small(record, RECORD_LIMIT))
    if "bytes" not in facts:
        raise ValueError(f"it {TOO_OLD}")
    arrays = {}
    for part, crc in facts["crc32"].items():
        path = array_path(record, part)
        size = path.stat().st_size
        if size <= SMALL or in_full:
            if crc32(path) != crc:
                raise ValueError(f"the checksum of {path.name} differs")
        elif size != facts["bytes"][part]:
            raise ValueError(f"{path.name} has {size:,} bytes, not {facts['bytes'][part]:,}")
        arrays[part] = open_array(path)
    return arrays


def array_path(entry: Path, part: str) -> Path:
    return entry.with_name(f"{entry.stem}_{part}_idx.npy")
