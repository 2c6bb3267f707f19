"""`manifest.json`, and reading that trusts only what it has hashed.

It has the size of each file and the SHA-256 of each 16 MiB chunk, so that a slice of a large file
can be verified without the rest. Hand-written because safetensors and torch's checkpoints have no
checksums.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import mmap
import os
import re
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.base import files
from meshwright.base.errors import BAD_DATA, IO, UserError
from meshwright.base.host import returned_memory
from meshwright.base.storage import store
from meshwright.checkpoint import disks
from meshwright.runtime.ranks.team import Team

if TYPE_CHECKING:
    from meshwright.checkpoint.machines import RunMachines

FORMAT = "meshwright checkpoint 1"
CHUNK = 16 << 20  # bytes that one hash covers; a slice reads at most this much extra at each end
THREADS = min(8, os.cpu_count() or 1)
AHEAD = max(4, THREADS)  # chunks read and hashed in advance: at most 128 MiB of memory
OTHERS_AHEAD = 1  # of another machine, on which many ranks may read at once
REMOTE_TRIES = 3  # readings of a chunk from storage: a network may have changed its bytes
MANIFEST = "manifest.json"
HIDDEN = f".{MANIFEST}"  # beside another program's files, so that its folder looks as it makes it
MANIFEST_LIMIT = 64 << 20  # bytes: the hashes of a 16 TB checkpoint
SEAL = 128  # last bytes of a manifest, which hold its own hash
JSON_LIMIT = 16 << 20


class DamagedCheckpoint(UserError):
    """A checkpoint file is missing or differs from what was written."""

    def __init__(self, message: str, everywhere: bool = False) -> None:
        super().__init__(message, BAD_DATA, everywhere)


def unreadable(path: Path, error: OSError, rest: str = "") -> UserError:
    """Return DamagedCheckpoint if the file is missing, otherwise an I/O UserError.

    Examples of the second are missing permission and a failing disk.
    """
    message = f"{path}: {error.strerror}{rest}"
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return DamagedCheckpoint(message)
    return UserError(message, IO)


class File(NamedTuple):
    size: int
    sha256: str  # the hex digests of its chunks, one after the other
    place: str = ""  # where it was written, if machines keep their files on disks of their own

    def as_json(self) -> dict[str, Any]:
        fields = self._asdict()
        return fields if self.place else {"size": self.size, "sha256": self.sha256}

    @property
    def chunks(self) -> int:
        return len(self.sha256) // 64

    def digest(self, index: int) -> str:
        return self.sha256[64 * index : 64 * index + 64]


class FilePart(NamedTuple):
    """A file of which only some chunks are read, each with its digest."""

    size: int
    digests: dict[int, str]

    def digest(self, index: int) -> str:
        return self.digests[index]


Manifest = dict[str, File]
Fill = Callable[[mmap.mmap, int], None]  # a buffer with what a file has from a byte on
Chunks = dict[tuple[Path, int], mmap.mmap]


def sha256(parts: Iterable[bytes | bytearray | memoryview | mmap.mmap]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)  # without the GIL
    return digest.hexdigest()


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode a manifest in its only valid spelling, with a hash of itself."""
    body: dict[str, Any] = {
        "format": FORMAT,
        "chunk": CHUNK,
        "files": {name: file.as_json() for name, file in manifest.items()},
    }
    spelling = json.dumps(body, sort_keys=True).encode()
    body["sha256"] = sha256([spelling])
    return json.dumps(body, sort_keys=True, indent=1).encode()


def find_manifest(folder: Path) -> Path:
    """Return the path of a step's manifest, whether or not it has one."""
    hidden = folder / HIDDEN
    return hidden if hidden.exists() else folder / MANIFEST


def read_manifest(folder: Path) -> Manifest:
    path = find_manifest(folder)
    return parse_manifest(read_small(path, MANIFEST_LIMIT), path)


def parse_manifest(raw: bytes, path: Path) -> Manifest:
    """Return the files that a manifest lists, after checking that it is as it was written."""
    body = parse_json(raw, path)
    if not isinstance(body, dict):
        raise DamagedCheckpoint(f"{path}: not a manifest")
    form = body.get("format")
    if isinstance(form, str) and form.startswith("meshwright") and form != FORMAT:
        raise DamagedCheckpoint(
            f"{path}: written in the format {form!r}, but this version reads {FORMAT!r}"
        )

    # Each file has as many digests as chunks, the last of which may be short.
    try:
        manifest = {
            name: File(file["size"], file["sha256"], file.get("place", ""))
            for name, file in body["files"].items()
        }
        valid = all(
            isinstance(size, int)
            and len(sha) == 64 * (-(-size // CHUNK))
            and isinstance(place, str)
            for size, sha, place in manifest.values()
        )
    except (KeyError, TypeError, AttributeError):
        valid = False
    # It is its own checksum: encoded again, it must be the same bytes.
    if not valid or raw != encode_manifest(manifest):
        raise DamagedCheckpoint(f"{path}: not as it was written (its own SHA-256 differs)")
    # Whoever made the manifest may have computed its hash anew.
    for name in manifest:
        if not re.fullmatch(r"(mp_rank_\d+(_\d+)?/)?[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
            raise DamagedCheckpoint(
                f"{path}: the file name {name!r} is not a plain name; nothing outside the folder is read"
            )
    return manifest


def read_seal(folder: Path) -> str:
    """Return the end of a step's manifest, its hash of itself: equal for equal steps alone."""
    path = find_manifest(folder)
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - SEAL, 0))
            return f"{size} {file.read(SEAL)!r}"
    except OSError as error:
        raise unreadable(path, error) from error


def size_of_sealed(seal: str) -> int:
    """Return the size of the manifest with this seal."""
    size = int(seal.partition(" ")[0])
    if size > MANIFEST_LIMIT:
        raise DamagedCheckpoint(
            f"a manifest of {size:,} bytes, above the limit of {MANIFEST_LIMIT:,}"
        )
    return size


def verify_step(folder: str | Path, full: bool = False) -> Manifest:
    """Check the manifest and all sizes, and with `full` every byte; return the manifest.

    Files on other machines' disks are passed over. Raise DamagedCheckpoint, which names file and
    offset.
    """
    folder = Path(folder)
    store.forget_sizes(folder)
    manifest = read_manifest(folder)
    here = files_here(folder, manifest)
    for name, file in here.items():
        check_size(folder / name, file)
    if full:
        hash_chunks(folder, divide_chunks(here, 1)[0])
    return manifest


def files_here(folder: Path, manifest: Manifest) -> Manifest:
    """Return the files of a step that should be on this machine."""
    return {
        name: file
        for name, file in manifest.items()
        if not disks.is_elsewhere(folder / name, file.place)
    }


# Of each file: its name and size, a first chunk, and the digests from there on.
Share = list[tuple[str, int, int, str]]


def verify_together(folder: Path, team: Team, machines: RunMachines | None = None) -> None:
    """Check every byte of a step; rank 0 reads the manifest, and each rank hashes its share.

    Of a step on the disks of several machines, the first rank of each hashes what it has.
    """
    if machines is not None:
        shares = team.deal(lambda: machines.divide(folder, machines.manifest_of(folder)))
        machines.deal_holders(folder, [name for name, *_ in shares], team)
    else:
        shares = team.deal(lambda: divide_chunks(verify_step(folder), team.size))
    team.run_on_all(lambda: hash_chunks(folder, shares, machines))


def divide_chunks(manifest: Manifest, ranks: int) -> list[Share]:
    """Divide the chunks of all files evenly; a rank's are consecutive, so they are in few files."""
    total = sum(file.chunks for file in manifest.values())
    shares: list[Share] = [[] for _ in range(ranks)]
    before = 0  # chunks of the files before this one
    for name, file in manifest.items():
        done = 0
        while done < file.chunks:
            # Rank r has the chunks from r * total // ranks up to where the next rank's begin.
            at = before + done
            rank = ((at + 1) * ranks - 1) // total
            end = (rank + 1) * total // ranks
            count = min(file.chunks - done, end - at)
            digests = file.sha256[64 * done : 64 * (done + count)]
            shares[rank].append((name, file.size, done, digests))
            done += count
        before += file.chunks
    return shares


def hash_chunks(folder: Path, share: Share, machines: RunMachines | None = None) -> None:
    for name, size, first, digests in share:
        part = {}
        for n in range(len(digests) // 64):
            part[first + n] = digests[64 * n : 64 * (n + 1)]
        file = FilePart(size, part)
        with VerifiedReader(folder / name, file, part, machines=machines) as reader:
            for index in part:
                reader.chunk(index)


def plain_size(path: Path, expected: str = "") -> int:
    """Return the size of a file, here or in its storage; refuse a link or anything else."""
    try:
        status = path.lstat()
    except OSError as error:
        if error.errno == errno.ENOENT and (size := store.size_of(path)) is not None:
            return size
        raise unreadable(path, error, expected) from error
    # A step's folder may be a link, which a user has made; what is in it may not.
    is_in_link = path.parent.name.startswith("mp_rank_") and path.parent.is_symlink()
    if not stat.S_ISREG(status.st_mode) or is_in_link:
        raise DamagedCheckpoint(
            f"{path}: not a plain file (a link, or something else), so it is not read"
        )
    return status.st_size


def check_size(path: Path, file: File | FilePart) -> None:
    size = plain_size(path, f"; the manifest says {file.size:,} bytes")
    if size != file.size:
        raise DamagedCheckpoint(
            f"{path} is {size:,} bytes long, but the manifest says {file.size:,}"
        )


class VerifiedReader:
    """Read byte ranges of one file, hashing each chunk before any of it is returned.

    `ahead` lists the chunks that will be needed. `last` keeps the last one for the next reader. A
    file that is not here, but in its storage or on the disk of one of the other `machines`, is read
    from there, in chunks. So is a chunk that is damaged here, if another machine has a copy.
    """

    def __init__(
        self,
        path: Path,
        file: File | FilePart,
        ahead: Iterable[int] = (),
        last: Chunks | None = None,
        machines: RunMachines | None = None,
    ) -> None:
        self.path = path
        self.file = file
        self.last: Chunks = {} if last is None else last
        self.ahead = deque(index for index in ahead if (path, index) not in self.last)
        self.ready: dict[int, Future[mmap.mmap]] = {}
        self.spare: list[mmap.mmap] = []  # new memory has to be cleared first
        self.machines = machines
        self.is_on_other = machines is not None and machines.is_on_other(path, file)
        self.fd: int | None = None
        if not self.is_on_other:
            self._open()
        self.pool = ThreadPoolExecutor(THREADS)

    def _open(self) -> None:
        """Open the file here, unless it is in storage."""
        if isinstance(self.file, File) and disks.is_elsewhere(self.path, self.file.place):
            raise disks.OnOtherMachine(self.path, self.file.place)
        check_size(self.path, self.file)
        try:
            # Between the look at it and this, someone may have put a link there.
            self.fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.ENOENT or store.size_of(self.path) is None:
                raise unreadable(self.path, error) from error

    def __enter__(self) -> VerifiedReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown(cancel_futures=True)
        if self.fd is not None:
            os.close(self.fd)

    def read(self, begin: int, end: int) -> memoryview:
        """Return verified bytes, valid until the next read; not copied within one chunk."""
        first = begin // CHUNK
        last = (end - 1) // CHUNK
        if first == last:
            return self.part_of(first, begin, end)
        joined = memoryview(bytearray(end - begin))
        for index in range(first, last + 1):
            low = max(begin, index * CHUNK)
            high = min(end, (index + 1) * CHUNK)
            joined[low - begin : high - begin] = self.part_of(index, low, high)
        return joined

    def part_of(self, index: int, begin: int, end: int) -> memoryview:
        """Return bytes of one chunk, by their place in the file."""
        start = index * CHUNK
        return memoryview(self.chunk(index))[begin - start : end - start]

    def chunk(self, index: int) -> mmap.mmap:
        if (self.path, index) in self.last:
            return self.last[self.path, index]
        # Chunks are asked for in their order: one that was passed over is not needed.
        for old in [i for i in self.ready if i < index]:
            del self.ready[old]
        limit = OTHERS_AHEAD if self.is_on_other else AHEAD
        while self.ahead and len(self.ready) < limit:
            coming = self.ahead.popleft()
            self.ready[coming] = self.pool.submit(self._read_chunk, coming)
        waiting = self.ready.pop(index, None)
        data = waiting.result() if waiting else self._read_chunk(index)
        # The last chunk, of this file or of the one before, is no longer needed: its memory is.
        self.spare += (old for old in self.last.values() if len(old) == CHUNK)
        self.last.clear()
        self.last[self.path, index] = data
        return data

    def _memory(self, size: int) -> mmap.mmap:
        with contextlib.suppress(IndexError):  # other threads take from the list too
            return self.spare.pop() if size == CHUNK else returned_memory(size)
        return returned_memory(size)

    def _read_chunk(self, index: int) -> mmap.mmap:
        begin = index * CHUNK
        data = self._memory(min(CHUNK, self.file.size - begin))
        expected = self.file.digest(index)
        end = begin + len(data)
        failures: list[UserError] = []
        for fill in self._ways():
            try:
                fill(data, begin)
            except UserError as failure:
                failures.append(failure)
                continue
            if sha256([data]) == expected:
                return data
            failures.append(
                DamagedCheckpoint(
                    f"{self.path}: bytes {begin:,} to {end:,} are not what was written (their SHA-256 differs)"
                )
            )
        raise failures[0]

    def _ways(self) -> Iterator[Fill]:
        """Yield ways to read a chunk, in the order in which they are tried."""
        if self.fd is not None:
            yield self._read_here
        elif not self.is_on_other:
            for _ in range(REMOTE_TRIES):
                yield self._read_stored
        machines = self.machines
        if machines is not None and machines.others_with(self.path):
            for attempt in range(REMOTE_TRIES):
                yield functools.partial(machines.read, self.path, attempt)

    def _read_stored(self, data: mmap.mmap, begin: int) -> None:
        """Read into `data` what the file has in its storage from byte `begin` on."""
        objects, key = store.locate(self.path)
        data[:] = objects.read(key, begin, len(data), tag=None)

    def _read_here(self, data: mmap.mmap, begin: int) -> None:
        """Read into `data` what the file has on this disk from byte `begin` on."""
        assert self.fd is not None
        got = 0
        try:
            while got < len(data):
                count = os.preadv(self.fd, [memoryview(data)[got:]], begin + got)
                if not count:
                    raise DamagedCheckpoint(
                        f"{self.path}: ends at byte {begin + got:,} of {self.file.size:,}"
                    )
                got += count
        except OSError as error:
            raise unreadable(self.path, error, f" at byte {begin + got:,}") from error


def read_json(
    folder: Path,
    manifest: Mapping[str, File | FilePart],
    name: str,
    limit: int = JSON_LIMIT,
    machines: RunMachines | None = None,
) -> Any:
    """Read a JSON file of a step, verified."""
    path = folder / name
    if name not in manifest:
        raise DamagedCheckpoint(f"{path}: not in the manifest")
    # Before a byte is read: anyone may have made the file.
    if manifest[name].size > limit:
        raise DamagedCheckpoint(
            f"{path}: {manifest[name].size:,} bytes of JSON, above the limit of {limit:,}"
        )
    size = manifest[name].size
    with VerifiedReader(path, manifest[name], machines=machines) as reader:
        raw = bytes(reader.read(0, size)) if size else b""
        return parse_json(raw, path)


def parse_json(raw: bytes, path: Path) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(raw.decode(), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path}: not JSON that we wrote: {str(error)[:200]}") from error


def read_small(path: Path, limit: int) -> bytes:
    """Read a plain file of bounded size."""
    if (size := plain_size(path)) > limit:
        raise DamagedCheckpoint(f"{path}: {size:,} bytes, above the limit of {limit:,}")
    try:
        return files.read_small(path, limit)
    except OSError as error:
        raise unreadable(path, error) from error
