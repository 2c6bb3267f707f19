"""The right of one run to write to an address of object storage.

The object OWNER names the process that last wrote there, and its folder. While a run writes, it
renews the object every BEAT seconds. Another run takes over what was released, or was not renewed
for DURATION seconds. The folder that was the last to write takes over at once, because its lock
shows that no other process is at work in it. A copy of that folder elsewhere has its id too, so
each start has an id of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.base.console import notice, remark
from meshwright.base.errors import IO, LOCKED, UserError
from meshwright.base.storage.addresses import address_of
from meshwright.base.storage.copies import read_note, write_note
from meshwright.base.storage.store import BucketObjects, locate
from meshwright.config.problem import SettingsError
from meshwright.runtime.ranks.heartbeat import heartbeat

OWNER = ".owner.json"  # also a file of the local folder: its name, and the last process that wrote
BEAT = 20.0  # seconds
DURATION = 90.0  # seconds
KEYS = ("id", "process", "beat")

# what this process is called at the addresses of its folders
_held: dict[Path, dict[str, str]] = {}


def identity(root: Path) -> str:
    """Return the name of this folder as a writer; empty if it never was one, or is no longer."""
    return str(read_note(root / OWNER).get("id", ""))


def wrote_last(root: Path, owner: dict[str, Any] | None) -> bool:
    """Return whether this folder was the last that wrote to its address: it may be ahead of it."""
    note = read_note(root / OWNER)
    if not note or owner is None:
        return bool(note)
    # A kill may have come between the note of a new start and the object: then the object has
    # the start before.
    starts = [note.get(name, "") for name in ("start", "before")]
    return owner["id"] == note.get("id") and owner["start"] in starts


def read_owner(store: BucketObjects, key: str) -> dict[str, Any] | None:
    raw = store.get(f"{key}/{OWNER}")
    if raw is None:
        return None
    try:
        owner = json.loads(raw[0])
        start = str(owner.get("start", ""))  # releases before 0.18 wrote none
        named = {name: str(owner[name]) for name in KEYS}
        return named | {"start": start, "released": bool(owner["released"]), "tag": raw[1]}
    except (ValueError, KeyError, TypeError):
        path = f"{store.bucket}/{key}/{OWNER}"
        raise UserError(
            f"{path} is not as a run writes it; remove it if no run writes there", IO
        ) from None


class Lease:
    """The right to write to the address of a folder, which the caller has locked.

    If it could not, as `is_locked` says, another process may be at work in the same folder.
    """

    def __init__(self, root: Path, is_locked: bool = True) -> None:
        self.root = root
        self.is_locked = is_locked
        self.ended = threading.Event()
        self.store, self.key = locate(root)
        root.mkdir(parents=True, exist_ok=True)
        process = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S %z')}"
        self.name = {
            "id": identity(root) or uuid.uuid4().hex,
            "process": process,
            "start": uuid.uuid4().hex,
        }
        # The object is written only if it is still as it was read: of two processes that take over
        # at the same time, one fails.
        self.before = before = self.wait_for_other()
        mode: Any = "create" if before is None else {"e_tag": before["tag"]}
        if not wrote_last(root, before):
            # what is here is not what is there, until `record`
            (root / OWNER).unlink(missing_ok=True)
        else:  # whether or not a kill comes before the object is written
            write_note(root / OWNER, self.name | {"before": before["start"] if before else ""})
        self.tag = self.put(mode)
        if self.tag is None:
            raise self.in_use(read_owner(self.store, self.key))
        self.thread = threading.Thread(target=self.keep, daemon=True, name="lease")

    def __enter__(self) -> Lease:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()
        self.renew(released=True)

    def record(self) -> None:
        """Note that the folder is as its address, or ahead of it."""
        write_note(self.root / OWNER, self.name)
        _held[self.root] = self.name

    def wait_for_other(self) -> dict[str, Any] | None:
        """Return the owner before, after waiting as long as it may be at work; refuse if it is."""
        first = owner = read_owner(self.store, self.key)
        if first is None or first["released"] or (self.is_locked and wrote_last(self.root, first)):
            return first
        notice(
            f"{address_of(self.root)} was written by {first['process']}: waiting {DURATION:.0f} s for a sign of it"
        )
        until = time.monotonic() + DURATION
        while time.monotonic() < until:
            time.sleep(min(1.0, DURATION / 10))
            heartbeat.tick()
            owner = read_owner(self.store, self.key)
            if owner is None or owner["released"]:
                return owner
            # Beats are compared, not times, since the clocks of two machines may differ.
            if owner["beat"] != first["beat"]:
                raise self.in_use(owner)
        remark(
            f" > {address_of(self.root)} is taken over from {first['process']}: no sign for {DURATION:.0f} s"
        )
        return owner

    def in_use(self, owner: dict[str, Any] | None) -> UserError:
        who = owner["process"] if owner else "another run"
        return SettingsError(
            f"{address_of(self.root)} is in use by {who}: wait for it, end it, or change {{save}}",
            LOCKED,
        )

    def put(self, mode: Any, released: bool = False) -> str | None:
        """Write the object and return its tag, None if another process has written it."""
        data = json.dumps({**self.name, "beat": uuid.uuid4().hex, "released": released}).encode()
        tag = self.store.put(f"{self.key}/{OWNER}", data, mode)
        if tag is not None:
            return tag
        # It may have been written, now or before, and the answer was lost.
        now = read_owner(self.store, self.key)
        if now and now.items() >= self.name.items():
            return str(now["tag"])
        return None

    def keep(self) -> None:
        while not self.ended.wait(BEAT):
            self.renew()

    def renew(self, released: bool = False) -> None:
        """Write the object again, unless another run has: then `confirm` will end this one."""
        with noting_failure():
            if self.tag is not None:
                self.tag = self.put({"e_tag": self.tag}, released)


def confirm(root: Path) -> str:
    """Refuse to go on if another run has taken the address over; return this start's id."""
    store, key = locate(root)
    owner = read_owner(store, key)
    name = _held.get(root)
    if owner is None or name is None or not owner.items() >= name.items():
        who = owner["process"] if owner else "someone who removed its owner's object"
        raise UserError(
            f"{address_of(root)} was taken over by {who}; this run's later steps are on this machine alone",
            LOCKED,
        )
    return name["start"]


@contextlib.contextmanager
def noting_failure() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        notice(f"WARNING: {error}")
