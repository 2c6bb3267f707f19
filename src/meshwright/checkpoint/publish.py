"""Commit protocol: a checkpoint is either complete or absent.

This module handles files and hashes; it knows nothing about models.

A step is written as `iter_0005000.tmp/`: files and fsync, manifest and fsync, rename, fsync of the
parent, and last Megatron's tracker, by replacement. A process killed at any moment leaves either
the complete step or a `.tmp` that the next writer removes. Nothing is ever written into a published
folder. Each rank writes its own files, rank 0 the rest; a failure of one is raised by all.

Hand-written because torch's checkpoint has no checksums, overwrites in place and unpickles, and
safetensors has no notion of steps.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from meshwright.base.console import remark
from meshwright.base.errors import IO, LOCKED, UnfitFile, UserError
from meshwright.base.files import naming_file, own_file, replacing, require_unlinked, sync
from meshwright.base.storage.addresses import address_of
from meshwright.checkpoint import disks, machines, manifests
from meshwright.checkpoint.steps import BEST, TRACKER, is_foreign, latest, list_steps, step_folder
from meshwright.config.problem import SettingsError
from meshwright.runtime.ranks.heartbeat import heartbeat
from meshwright.runtime.ranks.team import ALONE, Team

Write = Callable[[bytes | bytearray | memoryview], None]
Produce = Callable[[Write], None]  # writes a file's bytes, in order
Users = tuple[int, ...]  # for each rank the first one that uses the same folder; empty if all do


class Folders(NamedTuple):
    """Which folders get the files of a step, and how many of them each."""

    users: Users = ()
    copies: int = 1  # machines that keep each file, where they do not share the folder


ONE_FOLDER = Folders()
PARTS = ".parts"  # in a run's folder: the temporary step that Megatron's tree is made from
SEEN_WITHIN = 5.0  # seconds until a network file system shows one node's new files to another


def crash_point(name: str) -> None:
    """Do nothing; tests replace this to kill the process at a named point of a save or upload."""


# Writing


def write_step(
    root: str | Path,
    step: int,
    files: dict[str, Produce],
    *,
    bytes_needed: int = 0,
    team: Team = ALONE,
    run: Path | None = None,
    folders: Folders = ONE_FOLDER,
) -> None:
    """Write a step; `files` are this rank's part of it, by name.

    Rank 0 must hold the lock of `root`. An existing step is never overwritten unless it is damaged:
    then it is moved aside. `run` is the folder with the run's other steps, where it is not `root`.
    If machines do not share `root`, each of the `folders` gets its ranks' files and the manifest.
    Nothing gets its name before all machines have written all, and no tracker before all names.
    """
    root, users = Path(root), folders.users
    is_first = is_first_user(users, team)
    # Where a file is, for those who look for it on another machine; object storage has all of them.
    place = disks.own_place(run or root) if are_on_own_disks(run or root, users) else ""
    folder = root / f"iter_{step:07d}.tmp"
    explained = explain_failures(run or root, step, bytes_needed)
    crash_point("begin")

    def begin() -> None:
        root.mkdir(parents=True, exist_ok=True)
        clear_unfinished(root)

    def write() -> manifests.Manifest:
        if files:
            wait_until_visible(folder, team)
        for name in files:
            (folder / name).parent.mkdir(exist_ok=True)  # Megatron's mp_rank_00/
        written = {name: write_file(folder / name, produce) for name, produce in files.items()}
        return {name: file._replace(place=place) for name, file in written.items()}

    def complete() -> None:
        for name in names_here:
            wait_until_visible(folder / name, team)
        add_manifest(root, step, manifest)

    has_name = False

    def name() -> None:
        nonlocal has_name
        give_name(root, step)
        has_name = True

    def nothing() -> None:
        """Take part in what the first rank of each folder does."""

    team.run_on_all(explained(begin) if is_first else nothing)
    refuse_overwriting(root, step, team)
    try:
        team.run_on_all(explained(folder.mkdir) if is_first else nothing)
        crash_point("after_mkdir")
        parts = team.collect(explained(write))
        if users:  # each machine keeps the manifest
            parts = team.run_on_rank_0(lambda: parts)
        # Each machine has the small files; those of rank 0's count.
        manifest = {
            name: manifests.File(*file) for part in parts[::-1] for name, file in part.items()
        }
        if place and folders.copies > 1:
            by_name = {name: users[rank] for rank, part in enumerate(parts) for name in part}
            machines.copy_parts(folder, manifest, by_name, folders, team, explained)
        names_here = [
            name
            for rank, part in enumerate(parts)
            if not users or users[rank] == users[team.rank]
            for name in part
        ]
        team.run_on_all(explained(complete) if is_first else nothing)
        try:
            team.run_on_all(explained(name) if is_first else nothing)
        except UserError:
            if users and has_name:  # on another machine the step has not got its name
                with contextlib.suppress(OSError):
                    remove_steps(root, [step])
            raise
        team.run_on_all(explained(lambda: write_tracker(root, step)) if is_first else nothing)
    except UserError:
        if is_first:  # no rank writes any more
            shutil.rmtree(folder, ignore_errors=True)
        raise


def add_manifest(root: Path, step: int, manifest: manifests.Manifest) -> None:
    """Complete `iter_….tmp` by its manifest, and bring all of it to the disk."""
    folder = root / f"iter_{step:07d}.tmp"
    raw = manifests.encode_manifest(manifest)
    if len(raw) > (limit := manifests.MANIFEST_LIMIT):
        raise UserError(
            f"{folder}: a manifest of {len(raw):,} bytes is above the {limit:,} we read", IO
        )
    is_foreign_tree = any("/" in name for name in manifest)  # Megatron's mp_rank_00/
    name = manifests.HIDDEN if is_foreign_tree else manifests.MANIFEST
    # All that the folder names is on the disk before the folder gets its name.
    write_durably(folder / name, raw, "manifest_unsynced")
    for inner in {folder, *((folder / name).parent for name in manifest)}:
        if inner.exists():  # Megatron's mp_rank_00/ may be on another machine
            sync(inner)
    crash_point("before_rename")


def give_name(root: Path, step: int) -> None:
    """Publish `iter_….tmp`, which is complete."""
    folder = root / f"iter_{step:07d}.tmp"
    target = step_folder(root, step)
    if target.exists():  # it is damaged: refuse_overwriting() has let it pass
        aside = root / f"{target.name}.damaged"
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
        crash_point("moved_aside")
    folder.rename(target)
    crash_point("after_rename")
    sync(root)


def refuse_overwriting(root: Path, step: int, team: Team) -> None:
    """Refuse to overwrite an existing step unless it is damaged; all ranks verify a share of it."""
    target = step_folder(root, step)
    if not team.merge(target.exists(), any):
        return
    foreign = team.merge(target.exists() and is_foreign(target), any)
    # A damaged step may be written again; one that verifies is somebody's work.
    if not foreign:
        try:
            with machines.joined(root, team) as others:
                if others is not None:
                    team.run_on_rank_0(lambda: others.require_complete(step))
                manifests.verify_together(target, team, others)
        except manifests.DamagedCheckpoint as damage:
            remark(
                f"WARNING: {damage}; writing the step again and keeping the damaged one as {target.name}.damaged"
            )
            return
    raise SettingsError(
        f"{target} holds {'a Megatron' if foreign else 'another'} checkpoint, which is never overwritten; "
        "save to another folder, or start again with {save_overwrite=True}, which moves the old checkpoints aside",
        LOCKED,
        everywhere=True,
    )


def find_users(root: Path, team: Team) -> Users:
    """Find out which ranks share the folder; return () if all do.

    Others are on machines with a folder of their own, whose disks get names.
    """
    mark = root / team.run_on_rank_0(lambda: f".user-{uuid.uuid4().hex}")

    def claim() -> int:
        root.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            # at once with its content, on network file systems too
            os.symlink(str(team.rank), mark)
        return int(os.readlink(mark))

    # Each rank has read which rank made the mark; ranks that share a folder read the same one.
    claimed = team.gather(team.run_on_all(explain_failures(root, 0)(claim)))
    users = tuple(map(claimed.index, claimed))
    if is_first_user(users, team):
        mark.unlink()
    return named_users(root, users, team)


def users_by_machine(root: Path, team: Team) -> Users:
    """Return which ranks share a folder if each machine has one of its own."""
    hosts = team.gather(socket.gethostname())
    return named_users(root, tuple(map(hosts.index, hosts)), team)


def named_users(root: Path, users: Users, team: Team) -> Users:
    """Name the disks of these users; return () if all are one."""
    if not any(users):
        return ()
    name_disks(root, users, team)
    return users


def name_disks(root: Path, users: Users, team: Team) -> None:
    """Give the disks names, so that a later start knows them; a folder in storage needs none."""
    if not are_on_own_disks(root, users):
        return

    is_first = is_first_user(users, team)
    names = team.gather(disks.disk_of(root) if is_first else "")

    def name() -> None:
        # A folder that was copied from another machine has that machine's name of the disk.
        own = names[team.rank]
        if is_first and (not own or own in names[: team.rank]):
            root.mkdir(parents=True, exist_ok=True)
            disks.name_disk(root)

    team.run_on_all(explain_failures(root, 0)(name))


def are_on_own_disks(root: str | Path, users: Users) -> bool:
    """Return whether machines keep their parts of a step; object storage gets all of them."""
    return bool(users) and not address_of(root)


def is_first_user(users: Users, team: Team) -> bool:
    return users[team.rank] == team.rank if users else team.is_rank_0


def wait_until_visible(path: Path, team: Team) -> None:
    """Wait for a file or folder that another rank has just made."""
    until = time.monotonic() + SEEN_WITHIN
    while team.size > 1 and not path.exists():
        if time.monotonic() > until:
            me = f"rank {team.rank} on {socket.gethostname()}"
            cure = "the folder must be on a file system that all nodes share"
            raise UserError(f"{me} does not see {path}, which another rank has written; {cure}", IO)
        time.sleep(0.05)


def write_file(path: Path, produce: Produce) -> manifests.File:
    """Write and fsync one new file; threads hash and write its chunks.

    Nothing is copied, so the buffers that `produce` passes on must not change until this returns.
    """
    digests: list[Future[str]] = []
    parts: list[memoryview] = []  # of the current chunk
    size = 0
    with (
        ThreadPoolExecutor(manifests.THREADS) as pool,
        naming_file(path),
        open(path, "xb", buffering=0) as file,
    ):

        def send() -> None:
            begin = size - sum(map(len, parts))
            digests.append(pool.submit(write_chunk, file.fileno(), begin, tuple(parts)))
            parts.clear()
            # Bound the chunks in flight, which are copies if they come from a GPU.
            if len(digests) > manifests.THREADS:
                digests[-manifests.THREADS - 1].result()

        def write(data: bytes | bytearray | memoryview) -> None:
            nonlocal size
            # Data is cut at the ends of chunks, since each chunk has its own hash.
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
        crash_point("written_unsynced")
        os.fsync(file.fileno())
        crash_point("shard_done")
        return manifests.File(size, "".join(sha256s))


def write_chunk(fd: int, begin: int, parts: tuple[memoryview, ...]) -> str:
    # A call may write only a part of what it is given.
    end = begin
    for part in parts:
        while len(part):
            done = os.pwrite(fd, part, end)
            end += done
            part = part[done:]
    if hasattr(os, "posix_fadvise"):
        # Linux writes to the disk now, not all at once in fsync; unwritten pages stay cached.
        os.posix_fadvise(fd, begin, end - begin, os.POSIX_FADV_DONTNEED)
    heartbeat.tick()
    return manifests.sha256(parts)


def write_durably(path: Path, data: bytes, point: str = "") -> None:
    with naming_file(path), open(path, "wb", opener=own_file) as file:
        file.write(data)
        file.flush()
        crash_point(point)
        os.fsync(file.fileno())


def write_tracker(root: str | Path, step: int, name: str = TRACKER) -> None:
    """Record the newest step or, under the name BEST, the step with the lowest validation loss."""
    root = Path(root)
    with replacing(root / name, durably=True) as file:
        file.write(str(step).encode())
        crash_point("before_tracker")
    sync(root)
    crash_point("after_tracker")


def damaged_steps(root: str | Path, newest: int) -> list[int]:
    """Return the steps before `newest` of which this machine's files are damaged or unreadable."""
    damaged = []
    for step in list_steps(root):
        if step < newest:  # of the newest, other machines may still be sending their files
            try:
                manifests.verify_step(step_folder(root, step))
            except UserError:
                damaged.append(step)
    return damaged


def steps_to_remove(
    root: str | Path,
    newest: int,
    keep_last: int,
    keep_every: int | None,
    best: int | None,
    damaged: Collection[int],
) -> list[int]:
    """Return the steps to remove before `newest`, which was just saved.

    The newest `keep_last` complete steps stay, as do multiples of `keep_every` and the best.
    Damaged steps are neither counted nor removed. Neither are steps above `newest`: the run fell
    back from them, perhaps because full verification found damage.
    """
    complete = [n for n in list_steps(root) if n <= newest and n not in damaged]
    return [
        n
        for n in complete[keep_last:]
        if n != best and not (keep_every and n and n % keep_every == 0)
    ]


def remove_steps(root: str | Path, removed: list[int]) -> None:
    """Remove steps from a folder, whose lock the caller holds.

    A step is renamed before its files are removed, so a kill never leaves a partial step that looks
    complete.
    """
    root = Path(root)
    for step in removed:
        folder = step_folder(root, step)
        if not folder.exists():  # a machine may have no part of it
            continue
        unnamed = root / f"iter_{step:07d}.tmp"
        folder.rename(unnamed)
        crash_point("retention")
        sync(root)
        shutil.rmtree(unnamed)


def clear_unfinished(root: Path) -> None:
    # Steps, and trackers under the names that `replacing` gives them while they are written.
    tracker = rf"({re.escape(TRACKER)}|{re.escape(BEST)})\.[\da-f.]+"
    for path in list(root.iterdir()):
        if re.fullmatch(rf"(iter_\d{{7,}}|{tracker})\.tmp", path.name):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


@contextlib.contextmanager
def explain_failures(root: Path, step: int, bytes_needed: int = 0) -> Iterator[None]:
    """Turn an OSError during a save into a message that says which checkpoint is still intact."""
    try:
        yield
    except OSError as error:
        newest = None
        with contextlib.suppress(UserError, OSError):
            newest = latest(root)[0]
        if newest is None:
            rest = "there is no earlier checkpoint"
        elif newest == step:
            rest = f"{step_folder(root, step).name} itself is complete"
        else:
            rest = f"the previous checkpoint, {step_folder(root, newest).name}, is intact"
        what = (
            f"{error.strerror or error} at {error.filename or root} while saving iteration {step}"
        )
        room = f", which needs {bytes_needed:,} bytes" if bytes_needed else ""
        with contextlib.suppress(OSError):
            room += f" ({shutil.disk_usage(root).free:,} bytes are free)"
        raise UserError(f"{what}{room}; {rest}", IO) from error


def check_writable(
    root: str | Path, bytes_needed: int, team: Team = ALONE, copies: int = 2, users: Users = ()
) -> None:
    """Check that all ranks can write here and see each other's files, and that `copies` fit."""
    root = Path(root)
    mark = team.run_on_rank_0(lambda: f".write-test-{os.getpid()}")
    probe = root / f"{mark}-{team.rank}"

    def write() -> None:
        try:
            root.mkdir(parents=True, exist_ok=True)
            for name in (TRACKER, BEST):  # which would fail only after the first step is saved
                require_unlinked(root / name)
            write_durably(probe, b"x")
        except UnfitFile as error:  # its reason says what to do
            raise UserError(f"cannot write to {error.filename}: {error.strerror}", IO) from error
        except OSError as error:
            raise SettingsError(
                f"cannot write to {root}: {error.strerror or error}; change {{save}}", IO
            ) from error

    def measure_free_space() -> int:
        # The first user of a folder looks for the files of all, the others for the first one's.
        first = users[team.rank] if users else 0
        waited_for = [first]
        if team.rank == first:
            waited_for = [rank for rank in range(team.size) if not users or users[rank] == first]
        for rank in waited_for:
            wait_until_visible(root / f"{mark}-{rank}", team)
        return shutil.disk_usage(root).free

    try:
        team.run_on_all(write)
        free = team.merge(team.run_on_all(measure_free_space), min)
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    if free < copies * bytes_needed:
        raise SettingsError(
            f"{root} has {free:,} bytes free but needs {copies * bytes_needed:,}: room for "
            f"{'two' if copies == 2 else copies} checkpoints of about {bytes_needed:,} bytes each; free some space or "
            "change {save}",
            IO,
            everywhere=True,
        )
