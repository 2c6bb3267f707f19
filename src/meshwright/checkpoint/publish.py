"""How a checkpoint comes to be whole or not at all: folders, bytes and hashes; nothing here knows a model.

A step is a folder `iter_0005000/` of plain files and a `manifest.json` with the size of each file and the SHA-256 of
each 16 MiB chunk. It is written as `iter_0005000.tmp/`: files and fsync, manifest and fsync, rename, fsync of the
parent, and last `latest_checkpointed_iteration.txt`, Megatron's tracker, by replacement. A process killed anywhere
leaves the step published and whole, or a `.tmp` that the next writer clears. Published folders are never written into.

Many ranks write one step: each its own files, rank 0 all the rest, and what one of them finds is everybody's outcome.
They share the folder through a file system, and nothing but names, sizes and hashes goes through the `Team`.

The tracker is for other programs, and to notice that another program wrote something newer. Written by hand because no
library offers it: torch's checkpoint has no checksums, overwrites in place and unpickles on load; safetensors has no steps.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from meshwright.checkpoint import manifests
from meshwright.checkpoint.manifests import (
    MANIFEST,
    MANIFEST_LIMIT,
    THREADS,
    Damaged,
    File,
    Manifest,
    encode_manifest,
    sha256,
    verify,
)
from meshwright.checkpoint.steps import BEST, TRACKER, is_foreign, latest, listing, step_folder, steps
from meshwright.console import say
from meshwright.errors import IO, LOCKED, UserError
from meshwright.files import open_locked, replacing
from meshwright.launch.team import ALONE, Team

Write = Callable[[bytes | bytearray | memoryview], None]
Produce = Callable[[Write], None]  # writes a file's bytes, in order
PARTS = ".parts"  # of a run's folder: what Megatron's tree is made from, while it is made
SEEN_WITHIN = 5.0  # seconds: a network file system shows one node's new files to another after a while


def reached(point: str) -> None:
    """Does nothing. Tests put a kill here, at every named point of the protocol."""


# Writing


def write_step(
    root: str | Path,
    step: int,
    files: dict[str, Produce],
    *,
    bytes_needed: int = 0,
    team: Team = ALONE,
    run: Path | None = None,
) -> None:
    """Write a step, of which `files` are this rank's. `run`: where the run's other steps are, if not there.

    Rank 0 holds the lock of `root`. A step that is there is refused if it is whole, and else moved aside and written anew.
    """
    root = Path(root)
    folder = root / f"iter_{step:07d}.tmp"
    telling = telling_failures(run or root, step, bytes_needed)
    reached("begin")

    def begin() -> None:
        root.mkdir(parents=True, exist_ok=True)
        clear_unfinished(root)

    def write() -> Manifest:
        if files:
            must_see(folder, team)
        for name in files:
            (folder / name).parent.mkdir(exist_ok=True)  # Megatron's mp_rank_00/
        return {name: write_file(folder / name, produce) for name, produce in files.items()}

    def finish() -> None:
        for name in manifest:
            must_see(folder / name, team)
        commit(root, step, manifest)

    team.run_on_lead(telling(begin))
    refuse_whole(root, step, team)
    try:
        team.run_on_lead(telling(folder.mkdir))
        reached("after_mkdir")
        manifest = {name: File(*file) for part in team.run_on_all(telling(write)) for name, file in part.items()}
        team.run_on_lead(telling(finish))
    except UserError:
        if team.is_lead:  # nobody writes any more
            shutil.rmtree(folder, ignore_errors=True)
        raise


def commit(root: Path, step: int, manifest: Manifest) -> None:
    """Publish the files that lie in `iter_….tmp`."""
    folder, target = root / f"iter_{step:07d}.tmp", step_folder(root, step)
    raw = encode_manifest(manifest)
    if len(raw) > MANIFEST_LIMIT:
        raise UserError(f"{folder}: a manifest of {len(raw):,} bytes is above the {MANIFEST_LIMIT:,} we read", IO)
    write_durably(folder / MANIFEST, raw, "manifest_unsynced")
    for inner in {folder, *((folder / name).parent for name in manifest)}:
        sync_folder(inner)
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
    foreign = team.run_on_lead(lambda: is_foreign(target) if target.exists() else None)
    if foreign is None:
        return
    if not foreign:
        try:
            team.run_on_all(lambda: bool(verify(target, True, team)))
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
    """Write and fsync one new file, its chunks hashed and written by threads.

    Nothing is copied, so what `produce` hands over must not change until this returns.
    """
    digests: list[Future[str]] = []
    parts: list[memoryview] = []  # of the chunk that is being filled
    size = 0
    with ThreadPoolExecutor(THREADS) as pool, naming(path), open(path, "xb", buffering=0) as file:

        def send() -> None:
            begin = size - sum(map(len, parts))
            digests.append(pool.submit(write_chunk, file.fileno(), begin, tuple(parts)))
            parts.clear()
            if len(digests) > THREADS:  # bounds the chunks in flight when they are copies from a GPU
                digests[-THREADS - 1].result()

        def write(data: bytes | bytearray | memoryview) -> None:
            nonlocal size
            view = memoryview(data).cast("B")
            while len(view):
                part = view[: manifests.CHUNK - size % manifests.CHUNK]
                parts.append(part)
                size += len(part)
                if size % manifests.CHUNK == 0:
                    send()
                view = view[len(part) :]

        produce(write)
        if parts:
            send()
        sha256s = [digest.result() for digest in digests]
        reached("written_unsynced")
        os.fsync(file.fileno())
        reached("shard_done")
        return File(size, "".join(sha256s))


def write_chunk(fd: int, begin: int, parts: tuple[memoryview, ...]) -> str:
    end = begin
    for part in parts:
        view = part
        while len(view):
            done = os.pwrite(fd, view, end)
            end, view = end + done, view[done:]
    if hasattr(os, "posix_fadvise"):
        # Linux begins to write to the disk now, and not all at once in fsync; what is not written yet stays cached.
        os.posix_fadvise(fd, begin, end - begin, os.POSIX_FADV_DONTNEED)
    return sha256(parts)


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


def check_writable(root: str | Path, bytes_needed: int, team: Team = ALONE, copies: int = 2) -> None:
    """Before the first step: can every rank write here, do they see each other's files, is there room for so many?"""
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
        probes = team.run_on_all(write)
        free = team.run_on_lead(look)
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    if free < copies * bytes_needed:
        raise UserError(
            f"{root} has {free:,} bytes free; a checkpoint needs about {bytes_needed:,} and there must be room for "
            f"{'two' if copies == 2 else copies}, {copies * bytes_needed:,}: make room or change --save",
            IO,
            everywhere=True,
        )


@contextlib.contextmanager
def lock(root: str | Path) -> Iterator[None]:
    """Own the folder; the kernel releases the lock when this process dies."""
    root = Path(root)
    try:
        root.mkdir(parents=True, exist_ok=True)
        fd = _open_locked(root)
    except OSError as error:
        raise UserError(f"cannot lock {root}: {error.strerror or error}; change --save", IO) from error
    try:
        owner = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S %z')}"
        with contextlib.suppress(OSError):  # on a full disk the run itself reports it
            os.ftruncate(fd, 0)
            os.pwrite(fd, owner.encode(), 0)
        yield
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def _open_locked(root: Path) -> int:
    path = root / ".lock"
    for attempt in range(5):  # half a second: a killed owner may still be dying, a new one still writing its name
        try:
            fd, has_locks = open_locked(path)
        except BlockingIOError:
            time.sleep(0.1 * (attempt < 4))
            continue
        if not has_locks:
            say(f"WARNING: the file system of {root} has no locks: a second run there would not be noticed")
        return fd
    owner = path.read_text(errors="replace").strip() or "a process that gives no name"
    raise UserError(f"{root} is in use by {owner}: wait for it, end it, or change --save", LOCKED)


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
