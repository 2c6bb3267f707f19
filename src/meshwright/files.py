"""Files that appear whole or not at all, folders that take them, and what is read from front to back in blocks."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from meshwright.errors import IO, UserError

BLOCK = 1 << 22  # bytes, a multiple of every size of a number


@contextmanager
def replacing(path: Path, durably: bool = False) -> Iterator[BinaryIO]:
    """A file that gets its name only when whole; the process number keeps several writers apart.

    `durably`: its bytes are on the disk before it has the name.
    """
    path = path.resolve()  # a link stays one
    if path.exists() and not path.is_file():  # a device, a pipe
        with path.open("wb") as file:
            yield file
        return
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            if durably:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def make_folder(folder: Path, flag: str, needed: int = 0) -> None:
    """A folder that takes files, and so many bytes, before long work begins; `flag` is what names another one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        raise UserError(f"{folder} takes no files ({error.strerror or error}): choose another {flag}", IO) from None
    if free < needed:
        raise UserError(
            f"{folder} has {free:,} bytes free, but {needed:,} are needed: free space, or choose another {flag}", IO
        )


def checksums(file: BinaryIO, hashed: bool, look: Callable[[int, bytes], None]) -> tuple[str, str]:
    """CRC-32 and, if it is to be hashed, SHA-256 of a whole file; `look` is shown where each block begins, and the block."""
    crc, sha = 0, hashlib.sha256()
    file.seek(0)
    with ThreadPoolExecutor(1) as beside:  # hashing, reading and looking release the interpreter
        while block := file.read(BLOCK):
            done = beside.submit(sha.update, block) if hashed else None
            crc = zlib.crc32(block, crc)
            look(file.tell() - len(block), block)
            if done is not None:
                done.result()
    return f"{crc:08x}", sha.hexdigest() if hashed else ""
