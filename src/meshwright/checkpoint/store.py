"""How a checkpoint comes to be whole or not at all: folders, bytes and hashes; nothing here knows a model.

A step is a folder `iter_0005000/` of plain files and a `manifest.json` with the size of each file and the SHA-256 of
each 16 MiB chunk. It is written as `iter_0005000.tmp/`: files and fsync, manifest and fsync, rename, fsync of the
parent, and last `latest_checkpointed_iteration.txt`, Megatron's tracker, by replacement. A process killed anywhere
leaves the step published and whole, or a `.tmp` that the next writer clears. Published folders are never written into.

Many ranks write one step: each its own files, rank 0 all the rest, and what one of them finds is everybody's outcome.
They share the folder through a file system, and nothing but names, sizes and hashes goes through the `Team`.

Truth is the newest folder whose manifest holds, not the tracker: the tracker is for other programs, and to notice
that another program wrote something newer. Written by hand because no library offers it: torch's checkpoint has no
checksums, overwrites in place and unpickles on load; safetensors has neither checksums nor steps.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import stat
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.console import say
from meshwright.errors import BAD_DATA, IO, LOCKED, UserError
from meshwright.files import replacing
from meshwright.parallel.team import ALONE, Team

FORMAT = "meshwright checkpoint 1"
CHUNK = 16 << 20  # bytes of one hash; at most this much is read too much at each end of a slice
THREADS = min(4, os.cpu_count() or 1)
AHEAD = 4  # chunks read and hashed before they are asked for: 64 MiB of memory
MANIFEST = "manifest.json"
MANIFEST_LIMIT = 32 << 20  # bytes: the hashes of an 8 TB checkpoint
JSON_LIMIT = 16 << 20
SEEN_WITHIN = 5.0  # seconds: a network file system shows one node's new files to another after a while
TRACKER = "latest_checkpointed_iteration.txt"
BEST = "best_checkpointed_iteration.txt"  # ours: the step of the least validation loss

Write = Callable[[bytes | bytearray | memoryview], None]
Produce = Callable[[Write], None]  # writes a file's bytes, in order


class Damaged(UserError):
    """A file of a checkpoint is missing or is not what was written."""

    def __init__(self, message: str, everywhere: bool = False) -> None:
        super().__init__(message, BAD_DATA, everywhere)


def unreadable(path: Path, error: OSError, rest: str = "") -> UserError:
    """Only what is not there is damage: missing rights or a failing disk say nothing of the bytes."""
    words = f"{path}: {error.strerror}{rest}"
    return Damaged(words) if error.errno in (errno.ENOENT, errno.ENOTDIR) else UserError(words, IO)


class File(NamedTuple):
    size: int
    sha256: str  # the hex digests of its chunks, one after the other


Manifest = dict[str, File]


def reached(point: str) -> None:
    """Does nothing. Tests put a kill here, at every named point of the protocol."""


def step_folder(root: str | Path, step: int) -> Path:
    return Path(root) / f"iter_{step:07d}"


# Writing


def publish(
    root: str | Path,
    step: int,
    files: dict[str, Produce],
    *,
    bytes_needed: int = 0,
    team: Team = ALONE,
) -> None:
    """Write a step, of which `files` are this rank's.

    Rank 0 holds the lock of `root`. A step that is there is refused if it is whole, and else moved aside and written anew.
    """
    root = Path(root)
    folder = root / f"iter_{step:07d}.tmp"
    telling = telling_failures(root, step, bytes_needed)
    reached("begin")

    def begin() -> None:
        root.mkdir(parents=True, exist_ok=True)
        clear_unfinished(root)

    def write() -> Manifest:
        if files:
            must_see(folder, team)
        return {name: write_file(folder / name, produce) for name, produce in files.items()}

    def finish() -> None:
        for name in manifest:
            must_see(folder / name, team)
        commit(root, step, manifest)

    team.lead(telling(begin))
    refuse_whole(root, step, team)
    try:
        team.lead(telling(folder.mkdir))
        reached("after_mkdir")
        manifest = {name: File(*file) for part in team.all(telling(write)) for name, file in part.items()}
        team.lead(telling(finish))
    except UserError:
        if team.leads:  # nobody writes any more
            shutil.rmtree(folder, ignore_errors=True)
        raise


def commit(root: Path, step: int, manifest: Manifest) -> None:
    """Publish the files that lie in `iter_….tmp`."""
    folder, target = root / f"iter_{step:07d}.tmp", step_folder(root, step)
    raw = encode_manifest(manifest)
    if len(raw) > MANIFEST_LIMIT:
        raise UserError(f"{folder}: a manifest of {len(raw):,} bytes is above the {MANIFEST_LIMIT:,} we read", IO)
    write_durably(folder / MANIFEST, raw, "manifest_unsynced")
    sync_folder(folder)
    reached("before_rename")
    if target.exists():  # damaged, or refuse_whole() would have refused
        aside = root / f"{target.name}.damaged"
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
        reached("moved_aside")
    folder.rename(target)
    reached("after_rename")
    sync_folder(root)
    write_tracker(root, step)


def refuse_whole(root: Path, step: int, team: Team) -> None:
    """A checkpoint is never overwritten. Every rank looks at a part of the one that is there, all conclude alike."""
    target = step_folder(root, step)
    foreign = team.lead(lambda: is_foreign(target) if target.exists() else None)
    if foreign is None:
        return
    if not foreign:
        try:
            team.all(lambda: bool(verify(target, True, team)))
        except Damaged as damage:
            say(f"WARNING: {damage}; written anew, the damaged one is kept as {target.name}.damaged")
            return
    raise UserError(
        f"{target} holds {'a Megatron' if foreign else 'another'} checkpoint, which is never overwritten; save to another "
        "folder, or start anew with --save-overwrite, which moves the old ones aside",
        LOCKED,
        everywhere=True,
    )


def must_see(path: Path, team: Team) -> None:
    """What another rank has just made."""
    until = time.monotonic() + SEEN_WITHIN
    while team.size > 1 and not path.exists():
        if time.monotonic() > until:
            raise UserError(
                f"rank {team.rank} on {socket.gethostname()} does not see {path}, which another rank has: the folder "
                f"must be on a file system that all nodes share",
                IO,
            )
        time.sleep(0.05)


def write_file(path: Path, produce: Produce) -> File:
    """Write and fsync one new file; its chunks are hashed in threads meanwhile.

    Nothing is copied, so what `produce` hands over must not change until this returns.
    """
    digests: list[Future[str]] = []
    parts: list[memoryview] = []  # of the chunk that is being filled
    size = 0
    with ThreadPoolExecutor(THREADS) as pool, naming(path), open(path, "xb", buffering=0) as file:

        def hash_chunk() -> None:
            digests.append(pool.submit(sha256, tuple(parts)))
            parts.clear()
            if len(digests) > THREADS:  # bounds the chunks in flight when they are copies from a GPU
                digests[-THREADS - 1].result()

        def write(data: bytes | bytearray | memoryview) -> None:
            nonlocal size
            view = memoryview(data).cast("B")
            while len(view):
                part = view[: CHUNK - size % CHUNK]
                write_all(file.fileno(), part)
                parts.append(part)
                size += len(part)
                if size % CHUNK == 0:
                    hash_chunk()
                view = view[len(part) :]

        produce(write)
        if parts:
            hash_chunk()
        reached("written_unsynced")
        os.fsync(file.fileno())
        reached("shard_done")
        return File(size, "".join(digest.result() for digest in digests))


def sha256(parts: Iterable[bytes | bytearray | memoryview]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)  # without the GIL
    return digest.hexdigest()


def write_all(fd: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(fd, data) :]


def write_durably(path: Path, data: bytes, point: str = "") -> None:
    with naming(path), open(path, "wb", buffering=0) as file:
        write_all(file.fileno(), memoryview(data))
        if point:
            reached(point)
        os.fsync(file.fileno())


def write_tracker(root: str | Path, step: int, name: str = TRACKER) -> None:
    """Which step is the newest, or with BEST as its name the one of the least validation loss."""
    root = Path(root)
    with naming(root / name), replacing(root / name, durably=True) as file:
        file.write(str(step).encode())
        reached("before_tracker")
    sync_folder(root)
    reached("after_tracker")


def prune(root: str | Path, newest: int, keep_last: int, keep_every: int | None, best: int | None) -> list[int]:
    """Remove steps before `newest`, which was just saved, and return their numbers; the caller holds the lock.

    The newest `keep_last` whole steps stay, and with them multiples of `keep_every` and the best. A step that is damaged or
    cannot be read neither counts nor is removed, and none above `newest`: the run fell back from it, so it may be damaged
    where only a full reading looks. A step loses its name before its files, so that a kill leaves nothing that looks whole.
    """
    root, whole = Path(root), []
    for step in (n for n in steps(root) if n <= newest):
        with contextlib.suppress(UserError):
            verify(step_folder(root, step))
            whole.append(step)
    removed = [n for n in whole[keep_last:] if n != best and not (keep_every and n and n % keep_every == 0)]
    for step in removed:
        unnamed = root / f"iter_{step:07d}.tmp"
        step_folder(root, step).rename(unnamed)
        sync_folder(root)
        shutil.rmtree(unnamed)
    return removed


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def clear_unfinished(root: Path) -> None:
    for path in list(root.iterdir()):
        if re.fullmatch(rf"(iter_\d{{7,}}|({re.escape(TRACKER)}|{re.escape(BEST)})\.\d+)\.tmp", path.name):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an OSError of a descriptor the name of its file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextlib.contextmanager
def telling_failures(root: Path, step: int, bytes_needed: int) -> Iterator[None]:
    """Turn an OSError during a save into words."""
    try:
        yield
    except OSError as error:
        try:
            newest = latest(root)[0]
        except (UserError, OSError):
            newest = None
        if newest is None:
            rest = "there is no earlier checkpoint"
        elif newest == step:
            rest = f"{step_folder(root, step).name} itself is whole"
        else:
            rest = f"the previous checkpoint, {step_folder(root, newest).name}, is intact"
        raise UserError(
            f"{error.strerror or error} at {error.filename or root} while saving iteration {step}, "
            f"which needs {bytes_needed:,} bytes; {rest}",
            IO,
        ) from error


def check_writable(root: str | Path, bytes_needed: int, team: Team = ALONE) -> None:
    """Before the first step: can every rank write here, do they see each other's files, is there room for two?"""
    root = Path(root)
    probe = root / f".write-test-{team.rank}-{os.getpid()}"

    def write() -> str:
        try:
            root.mkdir(parents=True, exist_ok=True)
            write_durably(probe, b"x")
        except OSError as error:
            raise UserError(f"cannot write to {root}: {error.strerror or error}; change --save", IO) from error
        return probe.name

    def look() -> int:
        for name in probes:
            must_see(root / name, team)
        return shutil.disk_usage(root).free

    try:
        probes = team.all(write)
        free = team.lead(look)
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    if free < 2 * bytes_needed:
        raise UserError(
            f"{root} has {free:,} bytes free; a checkpoint needs about {bytes_needed:,} and there must be room for "
            f"two, {2 * bytes_needed:,}: make room or change --save",
            IO,
            everywhere=True,
        )


@contextlib.contextmanager
def lock(root: str | Path) -> Iterator[None]:
    """Own the folder. The kernel frees a flock when its process dies, so there is no stale lock."""
    root = Path(root)
    path = root / ".lock"
    try:
        root.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise UserError(f"cannot lock {root}: {error.strerror or error}; change --save", IO) from error
    try:
        if not _try_lock(fd, root):
            owner = os.pread(fd, 200, 0).decode(errors="replace").strip() or "a process that gives no name"
            raise UserError(f"{root} is in use by {owner}: wait for it, end it, or change --save", LOCKED)
        me = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S %z')}"
        with contextlib.suppress(OSError):  # a full disk must not stop a run from starting to say so itself
            os.ftruncate(fd, 0)
            os.pwrite(fd, me.encode(), 0)
        yield
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def _try_lock(fd: int, root: Path) -> bool:
    for attempt in range(5):  # half a second: a killed owner may still be dying, a new one still writing its name
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if attempt < 4:
                time.sleep(0.1)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise UserError(f"cannot lock {root}: {error.strerror}; change --save", IO) from error
            say(f"WARNING: the file system of {root} has no locks: a second run there would not be noticed")
            return True
    return False


# Reading


def encode_manifest(manifest: Manifest) -> bytes:
    """The one spelling of a manifest, with a hash of itself: any changed byte is noticed."""
    files = {name: {"size": file.size, "sha256": file.sha256} for name, file in manifest.items()}
    body: dict[str, Any] = {"format": FORMAT, "chunk": CHUNK, "files": files}
    body["sha256"] = sha256([json.dumps(body, sort_keys=True).encode()])
    return json.dumps(body, sort_keys=True, indent=1).encode()


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    raw = read_small(path, MANIFEST_LIMIT)
    body = parse_json(raw, path)
    if not isinstance(body, dict):
        raise Damaged(f"{path}: not a manifest")
    if isinstance(body.get("format"), str) and body["format"].startswith("meshwright") and body["format"] != FORMAT:
        raise Damaged(f"{path}: written in the format {body['format']!r}, this version reads {FORMAT!r}")
    try:
        manifest = {name: File(file["size"], file["sha256"]) for name, file in body["files"].items()}
        valid = all(
            isinstance(file.size, int) and len(file.sha256) == 64 * (-(-file.size // CHUNK))
            for file in manifest.values()
        )  # fmt: skip
    except (KeyError, TypeError, AttributeError):
        valid = False
    if not valid or raw != encode_manifest(manifest):
        raise Damaged(f"{path}: not as it was written (its own SHA-256 differs)")
    for name in manifest:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
            raise Damaged(f"{path}: the file name {name!r} is not a plain name; nothing outside the folder is read")
    return manifest


def verify(folder: str | Path, full: bool = False, team: Team = ALONE) -> Manifest:
    """Check manifest and sizes, and with `full` every byte; the manifest, or Damaged naming file and offset.

    Every rank of a team hashes its share of the chunks.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    for name, file in manifest.items():
        check_size(folder / name, file)
    number = 0
    for name, file in manifest.items() if full else ():
        count = len(file.sha256) // 64
        mine = [index for index in range(count) if (number + index) % team.size == team.rank]
        number += count
        with Reader(folder / name, file, mine) as reader:
            for index in mine:
                reader.chunk(index)
    return manifest


def check_size(path: Path, file: File) -> None:
    try:
        found = path.lstat()
    except OSError as error:
        raise unreadable(path, error, f"; the manifest says {file.size:,} bytes") from error
    if not stat.S_ISREG(found.st_mode):
        raise Damaged(f"{path}: a link or something else that is not a plain file; nothing else is read")
    if found.st_size != file.size:
        raise Damaged(f"{path}: {found.st_size:,} bytes long, the manifest says {file.size:,}")


class Reader:
    """Byte ranges of one file. Each chunk touched is hashed before it is believed; `ahead`: which will be touched."""

    def __init__(self, path: Path, file: File, ahead: Iterable[int] = ()) -> None:
        self.path, self.file, self.ahead = path, file, deque(ahead)
        self.ready: dict[int, Future[bytearray]] = {}
        check_size(path, file)
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise unreadable(path, error) from error
        self.pool = ThreadPoolExecutor(THREADS)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown(cancel_futures=True)
        os.close(self.fd)

    def read(self, begin: int, end: int) -> memoryview:
        """Bytes begin to end, verified, in memory of our own."""
        first, last = begin // CHUNK, (end - 1) // CHUNK
        if first == last:
            return memoryview(self.chunk(first))[begin - first * CHUNK : end - first * CHUNK]
        joined = bytearray(end - begin)
        for index in range(first, last + 1):
            low, high = max(begin, index * CHUNK), min(end, (index + 1) * CHUNK)
            joined[low - begin : high - begin] = memoryview(self.chunk(index))[low % CHUNK : high - index * CHUNK]
        return memoryview(joined)

    def chunk(self, index: int) -> bytearray:
        for old in [i for i in self.ready if i < index]:
            del self.ready[old]
        while self.ahead and len(self.ready) < AHEAD:
            coming = self.ahead.popleft()
            self.ready[coming] = self.pool.submit(self._read_chunk, coming)
        waiting = self.ready.get(index)
        return waiting.result() if waiting else self._read_chunk(index)

    def _read_chunk(self, index: int) -> bytearray:
        begin = index * CHUNK
        data = bytearray(min(CHUNK, self.file.size - begin))
        got = 0
        try:
            while got < len(data):
                count = os.preadv(self.fd, [memoryview(data)[got:]], begin + got)
                if not count:
                    raise Damaged(f"{self.path}: ends at byte {begin + got:,} of {self.file.size:,}")
                got += count
        except OSError as error:
            raise unreadable(self.path, error, f" at byte {begin + got:,}") from error
        if sha256([data]) != self.file.sha256[64 * index : 64 * index + 64]:
            end = begin + len(data)
            raise Damaged(f"{self.path}: bytes {begin:,} to {end:,} are not what was written (their SHA-256 differs)")
        return data


def read_json(folder: Path, manifest: Manifest, name: str, limit: int = JSON_LIMIT) -> Any:
    """A JSON file of a step, verified."""
    path = folder / name
    if name not in manifest:
        raise Damaged(f"{path}: not in the manifest")
    if manifest[name].size > limit:
        raise Damaged(f"{path}: {manifest[name].size:,} bytes of JSON, more than {limit:,} are not read")
    with Reader(path, manifest[name]) as reader:
        return parse_json(bytes(reader.read(0, manifest[name].size)) if manifest[name].size else b"", path)


def parse_json(raw: bytes, path: Path) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(raw.decode(), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path}: not JSON that we wrote: {str(error)[:200]}") from error


def read_small(path: Path, limit: int) -> bytes:
    """A whole plain file of bounded size."""
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode):
            raise Damaged(f"{path}: a link or something else that is not a plain file; nothing else is read")
        if found.st_size > limit:
            raise Damaged(f"{path}: {found.st_size:,} bytes, more than {limit:,} are not read")
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


# Which step


def latest(root: str | Path, below: int | None = None) -> tuple[int | None, list[str]]:
    """The newest step whose manifest and sizes hold, and what has to be said aloud about newer ones.

    None: no checkpoint was ever finished here. Steps that are all damaged are an error, never a fresh start, and so
    is a tracker that names something newer than our newest step. `below`: only older ones, after a damaged read.
    """
    root = Path(root)
    names = listing(root)
    notes: list[str] = []
    refuse_foreign(root, names, notes)
    damages = [f"{root / name} was found damaged and moved aside" for name in names if name.endswith(".damaged")]
    for step in steps(root):
        if below is not None and step >= below:
            continue
        try:
            verify(step_folder(root, step))
            return step, notes
        except Damaged as damage:
            notes.append(f"WARNING: skipping {step_folder(root, step).name}, it is damaged: {damage}")
            damages.append(str(damage))
    if damages or below is not None:
        raise Damaged(
            f"no whole checkpoint in {root}{f' below iteration {below}' if below is not None else ''}: "
            + "; ".join(damages or ["there is none"])
            + ". To start anew, give another folder or --save-overwrite"
        )
    notes += [f"WARNING: {root / name} was never finished and is ignored" for name in names if name.endswith(".tmp")]
    return None, notes


def steps(root: str | Path) -> list[int]:
    """Our steps, whole or not, newest first: by number, since clocks and copies change times."""
    found = (re.fullmatch(r"iter_(\d{7,})", name) for name in listing(Path(root)))
    return sorted((int(m[1]) for m in found if m and not is_foreign(Path(root) / m[0])), reverse=True)


def listing(root: Path) -> list[str]:
    """Names of what belongs to checkpoints in the folder."""
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"cannot read the folder {root}: {error.strerror}", BAD_DATA) from error
    pattern = rf"iter_\d{{7,}}(\.tmp|\.damaged)?|global_step\d+|latest|release|{re.escape(TRACKER)}|{re.escape(BEST)}"
    return sorted(name for name in names if re.fullmatch(pattern, name))


def is_foreign(folder: Path) -> bool:
    """A Megatron step: it has mp_rank_ folders, or Megatron-Core's torch_dist files, and no manifest."""
    try:
        if (folder / MANIFEST).exists():
            return False
        names = os.listdir(folder)
        return any(name.startswith("mp_rank_") or name.endswith(".distcp") for name in names) or any(
            name in (".metadata", "common.pt") for name in names
        )
    except OSError:
        return False


def refuse_foreign(root: Path, names: list[str], notes: list[str]) -> None:
    """Other programs' checkpoints count through their trackers: one newer than ours must not be passed over."""
    ours = [int(m[1]) for m in (re.fullmatch(r"iter_(\d+)(\.damaged)?", name) for name in names)
            if m and not is_foreign(root / m[0])]  # fmt: skip
    newest = max(ours, default=None)
    if newest is None:
        if any(name.startswith("global_step") for name in names):
            raise UserError(f"{root} holds a DeepSpeed checkpoint: not yet (planned for step 5)", BAD_DATA)
        if "release" in names or any(is_foreign(root / name) for name in names):
            raise UserError(f"{root} holds a Megatron checkpoint: not yet (planned for step 5)", BAD_DATA)
    for name, pattern in ((TRACKER, r"(\d{1,15})|release"), ("latest", r"global_step(\d{1,15})")):
        if name not in names or not (root / name).is_file():
            continue
        with open(root / name, "rb") as file:
            text = file.read(200).decode(errors="replace").strip()
        said = re.fullmatch(pattern, text, re.ASCII)
        if not said:
            if newest is None:
                raise UserError(f"{root / name} says {text!r}, not an iteration, and there is no checkpoint", BAD_DATA)
            notes.append(f"WARNING: {root / name} says {text!r}, not an iteration; ignored")
        elif text == "release":  # stands for iteration 0: any step of ours is newer
            if newest is None:
                raise UserError(f"{root} holds a Megatron release checkpoint: not yet (planned for step 5)", BAD_DATA)
        elif newest is None or int(said[1]) > newest:
            have = "there is no checkpoint of ours" if newest is None else f"our newest is iteration {newest}"
            if is_foreign(step_folder(root, int(said[1]))):
                have += " and Megatron checkpoints are not yet read (planned for step 5)"
            cure = "remove that file to start anew" if newest is None else f"write {newest} into it to go on from there"
            raise UserError(f"{root / name} names iteration {said[1]}, but {have}: {cure}", BAD_DATA)


def held(root: str | Path) -> list[str]:
    """Names of checkpoints, of anybody, that a run without --load must not write beside."""
    return [name for name in listing(Path(root)) if not name.endswith(".tmp")]


def move_aside(root: str | Path) -> Path:
    """Put every checkpoint into a folder `replaced-N` of the same root. The caller holds the lock."""
    root = Path(root)
    number = 1
    while (aside := root / f"replaced-{number}").exists():
        number += 1
    aside.mkdir()
    names = listing(root)
    for name in sorted(names, key=lambda name: name.startswith("iter_")):  # trackers first: none may outlive its step
        (root / name).rename(aside / name)
    sync_folder(root)
    return aside


def split_path(path: str | Path) -> tuple[Path, int | None]:
    """A root, or one step's folder in it: users name either."""
    path = Path(path)
    found = re.fullmatch(r"iter_(\d{7,})", path.name)
    return (path.parent, int(found[1])) if found else (path, None)
