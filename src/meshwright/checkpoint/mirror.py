"""Runs in object storage: the folder on this machine that stands for an address is kept like it.

In storage a step exists once its `manifest.json` does, which is written after all other files. On a
machine that did not write a step, its folder holds the manifest alone, and VerifiedReader reads the
rest from storage.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from meshwright.base import files
from meshwright.base.console import notice
from meshwright.base.errors import IO, UserError, not_a_run
from meshwright.base.progress import progress_bar
from meshwright.base.runs.rows import METRICS
from meshwright.base.storage.addresses import address_of
from meshwright.base.storage.copies import download, read_note, write_note
from meshwright.base.storage.store import BucketObjects, ChangedObject, Entry, locate
from meshwright.checkpoint.lease import (
    Lease,
    confirm,
    identity,
    noting_failure,
    read_owner,
    wrote_last,
)
from meshwright.checkpoint.manifests import MANIFEST, DamagedCheckpoint, read_manifest, sha256
from meshwright.checkpoint.steps import (
    OUR_STEP,
    TRACKER,
    list_steps,
    make_aside,
    split_path,
    step_folder,
)
from meshwright.runtime.ranks.heartbeat import heartbeat

FETCHED = ".fetched.json"  # the tags of objects that were copied here
# What was sent from here: the tags of steps' files, the hashes of their manifests.
SENT = ".sent.json"
# What a machine that goes on with a run does not need of it.
LEFT_OUT = r"(tensorboard|wandb|profile|replaced-\d+|logs)/.*"
LOOKS = 5  # at a run whose objects change while they are copied
NOT_SENT = r"(.*/)?\..*|(iter_\d|replaced-\d).*|.*\.tmp(/.*)?"


@functools.cache
def fetch(path: str | Path) -> None:
    """Bring here what a path that stands for an address needs, once in this process."""
    if address_of(path) is not None:
        refresh(path)


def fetch_runs(path: Path) -> None:
    """Bring here what the runs at or below a path that stands for an address say of themselves."""
    if address_of(path) is None:
        return
    store, key = locate(path)
    runs = {
        os.path.dirname(name) for name in store.entries(key) if os.path.basename(name) == METRICS
    }
    if not runs:
        raise not_a_run(path, METRICS)
    for run in sorted(runs):
        refresh(path / run)


def refresh(path: str | Path, had_owner: bool = True) -> None:
    """Make the folder of a run like its address, unless this folder is the last that wrote there.

    Our steps are copied as their manifests alone, other programs' folders with all files. A run
    that is at work changes its objects meanwhile: then all is looked at again. Without an owner
    (`had_owner` false) nobody knows who wrote last, so steps that only this machine has stay.
    """
    root = split_path(path)[0]
    store, key = locate(root)
    for left in reversed(range(LOOKS)):
        try:
            if objects := list_run(store, key):
                root.mkdir(parents=True, exist_ok=True)
                with files.lock(root / ".fetch.lock"):
                    bring(root, os.path.relpath(path, root), objects, had_owner)
            return
        except ChangedObject:
            if not left:
                raise


def list_run(store: BucketObjects, key: str) -> dict[str, Entry]:
    """Return the objects of a run; refuse a list without the step that the tracker names.

    Some services answer with a list that is out of date, and the run would start over.
    """
    objects = store.entries(key)
    tracked, _ = store.get(f"{key}/{TRACKER}") or (b"", None)
    if not re.fullmatch(rb"\d{1,15}", tracked):
        return objects
    folder = step_folder("", int(tracked))
    manifest = f"{folder}/{MANIFEST}"
    # A list may lag behind; an object that it lacks can still be found by its name.
    if manifest not in objects and store.entry(f"{key}/{manifest}") is not None:
        what = f"the list of {store.bucket}/{key} lacks {manifest}, which is there"
        raise UserError(f"{what}: the list is out of date; start again in a minute", IO)
    return objects


def bring(root: Path, below: str, objects: dict[str, Entry], had_owner: bool) -> None:
    """Copy what the folder of a run needs of its objects."""
    store, key = locate(root)
    owner = read_owner(store, key)
    is_ahead = wrote_last(root, owner if had_owner else None)
    kept = read_note(root / FETCHED)
    ours = {name for name in objects if re.fullmatch(rf"{OUR_STEP}/{MANIFEST}", name)}
    if not is_ahead or owner is None or not had_owner:
        set_steps_aside(root, keeps_unsent=is_ahead)

    # What is not here, or in another version. Whoever wrote last has the newest version of all.
    lacking: dict[str, Entry] = {}
    for name, entry in wanted_files(objects, ours, owner is not None, below).items():
        path = root / name
        exists = path.exists()
        is_same = exists and kept.get(name) == entry.tag and path.stat().st_size == entry.size
        if not is_same and not (exists and is_ahead):
            lacking[name] = entry
    total = sum(entry.size for entry in lacking.values())
    with progress_bar(f"reading {address_of(root)}", total) as advance:

        def count(size: int) -> None:
            advance(size)
            heartbeat.tick()  # other ranks may wait for this one

        for name, entry in lacking.items():
            download(store, f"{key}/{name}" if key else name, root / name, entry, count)
            kept[name] = entry.tag
    if not is_ahead:  # else these files will change here
        write_note(root / FETCHED, kept)


def wanted_files(
    objects: dict[str, Entry], ours: set[str], has_owner: bool, below: str
) -> dict[str, Entry]:
    """Return the objects to copy: of a run what it keeps beside its steps, and their manifests."""
    if ours or has_owner:
        beside = {
            n: e for n, e in objects.items() if not re.match(rf"({OUR_STEP}/|{LEFT_OUT}|\.)", n)
        }
        return beside | {name: objects[name] for name in sorted(ours)}
    prefix = "" if below == "." else f"{below}/"
    return {
        n: e
        for n, e in objects.items()
        if n.startswith(prefix) or "/" not in n or n.startswith("tokenizer/")
    }


def set_steps_aside(root: Path, keeps_unsent: bool) -> None:
    """Set steps aside that storage lacks, or has with other bytes: another run wrote there since.

    Each may be the only copy of what this machine has computed, unless it was in storage and was
    removed there: such a step is removed here too. With `keeps_unsent`, those that storage lacks
    stay.
    """
    aside = None
    kept: list[str] = []
    sent = read_note(root / SENT)
    for step in list_steps(root):
        folder = step_folder(root, step)
        there = manifest_there(folder)
        if is_here(folder, there) or (there is None and keeps_unsent):
            continue
        if not is_of_use(folder, sent.get(f"{folder.name}/{MANIFEST}")):
            shutil.rmtree(folder)  # its files were in storage, and another run has removed them
            continue
        aside = aside or make_aside(root)
        folder.rename(aside / folder.name)
        kept.append(folder.name)
    if aside:
        what = f"{address_of(root)} does not have {', '.join(kept)} as this machine does: another run has written there"
        notice(
            f"WARNING: {what} since; what is here is kept as {aside.name} in the local copy, and not used"
        )


def is_of_use(folder: Path, published: str | None) -> bool:
    """Return whether a step has files that storage never had, or a manifest of files there.

    `published` is the hash of the last manifest that this machine knows to have been there. A run
    that removes a step removes all of its files; when some are still there, something else has
    taken the others, and what is here may be their last copy.
    """
    path = folder / MANIFEST
    was_there = path.exists() and sha256([path.read_bytes()]) == published
    if not was_there and {each.name for each in folder.iterdir()} - {MANIFEST}:
        return True
    store, key = locate(folder)
    with contextlib.suppress(DamagedCheckpoint):
        return any(store.entry(f"{key}/{name}") is not None for name in read_manifest(folder))
    return False


def is_published(folder: Path) -> bool:
    """Return whether storage has the manifest that a step has here."""
    return is_here(folder, manifest_there(folder))


def manifest_there(folder: Path) -> bytes | None:
    store, key = locate(folder)
    found = store.get(f"{key}/{MANIFEST}")
    return found[0] if found else None


def is_here(folder: Path, manifest: bytes | None) -> bool:
    return (folder / MANIFEST).exists() and (folder / MANIFEST).read_bytes() == manifest


@contextlib.contextmanager
def leased(root: Path, is_locked: bool = True) -> Iterator[None]:
    """Be the one that writes to the address of a folder, which the caller has locked if it can."""
    if address_of(root) is None:
        yield
        return
    with Lease(root, is_locked) as lease:
        if lease.before is None or not identity(root):
            refresh(root, had_owner=lease.before is not None)
        lease.record()
        (root / FETCHED).unlink(missing_ok=True)  # these files will change here
        try:
            yield
        finally:
            with noting_failure():
                send_files(root)


_as_sent: dict[Path, tuple[int, int]] = {}  # size and time of files that this process has sent


def send_files(root: Path) -> None:
    """Send the files of a run beside its steps that have changed; see `confirm`."""
    if address_of(root) is None:
        return
    store, key = locate(root)
    for folder, _, names in os.walk(root):
        for path in (Path(folder, name) for name in sorted(names)):
            name = str(path.relative_to(root))
            if re.fullmatch(NOT_SENT, name) or name == TRACKER:
                continue
            # One that was removed meanwhile is passed over.
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                state = status.st_size, status.st_mtime_ns
                if stat.S_ISREG(status.st_mode) and _as_sent.get(path) != state:
                    confirm(root)
                    store.put(f"{key}/{name}", path)
                    _as_sent[path] = state
