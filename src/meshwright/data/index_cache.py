"""Index arrays in files: built once on a machine, memory-mapped by all its processes, built again where damaged.

The arrays lie under a hash of all that they depend on. A `.json` file written last makes the arrays of an entry valid and
holds their checksums. They are built within memory-mapped files, so that billions of samples need little memory of a
process. Whoever finds no entry waits for another process of the machine that is building it: on a folder of its own each
machine builds once, and on a shared one rank 0 has built before the others look. Where a file system has no locks, several
may build the same, and the last to finish gives the name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.console import notice, say
from meshwright.files import open_locked, replacing

Ints = npt.NDArray[np.integer[Any]]
WHOLE = 64 << 20  # files up to here are checked byte by byte when they are opened,
PROBES, PROBE = 256, 1 << 18  # larger ones in as many blocks of this many bytes: as much to read at any size


class Room:
    """Where a build puts its arrays: memory, if there is no folder."""

    def array(self, part: str, length: int, dtype: npt.DTypeLike) -> Ints:
        """To be filled in any order."""
        return np.empty(length, dtype)

    def stream(self, part: str, shape: tuple[int, ...], dtype: npt.DTypeLike, blocks: Iterable[Ints]) -> Ints:
        """The blocks one after the other, which together have this shape."""
        out, done = np.empty(shape, dtype), 0
        for block in blocks:
            out[done : done + len(block)] = block
            done += len(block)
        return out


Build = Callable[[Room], list[Ints]]


class Files(Room):
    """Files under temporary names, written as they are filled; a random word keeps writers on several machines apart."""

    def __init__(self, paths: dict[str, Path]) -> None:
        self.paths, word = paths, secrets.token_hex(4)
        self.temporary = {part: path.with_name(f"{path.name}.{word}.tmp") for part, path in paths.items()}

    def array(self, part: str, length: int, dtype: npt.DTypeLike) -> Ints:
        path = self.temporary[part]
        with path.open("wb") as file:
            begin = self._header(file, (length,), dtype)
            # Space now: on a disk that is full, writing to a mapped file would kill the process without a word.
            size = length * np.dtype(dtype).itemsize
            if size and hasattr(os, "posix_fallocate"):  # macOS lacks it
                os.posix_fallocate(file.fileno(), begin, size)
            file.truncate(begin + size)
        return mapped(path, "r+")

    def stream(self, part: str, shape: tuple[int, ...], dtype: npt.DTypeLike, blocks: Iterable[Ints]) -> Ints:
        path = self.temporary[part]
        with path.open("wb") as file:
            self._header(file, shape, dtype)
            for block in blocks:
                file.write(np.ascontiguousarray(block, dtype).data)
        return mapped(path, "r")

    @staticmethod
    def _header(file: Any, shape: tuple[int, ...], dtype: npt.DTypeLike) -> int:
        descr = np.lib.format.dtype_to_descr(np.dtype(dtype))
        np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
        file.flush()
        return int(file.tell())

    def publish(self, record: Path, key: dict[str, Any]) -> None:
        for part, path in self.paths.items():
            if self.temporary[part].stat().st_size > WHOLE:  # else its checksum tells what a power cut has left of it
                with self.temporary[part].open("rb") as file:
                    os.fsync(file.fileno())
            os.replace(self.temporary[part], path)
        checksums = {part: checksum(path) for part, path in self.paths.items()}
        with replacing(record) as file:
            file.write(json.dumps({**key, "crc32": checksums}, indent=1).encode() + b"\n")

    def clear(self) -> None:
        for path in self.temporary.values():
            with contextlib.suppress(OSError):  # the folder may be what takes no file
                path.unlink()


def mapped(path: Path, mode: Any) -> Ints:
    """As a plain array: indexing numpy's memmap class is several times slower."""
    array: Ints = np.asarray(np.load(path, mmap_mode=mode, allow_pickle=False))
    return array


def cached_indices(folder: str | Path | None, key: dict[str, Any], parts: Sequence[str], build: Build) -> list[Ints]:
    """The arrays from the cache; built, and put there, where they are missing or damaged. Without a folder: built."""
    if folder is None:
        return build(Room())
    folder = Path(folder)
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    paths = {part: folder / f"{name}_{part}_idx.npy" for part in parts}
    record = folder / f"{name}.json"
    found = look(paths, record)
    if found is not None:
        return found
    files = Files(paths)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with alone(folder / f"{name}.lock") as locked:
            for left in folder.glob(f"{name}_*.tmp") if locked else ():  # by a process that was killed
                left.unlink(missing_ok=True)
            found = look(paths, record)  # another process may have built it meanwhile
            if found is None:
                say(" > WARNING: could not find index map files, building the indices on rank 0 ...")
                built = build(files)
                files.publish(record, key)
    except OSError as error:
        notice(
            f"{folder} takes no index cache ({error.strerror or error}): the indices stay in memory; --data-cache-path "
            "names a folder that takes them"
        )
        files.clear()
        return build(Room())
    finally:
        files.clear()
    if found is not None:
        return found
    loaded = load_indices(paths, record, written=True)
    return built if isinstance(loaded, str) else loaded


def look(paths: dict[str, Path], record: Path) -> list[Ints] | None:
    """What a valid entry holds; None if there is none."""
    if not record.exists():
        return None
    found = load_indices(paths, record)
    if not isinstance(found, str):
        return found
    notice(f"{record} is damaged ({found}): building the indices again")
    with contextlib.suppress(OSError):
        record.unlink()  # so that it is told once
    return None


@contextlib.contextmanager
def alone(path: Path) -> Iterator[bool]:
    """One process of this machine at a time; all at once, and False, where the file system has no locks."""
    handle, locked = open_locked(path, wait=True)
    try:
        yield locked
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def checksum(path: Path) -> int:
    """Of all bytes of a small file; of a large one of its size and of blocks spread over it.

    Blocks find a file that is cut, swapped or of other data. Single bytes that change between them are not looked for: a run
    would wait seconds for each 10 GB at every start.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= WHOLE:
            crc = 0
            while block := file.read(1 << 22):
                crc = zlib.crc32(block, crc)
            return crc
        crc = zlib.crc32(str(size).encode())
        for n in range(PROBES):
            file.seek((size - PROBE) * n // (PROBES - 1))
            crc = zlib.crc32(file.read(PROBE), crc)
    return crc


def load_indices(paths: dict[str, Path], record: Path, written: bool = False) -> list[Ints] | str:
    """The arrays of a cache entry, memory-mapped, or what is wrong with it; `written`: by this process, just now."""
    start = time.perf_counter()
    try:
        checksums = json.loads(record.read_bytes())["crc32"]
        for part, path in paths.items():
            if not written and checksum(path) != checksums[part]:
                return f"the checksum of {path.name} differs"
        arrays = [mapped(path, "r") for path in paths.values()]
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        return str(error)
    for part, path in paths.items():
        say(f" > loading {part}-idx mapping from {path}")
    say(f"    loaded indexed file in {time.perf_counter() - start:.3f} seconds")
    return arrays
