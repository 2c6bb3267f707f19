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

from meshwright import files
from meshwright.checkpoint.lease import Lease, confirm, identity, noting_failure, read_owner
from meshwright.checkpoint.manifests import MANIFEST
from meshwright.checkpoint.steps import OUR_STEP, TRACKER, list_steps, split_path, step_folder
from meshwright.errors import not_a_run
from meshwright.progress import progress_bar
from meshwright.ranks.pulse import pulse
from meshwright.runs.rows import METRICS
from meshwright.storage.addresses import address_of
from meshwright.storage.copies import download, read_note, write_note
from meshwright.storage.store import BucketObjects, Entry, locate

FETCHED = ".fetched.json"  # the tags of objects that were copied here
LEFT_OUT = r"(tensorboard|wandb|profile|replaced-\d+|logs)/.*"  # of a run, when another machine goes on with it
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
    runs = {os.path.dirname(name) for name in store.entries(key) if os.path.basename(name) == METRICS}
    if not runs:
        raise not_a_run(path, METRICS)
    for run in sorted(runs):
        refresh(path / run)


def refresh(path: str | Path) -> None:
    """Make the folder of a run like its address, unless this folder is the last that wrote there.

    Our steps are copied as their manifests alone, other programs' folders with all files.
    """
    root = split_path(path)[0]
    store, key = locate(root)
    objects = store.entries(key)
    if not objects:
        return
    root.mkdir(parents=True, exist_ok=True)
    with files.lock(root / ".fetch.lock"):
        owner, own_name = read_owner(store, key), identity(root)
        is_ahead = bool(own_name) and (owner is None or owner["id"] == own_name)
        kept = read_note(root / FETCHED)
        ours = {name for name in objects if re.fullmatch(rf"{OUR_STEP}/{MANIFEST}", name)}
        if not is_ahead:
            remove_foreign_steps(root, {name.partition("/")[0] for name in ours}, store, key)
        wanted = wanted_files(objects, ours, owner is not None, os.path.relpath(path, root))
        lacking = {
            name: entry
            for name, entry in wanted.items()
            if not (root / name).exists() or not (is_ahead or kept.get(name) == entry.tag)
        }
        total = sum(entry.size for entry in lacking.values())
        with progress_bar(f"reading {address_of(root)}", total) as advance:

            def count(size: int) -> None:
                advance(size)
                pulse.tick()  # other ranks may wait for this one

            for name, entry in lacking.items():
                download(store, f"{key}/{name}" if key else name, root / name, entry, count)
                kept[name] = entry.tag
        write_note(root / FETCHED, kept)


def wanted_files(objects: dict[str, Entry], ours: set[str], has_owner: bool, below: str) -> dict[str, Entry]:
    """Return the objects to copy: of a run what it keeps beside its steps, and their manifests."""
    if ours or has_owner:
        beside = {n: e for n, e in objects.items() if not re.match(rf"({OUR_STEP}/|{LEFT_OUT}|\.)", n)}
        return beside | {name: objects[name] for name in sorted(ours)}
    prefix = "" if below == "." else f"{below}/"
    return {n: e for n, e in objects.items() if n.startswith(prefix) or "/" not in n or n.startswith("tokenizer/")}


def remove_foreign_steps(root: Path, known: set[str], store: BucketObjects, key: str) -> None:
    """Remove steps that storage does not have, or has with other bytes: another run wrote since."""
    for step in list_steps(root):
        folder = step_folder(root, step)
        raw = store.get(f"{key}/{folder.name}/{MANIFEST}") if folder.name in known else None
        path = folder / MANIFEST
        if raw is None or not path.exists() or path.read_bytes() != raw[0]:
            shutil.rmtree(folder)


@contextlib.contextmanager
def leased(root: Path) -> Iterator[None]:
    """Be the one that writes to the address of a folder, which the caller has locked."""
    if address_of(root) is None:
        yield
        return
    with Lease(root) as lease:
        if not identity(root):
            refresh(root)
        lease.record()
        try:
            yield
        finally:
            with noting_failure():
                confirm(root)
                send_files(root)


_as_sent: dict[Path, tuple[int, int]] = {}  # size and time of files that this process has sent


def send_files(root: Path) -> None:
    """Send the files of a run beside its steps that have changed."""
    if address_of(root) is None:
        return
    store, key = locate(root)
    for folder, _, names in os.walk(root):
        for path in (Path(folder, name) for name in sorted(names)):
            name = str(path.relative_to(root))
            if re.fullmatch(NOT_SENT, name) or name == TRACKER:
                continue
            with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
                status = path.lstat()
                state = status.st_size, status.st_mtime_ns
                if stat.S_ISREG(status.st_mode) and _as_sent.get(path) != state:
                    store.put(f"{key}/{name}", path)
                    _as_sent[path] = state
