"""Runs in object storage: the folder on this machine that stands for an address is kept like it.

In storage a step exists once its `manifest.json` does, which is written after all other files. On a
machine that did not write a step, its folder holds the manifest alone, and VerifiedReader reads the
rest from storage.

The object OWNER names the folder that last wrote to the address. While a run writes, it renews the
object every BEAT seconds. Another run takes over what was released, or was not renewed for LEASE
seconds. The same folder, which a run locks, takes over at once.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright import files
from meshwright.checkpoint.manifests import MANIFEST
from meshwright.checkpoint.steps import OUR_STEP, TRACKER, list_steps, split_path, step_folder
from meshwright.console import notice, remark
from meshwright.errors import IO, LOCKED, UserError
from meshwright.progress import progress_bar
from meshwright.storage.addresses import address_of
from meshwright.storage.copies import download, read_note, write_json
from meshwright.storage.store import BucketObjects, Entry, locate

OWNER = ".owner.json"
FETCHED = ".fetched.json"  # the tags of objects that were copied here
BEAT = 20.0  # seconds
LEASE = 90.0
LEFT_OUT = r"(tensorboard|wandb|profile|replaced-\d+|logs)/.*"  # of a run, when another machine goes on with it
NOT_SENT = r"(\.|iter_\d|replaced-\d).*|.*\.tmp(/.*)?"


@functools.cache
def fetch(path: str | Path) -> None:
    """Bring here what a path that stands for an address needs, once in this process."""
    if address_of(path) is not None:
        refresh(split_path(path)[0], Path(path))


def refresh(root: Path, path: Path | None = None, is_stale: bool = False) -> None:
    """Make the folder of a run like its address, unless this folder is the one that writes there.

    Our steps are copied as their manifests alone, other programs' folders with all files. With
    `is_stale`, another folder has written there until now.
    """
    store, key = locate(root)
    objects = store.entries(key)
    if not objects:
        return
    root.mkdir(parents=True, exist_ok=True)
    with files.lock(root / ".fetch.lock"):
        owner = read_owner(store, key)
        writes_here = owner is not None and owner["id"] == identity(root) and not is_stale
        kept = read_note(root / FETCHED)
        ours = {name for name in objects if re.fullmatch(rf"{OUR_STEP}/{MANIFEST}", name)}
        if not writes_here:
            remove_foreign_steps(root, {name.partition("/")[0] for name in ours}, store, key)
        wanted = wanted_files(objects, ours, owner is not None, "" if path is None else os.path.relpath(path, root))
        lacking = {
            name: entry
            for name, entry in wanted.items()
            if not (root / name).exists() or not (writes_here or kept.get(name) == entry.tag)
        }
        total = sum(entry.size for entry in lacking.values())
        with progress_bar(f"reading {address_of(root)}", total) as advance:
            for name, entry in lacking.items():
                download(store, f"{key}/{name}" if key else name, root / name, entry, advance)
                kept[name] = entry.tag
        write_json(root / FETCHED, kept)


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


# Who writes


def identity(root: Path) -> str:
    """Return the name of this folder as a writer, which is made when it first is one."""
    return str(read_note(root / OWNER).get("id", ""))


def read_owner(store: BucketObjects, key: str) -> dict[str, Any] | None:
    raw = store.get(f"{key}/{OWNER}")
    if raw is None:
        return None
    try:
        owner = json.loads(raw[0])
        return {"id": str(owner["id"]), "process": str(owner["process"]), "released": bool(owner["released"])} | {
            "beat": str(owner["beat"]),
            "tag": raw[1],
        }
    except (ValueError, KeyError, TypeError):
        path = f"{store.bucket}/{key}/{OWNER}"
        raise UserError(f"{path} is not as a run writes it; remove it if no run writes there", IO) from None


@contextlib.contextmanager
def claimed(root: Path) -> Iterator[None]:
    """Be the one that writes to the address of a folder, which the caller has locked."""
    if address_of(root) is None:
        yield
        return
    claim = Claim(root)
    beating = threading.Thread(target=claim.keep, daemon=True, name="owner")
    beating.start()
    try:
        yield
    finally:
        claim.ended.set()
        beating.join()
        with noting_failure():
            send_files(root)
        claim.renew(released=True)


class Claim:
    """The right to write to an address, renewed by a thread."""

    def __init__(self, root: Path) -> None:
        self.root, self.ended = root, threading.Event()
        self.store, self.key = locate(root)
        root.mkdir(parents=True, exist_ok=True)
        self.id = identity(root) or uuid.uuid4().hex
        process = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S %z')}"
        self.text = {"id": self.id, "process": process}
        before = self.wait_for_other()
        mode: Any = "create" if before is None else {"e_tag": before["tag"]}
        self.tag = self.put(mode)
        if self.tag is None:
            raise self.in_use(read_owner(self.store, self.key))
        if before is not None and before["id"] != self.id:
            refresh(root, is_stale=True)
        write_json(root / OWNER, {"id": self.id})

    def wait_for_other(self) -> dict[str, Any] | None:
        """Return the owner before, after waiting as long as it may be at work; refuse if it is."""
        first = owner = read_owner(self.store, self.key)
        if first is None or first["id"] == self.id or first["released"]:
            return first
        notice(f"{address_of(self.root)} was written by {first['process']}: waiting {LEASE:.0f} s for a sign of it")
        until = time.monotonic() + LEASE
        while time.monotonic() < until:
            time.sleep(min(1.0, LEASE / 10))
            owner = read_owner(self.store, self.key)
            if owner is None or owner["released"]:
                return owner
            if owner["beat"] != first["beat"]:
                raise self.in_use(owner)
        remark(
            f" > {address_of(self.root)} is taken over from {first['process']}, which gave no sign for {LEASE:.0f} s"
        )
        return owner

    def in_use(self, owner: dict[str, Any] | None) -> UserError:
        who = owner["process"] if owner else "another run"
        return UserError(f"{address_of(self.root)} is in use by {who}: wait for it, end it, or change --save", LOCKED)

    def put(self, mode: Any, released: bool = False) -> str | None:
        """Write the object and return its tag, None if another has written it."""
        beat = uuid.uuid4().hex
        data = json.dumps({**self.text, "beat": beat, "released": released}).encode()
        tag = self.store.put(f"{self.key}/{OWNER}", data, mode)
        if tag is None and (now := read_owner(self.store, self.key)) and now["beat"] == beat:
            return str(now["tag"])  # it was written, and the answer was lost
        return tag

    def keep(self) -> None:
        while not self.ended.wait(BEAT):
            self.renew()

    def renew(self, released: bool = False) -> None:
        """Write the object again, unless another run has: then `confirm` will end this one."""
        with noting_failure():
            if self.tag is not None:
                self.tag = self.put({"e_tag": self.tag}, released)


def confirm(root: Path) -> None:
    """Refuse to go on if another run has taken the address over."""
    store, key = locate(root)
    owner = read_owner(store, key)
    if owner is None or owner["id"] != identity(root):
        who = owner["process"] if owner else "someone who removed its owner's object"
        raise UserError(
            f"{address_of(root)} was taken over by {who}; this run's later steps are on this machine alone", LOCKED
        )


@contextlib.contextmanager
def noting_failure() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        notice(f"WARNING: {error}")


_as_sent: dict[Path, tuple[int, int]] = {}  # size and time of files that this process has sent


def send_files(root: Path) -> None:
    """Send the files of a run beside its steps that have changed."""
    if address_of(root) is None:
        return
    store, key = locate(root)
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if re.fullmatch(NOT_SENT, name) or name == TRACKER or path.is_symlink() or not path.is_file():
            continue
        status = path.stat()
        if _as_sent.get(path) != (state := (status.st_size, status.st_mtime_ns)):
            store.put(f"{key}/{name}", path)
            _as_sent[path] = state
