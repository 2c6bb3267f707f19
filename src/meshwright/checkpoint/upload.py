"""Copy the steps of a run to its address, in the background, while the run goes on.

A step's files are sent first and its manifest last, so a step in storage is complete or it does not
exist. The file SENT lists the tags of what was sent: an object that still has its tag is not sent
again. It has the hash of each manifest that was in storage, too; see mirror.set_steps_aside.
"""

from __future__ import annotations

import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from meshwright.base.console import notice, remark
from meshwright.base.errors import IO, LOCKED, UserError
from meshwright.base.storage.addresses import address_of
from meshwright.base.storage.copies import read_note, write_note
from meshwright.base.storage.store import Entry, locate
from meshwright.checkpoint import mirror, publish
from meshwright.checkpoint.lease import confirm, read_owner
from meshwright.checkpoint.manifests import MANIFEST, File, Manifest, read_manifest, sha256
from meshwright.checkpoint.mirror import SENT
from meshwright.checkpoint.steps import TRACKER, list_steps, step_folder
from meshwright.runtime.ranks.heartbeat import heartbeat
from meshwright.runtime.ranks.team import ALONE, Team

RECEIPT = ".sent-by-rank-"  # begins the name of an object in a step that is not complete
PATIENCE = 1800.0  # seconds in which other machines send their files of a step
LOOK = 1.0  # seconds between looks for their receipts
SOON = 2.0  # seconds of waiting that need no explanation


class Uploader:
    """Sends what a run has saved, by one thread of rank 0.

    `others` are folders of the run without steps. Before each change the thread confirms that no
    other run has taken the address over.

    If machines do not share the folder, as `users` says, the first rank of each sends what is
    there, and then a receipt for the step; rank 0 waits for all receipts before the manifest.
    """

    def __init__(
        self, root: Path, others: list[Path], team: Team = ALONE, users: publish.Users = ()
    ) -> None:
        self.root = root
        self.others = others
        self.rank = team.rank
        self.senders = sorted({0, *users})
        self.saved: int | None = None  # the step that other machines are sending too
        self.owner = ""  # the start of a run that writes to the address
        self.removed: list[int] = []  # steps that are not here any more, but perhaps in storage
        self.pool = ThreadPoolExecutor(1, "upload")
        self.flying: Future[None] | None = None

    def begin(self, saved: int, removed: list[int]) -> None:
        """Send all steps that storage lacks, then remove steps there. Nothing may be in flight."""
        assert self.flying is None
        self.saved = saved
        self.removed += removed
        self.flying = self.pool.submit(self.send)

    def send(self) -> None:
        # The oldest first; the newest, which the tracker then names, keeps its files here.
        steps = list_steps(self.root)
        for step in reversed(steps):
            if not self.send_step(step):
                continue
            self.note_published(step)
            if step < steps[0]:
                self.thin(step)
            elif not self.rank:
                store, key = locate(self.root)
                self.confirm()
                store.put(f"{key}/{TRACKER}", str(step).encode())

        # Rank 0 alone changes what is not a step's file.
        if self.rank:
            for step in self.removed:
                shutil.rmtree(step_folder(self.root, step), ignore_errors=True)
        else:
            self.send_files()
            self.remove(self.removed)
        self.removed.clear()

    def wait(self) -> None:
        """Wait until nothing is sent any more, with heartbeats for ranks that wait for this."""
        began = time.monotonic()
        is_explained = False
        while self.flying is not None and not self.flying.done():
            time.sleep(0.01)
            heartbeat.tick()
            if not is_explained and time.monotonic() - began > SOON:
                remark(f" > waiting for the upload to {address_of(self.root)}")
                is_explained = True

    def end(self) -> None:
        """Wait, and raise the failure of what was sent."""
        self.wait()
        # The upload is forgotten first, so that its failure is reported once.
        flying = self.flying
        self.flying = None
        if flying is not None:
            flying.result()

    def close(self) -> None:
        self.pool.shutdown()
        if self.flying is not None and (failure := self.flying.exception()):
            notice(f"the upload in flight failed: {failure}")

    def send_step(self, step: int) -> bool:
        """Send what storage lacks of a step: files, then the manifest; return whether all is there.

        Storage is asked each time: another writer may have replaced or removed what was sent.
        """
        folder = step_folder(self.root, step)
        store, key = locate(folder)
        if not (folder / MANIFEST).exists():
            return False
        sent = read_note(self.root / SENT)
        manifest = read_manifest(folder)
        raw = (folder / MANIFEST).read_bytes()
        here = {name: file for name, file in manifest.items() if (folder / name).exists()}
        if not here:
            return False  # it was sent, or read from storage
        is_published = mirror.is_published(folder)
        # Other machines send their files of the step that is being saved; those of another one,
        # if they are not here, are nowhere.
        is_shared = step == self.saved and len(self.senders) > 1
        if len(here) < len(manifest) and not is_published and not is_shared:
            return False
        lacking = [name for name in here if not self.is_sent(folder / name, here[name], sent)]
        if is_published and not lacking:
            return True
        self.confirm()

        # What another step of this number left is removed, its manifest first, so that it is at no
        # moment a complete step. Receipts may be those of machines that are done already.
        if not is_published and not self.rank:
            others = sorted(
                name
                for name in store.entries(key)
                if name not in manifest and not name.startswith(RECEIPT)
            )
            store.delete([f"{key}/{name}" for name in dict.fromkeys([MANIFEST, *others])])

        # The files, each of them noted once it is there, then the manifest.
        for name in lacking:
            self.confirm()
            publish.crash_point("before_file")
            tag = store.put(f"{key}/{name}", folder / name)
            sent[f"{folder.name}/{name}"] = [here[name].sha256, tag]
            write_note(self.root / SENT, sent)
        if not is_published:
            self.publish(step, manifest, raw, sent)
        publish.crash_point("after_manifest")
        if not self.rank:
            remark(f" > uploaded step {step:,} to {address_of(self.root)}")
        return is_published or not self.rank

    def note_published(self, step: int) -> None:
        """Note that storage has this step: if it is gone later, it was removed."""
        folder = step_folder(self.root, step)
        raw = (folder / MANIFEST).read_bytes()
        sent = read_note(self.root / SENT)
        sent[f"{folder.name}/{MANIFEST}"] = sha256([raw])
        write_note(self.root / SENT, sent)

    def is_sent(self, path: Path, file: File, sent: dict[str, Any]) -> bool:
        """Return whether an object is the one that this machine has sent, of this file's bytes."""
        known = sent.get(f"{path.parent.name}/{path.name}")
        if known is None:
            return False
        digest, tag = known
        store, key = locate(path)
        return digest == file.sha256 and store.entry(key) == Entry(file.size, tag)

    def publish(self, step: int, manifest: Manifest, raw: bytes, sent: dict[str, Any]) -> None:
        """Put the manifest of a step whose files this machine has sent; other ranks, a receipt."""
        folder = step_folder(self.root, step)
        store, key = locate(folder)
        receipt = sha256([raw, self.owner.encode()]).encode()  # of this start of the run alone
        if self.rank:
            store.put(f"{key}/{RECEIPT}{self.rank}", receipt)
            return
        self.send_files()  # the rows of metrics.jsonl before this step

        # Wait for the other machines' receipts; one of an earlier start does not count.
        lacking = [f"{key}/{RECEIPT}{rank}" for rank in self.senders[1:]]
        until = time.monotonic() + PATIENCE
        while lacking and any((store.get(name) or [None])[0] != receipt for name in lacking):
            if time.monotonic() > until:
                raise UserError(
                    f"another machine has not sent its files of step {step:,} for {PATIENCE:.0f} s",
                    IO,
                )
            time.sleep(LOOK)

        # All files must be there, those of this machine with the tags that they were given.
        there = store.entries(key)
        for name, file in manifest.items():
            entry = there.get(name)
            known = sent.get(f"{folder.name}/{name}")
            is_ours = not known or entry is None or known[1] in (None, entry.tag)
            if entry is None or entry.size != file.size or not is_ours:
                what = f"{store.bucket}/{key}/{name} is not there, or not as it was sent"
                raise UserError(f"{what}; does another program write there?", IO)

        # "create" fails if there is a manifest; after a lost answer it may be this one.
        self.confirm()
        publish.crash_point("before_manifest")
        is_created = store.put(f"{key}/{MANIFEST}", raw, "create") is not None
        if not is_created and not mirror.is_published(folder):
            raise UserError(
                f"{store.bucket}/{key}/{MANIFEST} was written by another run meanwhile", IO
            )
        store.delete(lacking)

    def confirm(self) -> None:
        """Refuse to go on if another run has taken the address over, since this one began."""
        if not self.rank:
            self.owner = confirm(self.root)
            return
        owner = read_owner(*locate(self.root))
        self.owner = self.owner or (owner["start"] if owner else "")
        if owner is None or owner["start"] != self.owner:
            raise UserError(f"{address_of(self.root)} was taken over by another run", LOCKED)

    def send_files(self) -> None:
        self.confirm()
        for root in (self.root, *self.others):
            mirror.send_files(root)

    def thin(self, step: int) -> None:
        """Remove the files of a step from this machine, of which storage has just shown its own."""
        for path in step_folder(self.root, step).iterdir():
            if path.name != MANIFEST:
                path.unlink(missing_ok=True)

    def remove(self, steps: list[int]) -> None:
        """Remove steps that are not here from storage, their manifests first."""
        sent = read_note(self.root / SENT)
        for step in set(steps) - set(list_steps(self.root)):
            confirm(self.root)
            folder = step_folder(self.root, step)
            store, key = locate(folder)
            names = dict.fromkeys([MANIFEST, *store.entries(key)])
            store.delete([f"{key}/{name}" for name in names])
            # The notes of what was sent of this step go too.
            for name in list(sent):
                if name.startswith(f"{folder.name}/"):
                    del sent[name]
        write_note(self.root / SENT, sent)
