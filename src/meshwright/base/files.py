"""Files that appear complete or not at all, locks, folders to write to, templates, and checksums.

The locks are by hand (fcntl.flock), because the filelock package leaves its lock files in the
users' data folders.
"""

from __future__ import annotations

import errno
import fcntl
import filecmp
import hashlib
import math
import os
import re
import resource
import secrets
import shutil
import socket
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib import resources
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

from meshwright.base.errors import IO, LOCKED, UnfitFile, UserError
from meshwright.base.python310 import file_digest, possessive, tomllib

RECORD_LIMIT = 64 << 20  # bytes of a record of ours; it may name thousands of files
# Of a file of settings.
TOML_DEPTH = 8
TOML_ENTRIES = 10_000
# how tomllib refuses a key or table that the file has given before
TOML_TWICE = re.compile(r"Cannot (?:overwrite a value|declare .* twice) \(at line (\d+),")
# Strings and comments of TOML. An open string lasts to the end of the file or line: tomllib stops.
TOML_STRINGS = possessive(
    r'''"""(?:[^"\\]++|\\.|"(?!""))*+(?:"""|\\?\Z)|"(?:[^"\\\n]++|\\[^\n])*+"?'''
    r"""|'''(?:[^']++|'(?!''))*+(?:'''|\Z)|'[^'\n]*+'?|\#[^\n]*+""",
    re.DOTALL,
)
DEEP_KEY = re.compile(rf"(?<![\w-])[\w-]+(?:[ \t]*\.[ \t]*[\w-]+){{{TOML_DEPTH}}}")
BLOCK = 1 << 22  # bytes that are read at once, a multiple of every item size


@contextmanager
def naming_file(path: str | Path, temporary: Path | None = None) -> Iterator[None]:
    """Name the file in an OSError that was raised for its descriptor, or for a temporary one."""
    try:
        yield
    except OSError as error:
        if error.filename in (None, temporary, str(temporary)):
            error.filename = str(path)
        raise


def open_plain(path: str | Path, folder: Path | None = None) -> BufferedReader:
    """Open a regular file to read it; with `folder`, one that no link leads out of.

    Raise UnfitFile for others: a device may have no end, and a pipe nobody who writes.
    """
    # A link to itself stays as it is here, and fails when it is opened; Path.resolve raises for it.
    if folder is not None:
        target = Path(os.path.realpath(path))
        if not target.is_relative_to(os.path.realpath(folder)):
            raise UnfitFile(
                path, f"a link out of {folder}, which is not followed; put the file itself there"
            )
    # A pipe opens at once, and is refused below.
    file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise UnfitFile(path, "not a regular file, so it is not read")
    return file


def read_small(
    path: str | Path, limit: int, folder: Path | None = None, pipes: bool = False
) -> bytes:
    """Return the content of a regular file, or of a pipe if `pipes`, of at most `limit` bytes.

    See open_plain.
    """
    is_pipe = pipes and Path(path).is_fifo()
    with open(path, "rb") if is_pipe else open_plain(path, folder) as file, naming_file(path):
        size = limit if is_pipe else os.fstat(file.fileno()).st_size
        data = file.read(size + 1) if size <= limit else b""
    if max(size, len(data)) > limit:
        raise UnfitFile(path, f"more than {limit:,} bytes, so it is not read")
    return data


def allow_open_files(count: int, what: str) -> None:
    """Raise this process's limit of open files, which is often 1024, by as many as are needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    others = 1024  # which the rest of the program may open
    if resource.RLIM_INFINITY in (soft, hard) or soft >= count + others:
        return
    if hard < count + 100:
        raise UserError(
            f"{what} need {count:,} open files, and a process here may open {hard:,}; raise that limit (ulimit -n, as "
            "an administrator), or merge them with `meshwright data merge`",
            IO,
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(count + others, hard), hard))


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all bytes; a nearly full disk may take only a part at once."""
    while len(data):
        data = data[os.write(fd, data) :]


def sync(path: str | Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    # A folder can be opened this way, too, and syncing it makes renames in it durable.
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def require_unlinked(path: Path) -> None:
    """Raise UnfitFile if a link, a pipe or a device has the name of a file or folder of ours.

    Whoever made the folder may have put it there, so that we write to another file of the user.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISLNK(mode):
        raise unwritable(path, "a link, which is not followed")
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise unwritable(path, "not a regular file")


def unwritable(path: object, what: str) -> UnfitFile:
    return UnfitFile(
        path,
        f"{what}, so nothing is written there; put the file or folder itself there, or remove it",
    )


def own_file(path: str | Path, flags: int, mode: int = 0o666) -> int:
    """Open a file of ours to write it and return its descriptor; made to be an `opener` of `open`.

    Raise UnfitFile for a link, a pipe or a device; see require_unlinked.
    """
    # a pipe without a reader opens at once
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, mode)
    except OSError as error:
        # The path is a link or a pipe without a reader: say which.
        if error.errno in (errno.ELOOP, errno.ENXIO):
            require_unlinked(Path(path))
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise unwritable(path, "not a regular file")
    return fd


def own_folder(path: Path) -> None:
    """Make a folder in one of ours, unless it is there; raise UnfitFile for a link."""
    require_unlinked(path)
    path.mkdir(exist_ok=True)


def make_anew(folder: Path) -> None:
    """Make an empty folder in one of ours, in the place of an earlier one; refuse a link."""
    require_unlinked(folder)
    shutil.rmtree(folder, ignore_errors=True)
    own_folder(folder)


@contextmanager
def replacing(path: Path, durably: bool = False, typed: bool = False) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` when the block ends without an error.

    With `durably`, its bytes reach the disk before it gets its name. If the user has `typed` the
    path, a link there is followed and a device or a pipe written; else see require_unlinked.
    """
    if not typed:
        require_unlinked(path)
    elif path.exists() and not path.is_file():
        with naming_file(path), path.open("wb") as file:
            yield file
        return
    else:
        path = Path(os.path.realpath(path))  # the link stays
    # The process names the file for who looks; the word keeps threads and other machines apart.
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with naming_file(path, temporary):
            with open(temporary, "xb") as file:
                yield file
                file.flush()
                if durably:
                    os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class _Unchanged(Exception):
    """The file is there, with the same content."""


def write_lines(path: Path, lines: Iterable[bytes], overwrite: bool) -> bool:
    """Write lines, complete or not at all; return False if the file was there with this content.

    Another content is kept, unless `overwrite`.
    """
    try:
        with replacing(path, typed=True) as file:
            file.writelines(line + b"\n" for line in lines)
            file.flush()
            # An equal file keeps its time of change, so that nothing made from it is made again.
            if path.is_file() and filecmp.cmp(file.name, path, shallow=False):
                raise _Unchanged
            if path.is_file() and not overwrite:
                raise UserError(
                    f"{path} exists already, with another content, which is kept; "
                    "add --overwrite to replace it, or choose another --output-file",
                    LOCKED,
                )
    except _Unchanged:
        return False
    return True


@contextmanager
def lock(path: Path, patience: float = math.inf, stays: bool = False) -> Iterator[bool]:
    """Hold an exclusive lock on a file of its own; yield whether the file system has locks.

    While it is held, the file names this process. Raise BlockingIOError, with the name of the other
    process, if that still holds the lock after `patience` seconds. At the end the file is removed,
    or is left empty if it `stays`.
    """
    fd, has_locks = open_locked(path, patience)
    try:
        owner = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S %z')}"
        with suppress(OSError):  # on a full disk, what the caller writes next reports it
            os.ftruncate(fd, 0)
            os.pwrite(fd, owner.encode(), 0)
        yield has_locks
    finally:
        with suppress(OSError):
            if stays:
                os.ftruncate(fd, 0)
            else:
                path.unlink(missing_ok=True)
        os.close(fd)


def open_locked(path: Path, patience: float) -> tuple[int, bool]:
    """Open or create a file and lock it; return its descriptor and whether there are locks.

    The kernel releases the lock when the descriptor is closed or the process dies, so that no lock
    is ever stale.
    """
    until = time.monotonic() + patience
    while True:
        fd = own_file(path, os.O_RDWR | os.O_CREAT)
        has_locks = True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if patience == math.inf else fcntl.LOCK_NB))
        except OSError as error:
            # Some network disks have no locks; any other error is that it is held, or a real one.
            has_locks = False
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                os.close(fd)
                if error.errno != errno.EWOULDBLOCK:
                    raise
                if time.monotonic() > until:
                    owner = (
                        path.read_text(errors="replace").strip() or "a process that gives no name"
                    )
                    raise BlockingIOError(errno.EWOULDBLOCK, owner, str(path)) from None
                time.sleep(0.05)
                continue
        try:
            # The lock counts only if the file still has its name.
            if os.path.samestat(os.stat(path), os.fstat(fd)):
                return fd, has_locks
        except FileNotFoundError:
            pass
        os.close(fd)  # its owner has just removed it: lock the new file


def make_folder(folder: Path, flag: str, needed: int = 0) -> None:
    """Make a folder; check that it takes files and has `needed` bytes free. `flag` names it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Permissions do not tell: a disk may be mounted read-only.
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        raise UserError(
            f"cannot write to {folder} ({error.strerror or error}); choose another {flag}", IO
        ) from None
    if free < needed:
        shortage = f"{folder} has {free:,} bytes free, but {needed:,} are needed"
        raise UserError(f"{shortage}; free space, or choose another {flag}", IO)


@contextmanager
def writing(path: Path, flag: str) -> Iterator[None]:
    """Make the folder of a file that `flag` names, and say why a block could not write it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(f"{flag} {path} cannot be written: {error.strerror or error}", IO) from None


def fill(template: str, **values: object) -> str:
    """Return a file of this package with its names of the form @NAME@ replaced by values."""
    text = resources.files("meshwright").joinpath(template).read_text(encoding="utf-8")
    return re.sub("@([A-Z]+)@", lambda name: str(values[name[1]]), text)


class GivenTwice(ValueError):
    """A key that a file of settings gives twice; the message says which, or where."""


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, as an object_pairs_hook; raise GivenTwice if a key is repeated.

    Python's reader would take the last of equal keys, silently.
    """
    out = dict[str, Any]()
    for key, value in pairs:
        if key in out:
            raise GivenTwice(f'"{key}" is given twice')
        out[key] = value
    return out


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of TOML that strangers wrote; raise ValueError for what no settings need.

    tomllib keeps every beginning of a dotted key: 100 KB of `a.a.a...` would take 10 GB.
    """
    # Count only what is outside strings and comments.
    outside = TOML_STRINGS.sub("_", text)
    if DEEP_KEY.search(outside):
        raise ValueError(f"a key has more than {TOML_DEPTH} parts; no file of settings needs that")
    if (count := outside.count("=") + outside.count("[")) > TOML_ENTRIES:
        raise ValueError(f"{count:,} keys and tables; at most {TOML_ENTRIES:,} are read")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # tomllib says that it cannot overwrite a value, or declare a table twice.
        if found := TOML_TWICE.match(str(error)):
            raise GivenTwice(
                f"line {found[1]} gives a key or section again that an earlier line gives"
            ) from None
        raise


def parse_yaml(text: str) -> Any:
    """Return what YAML holds; raise GivenTwice if a key of a table is given twice.

    YAML forbids that, as TOML does, but yaml.safe_load takes the last one.
    """
    import yaml

    class UniqueKeyLoader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
            # Before merge keys (<<) add what a table may give again.
            lines = dict[str, int]()
            for key, _ in getattr(node, "value", ()):
                if isinstance(key, yaml.ScalarNode):
                    line = key.start_mark.line + 1
                    if key.value in lines and key.value != "<<":
                        first = lines[key.value]
                        where = f"lines {first} and {line}" if line > first else f"line {line}"
                        raise GivenTwice(f"{key.value} is given twice, in {where}")
                    lines[key.value] = line
            return super().construct_mapping(node, deep)

    return yaml.load(text, UniqueKeyLoader)  # noqa: S506 (a SafeLoader)


def read_table(name: str) -> dict[str, Any]:
    """Return a TOML file of this package."""
    return tomllib.loads(resources.files("meshwright").joinpath(name).read_text(encoding="utf-8"))


def sha256(path: str | Path, folder: Path | None = None) -> str:
    """Return the SHA-256 of a regular file; see open_plain."""
    with open_plain(path, folder) as file:
        return file_digest(file, "sha256").hexdigest()


def sample(path: str | Path, size: int, count: int, prefix: bytes = b"") -> str:
    """Return the SHA-256 of `prefix` and of the `sample_ranges` of a file."""
    digest = hashlib.sha256(prefix)
    with open(path, "rb") as file:
        for begin, end in sample_ranges(os.fstat(file.fileno()).st_size, size, count):
            file.seek(begin)
            digest.update(file.read(end - begin))
    return digest.hexdigest()


def sample_ranges(length: int, size: int, count: int) -> list[tuple[int, int]]:
    """Return `count` blocks of a file, spread evenly from its beginning to its end.

    A file that is no longer than the blocks is one.
    """
    if length <= size * count:
        return [(0, length)]
    # The first block begins at 0, and the last one ends with the file.
    begins = ((length - size) * n // (count - 1) for n in range(count))
    return [(begin, begin + size) for begin in begins]


def crc32(path: Path) -> int:
    """Return the CRC-32 of a file."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            crc = zlib.crc32(block, crc)
    return crc


def checksums(
    file: BinaryIO, hashed: bool, inspect: Callable[[int, bytes], None]
) -> tuple[str, str]:
    """Return a file's CRC-32 and, if `hashed`, SHA-256; call inspect(offset, block) on the way."""
    crc = 0
    sha = hashlib.sha256()
    file.seek(0)
    with ThreadPoolExecutor(1) as thread:  # hashing and reading release the interpreter
        while block := file.read(BLOCK):
            hashing = thread.submit(sha.update, block) if hashed else None
            crc = zlib.crc32(block, crc)
            inspect(file.tell() - len(block), block)
            if hashing is not None:
                hashing.result()
    return f"{crc:08x}", sha.hexdigest() if hashed else ""
